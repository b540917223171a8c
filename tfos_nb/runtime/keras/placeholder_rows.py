"""Give a placeholder row to a replica without rows, so that a program never gets an empty batch.

If a step has fewer rows than replicas, a replica without a row must still take part. It gets the first row that it ever
had, or zeros if it had none, and this row does not count (:mod:`tfos_nb.runtime.keras.replicas.replica`). A real row is
best, because the program can certainly process it. Some layers fail on an empty batch or on a row of zeros, and a
lookup may refuse an empty text.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["PlaceholderRows", "first_rows", "rows_of"]


def rows_of(data: Any) -> Any:
    """Return the number of rows of a batch: an int if TensorFlow knows it, else a tensor."""
    import keras
    import tensorflow as tf

    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int32)
    if isinstance(first, tf.SparseTensor):
        known = first.shape[0] if first.shape.rank else None
        return known if known is not None else tf.cast(first.dense_shape[0], tf.int32)
    first = tf.convert_to_tensor(first)
    return first.shape[0] if first.shape.rank and first.shape[0] is not None else tf.shape(first)[0]


@dataclass
class _Kept:
    """The row that is kept for one kind of batch, in variables."""

    parts: list[Any]
    real: Any  # variable: whether it is a real row of this replica, not zeros

    def keep(self, leaves: list[Any]) -> Any:
        """Keep the first row of a batch; return a true tensor."""
        import tensorflow as tf

        row = tf.nest.flatten([first_rows(leaf, 1) for leaf in leaves], expand_composites=True)
        with tf.control_dependencies([v.assign(part) for v, part in zip(self.parts, row, strict=True)]):
            self.real.assign(True)
        return tf.constant(True)


class PlaceholderRows:
    """Replace empty batches by a placeholder row.

    It keeps one row for each replica and each kind of batch.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, _Kept] = {}
        self._lock = threading.Lock()

    def fill(self, data: Any, place: int | None = None) -> tuple[Any, Any]:
        """Return ``data``, or a placeholder row if it is empty, and whether it has rows.

        The second value is a tensor, or None if ``data`` certainly has rows. ``place`` distinguishes calls with data of
        the same kind. If it is given, a graph is never traced as one that certainly has rows. Otherwise it would have
        other collectives than the graph of a worker that has seen more batch sizes.
        """
        import tensorflow as tf

        data = tf.nest.map_structure(_as_tensor, data)
        rows = rows_of(data)
        if isinstance(rows, int) and rows > 0 and (place is None or tf.executing_eagerly()):
            if tf.executing_eagerly():  # the next batch may be empty
                self._keep([leaf for leaf in tf.nest.flatten(data) if leaf is not None], place)
            return data, None
        has_rows = tf.convert_to_tensor(rows) > 0
        leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        filled = iter(self._filled(leaves, has_rows, place))
        return tf.nest.map_structure(lambda leaf: leaf if leaf is None else next(filled), data), has_rows

    def _filled(self, leaves: list[Any], has_rows: Any, place: int | None) -> list[Any]:
        import tensorflow as tf

        parts = tf.nest.flatten(leaves, expand_composites=True)
        kept = self._kept_for(leaves, place)

        def own() -> list[Any]:
            return [tf.identity(part) for part in parts]

        def placeholder() -> list[Any]:
            return [variable.read_value() for variable in kept.parts]

        lacks = tf.logical_and(has_rows, tf.logical_not(kept.real))
        kept_now = tf.cond(lacks, lambda: kept.keep(leaves), lambda: tf.constant(False))
        with tf.control_dependencies([kept_now] if not tf.executing_eagerly() else []):
            filled = tf.cond(has_rows, own, placeholder)
        for part, one in zip(parts, filled, strict=True):
            if part.shape.rank is not None:
                one.set_shape([None if at == 0 else size for at, size in enumerate(part.shape)])
        made: list[Any] = tf.nest.pack_sequence_as(leaves, filled, expand_composites=True)
        return made

    def _keep(self, leaves: list[Any], place: int | None) -> None:
        kept = self._kept_for(leaves, place)
        if not kept.real:
            kept.keep(leaves)

    def _kept_for(self, leaves: list[Any], place: int | None) -> _Kept:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        parts = tf.nest.flatten(leaves, expand_composites=True)
        shapes = tuple((part.dtype, tuple(part.shape[1:]) if part.shape.rank is not None else None) for part in parts)
        kind = (context._replica_id if context is not None else 0, place, shapes)
        with self._lock:
            if kind not in self._kept:
                with tf.init_scope():
                    self._kept[kind] = _empty(leaves)
        return self._kept[kind]


def _as_tensor(leaf: Any) -> Any:
    """Convert a NumPy array to a tensor; return anything else unchanged."""
    import numpy as np
    import tensorflow as tf

    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _empty(leaves: list[Any]) -> _Kept:
    """Create the variables for a row of such leaves, with zeros and empty texts until a real row is kept."""
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a strategy would make it everyone's

    def variable(initial: Any, shape: Any) -> Any:
        with tf.device("CPU:0"):
            return ResourceVariable(initial, trainable=False, shape=shape, validate_shape=False)

    zeros = tf.nest.flatten([_zeros(leaf) for leaf in leaves], expand_composites=True)
    loose = [tf.TensorShape([None] * part.shape.rank) if part.shape.rank else part.shape for part in zeros]
    return _Kept([variable(part, shape) for part, shape in zip(zeros, loose, strict=True)], variable(False, []))


def _zeros(leaf: Any) -> Any:
    import tensorflow as tf

    spec = tf.type_spec_from_value(leaf)
    if isinstance(leaf, tf.SparseTensor):
        shape = [1, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros((0, len(shape)), tf.int64), tf.zeros((0,), spec.dtype), shape)
    if isinstance(leaf, tf.RaggedTensor):
        inner = [size or 1 for size in leaf.flat_values.shape[1:]]
        flat = tf.zeros([1, *inner], spec.dtype)
        return tf.RaggedTensor.from_nested_row_lengths(flat, [tf.ones([1], spec.row_splits_dtype)] * spec.ragged_rank)
    return tf.zeros([1, *(size or 1 for size in spec.shape[1:])] if spec.shape.rank else [], spec.dtype)


def first_rows(leaf: Any, rows: Any) -> Any:
    """Return the first ``rows`` rows of a dense, ragged or sparse tensor; return a number unchanged."""
    import tensorflow as tf

    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[tf.cast(rows, tf.int64)], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, tf.zeros_like(leaf.dense_shape), size)
    return leaf[:rows] if leaf.shape.rank != 0 else leaf
