"""Numbers that a program makes of sums and means over the rows of a batch, such as the loss of a ``train_step``.

A program writes ``tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)``, or the root of a mean, or two sums of which one
is divided by the other (Dice, F1). On a replica each sum is that of its own rows, and what is made of it is not what a
single process makes of all rows. The graph of the step says which sums and means a number is made of. Here they are
taken over the rows of all replicas, and what the program has made of them is made again of those:

    f(s1, ..., m1, ...)  ->  f(sum of s1, ..., mean of m1, ...)

The derivative by a replica's own ``s1`` is that of ``f`` by the sum, so that the gradient is exact as well. A number
that is linear in means, such as the usual ``tf.reduce_mean``, is right without it and costs nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfos_nb.runtime.keras.replica import Replica

__all__ = ["is_of_rows", "of_all_rows", "targets_of_all_rows"]

_LINEAR = {
    "Add", "AddN", "AddV2", "Cast", "ConcatV2", "ExpandDims", "Identity", "Mean", "Neg", "Pack", "Reshape", "Squeeze",
    "StopGradient", "StridedSlice", "Sub", "Sum",
}  # fmt: skip
_PRODUCTS = {"Mul": (0, 1), "MulNoNan": (0, 1), "RealDiv": (0,), "Div": (0,), "DivNoNan": (0,), "Xdivy": (0,)}
"""What is linear in an operand if the other has no rows, and which operands that may be."""
_OTHERS = {
    "Abs", "Equal", "Exp", "Expm1", "Greater", "GreaterEqual", "Inv", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd",
    "LogicalNot", "LogicalOr", "Maximum", "Minimum", "NotEqual", "Pow", "Prod", "Reciprocal", "Relu", "Rsqrt", "Select",
    "SelectV2", "Sigmoid", "Softplus", "Sqrt", "Square", "SquaredDifference", "Tanh",
}  # fmt: skip
_KNOWN = _LINEAR | _OTHERS | set(_PRODUCTS)
_SELECTING = {"DynamicPartition", "RaggedGather", "RaggedRange", "SparseReshape", "Unique", "UniqueV2", "Where"}
"""After these a tensor need not have equally many numbers for each row."""
_MOST = 4096  # numbers of a tensor: what has more is no loss


@dataclass(frozen=True)
class _Leaf:
    """A tensor that a number is made of, and how the replicas' come to that of all rows.

    Parameters
    ----------
    tensor : tensor
        It has no rows any more.
    summed : bool
        Whether it is a sum over rows. Else it is a mean over them, or what is no such thing: that of the replicas is
        their mean, weighted by rows.
    size : tensor, optional
        Of how many numbers it is the mean, where these need not be equally many a row.
    """

    tensor: Any
    summed: bool = False
    size: Any = None

    @property
    def is_number(self) -> bool:
        """Whether there is a gradient by it."""
        return bool(self.tensor.dtype.is_floating)

    def whole(self, replica: Replica) -> Any:
        """Return its value on the rows of all replicas."""
        import tensorflow as tf

        if self.is_number:
            weight = self._weight(replica)
            whole = replica.added_up(self.tensor * weight)
            return whole if self.size is None else tf.math.divide_no_nan(whole, replica.added_up(weight))
        if self.summed:
            return tf.cast(replica.added_up(tf.cast(self.tensor, tf.int64)), self.tensor.dtype)
        return self.tensor  # a counter or a flag, which is the same on all

    def part(self, replica: Replica) -> Any:
        """Return the derivative of the whole by this replica's own, divided by its share of the rows.

        Gradients are weighted by the share when they are added up.
        """
        import tensorflow as tf

        weight = self._weight(replica)
        over = tf.cast(replica.share, weight.dtype)
        if self.size is not None:
            over *= replica.added_up(weight)
        return tf.math.divide_no_nan(weight, over)

    def _weight(self, replica: Replica) -> Any:
        """Return by what it is multiplied before it is added up."""
        import tensorflow as tf

        if self.summed:
            return tf.ones([], self.tensor.dtype)
        return tf.cast(replica.share if self.size is None else self.size, self.tensor.dtype)


@dataclass
class _Formula:
    """How a tensor is made of sums and means over rows: tensors by their names, in the graph of the step."""

    value: Any
    leaves: dict[str, _Leaf]
    constants: dict[str, Any]
    operations: list[Any]  # each after those that it takes from
    differs: bool
    """Whether it is other than the mean of what each replica makes of its own rows, weighted by rows."""

    def of(self, wholes: dict[str, Any]) -> Any:
        """Compute the value anew, of other values of the leaves."""
        import tensorflow as tf

        made = {name: tf.constant(constant) for name, constant in self.constants.items()} | wholes
        for operation in self.operations:
            made[operation.outputs[0].name] = _made_anew(operation, [made[one.name] for one in operation.inputs])
        return made[self.value.name]


def is_of_rows(value: Any) -> bool:
    """Return whether a tensor of a graph is not what the mean of each replica's own comes to."""
    return (formula := _formula(value)) is not None and formula.differs


