"""Support a program's own training loops: a replica without rows gets a placeholder row, which does not count.

If a step has fewer rows than replicas, the function that a program passes to ``strategy.run`` would get an empty batch.
Many layers fail on one, and a mean over it is NaN. So the function gets a real row
(:mod:`tfos_nb.runtime.keras.placeholder_rows`), as Keras' own steps do. All effects of that row are removed:

- The gradients that a ``GradientTape`` returns become zero, so an optimizer's sum over replicas does not include them.
- Values that the replicas reduce, such as the moments of a synchronized normalization, become zero, and so do their
  gradients.
- Assignments to variables of the strategy have no effect. The layers' states, such as the moving averages of
  ``BatchNormalization``, then move by the mean of all replicas' moves, as in Keras' own steps.
- Of the function's results, numbers become zero and rows are left out, so ``strategy.reduce`` and ``gather`` are right.

A variable on each replica says whether it has rows, because a ``tf.function`` that was traced with rows is also called
without rows, and vice versa.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.keras.placeholder_rows import PlaceholderRows, first_rows, rows_of
from tfos_nb.runtime.keras.replicas.optimizers import is_applying
from tfos_nb.runtime.keras.replicas.replica import (
    Replica,
    all_reduced,
    are_numbers,
    is_synchronous,
    of_gradient,
    replica_of_own_loop,
)

__all__ = ["expect_lacking_rows", "patch_own_loops"]

_OWN_STEPS = ("keras.", "tfos_nb.")  # these already use placeholder rows


_placeholders: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()


class _Rows:
    """A strategy's placeholder rows, and a flag for each replica that says whether it has rows of its own."""

    def __init__(self) -> None:
        self.placeholder = PlaceholderRows()
        self._flags: dict[int, Any] = {}
        self._lock = threading.Lock()

    def flag(self) -> Any:
        """Return the flag of this thread's replica, a variable."""
        import tensorflow as tf
        from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a strategy would make it everyone's

        replica = tf.distribute.get_replica_context()._replica_id
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            if replica not in self._flags:
                self._flags[replica] = ResourceVariable(True, trainable=False)
        return self._flags[replica]


def expect_lacking_rows(strategy: Any) -> None:
    """Mark a strategy that distributes a dataset of fed rows: replicas may have no rows in its steps."""
    _placeholders.setdefault(strategy.extended, _Rows())


def patch_own_loops() -> None:
    """Patch TensorFlow's synchronous strategies, tapes and variables to ignore placeholder rows."""
    import tensorflow as tf
    from tensorflow.python.distribute import values

    owner = next(c for c in tf.distribute.Strategy.__mro__ if "run" in vars(c))
    if hasattr(owner.run, "_tfos_nb"):
        return
    for one in [owner, *_subclasses(owner)]:
        if "run" in vars(one):
            one.run = _on_rows(vars(one)["run"])
    tf.GradientTape.gradient = _selected(tf.GradientTape.gradient)
    context = next(c for c in tf.distribute.ReplicaContext.__mro__ if "all_reduce" in vars(c))
    context.all_reduce = _reduced(context.all_reduce)
    for one in [values.DistributedVariable, *_subclasses(values.DistributedVariable)]:
        for name in ("assign", "assign_add", "assign_sub"):
            if name in vars(one):
                setattr(one, name, _kept(vars(one)[name], name == "assign"))
    owner.run._tfos_nb = True


def _subclasses(kind: Any) -> list[Any]:
    found: list[Any] = []
    for below in kind.__subclasses__():
        found += [below, *_subclasses(below)]
    return found


def _on_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Strategy.run``."""

    @functools.wraps(original)
    def run(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        import tensorflow as tf

        rows = _placeholders.get(self.extended) if is_synchronous(self) else None
        module = str(getattr(getattr(fn, "python_function", fn), "__module__", ""))
        if rows is None or module.startswith(_OWN_STEPS) or replica_of_own_loop() is not None:
            return original(self, fn, args, kwargs, options)
        autograph = tf.__internal__.autograph
        step = _Step(autograph.tf_convert(fn, autograph.control_status_ctx()), rows)
        converted: Any = tf.autograph.experimental.do_not_convert(step)
        return original(self, converted, args, kwargs, options)

    return run


class _Step:
    """The function that each replica calls instead of the program's."""

    def __init__(self, fn: Callable[..., Any], rows: _Rows) -> None:
        self._fn = fn
        self._rows = rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        given = (args, kwargs)
        leaves = [leaf for leaf in tf.nest.flatten(given) if _has_rows(leaf)]
        if not leaves:
            return self._fn(*args, **kwargs)
        filled = [self._rows.placeholder.fill([leaf], place) for place, leaf in enumerate(leaves)]
        left = iter([leaf for (leaf,), _ in filled])
        args, kwargs = tf.nest.map_structure(lambda leaf: next(left) if _has_rows(leaf) else leaf, given)
        flag = self._rows.flag()
        has_rows = tf.reduce_all([True if has is None else has for _, has in filled])
        with tf.control_dependencies([flag.assign(has_rows)]):
            replica = Replica(None, flag)
            with replica.keeping():
                outputs = tf.nest.map_structure(functools.partial(_counted, replica), self._fn(*args, **kwargs))
            replica.level(tf.where(flag, rows_of(filled[0][0]), 0))
            return outputs


def _has_rows(leaf: Any) -> bool:
    """Return whether a value may be part of a batch: a tensor, but not a single number."""
    import tensorflow as tf

    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and leaf.shape.rank != 0


def _counted(replica: Replica, leaf: Any) -> Any:
    """Return a replica's result: without rows of its own, numbers become zero and rows are left out."""
    import tensorflow as tf

    eager, flag = tf.executing_eagerly(), replica.has_rows
    if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) or (eager and flag):
        return leaf
    if _has_rows(leaf) and (leaf.shape.rank is None or leaf.shape[0] == (1 if eager else None)):
        rows = leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]
        return first_rows(leaf, tf.where(flag, rows, tf.zeros_like(rows)))
    if isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_integer):
        return replica.selected(leaf)
    return leaf


def _selected(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GradientTape.gradient``."""

    @functools.wraps(original)
    def gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        gradients, replica = original(self, *args, **kwargs), replica_of_own_loop()
        if replica is None:
            return gradients
        return tf.nest.map_structure(functools.partial(of_gradient, replica.selected), gradients)

    return gradient


def _reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ReplicaContext.all_reduce``."""

    @functools.wraps(original)
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        import tensorflow as tf

        replica, values = replica_of_own_loop(), tf.nest.flatten(value)
        if replica is None or is_applying() or not are_numbers(values):
            return original(self, reduce_op, value, options)

        def reduce(own: list[Any]) -> list[Any]:
            reduced: list[Any] = original(self, reduce_op, own, options)
            return reduced

        own = replica.selected
        return tf.nest.pack_sequence_as(value, all_reduced(reduce, values, own=own, part=own, back=lambda one: one))

    return all_reduce


def _kept(original: Callable[..., Any], assigns: bool) -> Callable[..., Any]:
    """Wrap ``assign``, ``assign_add`` or ``assign_sub`` of a strategy's variable."""

    @functools.wraps(original)
    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        replica = replica_of_own_loop()
        of_rows = self.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA
        if replica is not None and of_rows and not is_applying() and tf.distribute.get_replica_context():
            value = tf.convert_to_tensor(value, self.dtype)
            value = tf.where(replica.has_rows, value, tf.convert_to_tensor(self) if assigns else tf.zeros_like(value))
        return original(self, value, *args, **kwargs)

    return assign
