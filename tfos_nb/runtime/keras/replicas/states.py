"""Patches of metrics' results, of trackers, and of variables: each has the value of one process.

Each wrapper calls the original outside of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.runtime.keras.replicas.collective_calls import call_in_group
from tfos_nb.runtime.keras.replicas.reductions import of_all_rows
from tfos_nb.runtime.keras.replicas.replica import current, sent_as

__all__ = ["note_results", "patch_states"]


def patch_states() -> None:
    """Patch Keras' metrics and trackers, and the variables of Keras and TensorFlow."""
    import keras
    from tensorflow.python.distribute import values_util  # the function has no public name that can be replaced

    keras.metrics.Metric.__init__ = _made_to_note(keras.metrics.Metric.__init__)
    owner = next(c for c in keras.Model.__mro__ if "get_metrics_result" in vars(c))
    owner.get_metrics_result = _read_later(owner.get_metrics_result)
    for tracker in (keras.metrics.Mean, keras.metrics.Sum):
        tracker.update_state = _weighted(tracker.update_state)
    owner = next(c for c in keras.Variable.__mro__ if "assign" in vars(c))
    owner.assign = _assigned(owner.assign)
    owner = next(c for c in keras.Variable.__mro__ if "_initialize" in vars(c))
    owner._initialize = _begun_once(owner._initialize)
    owner = next(c for c in keras.Variable.__mro__ if "_initialize_with_initializer" in vars(c))
    owner._initialize_with_initializer = _made_everywhere(owner._initialize_with_initializer)
    values_util.on_read_assign_cross_replica = _whole(values_util.on_read_assign_cross_replica)
    _let_be_numbers()
    _send_any_type()


def _weighted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``update_state`` of a metric that adds up its values: weight one number per step by this replica's rows."""

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        import tensorflow as tf

        replica = current.replica
        if replica is not None and tf.convert_to_tensor(values).shape.rank == 0:
            values = of_all_rows(replica, values)
            sample_weight = replica.share if sample_weight is None else sample_weight
        return original(self, values, sample_weight=sample_weight)

    return update_state


def note_results(metrics: Sequence[Any]) -> None:
    """Patch the classes of these metrics: a result within a step is that of all replicas."""
    for metric in metrics:
        owner: Any = next(c for c in type(metric).__mro__ if "result" in vars(c))
        if not hasattr(owner.result, "_tfos_noted"):
            owner.result = _noted(owner.result)


