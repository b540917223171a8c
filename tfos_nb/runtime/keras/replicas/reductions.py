"""Recompute a program's sums and means over the rows of all replicas, such as those in the loss of a ``train_step``.

A program writes ``tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)``, or the root of a mean, or a quotient of two
sums (Dice, F1). On a replica each sum covers only its own rows, so the result is not that of a single process on all
rows. The graph of the step shows from which sums and means a number is computed. This module computes these sums and
means over the rows of all replicas, and then computes the program's number again from them:

    f(s1, ..., m1, ...)  ->  f(sum of s1, ..., mean of m1, ...)

The derivative with respect to a replica's own ``s1`` is the derivative of ``f`` with respect to the sum, so the
gradient is exact as well. A number that is linear in means, such as the usual ``tf.reduce_mean``, is right already. It
is left unchanged, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["agreed", "behind", "is_even", "is_of_rows", "of_all_rows", "targets_of_all_rows"]

_LINEAR = {
    "Add", "AddN", "AddV2", "BroadcastTo", "Cast", "CheckNumerics", "ConcatV2", "ExpandDims", "GatherV2", "Identity",
    "Mean", "Neg", "Pack", "Reshape", "Slice", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Sum", "Tile",
    "Transpose", "Unpack",
}  # fmt: skip
_PRODUCTS = {"Mul": (0, 1), "MulNoNan": (0, 1), "RealDiv": (0,), "Div": (0,), "DivNoNan": (0,), "Xdivy": (0,)}
"""Operations that are linear in one operand if the other one has no rows, with the possible places of that operand."""
_SUMS = {
    "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "DenseBincount", "Einsum", "L2Loss", "MatMul", "SegmentSum",
    "Size", "SparseSegmentSum", "Sum", "UnsortedSegmentSum",
}  # fmt: skip
"""Operations that add up over rows, if their input has rows and their output has none."""
_OTHERS = {"Mean": "mean", "Max": "max", "Min": "min", "Any": "any", "All": "all", "EuclideanNorm": "norm"}
_CALLS = {
    "Case", "If", "IdentityN", "PartitionedCall", "Placeholder", "StatefulPartitionedCall", "StatelessCase",
    "StatelessIf", "StatelessWhile", "While",
}  # fmt: skip
"""Operations that are not computed again: functions, loops, and operations with a custom gradient of the program."""
_SELECTING = {"DynamicPartition", "RaggedGather", "RaggedRange", "SparseReshape", "Unique", "UniqueV2", "Where"}
"""Operations after which rows may have different numbers of elements."""
_MOST = 4096  # maximum number of elements: a tensor with more is not a loss
_ANY = float("inf")


class Sums(Protocol):
    """The part of a step's replica that adds up over all replicas, and knows which tensors are sums already."""

    known: list[str]
    """Names of tensors that are equal on all replicas."""

    @property
    def parts(self) -> set[str]:
        """Names of tensors that read a variable of which each replica has a part."""

    @property
    def is_in_its_graph(self) -> bool:
        """Whether the code is outside of loops and conditions, where TensorFlow cannot combine replicas."""

    @property
    def share(self) -> Any:
        """The replica's rows divided by the rows of all replicas."""

    def added_up(self, own: Any) -> Any:
        """Return the sum of a tensor over all replicas, with a gradient if it is of floating point."""

    def sum_of_parts(self, value: Any) -> Any:
        """Return the whole value of a variable of which each replica has a part."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor from which a number is computed, and how to combine the replicas' values of it.

    Parameters
    ----------
    tensor : tensor
        This replica's value. Its shape does not depend on the number of rows.
    kind : str
        ``sum``, ``mean``, ``max``, ``min``, ``any``, ``all`` or ``norm`` over rows, or the ``shape`` of a tensor with
        rows. ``part`` is the value of a metric's variable, which counts rows of earlier steps too. ``same`` is equal on
        all replicas. ``other`` values are combined to their mean over replicas, weighted by rows.
    size : tensor, optional
        Number of elements of which it is the mean, if rows may have different numbers of elements.
    """

    tensor: Any
    kind: str = "other"
    size: Any = None

    @property
    def is_number(self) -> bool:
        """Whether a gradient with respect to it exists."""
        return bool(self.tensor.dtype.is_floating)

    @property
    def has_rows(self) -> bool:
        """Whether it is computed from rows, in a known way."""
        return self.kind not in ("same", "other")

    @property
    def is_plain(self) -> bool:
        """Whether the mean of the replicas' values, weighted by rows, is the value of all rows."""
        return self.kind in ("same", "other") or (self.kind == "mean" and self.size is None)

    def whole(self, replica: Sums) -> Any:
        """Return its value on the rows of all replicas."""
        import tensorflow as tf

        kind = self.tensor.dtype
        if self.kind == "same" or (self.kind == "other" and not self.is_number):
            return self.tensor
        if self.kind == "part":
            return replica.sum_of_parts(self.tensor)
        if self.kind == "shape":
            return self._shape(replica)
        if self.kind in ("any", "all"):
            own = self.tensor if self.kind == "any" else tf.logical_not(self.tensor)
            some = replica.added_up(tf.cast(own, tf.int32)) > 0
            return some if self.kind == "any" else tf.logical_not(some)
        if self.kind in ("max", "min"):
            return self._extreme(replica)
        if self.kind == "norm":
            return tf.sqrt(replica.added_up(tf.square(self.tensor)))
        if not self.is_number:
            return tf.cast(replica.added_up(tf.cast(self.tensor, tf.int64)), kind)
        weight = self._weight(replica)
        # tf.where, because a product is not enough: the mean of zero elements is NaN, and must not count.
        whole = replica.added_up(tf.where(weight > 0, self.tensor * weight, tf.zeros_like(self.tensor)))
        return whole if self.size is None else tf.math.divide_no_nan(whole, replica.added_up(weight))

    def part(self, replica: Sums, whole: Any) -> Any:
        """Return the derivative of ``whole`` with respect to this replica's value, divided by its share of the rows.

        Gradients are multiplied by the share when they are added up.
        """
        import tensorflow as tf

        share = tf.cast(replica.share, self.tensor.dtype)
        if self.kind == "same":
            return tf.ones_like(share)
        if self.kind in ("max", "min"):
            attains = tf.cast(self.tensor == whole, self.tensor.dtype)
            return tf.math.divide_no_nan(attains, share * replica.added_up(attains))
        if self.kind == "norm":
            return tf.math.divide_no_nan(self.tensor, share * whole)
        weight = self._weight(replica)
        over = share if self.size is None else share * replica.added_up(weight)
        return tf.math.divide_no_nan(weight, over)

    def _weight(self, replica: Sums) -> Any:
        """Return the factor by which this replica's value is multiplied before it is added up."""
        import tensorflow as tf

        if self.kind == "sum":
            return tf.ones([], self.tensor.dtype)
        return tf.cast(replica.share if self.size is None else self.size, self.tensor.dtype)

    def _shape(self, replica: Sums) -> Any:
        """Return the shape of the tensor on all rows. The first unknown dimension is the number of rows."""
        import tensorflow as tf

        sizes = list(self.tensor.op.inputs[0].shape)
        counts = [place == sizes.index(None) for place in range(len(sizes))]
        whole = tf.cast(replica.added_up(tf.cast(self.tensor, tf.int64)), self.tensor.dtype)
        return tf.where(counts, whole, self.tensor)

    def _extreme(self, replica: Sums) -> Any:
        """Return the maximum or the minimum of the values of the replicas that have a row."""
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        here = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync, True, False, dtype=tf.bool)
        here = tf.reshape(here, [-1, *[1] * self.tensor.shape.rank])
        kind = self.tensor.dtype if self.is_number else tf.int64
        own = tf.cast(self.tensor, kind)[None]
        each = replica.added_up(tf.where(here, own, tf.zeros_like(own)))
        there = replica.added_up(tf.cast(here, tf.int32)) > 0
        reduce = tf.reduce_max if self.kind == "max" else tf.reduce_min
        worst = kind.min if self.kind == "max" else kind.max
        return tf.cast(reduce(tf.where(there, each, worst), axis=0), self.tensor.dtype)


