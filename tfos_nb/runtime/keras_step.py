"""One step of Keras 3 on several replicas that may have different numbers of rows, or none.

What :mod:`tfos_nb.runtime.keras_fit` puts in the place of Keras' own step; the faults are numbered as there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfos_nb.runtime.keras_empty import with_a_row_at_least

__all__ = ["Shares", "StepFunction", "is_synchronous", "moments_of_rows", "rows_of"]

_log = logging.getLogger(__name__)


def is_synchronous(strategy: Any) -> bool:
    """Whether several replicas compute each step together."""
    import tensorflow as tf

    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    return isinstance(strategy, mirrored) and strategy.num_replicas_in_sync > 1


# --- fault 4: each replica weighs as many rows as it has -------------------------------------------------------------


class Shares(threading.local):
    """This replica's part of the rows of the step under way; replicas of one process are threads."""

    share: Any = None
    used: bool = False

    @contextlib.contextmanager
    def during(self, share: Any) -> Iterator[None]:
        """Scale losses by this share within the block."""
        self.share, self.used = share, False
        try:
            yield
        finally:
            self.share = None

    def scale(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``scale_loss_for_distribution``: the replica's mean times its rows / all rows."""

        @functools.wraps(original)
        def scale_loss_for_distribution(value: Any) -> Any:
            import tensorflow as tf

            if self.share is None:
                return original(value)
            self.used = True
            return value * tf.cast(self.share, value.dtype)

        return scale_loss_for_distribution

    def unscale(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``unscale_loss_for_distribution``: back to the replica's own mean, 0 if it has no row."""

        @functools.wraps(original)
        def unscale_loss_for_distribution(value: Any) -> Any:
            import tensorflow as tf

            if self.share is None:
                return original(value)
            return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

        return unscale_loss_for_distribution


class StepFunction:
    """What ``TensorFlowTrainer._make_function`` makes, for several replicas that may have different numbers of rows."""

    def __init__(self, model: Any, step: Any, shares: Shares) -> None:
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

        self.model = model
        self.step = step
        self.shares = shares
        self.strategy = model.distribute_strategy
        self.trains = step == model.train_step
        self.own_step = step.__func__ not in (TensorFlowTrainer.train_step, TensorFlowTrainer.test_step)

    def build(self) -> Callable[[Any], Any]:
        """Make the function that ``fit`` calls with its iterator, once for each ``steps_per_execution`` steps."""
        import tensorflow as tf

        on_data: Any = tf.autograph.experimental.do_not_convert(self._on_data)
        if not self.model.run_eagerly:
            on_data = tf.function(on_data, reduce_retracing=True, jit_compile=self.model.jit_compile)

        def on_iterator(iterator: Any) -> Any:
            return on_data(_without_optionals(iterator.get_next()))

        once: Any = tf.autograph.experimental.do_not_convert(on_iterator)
        if not self.model.run_eagerly:
            once = tf.function(once, reduce_retracing=True)

        def function(iterator: Any) -> Any:
            outputs = None
            for _ in range(self.model.steps_per_execution):
                try:
                    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                        outputs = once(iterator)
                    else:  # train_on_batch hands over a Python generator
                        outputs = on_data(_without_optionals(next(iterator)))
                except (tf.errors.OutOfRangeError, StopIteration):
                    if outputs is None:
                        raise
                    break
            return outputs

        return function

    def _on_data(self, data: Any) -> Any:
        import keras
        import tensorflow as tf

        # Nothing of a step before its data: else the optimizer counts a step more at the end of an epoch, and it is a
        # matter of chance on which workers (Keras in a single process does count one more).
        with tf.control_dependencies(_tensors(self.strategy, data)):
            outputs = self.strategy.run(self._on_replica, args=(data,))
        if self.trains and self.own_step and not self.shares.used:
            _log.warning(
                "the train_step of %s does not take its loss from compute_loss: replicas with fewer rows will not "
                "weigh less, as they do elsewhere",
                type(self.model).__name__,
            )
        return keras.tree.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], outputs)

    def _on_replica(self, data: Any) -> Any:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        rows = tf.cast(rows_of(data), tf.float32)
        share = tf.math.divide_no_nan(rows, context.all_reduce(tf.distribute.ReduceOp.SUM, rows))
        averages = _moving_averages(self.model) if self.trains else []
        before = [tf.convert_to_tensor(v.value) for v in averages]
        with self.shares.during(share), with_a_row_at_least(self.model, rows_of(data)):
            outputs = self.step(data)
        moved = [tf.convert_to_tensor(v.value) - old for v, old in zip(averages, before, strict=True)]
        outputs, moved = self._level(context, outputs, rows, moved, share)
        for variable, old, by in zip(averages, before, moved, strict=True):
            variable.value.assign(old + by)
        return outputs

    def _level(self, context: Any, outputs: Any, rows: Any, moved: list[Any], share: Any) -> tuple[Any, list[Any]]:
        """Replace metrics and moves of moving averages by their row-weighted means over replicas, in one collective."""
        import keras
        import tensorflow as tf

        leaves = keras.tree.flatten(outputs)
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.shape.rank == 0]
        # The weights that the trainer's own loss metric gives: rows since the metrics were reset.
        seen = rows if self.own_step else tf.cast(tf.convert_to_tensor(self.model._loss_tracker.count), tf.float32)
        parts = [(tf.cast(leaves[i], tf.float32), seen) for i in places]
        parts += [(tf.cast(move, tf.float32), share) for move in moved]
        # where, not a product alone: what is NaN for want of rows must count nothing.
        flat = [tf.reshape(tf.where(w > 0, value * w, tf.zeros_like(value)), [-1]) for value, w in parts]
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat([[seen], *flat], axis=0))
        sums = tf.split(total, [1, *(part.shape[0] for part in flat)])
        for place, value in zip(places, sums[1:], strict=False):
            leaves[place] = tf.math.divide_no_nan(value[0], sums[0][0])
        levelled = [
            tf.cast(tf.reshape(value, move.shape), move.dtype)
            for value, move in zip(sums[1 + len(places) :], moved, strict=True)
        ]
        return keras.tree.pack_sequence_as(outputs, leaves), levelled


def _without_optionals(data: Any) -> Any:
    """What Keras' ``_autoconvert_optionals`` does to a batch."""
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)


def _tensors(strategy: Any, data: Any) -> list[Any]:
    import tensorflow as tf

    local = [strategy.experimental_local_results(v) for v in tf.nest.flatten(data) if v is not None]
    return [v for v in tf.nest.flatten(local, expand_composites=True) if tf.is_tensor(v)]


def rows_of(data: Any) -> Any:
    """Return how many rows a batch has, as a tensor."""
    import keras
    import tensorflow as tf

    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


# --- fault 5: BatchNormalization -------------------------------------------------------------------------------------


def _moving_averages(model: Any) -> list[Any]:
    import keras

    names = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            variables = (getattr(layer, name, None) for name in names)
            found.update((id(variable), variable) for variable in variables if variable is not None)
    return list(found.values())


def moments_of_rows(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Wrap ``BatchNormalization._moments``: a batch without rows has the moving averages for its mean and variance."""

    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        import tensorflow as tf

        mean, variance = original(self, inputs, mask)
        if self.synchronized or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return mean, variance
        has_rows = tf.shape(inputs)[0] > 0
        return (
            tf.where(has_rows, mean, tf.cast(self.moving_mean, mean.dtype)),
            tf.where(has_rows, variance, tf.cast(self.moving_variance, variance.dtype)),
        )

    return _moments
