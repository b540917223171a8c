"""The steps of ``fit``, ``evaluate`` and ``predict`` when replicas have different numbers of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.keras.inputs import explained
from tfos_nb.runtime.keras.placeholder_rows import PlaceholderRows, first_rows, rows_of
from tfos_nb.runtime.keras.replicas.losses import as_python
from tfos_nb.runtime.keras.replicas.reductions import of_all_rows
from tfos_nb.runtime.keras.replicas.replica import (
    Replica,
    is_synchronous,
    replica_of_step,
    replica_that_keeps_states,
    sum_over_replicas,
    whole_value,
)
from tfos_nb.runtime.keras.replicas.rows_needed import is_of_keras
from tfos_nb.runtime.keras.replicas.states import note_results
from tfos_nb.runtime.keras.scope import refuse_losses_by_row, refuse_what_is_outside

__all__ = ["OWN_BATCH", "StepFunction", "cut_predictions", "with_results"]

OWN_BATCH = "_tfos_own_batch"
"""Attribute of a model that is true while it predicts a batch that belongs to this worker alone."""
_RETURNED = "_tfos_metrics"


class StepFunction:
    """Builder of the function of ``Model.make_train_function`` and ``make_test_function``, for several replicas.

    Parameters
    ----------
    model : keras.Model
        The model.
    step : callable
        Its ``train_step`` or ``test_step``.
    """

    def __init__(self, model: Any, step: Any) -> None:
        self.model = model
        self.step = as_python(step)
        self.strategy = model.distribute_strategy
        self.placeholder = PlaceholderRows()
        self.own_step = not is_of_keras(self.step)
        # Keras reads the metrics again at the end of an epoch if a step returns just their results.
        self.reads_later = not self.own_step and all(
            is_of_keras(one) for one in (model.compute_metrics, model.get_metrics_result)
        )
        self.metrics: dict[str, Any] = {}  # metrics whose own results a step returns, by their names in its outputs
        note_results(model.metrics)
        refuse_what_is_outside(model)  # everything is built by now
        if not self.own_step:
            refuse_losses_by_row(model)
        _refuse_xla(model)

    def build(self) -> Callable[[Any], Any]:
        """Return the function that ``fit`` calls with its iterator, once for each ``steps_per_execution`` steps."""
        import tensorflow as tf

        on_data: Any = tf.autograph.experimental.do_not_convert(self._on_data)
        if not self.model.run_eagerly:
            on_data = tf.function(on_data, reduce_retracing=True, jit_compile=self.model.jit_compile)

        def on_iterator(iterator: Any) -> Any:
            return on_data(_without_optionals(iterator.get_next()))

        once: Any = tf.autograph.experimental.do_not_convert(on_iterator)
        if not self.model.run_eagerly:
            once = tf.function(once, reduce_retracing=True)

        @explained(self.model)
        def function(iterator: Any) -> Any:
            outputs = None
            vars(self.model)[_RETURNED] = self.metrics  # past Keras' tracking of attributes
            for _ in range(self.model.steps_per_execution):
                try:
                    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                        outputs = once(iterator)
                    else:  # train_on_batch passes a Python generator
                        outputs = on_data(_without_optionals(next(iterator)))
                except (tf.errors.OutOfRangeError, StopIteration):
                    if outputs is None:
                        raise
                    break
            return outputs

        return function

    def _on_data(self, data: Any) -> Any:
        import keras

        outputs = self.strategy.run(self._on_replica, args=(data,))
        return keras.tree.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], outputs)

    def _on_replica(self, data: Any) -> Any:
        import tensorflow as tf

        # Run no operation of a step before its data has arrived. Otherwise the optimizer may count one more step at the
        # end of an epoch, on some of the workers only (Keras in a single process does count one more).
        with tf.control_dependencies(_tensors(data)):
            return self._step(data)

    def _step(self, data: Any) -> Any:
        import keras
        import tensorflow as tf

        data, has_rows = self.placeholder.fill(data)
        rows = _counted_rows(data, has_rows)
        share = tf.math.divide_no_nan(rows, sum_over_replicas(rows))
        replica = Replica(
            share,
            has_rows,
            compiled=bool(self.model.jit_compile),
            own_step=self.own_step,
            metrics=self.model.metrics,
            reads_later=self.reads_later,
        )
        with replica.during():
            outputs = self.step(data)
            if not self.reads_later:
                outputs = keras.tree.map_structure(functools.partial(of_all_rows, replica), outputs)
        self.metrics.update(replica.metrics_of(outputs))
        replica.level_counts(rows)
        return self._level(outputs, rows, replica)

    def _level(self, outputs: Any, rows: Any, replica: Replica) -> Any:
        """Replace numbers and moves of states by their row-weighted means over replicas, in one collective."""
        import keras
        import tensorflow as tf

        leaves = list(map(whole_value, keras.tree.flatten(outputs)))
        places = [place for place, leaf in enumerate(leaves) if _is_number(leaf) and not replica.knows(leaf)]
        moved = replica.moved()
        # The weights that the trainer's own loss metric gives: rows since the metrics were reset.
        seen = rows
        if self.reads_later:
            seen = tf.cast(tf.convert_to_tensor(self.model._loss_tracker.count), tf.float32)
        parts = [(tf.cast(leaves[place], tf.float32), seen) for place in places]
        parts += [(tf.cast(move, tf.float32), replica.share) for _, _, move in moved]
        # tf.where, because a product is not enough: a value that is NaN without rows must not count.
        flat = [tf.reshape(tf.where(w > 0, value * w, tf.zeros_like(value)), [-1]) for value, w in parts]
        sums = tf.split(sum_over_replicas(tf.concat([[seen], *flat], axis=0)), [1, *(part.shape[0] for part in flat)])
        for place, value in zip(places, sums[1:], strict=False):
            leaves[place] = _like(leaves[place], tf.math.divide_no_nan(value, sums[0][0]))
        for (variable, before, move), value in zip(moved, sums[1 + len(places) :], strict=True):
            variable._value.assign(before + tf.cast(tf.reshape(value, move.shape), move.dtype))
        return keras.tree.pack_sequence_as(outputs, leaves)


def with_results(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_metrics_result_or_logs``, so that an epoch's results are those of the metrics on all replicas.

    In a step of Keras' own, and in a loop or a condition, a metric's result is that of one replica. Keras reads the
    metrics themselves only if a step returns nothing but their results.
    """

    @functools.wraps(original)
    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        found = original(self, logs)
        if not isinstance(found, dict) or not is_synchronous(self.distribute_strategy):
            return found
        if found is logs:
            metrics = vars(self).get(_RETURNED, {})
            found = {name: metrics[name].result() if name in metrics else value for name, value in logs.items()}
        with self.distribute_strategy.scope():
            return {name: whole_value(value) for name, value in found.items()}

    return _get_metrics_result_or_logs