@dataclass
class _Formula:
    """Formula of a tensor: the sums and means over rows, the constants, and the operations that give its value.

    The keys are the names of tensors in the graph of the step.
    """

    value: Any
    leaves: dict[str, _Leaf]
    constants: dict[str, Any]
    operations: list[Any]  # each one comes after the operations whose outputs it uses
    differs: bool
    """Whether the value on all rows differs from the mean of the replicas' own values, weighted by rows."""

    @property
    def has_rows(self) -> bool:
        """Whether it is computed from rows, in a known way."""
        return any(leaf.has_rows for leaf in self.leaves.values())

    @property
    def is_known(self) -> bool:
        """Whether all replicas get the same value once they know each other's sums and means."""
        return all(leaf.kind != "other" for leaf in self.leaves.values())

    def of(self, wholes: dict[str, Any]) -> Any:
        """Compute the value again, from other values of the leaves."""
        import tensorflow as tf

        made = {name: tf.constant(constant) for name, constant in self.constants.items()} | wholes
        for operation in self.operations:
            anew = _made_anew(operation, [made[one.name] for one in operation.inputs])
            made.update((old.name, new) for old, new in zip(operation.outputs, anew, strict=True))
        return made[self.value.name]


def is_of_rows(value: Any) -> bool:
    """Return whether a tensor of a graph has rows, or is not the row-weighted mean of the replicas' own values."""
    import tensorflow as tf

    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return False
    return _has_rows(value) or ((formula := _formula(value)) is not None and formula.differs)


