"""Add up gradients over replicas, so that sparse ones have the entries that they would have in one process.

The gradient of an embedding is sparse: each entry has the index of a row of its table, and the gradient for it. An
optimizer such as Adam squares the entries, or takes their norm, without adding up those with equal indices. So it
matters how many entries there are:

- Tokens: the indices come from the batch, and each token of it is an entry. The entries of all replicas together are
  those of one process.
- Positions (``Embedding(length, width)(ops.arange(length))``): the indices are no part of the batch. Each replica has
  the same entries, and one process has them once. Here they are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.keras.replicas.reductions import behind

__all__ = ["sum_gradients"]

_SHAPES = ("Shape", "ShapeN", "Size")
_MADE_OF_NUMBERS = {
    "Abs", "Add", "AddN", "AddV2", "BroadcastArgs", "BroadcastTo", "Cast", "Ceil", "ClipByValue", "ConcatV2", "Const",
    "Cos", "Cumsum", "Div", "Equal", "Exp", "ExpandDims", "Fill", "Floor", "FloorDiv", "FloorMod", "GatherNd",
    "GatherV2", "Greater", "GreaterEqual", "Identity", "Less", "LessEqual", "LinSpace", "Log", "Log1p", "LogicalAnd",
    "LogicalNot", "LogicalOr", "Max", "Maximum", "Mean", "Min", "Minimum", "Mod", "Mul", "Neg", "NotEqual", "Pack",
    "Pow", "Prod", "Range", "RealDiv", "Reshape", "ReverseV2", "Rint", "Round", "Select", "SelectV2", "Sign", "Sin",
    "Slice", "Split", "SplitV", "Sqrt", "Square", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Sum", "Tile",
    "Transpose", "Unpack", "Where",
}  # fmt: skip
"""Operations whose result is the same on all replicas if their inputs are."""
_ROWS, _SAME, _UNIQUE = "rows", "same", "unique"


@dataclass(frozen=True)
class _Part:
    """Some entries of a sparse gradient.

    ``kind``: ``rows`` for indices that come from the batch; ``same`` for entries that are the same ones on all
    replicas, in the same order; ``unique`` if they are, but in a number that is known only when the step runs.
    """

    values: Any
    indices: Any
    kind: str
    shape: Any

    @property
    def to_add_up(self) -> Any:
        """Sum over all replicas: a dense tensor, or entries, which are concatenated."""
        import tensorflow as tf

        return self.values if self.kind == _SAME else tf.IndexedSlices(self.values, self.indices, self.shape)

    def added_up(self, whole: Any) -> tuple[Any, Any]:
        """Return the values and indices of all replicas' entries."""
        import tensorflow as tf

        if self.kind == _SAME:
            return whole, self.indices
        if self.kind == _ROWS:
            return whole.values, whole.indices
        indices, places = tf.unique(whole.indices)
        return tf.math.unsorted_segment_sum(whole.values, places, tf.size(indices)), indices


def sum_gradients(add_up: Callable[[list[Any]], Any], gradients: Sequence[Any]) -> list[Any]:
    """Return the sum of each gradient over all replicas of the current step; none of them is None.

    ``add_up`` adds up tensors and entries over all replicas.
    """
    import tensorflow as tf

    parts = [list(_parts(one)) if isinstance(one, tf.IndexedSlices) else [] for one in gradients]
    given = [
        wanted
        for gradient, own in zip(gradients, parts, strict=True)
        for wanted in ([part.to_add_up for part in own] or [gradient])
    ]
    sums, whole = iter(add_up(given)), []
    for gradient, own in zip(gradients, parts, strict=True):
        if not own:
            whole.append(next(sums))
            continue
        values, indices = zip(*[part.added_up(next(sums)) for part in own], strict=True)
        joined = [several[0] if len(several) == 1 else tf.concat(several, 0) for several in (values, indices)]
        whole.append(tf.IndexedSlices(*joined, gradient.dense_shape))
    return whole


def _parts(gradient: Any) -> Iterator[_Part]:
    """Take a sparse gradient apart: a table that is read several times in a step has the entries of each reading."""
    import tensorflow as tf

    indices = list(_joined(gradient.indices))
    kinds = [_kind(one) for one in indices]
    if all(kind == _ROWS for kind in kinds):
        yield _Part(gradient.values, gradient.indices, _ROWS, gradient.dense_shape)
        return
    sizes = [tf.size(one) for one in indices]
    values = [gradient.values] if len(indices) == 1 else tf.split(gradient.values, sizes, num=len(sizes))
    for value, index, kind in zip(values, indices, kinds, strict=True):
        yield _Part(value, index, kind, gradient.dense_shape)


def _joined(indices: Any) -> Iterator[Any]:
    """Iterate over the tensors that TensorFlow has put one after another, since several gradients were added up."""
    import tensorflow as tf

    if not tf.is_symbolic_tensor(indices) or indices.op.type != "ConcatV2":
        yield indices
        return
    for one in indices.op.inputs[:-1]:
        yield from _joined(one)


def _kind(indices: Any) -> str:
    import tensorflow as tf

    if not tf.is_symbolic_tensor(indices):
        return _ROWS
    found = list(behind(indices, further=lambda tensor: tensor.op.type not in _SHAPES))
    if not all(one.op.type in _MADE_OF_NUMBERS or one.op.type in _SHAPES for one in found):
        return _ROWS
    if indices.shape.is_fully_defined():
        return _SAME
    shapes = [one for one in found if one.op.type in _SHAPES and _kind(one.op.inputs[0]) == _ROWS]
    return _UNIQUE if all(_is_of_a_row(one, found) for one in shapes) else _ROWS


def _is_of_a_row(shape: Any, found: Sequence[Any]) -> bool:
    """Return whether only sizes of a row are taken from the shape of a batch, not its number of rows."""
    import tensorflow as tf

    readers = [one.op for one in found if any(given is shape for given in one.op.inputs)]
    starts = [tf.get_static_value(one.inputs[1]) for one in readers if one.type == "StridedSlice"]
    return len(starts) == len(readers) and all(start is not None and start.min() > 0 for start in starts)
