"""Decide from a function's graph whether it compares the rows of a batch with each other.

A loss function that returns one number per row usually computes each of them from one row. Then each replica can call
it on its own rows. A contrastive loss, a triplet loss or a recall within the batch compares each row with the others.

The function is traced with two numbers of rows. Sizes and constants that differ between the two graphs depend on the
number of rows. The graph is then walked from the arguments to the result. Each tensor either has its rows along one
axis, with each row computed from the same row of the arguments, or it does not depend on rows, or it is computed from
the number of rows only. Any other tensor, and the output of any operation that is not listed here, counts as
``_MIXED``. So a function is called on one replica's rows only if its graph shows that this is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["compares_rows", "has_captured_rows"]


@dataclass(frozen=True)
class _Rows:
    """Kind of a tensor whose rows lie along ``axis``, ``block`` entries of that axis for each row."""

    axis: int
    block: int = 1


_FREE, _COUNT, _MIXED = "free", "count", "mixed"  # no rows; computed from the number of rows; anything else
_Kind = _Rows | str
_Rule = Callable[["_Operation", list[_Kind], "_Tensor"], _Kind | None]
_RANDOM = ("Random", "StatelessRandom", "Multinomial", "TruncatedNormal")

_ELEMENTWISE = {
    "Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Angle", "ApproximateEqual", "Asin", "Asinh", "Atan", "Atan2",
    "Atanh", "BesselI0e", "BesselI1e", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Ceil",
    "CheckNumerics", "CheckNumericsV2", "ClipByValue", "Complex", "ComplexAbs", "Conj", "Cos", "Cosh",
    "DebugIdentityV2", "Digamma", "Div", "DivNoNan", "Elu", "EnsureShape", "Equal", "Erf", "Erfc", "Erfinv", "Exp",
    "Expm1", "Floor", "FloorDiv", "FloorMod", "Gelu", "Greater", "GreaterEqual", "Identity", "Igamma", "Igammac",
    "Imag", "Inv", "Invert", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "LeftShift", "Less", "LessEqual", "Lgamma",
    "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan", "Ndtri",
    "Neg", "NextAfter", "NotEqual", "OnesLike", "Polygamma", "Pow", "PreventGradient", "Real", "RealDiv", "Reciprocal",
    "Relu", "Relu6", "RightShift", "Rint", "Round", "Rsqrt", "SelectV2", "Selu", "Sigmoid", "Sign", "Sin", "Sinh",
    "Snapshot", "Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference", "StopGradient", "Sub", "Tan", "Tanh",
    "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "ZerosLike", "Zeta", "_EagerConst",
}  # fmt: skip
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"}
_ALONG_AN_AXIS = {"Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"}
_LAST = {
    "FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1, "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2, "Softmax": 1,
    "LogSoftmax": 1, "TopK": 1, "TopKV2": 1, "Cholesky": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "MatrixInverse": 2, "LogMatrixDeterminant": 2, "BiasAdd": 1,
}  # fmt: skip
"""Operations that keep the leading dimensions, with the number of last dimensions that they mix."""
_OF_FIRST = {
    "AvgPool", "AvgPool3D", "Conv2D", "Conv3D", "DepthToSpace", "DepthwiseConv2dNative", "ExtractImagePatches",
    "FusedBatchNormV3", "InTopK", "InTopKV2", "MaxPool", "MaxPool3D", "ResizeBicubic", "ResizeBilinear",
    "ResizeNearestNeighbor", "SoftmaxCrossEntropyWithLogits", "SpaceToDepth", "SparseSoftmaxCrossEntropyWithLogits",
}  # fmt: skip
"""Operations that compute each entry of the first dimension from the same entry of their inputs."""


class _Tensor:
    """A tensor of two graphs of a function, which were traced with different numbers of rows."""

    def __init__(self, one: Any, other: Any, constant: Any, of_other: Any) -> None:
        import tensorflow as tf

        self.name = one.name
        self.dtype = one.dtype
        self.shape = tf.TensorShape(None)
        if one.shape.rank == other.shape.rank is not None:
            pairs = zip(one.shape, other.shape, strict=True)
            self.shape = tf.TensorShape([size if size == more else None for size, more in pairs])
        self.constant = constant
        self.varies = constant is not None and not np.array_equal(constant, of_other)

    @property
    def integers(self) -> list[int] | None:
        """The values of a constant that does not depend on the number of rows."""
        if self.constant is None or self.varies:
            return None
        return [int(one) for one in np.reshape(self.constant, -1)]


class _Operation:
    """An operation of both graphs."""

    def __init__(self, one: Any, tensors: dict[str, _Tensor]) -> None:
        self.type = one.type
        self.get_attr = one.get_attr
        self.inputs = [tensors[tensor.name] for tensor in one.inputs]
        self.outputs = [tensors[tensor.name] for tensor in one.outputs]


def compares_rows(given: Sequence[Any], made: Any, of_more: Any) -> bool:
    """Return whether ``made`` may depend on several rows in each of its rows, or on the number of rows.

    Parameters
    ----------
    given : sequence of tensor
        Placeholders of the arguments, whose first dimension is the rows.
    made : tensor
        The result, in the same graph.
    of_more : tensor
        The result in a graph of the same function for another number of rows.
    """
    operations, others = made.graph.get_operations(), of_more.graph.get_operations()
    if [one.type for one in operations] != [one.type for one in others]:
        return True
    kinds: dict[str, Any] = {one.name: _Rows(0) for one in given}
    tensors: dict[str, _Tensor] = {}
    constants: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for one, other in zip(operations, others, strict=True):
        pairs = zip(one.outputs, other.outputs, strict=True)
        for place, (output, of_other) in enumerate(pairs):
            of_both = _constant(output, place, constants[0]), _constant(of_other, place, constants[1])
            tensors[output.name] = _Tensor(output, of_other, *of_both)
        operation = _Operation(one, tensors)
        inputs = [kinds[tensor.name] for tensor in operation.inputs]
        for place, output in enumerate(operation.outputs):
            if output.name not in kinds:
                kinds[output.name] = _kind(operation, inputs, place)
    return not isinstance(kinds[made.name], _Rows) or kinds[made.name].axis != 0


def _constant(tensor: Any, place: int, known: dict[str, Any]) -> Any:
    """Return the value of a tensor if it is constant, or None. Those of the tensors before it are ``known``."""
    import tensorflow as tf

    operation, value = tensor.op, tf.get_static_value(tensor)
    given = [known.get(one.name) for one in operation.inputs]
    if operation.type in ("Shape", "ShapeN") and operation.inputs[place].shape.is_fully_defined():
        value = np.array(operation.inputs[place].shape.as_list())
    elif value is None and given and all(one is not None for one in given) and tensor.dtype.is_integer:
        value = _computed(operation, given)
    known[tensor.name] = value
    return value


def _computed(operation: Any, given: list[Any]) -> Any:
    """Return the output of an operation with sizes, such as ``tf.shape(x)[0] * 2``."""
    if operation.type == "Pack" and operation.get_attr("axis") == 0:
        return np.stack(given)
    if operation.type == "ConcatV2":
        return np.concatenate(given[:-1], int(given[-1]))
    if operation.type == "Prod":
        return np.prod(given[0])
    if operation.type != "StridedSlice" or given[0].ndim != 1 or given[1].size != 1:
        return None
    begin, end, stride = (int(one.item()) for one in given[1:])
    if operation.get_attr("shrink_axis_mask"):
        return given[0][begin]
    masks = operation.get_attr("begin_mask"), operation.get_attr("end_mask")
    return given[0][(None if masks[0] else begin) : (None if masks[1] else end) : stride]


def has_captured_rows(graph: Any) -> bool:
    """Return whether a function uses a tensor from outside that has rows, which cannot be those of all replicas."""
    return any(not one.shape.is_fully_defined() for one in graph.internal_captures if one.dtype.is_numpy_compatible)


def _kind(operation: _Operation, inputs: list[_Kind], place: int) -> _Kind:
    """Return the kind of one output of an operation."""
    output = operation.outputs[place]
    if operation.type == "IdentityN":
        return inputs[place]
    if operation.type in ("Shape", "ShapeN", "Size", "Rank") or not any(isinstance(kind, _Rows) for kind in inputs):
        return _kind_without_rows(operation, inputs, output)
    if _MIXED in inputs or output.shape.rank is None or any(one.shape.rank is None for one in operation.inputs):
        return _MIXED
    rule = _rule(operation.type)
    found = None if rule is None else rule(operation, inputs, output)
    return _MIXED if found is None else found


def _kind_without_rows(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind:
    """Return the kind of an output that is computed from no row, but perhaps from the number of rows."""
    if output.constant is not None and not output.varies:
        return _FREE
    if output.constant is not None and output.shape.is_fully_defined():
        return _COUNT
    if _MIXED in inputs or any(isinstance(kind, _Rows) for kind in inputs) or operation.type.startswith(_RANDOM):
        return _MIXED
    axes = [axis for axis, size in enumerate(output.shape) if size is None] if output.shape.rank else []
    if output.constant is not None and len(axes) == 1:
        first = np.take(output.constant, [0], axes[0])
        return _Rows(axes[0]) if np.all(output.constant == first) else _MIXED
    if _COUNT not in inputs:
        known = inputs or output.shape.is_fully_defined() or not output.dtype.is_numpy_compatible
        return _FREE if known else _MIXED
    if output.shape.is_fully_defined():
        return _COUNT
    if operation.type in ("Fill", "BroadcastTo", "Tile") and len(axes) == 1:  # all rows are equal
        place = 1 if operation.type == "Fill" else 0
        at = axes[0] - output.shape.rank + operation.inputs[place].shape.rank
        if inputs[place] == _FREE and (at < 0 or operation.inputs[place].shape[at] == 1):
            return _Rows(axes[0])
    return _MIXED


def _rule(name: str) -> _Rule | None:
    if name in _ELEMENTWISE:
        return _elementwise
    if name in _REDUCTIONS:
        return _reduction
    if name in _ALONG_AN_AXIS:
        return _along_an_axis
    if name in _LAST:
        return _of_last
    if name in _OF_FIRST:
        return _of_first
    return _RULES.get(name)


def _only(inputs: list[_Kind]) -> _Rows | None:
    """Return the kind of the first input if the others have no rows."""
    first, *others = inputs
    return first if isinstance(first, _Rows) and all(kind == _FREE for kind in others) else None


def _alike(inputs: list[_Kind]) -> _Rows | None:
    """Return the kind of all inputs if they have the same one."""
    first = inputs[0]
    return first if isinstance(first, _Rows) and all(kind == first for kind in inputs) else None


def _elementwise(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    places = set()
    for kind, one in zip(inputs, operation.inputs, strict=True):
        if isinstance(kind, _Rows):
            places.add((one.shape.rank - kind.axis, kind.block))
        elif kind == _COUNT:
            return None
    if len(places) != 1:
        return None
    ((from_right, block),) = places
    for kind, one in zip(inputs, operation.inputs, strict=True):
        if kind == _FREE and one.shape.rank >= from_right and one.shape[one.shape.rank - from_right] != 1:
            return None
    return _Rows(output.shape.rank - from_right, block)


def _of_equal_size(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    """Return the kind of a Bitcast, which adds or takes a dimension if the sizes of the types differ."""
    return _only(inputs) if output.shape.rank == operation.inputs[0].shape.rank else None


def _reduction(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axes = _only(inputs), operation.inputs[1].integers
    if kind is None or axes is None:
        return None
    rank = operation.inputs[0].shape.rank
    gone = {axis % rank for axis in axes}
    if kind.axis in gone:
        return None
    kept = output.shape.rank == rank
    return kind if kept else _Rows(kind.axis - sum(axis < kind.axis for axis in gone), kind.block)


def _along_an_axis(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axes = _only(inputs), operation.inputs[1].integers
    if kind is None or axes is None or kind.axis in {axis % output.shape.rank for axis in axes}:
        return None
    return kind


def _of_last(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind = _only(inputs)
    given = operation.inputs[0].shape.rank
    return kind if kind is not None and kind.axis < given - _LAST[operation.type] else None


def _of_first(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    rows = [kind for kind in inputs if isinstance(kind, _Rows)]
    if operation.type == "FusedBatchNormV3" and operation.get_attr("is_training"):
        return None
    if operation.type in ("AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D") and operation.get_attr("ksize")[0] != 1:
        return None
    of_labels = operation.type.startswith(("InTopK", "SoftmaxCross", "SparseSoftmaxCross"))
    kind = _alike(inputs[:2]) if of_labels else _only(inputs)
    return rows[0] if kind is not None and kind.axis == 0 else None


def _reshape(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, given = inputs[0], operation.inputs[0].shape
    unknown = [axis for axis, size in enumerate(output.shape) if size is None]
    if not isinstance(kind, _Rows) or isinstance(inputs[1], _Rows) or len(unknown) != 1:
        return None
    before, after = given[: kind.axis].as_list(), given[kind.axis + 1 :].as_list()
    (axis,) = unknown
    if any(size != 1 for size in (*before, *output.shape[:axis])) or None in after:
        return None  # the entries of a row must follow each other
    entries, each = kind.block * math.prod(after), math.prod(output.shape[axis + 1 :])
    return _Rows(axis, entries // each) if each and entries % each == 0 and entries else None


def _transpose(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, order = _only(inputs), operation.inputs[1].integers
    return None if kind is None or order is None else _Rows(order.index(kind.axis), kind.block)


def _expand(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axes = _only(inputs), operation.inputs[1].integers
    if kind is None or axes is None:
        return None
    return _Rows(kind.axis + (axes[0] % output.shape.rank <= kind.axis), kind.block)


def _squeeze(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, rank = _only(inputs), operation.inputs[0].shape.rank
    gone = {axis % rank for axis in operation.get_attr("squeeze_dims")}
    if kind is None or not gone or kind.axis in gone:
        return None
    return _Rows(kind.axis - sum(axis < kind.axis for axis in gone), kind.block)


def _strided_slice(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, strides = _only(inputs), operation.inputs[3].integers
    if kind is None or strides is None:
        return None
    begins, ends, ellipsis, new, shrink = (
        operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    )
    rank, taken, made = operation.inputs[0].shape.rank, 0, 0
    named = sum(not (ellipsis | new) >> i & 1 for i in range(len(strides)))
    for i, stride in enumerate(strides):
        if ellipsis >> i & 1:
            count = rank - named
            if taken <= kind.axis < taken + count:
                return _Rows(made + kind.axis - taken, kind.block)
            taken, made = taken + count, made + count
        elif new >> i & 1:
            made += 1
        elif taken == kind.axis:
            whole = begins >> i & 1 and ends >> i & 1 and not shrink >> i & 1 and stride == 1
            return _Rows(made, kind.block) if whole else None
        else:
            taken, made = taken + 1, made + (not shrink >> i & 1)
    return _Rows(made + kind.axis - taken, kind.block)


def _slice(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, begins, sizes = _only(inputs), operation.inputs[1].integers, operation.inputs[2].integers
    if kind is None or begins is None or sizes is None:
        return None
    return kind if begins[kind.axis] == 0 and sizes[kind.axis] == -1 else None


def _split(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    values, axes = (0, 2) if operation.type == "SplitV" else (1, 0)
    kind, axis = inputs[values], operation.inputs[axes].integers
    if not isinstance(kind, _Rows) or axis is None or any(isinstance(k, _Rows) for k in inputs if k is not kind):
        return None
    return kind if axis[0] % output.shape.rank != kind.axis else None


def _unpack(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axis = _only(inputs), operation.get_attr("axis") % (output.shape.rank + 1)
    return None if kind is None or axis == kind.axis else _Rows(kind.axis - (axis < kind.axis), kind.block)


def _pack(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axis = _alike(inputs), operation.get_attr("axis") % output.shape.rank
    return None if kind is None else _Rows(kind.axis + (axis <= kind.axis), kind.block)


def _concat(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axis = _alike(inputs[:-1]), operation.inputs[-1].integers
    return None if kind is None or axis is None or axis[0] % output.shape.rank == kind.axis else kind


def _tile(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, times = _only(inputs), operation.inputs[1].integers
    return kind if kind is not None and times is not None and times[kind.axis] == 1 else None


def _broadcast(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind = inputs[0]
    if not isinstance(kind, _Rows) or isinstance(inputs[1], _Rows):
        return None
    axis = output.shape.rank - operation.inputs[0].shape.rank + kind.axis
    return _Rows(axis, kind.block) if [a for a, size in enumerate(output.shape) if size is None] == [axis] else None


def _pad(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, paddings = _only(inputs), operation.inputs[1].integers
    if kind is None or paddings is None or any(paddings[2 * kind.axis : 2 * kind.axis + 2]):
        return None
    return kind


def _gather(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    values, indices = inputs[:2]
    of_variable = operation.type == "ResourceGather"
    axes = [0] if of_variable else operation.inputs[2].integers
    batched = operation.get_attr("batch_dims")
    if axes is None:
        return None
    axis = axes[0]
    if values == _FREE and isinstance(indices, _Rows) and batched == 0:
        rank = operation.inputs[0].shape.rank
        return _Rows((0 if of_variable else axis % rank) + indices.axis, indices.block)
    if not isinstance(values, _Rows):
        return None
    axis %= operation.inputs[0].shape.rank
    if indices == _FREE and batched == 0 and axis != values.axis:
        moved = operation.inputs[1].shape.rank - 1 if axis < values.axis else 0
        return _Rows(values.axis + moved, values.block)
    return values if values == indices and batched > values.axis else None


def _gather_nd(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    values, indices = inputs[:2]
    if values != _FREE or not isinstance(indices, _Rows):
        return None
    return indices if indices.axis < operation.inputs[1].shape.rank - 1 else None


def _one_hot(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind, axis = _only(inputs), operation.get_attr("axis") % output.shape.rank
    return None if kind is None else _Rows(kind.axis + (axis <= kind.axis), kind.block)


def _select(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    kind = _alike(inputs)
    ranks = {one.shape.rank for one in operation.inputs}
    return kind if kind is not None and (len(ranks) == 1 or kind.axis == 0) else None


def _product(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    """Return the kind of a matrix product."""
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    labels = []
    for name, tensor, matrix in zip(names, operation.inputs, ("ik", "kj"), strict=True):
        turned = matrix[::-1] if operation.get_attr(name) else matrix
        labels.append([*_stacked(tensor), *turned])
    return _by_labels(inputs, labels, [*_stacked(output), *"ij"])


def _stacked(tensor: _Tensor) -> list[str]:
    """Return labels of the dimensions before the matrices, which are broadcast from the right."""
    return [str(place) for place in range(tensor.shape.rank - 2, 0, -1)]


def _einsum(operation: _Operation, inputs: list[_Kind], output: _Tensor) -> _Kind | None:
    equation = operation.get_attr("equation").decode().replace(" ", "")
    labels, arrow, result = equation.partition("->")
    if "." in equation or not arrow:
        return None
    return _by_labels(inputs, labels.split(","), result)


def _by_labels(inputs: list[_Kind], labels: Sequence[Sequence[str]], result: Sequence[str]) -> _Kind | None:
    """Return the kind of a product whose dimensions have labels. Those that ``result`` lacks are summed."""
    pairs = list(zip(inputs, labels, strict=True))
    of_rows = {(names[kind.axis], kind.block) for kind, names in pairs if isinstance(kind, _Rows)}
    if _COUNT in inputs or len(of_rows) != 1:
        return None
    ((label, block),) = of_rows
    if label not in result or any(list(names).count(label) != isinstance(kind, _Rows) for kind, names in pairs):
        return None
    return _Rows(list(result).index(label), block)


_RULES: dict[str, _Rule] = {
    "Bitcast": _of_equal_size,
    "BatchMatMul": _product, "BatchMatMulV2": _product, "BatchMatMulV3": _product, "BroadcastTo": _broadcast,
    "ConcatV2": _concat, "Einsum": _einsum, "ExpandDims": _expand, "GatherNd": _gather_nd, "GatherV2": _gather,
    "MatMul": _product, "MirrorPad": _pad, "OneHot": _one_hot, "Pack": _pack, "Pad": _pad, "PadV2": _pad,
    "Reshape": _reshape, "ResourceGather": _gather, "Select": _select, "Slice": _slice, "Split": _split,
    "SplitV": _split, "Squeeze": _squeeze, "StridedSlice": _strided_slice, "Tile": _tile, "Transpose": _transpose,
    "Unpack": _unpack,
}  # fmt: skip