def of_all_rows(replica: Sums, value: Any) -> Any:
    """Return ``value`` as computed on the rows of all replicas, with a gradient that fits :meth:`Replica.gradients`.

    Returns
    -------
    tensor
        ``value`` itself if the mean of the replicas' own values is the same. Also ``value`` itself where this cannot be
        determined: outside of graphs, and in a loop or a condition of the step.
    """
    formula = _formula(value, replica.known, parts=replica.parts) if replica.is_in_its_graph else None
    if formula is None or not formula.differs:
        return value
    return formula.of(_wholes(replica, formula))


def agreed(replica: Sums, value: Any, known: Sequence[str] = (), *, plain: bool = True) -> Any:
    """Return the common value of all replicas for ``value``, if sums and means are enough to compute it.

    Parameters
    ----------
    replica : Sums
        This replica.
    value : tensor
        An assigned value, or a gradient.
    known : sequence of str
        Names of tensors that are equal on all replicas.
    plain : bool
        Whether to compute the value even if it is the mean of the replicas' own values. False for layers' states, which
        :meth:`Replica.level` sets to that mean.

    Returns
    -------
    tensor or None
        None if the value is computed from rows in another way, or if that cannot be determined.
    """
    formula = _formula(value, known, _ANY, replica.parts)
    if formula is None or not formula.is_known:
        return None
    if not formula.has_rows:
        return value
    if not replica.is_in_its_graph or not (plain or formula.differs):
        return None
    return formula.of(_wholes(replica, formula))