def _refuse_xla(model: Any) -> None:
    """Refuse ``jit_compile=True`` where XLA has no collectives.

    The first step would fail with UNIMPLEMENTED, and every later collective of the process with INTERNAL.
    """
    import tensorflow as tf

    if model.jit_compile and not tf.config.list_logical_devices("GPU"):
        raise PlanError(
            "compile(jit_compile=True): XLA has no collectives on CPUs, so several workers cannot train together. "
            "Leave jit_compile out, or train on GPUs"
        )


def _is_number(leaf: Any) -> bool:
    import tensorflow as tf

    numeric = tf.is_tensor(leaf) and (leaf.dtype.is_floating or leaf.dtype.is_integer)
    return bool(numeric and leaf.shape.is_fully_defined())


def _like(leaf: Any, flat: Any) -> Any:
    import tensorflow as tf

    value = tf.reshape(flat, leaf.shape)
    return tf.cast(value if leaf.dtype.is_floating else tf.round(value), leaf.dtype)


def cut_predictions(kind: Any) -> None:
    """Patch ``predict_step(self, data)`` of a class of models, or of its base, for replicas that predict together.

    A replica without rows predicts a placeholder row, which is then left out. Layers' states move as in a step of
    ``evaluate``. A batch of ``predict_on_batch`` belongs to one worker, which nothing is combined with.
    """
    owner: Any = next(c for c in kind.__mro__ if "predict_step" in vars(c))
    if not hasattr(owner.predict_step, "_tfos_cut"):
        owner.predict_step = _cut_step(owner.predict_step)


def _cut_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def predict_step(self: Any, data: Any) -> Any:
        import keras

        if not is_synchronous(self.distribute_strategy) or replica_of_step() is not None:  # called by another one
            return step(self, data)
        if "_tfos_placeholder" not in vars(self):
            vars(self)["_tfos_placeholder"] = PlaceholderRows()  # past Keras' tracking of attributes
        together = _predicts_together(self)
        # A worker without rows traces a graph again. With a place, it has the collectives of the others' graphs.
        place = 0 if together and not self.jit_compile else None
        data, has_rows = vars(self)["_tfos_placeholder"].fill(data, place)
        if not together:
            outputs = step(self, data)
        else:
            rows = _counted_rows(data, has_rows)
            replica = _Predicting(rows, has_rows, bool(self.jit_compile))
            with replica.during():
                outputs = step(self, data)
            replica.level(rows)
        return outputs if has_rows is None else keras.tree.map_structure(lambda v: _cut(v, has_rows), outputs)

    vars(predict_step)["_tfos_cut"] = True
    return predict_step


def _predicts_together(model: Any) -> bool:
    """Return whether this is a replica of ``predict``, and not of a step of the program's own."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    of_predict = context is not None and context.strategy is model.distribute_strategy
    return of_predict and replica_that_keeps_states() is None and not vars(model).get(OWN_BATCH)


class _Predicting(Replica):
    """A replica whose share of the rows is computed only if a state is computed from it.

    Most models need no collective for it.
    """

    _share: Any

    def __init__(self, rows: Any, has_rows: Any, compiled: bool) -> None:
        super().__init__(None, has_rows, compiled)
        self._rows = rows

    @property
    def is_in_its_graph(self) -> bool:
        """Whether values are computed over all rows. With XLA, graphs of workers differ by what they know of rows."""
        return not self.compiled and super().is_in_its_graph

    @property
    def share(self) -> Any:
        import tensorflow as tf

        if self._share is None:
            self._share = tf.math.divide_no_nan(self._rows, sum_over_replicas(self._rows))
        return self._share

    @share.setter
    def share(self, value: Any) -> None:
        self._share = value


def _counted_rows(data: Any, has_rows: Any) -> Any:
    """Return the number of a batch's rows as a floating-point number; zero for a placeholder row."""
    import tensorflow as tf

    rows = tf.cast(rows_of(data), tf.float32)
    return rows if has_rows is None else tf.where(has_rows, rows, 0.0)


def _cut(leaf: Any, has_rows: Any) -> Any:
    import tensorflow as tf

    if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
        return leaf
    return first_rows(leaf, tf.where(has_rows, rows_of(leaf), 0))


def _without_optionals(data: Any) -> Any:
    """Replace ``Optional`` values in a batch by None, as Keras' ``_autoconvert_optionals`` does."""
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)


def _tensors(data: Any) -> list[Any]:
    import tensorflow as tf

    return [v for v in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(v)]