def of_all_rows(replica: Replica, value: Any) -> Any:
    """Return what ``value`` is on the rows of all replicas, with a gradient that fits :meth:`Replica.gradients`.

    Returns
    -------
    tensor
        ``value`` itself where it is made of nothing that sums over rows, or where this cannot be seen: outside of
        graphs, and in a loop or a condition of the step.
    """
    formula = _formula(value) if replica.is_in_its_graph else None
    if formula is None or not formula.differs:
        return value
    return formula.of(_wholes(replica, formula))


def targets_of_all_rows(replica: Replica, targets: list[Any], upstream: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return of which tensors the gradient is taken instead of ``targets``, and what comes to each of them.

    Parameters
    ----------
    replica : Replica
        This replica, whose gradients are weighted by its share of the rows afterwards.
    targets, upstream : list
        What a tape is asked for the gradient of, and of each target the gradient that comes to it, or None for ones.

    Returns
    -------
    list, list
        The targets, of which each that is made of sums over rows has become these sums.
    """
    import tensorflow as tf

    found: tuple[list[Any], list[Any]] = ([], [])
    for target, above in zip(targets, upstream, strict=True):
        formula = _formula(target) if replica.is_in_its_graph else None
        if formula is None or not formula.differs:
            found[0].append(target)
            found[1].append(tf.ones_like(target) if above is None else above)
            continue
        numbers = {name: leaf for name, leaf in formula.leaves.items() if leaf.is_number}
        wholes = _wholes(replica, formula)
        by = [wholes[name] for name in numbers]
        with tf.GradientTape() as tape:
            tape.watch(by)
            made = formula.of(wholes)
        for leaf, slope in zip(numbers.values(), tape.gradient(made, by, output_gradients=above), strict=True):
            if slope is not None:
                found[0].append(leaf.tensor)
                found[1].append(slope * leaf.part(replica))
    return found


def _wholes(replica: Replica, formula: _Formula) -> dict[str, Any]:
    return {name: leaf.whole(replica) for name, leaf in formula.leaves.items()}


def _formula(value: Any) -> _Formula | None:
    """Return how a tensor is made; None if it is none of a graph, or not of a few numbers."""
    import tensorflow as tf

    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.dtype.is_floating or not _is_few(value):
        return None
    operations, leaves = _walk(value)
    found, of_rows = _Formula(value, leaves, {}, [], differs=False), set(leaves)
    for operation in operations:
        if any(one.name in of_rows for one in operation.inputs):
            of_rows.add(operation.outputs[0].name)
    found.operations = [one for one in operations if one.outputs[0].name in of_rows]
    for operation in found.operations:
        for one in operation.inputs:
            if one.name not in of_rows and (constant := tf.get_static_value(one)) is not None:
                found.constants[one.name] = constant
            elif one.name not in of_rows:
                found.leaves[one.name] = _Leaf(one)
    found.differs = not all(_is_linear(one, of_rows) for one in found.operations) or any(
        leaf.summed or leaf.size is not None for leaf in found.leaves.values()
    )
    return found


def _walk(value: Any) -> tuple[list[Any], dict[str, _Leaf]]:
    """Return the operations that make ``value``, each after those that it takes from, and the sums and means."""
    operations: list[Any] = []
    leaves: dict[str, _Leaf] = {}
    seen: set[str] = set()
    left = [(value, False)]
    while left:
        tensor, done = left.pop()
        if done:
            operations.append(tensor.op)
        elif tensor.name not in seen:
            seen.add(tensor.name)
            if (leaf := _of_rows(tensor)) is not None:
                leaves[tensor.name] = leaf
            elif tensor.op.type in _KNOWN and all(map(_is_few, tensor.op.inputs)):
                left.append((tensor, True))
                left.extend((one, False) for one in tensor.op.inputs)
    return operations, leaves


def _of_rows(tensor: Any) -> _Leaf | None:
    """Return how a tensor is a sum or mean over rows, or a number of rows; None if it is none of these."""
    import tensorflow as tf

    operation = tensor.op
    if not operation.inputs or not _is_few(tensor):
        return None
    given = operation.inputs[0]
    if operation.type in ("StridedSlice", "Prod") and given.op.type == "Shape":  # tf.shape(x)[0], tf.size(x)
        first = operation.type == "Prod" or _is_first(operation)
        return _Leaf(tensor, summed=True) if first and _has_rows(given.op.inputs[0]) else None
    if not _has_rows(given):
        return None
    if operation.type in ("L2Loss", "Size", "Sum"):
        return _Leaf(tensor, summed=True)
    if operation.type != "Mean":
        return None
    return _Leaf(tensor, size=None if _is_even(given) else tf.size(given))


def _has_rows(tensor: Any) -> bool:
    """Return whether a size of a tensor is not known before there is a batch."""
    return not tensor.shape.is_fully_defined()


def _is_first(operation: Any) -> bool:
    """Return whether a slice is that of the first size of a shape, and the first is that of rows."""
    import tensorflow as tf

    begin = tf.get_static_value(operation.inputs[1])
    shape = operation.inputs[0].op.inputs[0].shape
    return begin is not None and list(begin) == [0] and (shape.rank is None or shape[0] is None)


def _is_even(tensor: Any) -> bool:
    """Return whether a tensor has equally many numbers for each row, as far as its graph shows."""
    if tensor.shape.rank is None or sum(size is None for size in tensor.shape) != 1:
        return False
    left, seen = [tensor.op], set()
    while left:
        operation = left.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            if operation.type in _SELECTING:
                return False
            left.extend(one.op for one in operation.inputs)
    return True


def _is_few(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined()) and tensor.shape.num_elements() <= _MOST


def _is_linear(operation: Any, of_rows: set[str]) -> bool:
    """Return whether the mean of what an operation makes is what it makes of the mean."""
    places = [place for place, one in enumerate(operation.inputs) if one.name in of_rows]
    return operation.type in _LINEAR or (len(places) == 1 and places[0] in _PRODUCTS.get(operation.type, ()))


def _made_anew(operation: Any, inputs: list[Any]) -> Any:
    """Run an operation on other inputs, as a tape can see it."""
    import tensorflow as tf

    function, given, left = getattr(tf.raw_ops, operation.type), [], list(inputs)
    kinds = set()  # attributes that the inputs say
    for argument in operation.op_def.input_arg:
        kinds |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
        count = operation.get_attr(argument.number_attr) if argument.number_attr else 1
        given.append(left[:count] if argument.number_attr else left[0])
        left = left[count:]
    names = list(inspect.signature(function).parameters)  # TensorFlow calls some inputs otherwise than its operation
    named = {attr.name: operation.get_attr(attr.name) for attr in operation.op_def.attr if attr.name not in kinds}
    return function(**dict(zip(names, given, strict=False)), **named)