def targets_of_all_rows(replica: Sums, targets: list[Any], upstream: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors whose gradient a tape must compute instead of ``targets``, and their upstream gradients.

    Parameters
    ----------
    replica : Sums
        This replica. Its gradients are weighted by its share of the rows afterwards.
    targets, upstream : list
        The tensors whose gradient the program asks for, and the upstream gradient of each, or None for ones.

    Returns
    -------
    list, list
        The new targets and their upstream gradients. Each target that is computed from sums over rows is replaced by
        these sums.
    """
    import tensorflow as tf

    found: tuple[list[Any], list[Any]] = ([], [])
    for target, above in zip(targets, upstream, strict=True):
        above = tf.ones_like(target) if above is None else above
        if _has_rows(target):  # for one number per row the tape adds up the gradients
            above = tf.math.divide_no_nan(above, tf.cast(replica.share, above.dtype))
        formula = _formula(target) if replica.is_in_its_graph else None
        if formula is None or not formula.differs:
            found[0].append(target)
            found[1].append(above)
            continue
        numbers = {name: leaf for name, leaf in formula.leaves.items() if leaf.is_number}
        wholes = _wholes(replica, formula)
        by = [wholes[name] for name in numbers]
        with tf.GradientTape() as tape:
            tape.watch(by)
            made = formula.of(wholes)
        slopes = tape.gradient(made, by, output_gradients=above)
        for whole, leaf, slope in zip(by, numbers.values(), slopes, strict=True):
            if slope is not None:
                found[0].append(leaf.tensor)
                found[1].append(slope * leaf.part(replica, whole))
    return found


def behind(value: Any, further: Callable[[Any], bool] = lambda tensor: True) -> Iterator[Any]:
    """Iterate over a tensor and the tensors that it is computed from. Do not go past those that ``further`` rejects."""
    left, seen = [value], set()
    while left:
        tensor = left.pop()
        if tensor.name not in seen:
            seen.add(tensor.name)
            yield tensor
            if further(tensor):
                left.extend(tensor.op.inputs)


def _wholes(replica: Sums, formula: _Formula) -> dict[str, Any]:
    """Return the sums and means over the rows of all replicas, by the names of the tensors with this replica's own."""
    return {name: leaf.whole(replica) for name, leaf in formula.leaves.items()}


def _formula(
    value: Any, known: Sequence[str] = (), most: float = _MOST, parts: Collection[str] = ()
) -> _Formula | None:
    """Return the formula of a tensor; None if it is not in a graph, or not a number or has too many elements."""
    import tensorflow as tf

    if tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not _is_few(value, most):
        return None
    if not value.dtype.is_floating and not value.dtype.is_integer:
        return None
    operations, leaves = _walk(value, known, most, parts)
    of_rows = set(leaves)
    for operation in operations:
        if any(one.name in of_rows for one in operation.inputs):
            of_rows.update(one.name for one in operation.outputs)
    found = _Formula(value, leaves, {}, [one for one in operations if one.outputs[0].name in of_rows], differs=False)
    for operation in found.operations:
        for one in operation.inputs:
            if one.name not in of_rows and (constant := tf.get_static_value(one)) is not None:
                found.constants[one.name] = constant
            elif one.name not in of_rows:
                found.leaves[one.name] = _Leaf(one, "same" if _is_made_of_same(one, known) else "other")
    if not found.operations and not leaves:
        found.leaves[value.name] = _Leaf(value, "same" if _is_made_of_same(value, known) else "other")
    found.differs = not all(_is_linear(one, of_rows) for one in found.operations) or not all(
        leaf.is_plain for leaf in found.leaves.values()
    )
    return found


def _walk(value: Any, known: Sequence[str], most: float, parts: Collection[str]) -> tuple[list[Any], dict[str, _Leaf]]:
    """Return the operations that compute ``value``, in the order of computation, and the leaves where they start."""
    operations: list[Any] = []
    leaves: dict[str, _Leaf] = {}
    seen: set[str] = set()
    done_already: set[str] = set()  # names of operations: one may have several of the tensors as outputs
    left = [(value, False)]
    while left:
        tensor, done = left.pop()
        if done:
            if tensor.op.name not in done_already:
                done_already.add(tensor.op.name)
                operations.append(tensor.op)
        elif tensor.name not in seen and tensor.name not in known:
            seen.add(tensor.name)
            if tensor.op.type == "ReadVariableOp" and tensor.op.inputs[0].name in parts:
                leaves[tensor.name] = _Leaf(tensor, "part")
            elif (leaf := _of_rows(tensor)) is not None:
                leaves[tensor.name] = leaf
            elif _is_made_anew(tensor.op, most):
                left.append((tensor, True))
                left.extend((one, False) for one in tensor.op.inputs)
    return operations, leaves


def _is_made_anew(operation: Any, most: float) -> bool:
    """Return whether an operation can be computed again on other inputs of the same shapes."""
    definition = operation.op_def
    if operation.type in _CALLS or definition is None or not operation.inputs:
        return False
    if definition.is_stateful and operation.type not in ("CheckNumerics", "CheckNumericsV2"):
        return False
    if any(argument.type_list_attr for argument in definition.input_arg):
        return False
    return all(_is_few(one, most) for one in operation.inputs)


def _is_same(tensor: Any, known: Sequence[str]) -> bool:
    """Return whether a tensor is equal on all replicas: a variable, a constant, or one of the ``known`` names."""
    return tensor.op.type in ("ReadVariableOp", "Const") or tensor.name in known


def _is_made_of_same(tensor: Any, known: Sequence[str]) -> bool:
    """Return whether a tensor is computed only from equal tensors, by deterministic operations."""
    sources = behind(tensor, lambda one: not _is_same(one, known))
    return all(_is_same(one, known) or _is_made_anew(one.op, _ANY) for one in sources)


def _of_rows(tensor: Any) -> _Leaf | None:
    """Return the leaf of a tensor that reduces rows or counts them; None if it does neither."""
    import tensorflow as tf

    operation = tensor.op
    if not _is_few(tensor, _MOST) or not any(map(_has_rows, operation.inputs)):
        return None
    given = operation.inputs[0]
    if operation.type == "Shape":
        return _Leaf(tensor, "shape") if given.shape.rank is not None else None
    if operation.type == "Einsum" and not _adds_up_one_size(operation):
        return None
    of_product = operation.type == "Reshape" and given.op.type == "MatMul"  # tf.tensordot creates this pair
    if operation.type in _SUMS or of_product:
        return _Leaf(tensor, "sum")
    kind = _OTHERS.get(operation.type)
    if kind is None or (kind == "mean" and not tensor.dtype.is_floating):
        return None
    return _Leaf(tensor, kind, tf.size(given) if kind == "mean" and not is_even(given) else None)


def _adds_up_one_size(operation: Any) -> bool:
    """Return whether an ``Einsum`` adds up over exactly one unknown dimension, with the same label in all inputs."""
    labels = operation.get_attr("equation").decode().partition("->")[0].split(",")
    if "." in "".join(labels) or any(one.shape.rank is None for one in operation.inputs):
        return False
    unknown = [
        label
        for of_input, one in zip(labels, operation.inputs, strict=True)
        for label, size in zip(of_input, one.shape, strict=True)
        if size is None
    ]
    return len(set(unknown)) == 1


def _has_rows(tensor: Any) -> bool:
    """Return whether a dimension of a tensor is unknown in the graph, so that it depends on the batch."""
    return not tensor.shape.is_fully_defined()


def is_even(tensor: Any) -> bool:
    """Return whether all rows of a tensor have the same number of elements, as far as its graph shows."""
    if tensor.shape.rank is None or sum(size is None for size in tensor.shape) != 1:
        return False
    return not any(one.op.type in _SELECTING for one in behind(tensor))


def _is_few(tensor: Any, most: float) -> bool:
    return bool(tensor.shape.is_fully_defined()) and tensor.shape.num_elements() <= most


def _is_linear(operation: Any, of_rows: set[str]) -> bool:
    """Return whether the mean of an operation's outputs is its output for the mean of its inputs."""
    places = [place for place, one in enumerate(operation.inputs) if one.name in of_rows]
    if operation.type in ("GatherV2", "Slice", "StridedSlice", "Tile", "BroadcastTo", "Reshape", "Transpose"):
        return places == [0]  # only the values may come from rows, not the indices or sizes
    return operation.type in _LINEAR or (len(places) == 1 and places[0] in _PRODUCTS.get(operation.type, ()))


def _made_anew(operation: Any, inputs: list[Any]) -> list[Any]:
    """Run an operation on other inputs so that a tape records it, as TensorFlow's own functions for operations do."""
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import op_def_library

    given, left = {}, list(inputs)
    kinds = set()  # attributes that follow from the inputs
    for argument in operation.op_def.input_arg:
        kinds |= {argument.type_attr, argument.number_attr}
        count = operation.get_attr(argument.number_attr) if argument.number_attr else 1
        given[argument.name] = left[:count] if argument.number_attr else left[0]
        left = left[count:]
    names = [attr.name for attr in operation.op_def.attr]
    named = {name: operation.get_attr(name) for name in names if name not in kinds}
    _, _, made, _ = op_def_library._apply_op_helper(operation.type, **given, **named)
    attributes = tuple(part for name in names for part in (name, made.get_attr(name)))
    execute.record_gradient(operation.type, made.inputs, attributes, list(made.outputs))
    return list(made.outputs)
