"""Patches of Keras' losses, and of the metrics that call a loss' function: computed as in one process.

Each wrapper calls the original outside of a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.keras.replicas.reductions import is_even, of_all_rows
from tfos_nb.runtime.keras.replicas.replica import Replica, are_numbers, current, sum_over_replicas
from tfos_nb.runtime.keras.replicas.rows_needed import (
    RowsNeeded,
    can_gather,
    is_loss_of_keras,
    is_of_keras,
    rows_needed,
)

__all__ = ["as_python", "patch_losses"]

_LIBRARIES = ("tensorflow", "keras", "tfos_nb")


def patch_losses() -> None:
    """Patch Keras' losses, metrics that call a loss' function, and the layers' reductions."""
    import keras
    import tensorflow as tf
    from keras.src.losses import loss

    loss.reduce_values = _reduced(loss.reduce_values)
    loss.apply_mask = _masked(loss.apply_mask)
    loss.scale_loss_for_distribution = _scaled(loss.scale_loss_for_distribution)
    loss.unscale_loss_for_distribution = _unscaled(loss.unscale_loss_for_distribution)
    keras.losses.Loss.__call__ = _sees_all_rows(keras.losses.Loss.__call__)
    wrapper = keras.metrics.MeanMetricWrapper
    wrapper.update_state = _of_all_rows(wrapper.update_state)
    owner = next(c for c in tf.distribute.ReplicaContext.__mro__ if "all_reduce" in vars(c))
    owner.all_reduce = _with_right_gradient(owner.all_reduce)
    for owner in (tf.distribute.Strategy, tf.distribute.ReplicaContext):
        holder = next(c for c in owner.__mro__ if "num_replicas_in_sync" in vars(c))
        counted: Any = vars(holder)["num_replicas_in_sync"]
        holder.num_replicas_in_sync = property(_noticed(counted.fget), doc=counted.__doc__)
    tf.nn.compute_average_loss = _scales(tf.nn.compute_average_loss)
    kind = type(tf.function(patch_losses))
    kind.__call__ = _inlined(kind.__call__)


def _reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``reduce_values``, which reduces the losses of the elements to one number."""

    @functools.wraps(original)
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        import tensorflow as tf

        replica = current.replica
        if replica is None or reduction in (None, "none") or not replica.is_in_its_graph:
            return original(values, sample_weight, reduction)
        if values.shape.rank == 0:  # the loss function has returned one number for the batch
            return replica.mean(of_all_rows(replica, values))
        total = tf.reduce_sum(values)
        if reduction == "sum":
            return replica.whole(total)
        by = _divisor(replica, values, sample_weight if reduction == "mean_with_sample_weight" else None)
        return replica.whole(tf.math.divide_no_nan(replica.selected(total), by))

    return reduce_values


def _sees_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Loss.__call__``: a loss whose ``call`` returns one number for a batch gets the rows of all replicas."""

    @functools.wraps(original)
    def call_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current.replica is not None:
            owner: Any = next(c for c in type(self).__mro__ if "call" in vars(c))
            if not hasattr(owner.call, "_tfos_sees_all"):
                owner.call = _called_on_all(owner.call)
        return original(self, *args, **kwargs)

    return call_loss