def _noted(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def result(self: Any) -> Any:
        replica = current.replica
        return original(self) if replica is None else replica.result_of(self, functools.partial(original, self))

    vars(result)["_tfos_noted"] = True
    return result


def _made_to_note(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Metric.__init__``: a model does not know the metrics that a program keeps elsewhere."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note_results([self])

    return init


def _read_later(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``get_metrics_result``, with which Keras' own steps end."""

    @functools.wraps(original)
    def get_metrics_result(self: Any) -> Any:
        replica = current.replica
        current.reads_later = replica is not None and replica.reads_later
        try:
            return original(self)
        finally:
            current.reads_later = False

    return get_metrics_result


def _assigned(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``Variable.assign``, which ``assign_add`` and ``assign_sub`` call too."""

    @functools.wraps(original)
    def assign(self: Any, value: Any) -> Any:
        replica = current.keeper
        if replica is not None:
            value = replica.kept(self, self._convert_to_tensor(value, dtype=self._dtype))
        return original(self, value)

    return assign


def _begun_once(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap ``Variable._initialize``: count a first value only once if the replicas' values are added up.

    Each replica starts with that value, so the sum would have it once for each replica.
    """

    @functools.wraps(original)
    def initialize(self: Any, value: Any) -> None:
        import tensorflow as tf

        original(self, value)
        made = self._value
        if not isinstance(made, tf.distribute.DistributedValues) or not tf.distribute.in_cross_replica_context():
            return
        if self.synchronization == "on_read" and made.aggregation == tf.VariableAggregation.SUM:
            with tf.init_scope():
                made.assign(made.values[0])  # divides the value among the replicas

    return initialize


def _made_everywhere(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap ``Variable._initialize_with_initializer``: each worker makes zeros and ones itself.

    TensorFlow sends the chief's first value of each variable to all workers, one after another. Most variables begin
    with zeros: the optimizer's, biases, metrics.
    """

    @functools.wraps(original)
    def initialize_with_initializer(self: Any, initializer: Any) -> None:
        import keras

        before, alike = current.first_value, type(initializer) in (keras.initializers.Zeros, keras.initializers.Ones)
        current.first_value = functools.partial(initializer, self._shape, dtype=self._dtype) if alike else None
        try:
            original(self, initializer)
        finally:
            current.first_value = before

    return initialize_with_initializer


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``on_read_assign_cross_replica``, which assigns a count outside of a step.

    TensorFlow gives each replica an equal part, rounded. Here the first replica gets the remainder, so that the parts
    add up to the whole.
    """

    @functools.wraps(original)
    def on_read_assign_cross_replica(var: Any, value: Any, read_value: bool = True) -> Any:
        import tensorflow as tf

        of_all = tf.distribute.get_replica_context() is None and var.aggregation == tf.VariableAggregation.SUM
        if not of_all or not var.dtype.is_integer:
            return original(var, value, read_value)
        strategy = var.distribute_strategy
        value = tf.cast(value, var.dtype)
        rest = value % tf.cast(strategy.num_replicas_in_sync, var.dtype)
        assigned = original(var, value - rest, read_value)
        if getattr(strategy.extended, "_id_in_cluster", 0) == 0:
            var.values[0].assign_add(rest)
        return assigned

    return on_read_assign_cross_replica


def _send_any_type() -> None:
    """Patch TensorFlow to send the first value of a variable of any type to all workers, unless each makes it."""
    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    send, receive = collective_ops.broadcast_send, collective_ops.broadcast_recv

    @functools.wraps(send)
    def broadcast_send(value: Any, shape: Any, dtype: Any, group_size: int, *args: Any) -> Any:
        if current.first_value is not None:
            return value
        kind = sent_as(dtype)
        return tf.cast(call_in_group(group_size, send, tf.cast(value, kind), shape, kind, group_size, *args), dtype)

    @functools.wraps(receive)
    def broadcast_recv(shape: Any, dtype: Any, group_size: int, *args: Any) -> Any:
        if current.first_value is not None:
            return tf.cast(current.first_value(), dtype)
        return tf.cast(call_in_group(group_size, receive, shape, sent_as(dtype), group_size, *args), dtype)

    collective_ops.broadcast_send, collective_ops.broadcast_recv = broadcast_send, broadcast_recv


def _let_be_numbers() -> None:
    """Make ``int(model.optimizer.iterations)`` and ``np.asarray(model.optimizer.learning_rate.value)`` work.

    TensorFlow converts plain variables to numbers, but not mirrored ones.
    """
    from tensorflow.python.distribute.values import DistributedVariable

    DistributedVariable.__array__ = _as_array
    for kind in (int, float, complex):
        name = f"__{kind.__name__}__"
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, functools.partialmethod(_as_number, kind))


def _as_array(variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    import numpy as np

    return np.array(_read(variable), dtype)


def _as_number(variable: Any, kind: Callable[[Any], Any]) -> Any:
    return kind(_read(variable))


def _read(variable: Any) -> Any:
    """Return a variable's value. For a metric's state it is that of all replicas, which ``numpy()`` does not return."""
    import tensorflow as tf

    strategy, context = variable.distribute_strategy, tf.distribute.get_replica_context()
    on_replica = context is not None and context.strategy is strategy
    if on_replica or variable.synchronization != tf.VariableSynchronization.ON_READ:
        return variable.numpy()
    with strategy.scope():
        return tf.convert_to_tensor(variable).numpy()