def _called_on_all(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    @functools.wraps(original)
    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        import keras
        import tensorflow as tf

        replica, function, given = current.replica, functools.partial(original, self), (y_true, y_pred)
        if replica is None:
            return function(*given)
        if isinstance(self, keras.losses.Circle):
            needs = RowsNeeded.ROWS
        else:
            needs = rows_needed(self, is_loss_of_keras(self), function, given)
        if needs == RowsNeeded.OWN or not can_gather(replica, self, needs):
            return function(*given)
        if needs == RowsNeeded.ROWS:
            return replica.on_all_rows(function, given, number=False)
        made = replica.on_all_rows(function, given, number=True)
        if made.shape.rank == 0 or self.reduction in (None, "none"):
            return made
        return tf.reduce_sum(made) if self.reduction == "sum" else tf.reduce_mean(made)

    vars(call)["_tfos_sees_all"] = True
    return call


def _of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MeanMetricWrapper.update_state``: call a function that needs the rows of all replicas with these."""

    @functools.wraps(original)
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        import keras
        import tensorflow as tf

        replica, function = current.replica, functools.partial(self._fn, **self._fn_kwargs)
        given = (y_true, y_pred)
        needs = RowsNeeded.OWN if replica is None else rows_needed(self, is_of_keras(self._fn), function, given)
        if replica is None or needs == RowsNeeded.OWN or not can_gather(replica, self, needs):
            return original(self, y_true, y_pred, sample_weight=sample_weight)
        if needs == RowsNeeded.ROWS:
            values = replica.on_all_rows(function, given, number=False)
            twin: Any = object.__new__(type(self))  # the same variables, but the function's values are known
            vars(twin).update(vars(self), _fn=lambda y_true, y_pred: values, _fn_kwargs={})
            return original(twin, y_true, y_pred, sample_weight=sample_weight)
        value = replica.on_all_rows(function, given, number=True)
        if sample_weight is None and value.shape.rank != 0:  # a mean over steps counts each of the numbers
            sample_weight = replica.share * tf.cast(tf.size(value), replica.share.dtype)
        return keras.metrics.Mean.update_state(self, tf.reduce_mean(value), sample_weight=sample_weight)

    return update_state


def _divisor(replica: Replica, values: Any, sample_weight: Any) -> Any:
    """Return the divisor of the sum of all replicas' values."""
    import tensorflow as tf

    if sample_weight is not None:
        return sum_over_replicas(replica.selected(tf.cast(tf.reduce_sum(sample_weight), values.dtype)))
    own = tf.cast(tf.size(values), values.dtype)
    if values.shape[1:].is_fully_defined() and (tf.executing_eagerly() or is_even(values)):  # equal numbers per row
        return tf.math.divide_no_nan(own, tf.cast(replica.share, values.dtype))
    return sum_over_replicas(replica.selected(own))


def _masked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply_mask``: valid entries get the weight total / valid, with both counted over all replicas."""

    @functools.wraps(original)
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        import tensorflow as tf

        replica = current.replica
        weights = original(sample_weight, mask, dtype, reduction)
        elsewhere = replica is None or not replica.is_in_its_graph
        if replica is None or elsewhere or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        total = tf.cast(tf.size(mask), tf.float32)
        valid_of_all, total_of_all = tf.unstack(sum_over_replicas(replica.selected(tf.stack([valid, total]))))
        right = tf.math.divide_no_nan(total_of_all, valid_of_all)
        return weights * tf.cast(right * tf.math.divide_no_nan(valid, total), weights.dtype)

    return apply_mask


def _scaled(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``scale_loss_for_distribution``, which Keras calls for a loss's value and for the losses that layers add.

    Outside of ``strategy.run`` no loss of another replica is added to the value, so it is returned unchanged.
    """

    @functools.wraps(original)
    def scale_loss_for_distribution(value: Any) -> Any:
        replica = current.replica
        if replica is not None:
            return replica.mean(of_all_rows(replica, value)) if replica.is_in_its_graph else value
        return original(value) if _has_replicas() else value

    return scale_loss_for_distribution


def _unscaled(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``unscale_loss_for_distribution``: the loss already has the value of a single process."""

    @functools.wraps(original)
    def unscale_loss_for_distribution(value: Any) -> Any:
        return original(value) if current.replica is None and _has_replicas() else value

    return unscale_loss_for_distribution


def _has_replicas() -> bool:
    import tensorflow as tf

    return not current.one_process and tf.distribute.get_replica_context() is not None


def _noticed(count: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``num_replicas_in_sync``: a ``train_step`` that reads it scales its loss itself, as TensorFlow advises."""

    @functools.wraps(count)
    def num_replicas_in_sync(self: Any) -> int:
        replica = current.replica
        if replica is not None and not replica.scaled:
            module = sys._getframe(1).f_globals.get("__name__", "")
            replica.scaled = module.partition(".")[0] not in _LIBRARIES
        return count(self)

    return num_replicas_in_sync


def _scales(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``tf.nn.compute_average_loss``, which divides by the rows of all replicas."""

    @functools.wraps(original)
    def compute_average_loss(*args: Any, **kwargs: Any) -> Any:
        if current.replica is not None:
            current.replica.scaled = True
        return original(*args, **kwargs)

    return compute_average_loss


def _with_right_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ReplicaContext.all_reduce``, which layers such as ``BatchNormalization(synchronized=True)`` call."""

    @functools.wraps(original)
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        import tensorflow as tf

        replica, values = current.replica, tf.nest.flatten(value)
        if replica is None or replica.applying or current.adds_up or not are_numbers(values):
            return original(self, reduce_op, value, options)
        reduced = replica.all_reduced(lambda own: original(self, reduce_op, own, options), values)
        return tf.nest.pack_sequence_as(value, reduced)

    return all_reduce


def _inlined(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a ``tf.function``: within a step it is traced into the step's graph.

    Only there can replicas be combined. A ``train_step`` or a layer's ``call`` may be a ``tf.function``. Functions that
    XLA compiles are left unchanged.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        in_step = current.keeper is not None and not tf.executing_eagerly()
        if not in_step or type(self) is not type(tf.function(call)) or self._jit_compile:
            return original(self, *args, **kwargs)
        return as_python(self)(*args, **kwargs)

    return call


def as_python(function: Any) -> Any:
    """Return the Python function of a ``tf.function``, so that it can be traced into another graph.

    Any other function is returned unchanged.
    """
    import tensorflow as tf

    python = getattr(function, "python_function", None)
    if python is None:
        return function
    return tf.autograph.to_graph(python) if getattr(function, "_autograph", True) else python
