"""One replica's part of a step, and the changes to Keras' computations while it runs.

Keras computes each replica's losses, metrics and states as if that replica were alone, and scales its loss by one over
the number of replicas. That is the loss of the global batch only if all replicas have the same number of rows, no mask
and no weights. Within a step the following holds instead. So every value is the one that a single process computes on
the rows of all replicas:

- A loss of Keras is the sum over all replicas, divided by the sum of all replicas' divisors. The gradient of the global
  batch is the mean of the replicas' gradients, weighted by rows.
- A loss or a metric's function that returns one number for a whole batch is called on the rows of all replicas. So is
  one that returns a number per row, but compares each row with the others, such as ``Circle``
  (:mod:`tfos_nb.runtime.keras.replicas.comparisons`).
- A metric's result within a step is computed from the metric's variables, added up over all replicas.
- If a ``Mean`` or a ``Sum`` tracks one number per step, the number is weighted by this replica's share of the rows. A
  number that a program computes from sums over its rows is computed from the sums over the rows of all replicas
  (:mod:`tfos_nb.runtime.keras.replicas.reductions`).
- A replica without rows gets a placeholder row, which does not count (:mod:`tfos_nb.runtime.keras.placeholder_rows`).
  Its losses and gradients are replaced by zeros (selected, not multiplied: they may be NaN). It changes no variable.
- The floating-point state of a layer, such as the moving averages of ``BatchNormalization``, moves by the mean of the
  replicas' moves, weighted by rows. So it is the same on all workers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.keras.replicas.reductions import agreed
from tfos_nb.runtime.keras.replicas.sparse_gradients import sum_gradients

__all__ = [
    "Replica",
    "all_reduced",
    "are_numbers",
    "as_one_process",
    "current",
    "is_synchronous",
    "of_each_replica",
    "of_gradient",
    "replica_of_own_loop",
    "replica_of_step",
    "replica_that_keeps_states",
    "sent_as",
    "sum_over_replicas",
    "whole_value",
]

_SEED = "seed_generator_state"  # Keras' name of it; all replicas draw the same numbers, with or without rows


def is_synchronous(strategy: Any) -> bool:
    """Return whether several replicas compute each step together."""
    import tensorflow as tf

    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    return isinstance(strategy, mirrored) and strategy.num_replicas_in_sync > 1


def sum_over_replicas(values: Any) -> Any:
    """Return the sum of a tensor, or of each of several, over all replicas of the current step."""
    import tensorflow as tf

    current.adds_up = True
    try:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)
    finally:
        current.adds_up = False


def all_reduced(
    reduce: Callable[[list[Any]], list[Any]],
    values: list[Any],
    *,
    own: Callable[[Any], Any],
    part: Callable[[Any], Any],
    back: Callable[[Any], Any],
) -> list[Any]:
    """Reduce ``values`` over replicas by ``reduce``, with a gradient that is reduced in the same way.

    Parameters
    ----------
    reduce : callable
        Reduces a list of tensors over all replicas.
    values : list of tensor
        This replica's values.
    own : callable
        Applied to each value before it is reduced.
    part : callable
        Applied to each upstream gradient before it is reduced.
    back : callable
        Applied to each reduced gradient.

    Returns
    -------
    list of tensor
        The reduced values.
    """
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        def gradient(*upstream: Any) -> list[Any]:
            return [back(one) for one in reduce([part(one) for one in upstream])]

        return reduce([own(one) for one in given]), gradient

    result = reduced(*values)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def of_gradient(part: Callable[[Any], Any], gradient: Any) -> Any:
    """Return ``part`` of a gradient, or of its values if it is sparse; None if the gradient is None."""
    import tensorflow as tf

    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part(gradient.values), gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else part(gradient)


def are_numbers(values: Sequence[Any]) -> bool:
    """Return whether all of them are dense tensors of floating-point numbers."""
    import tensorflow as tf

    return all(isinstance(one, tf.Tensor) and one.dtype.is_floating for one in values)


@dataclass
class _Move:
    """A variable to which the step has assigned, and its value before the step."""

    variable: Any
    before: Any


@dataclass
class Replica:
    """This replica's part of the current step.

    Parameters
    ----------
    share : tensor
        Its rows divided by the rows of all replicas, ``float32``.
    has_rows : tensor or None
        Whether it has a row; None if it certainly has one.
    compiled : bool
        Whether XLA compiles the step. The rows of the other replicas are not used then, since XLA would need to know
        their number.
    own_step : bool
        Whether the step is the program's own, which may change gradients before it calls an optimizer.
    metrics : sequence of keras.Metric
        The model's metrics. Their variables are added up in one collective.
    reads_later : bool
        Whether ``get_metrics_result`` may return this replica's own results, because Keras reads the metrics again at
        the end of the epoch. The step then needs no collective for them.
    """

    share: Any
    has_rows: Any
    compiled: bool = False
    own_step: bool = False
    metrics: Sequence[Any] = ()
    reads_later: bool = False
    has_whole_gradients: bool = False  # a tape has returned them, and an optimizer gets values computed from them
    reduced: bool = False  # a loss of Keras was reduced over all replicas
    scaled: bool = False  # the program has scaled its loss for a sum over replicas
    applying: bool = False
    _graph: Any = None
    moves: dict[int, _Move] = field(default_factory=dict)
    has_own_gradients: bool = False  # a tape has returned some in a loop or a condition, of this replica's rows only
    # Names of tensors that are equal on all replicas: whole gradients, and results of metrics.
    known: list[str] = field(default_factory=list)
    results: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # id of its own result -> result, metric
    _sums: dict[int, Any] = field(default_factory=dict)  # id of a metric's variable -> sum, until it is assigned

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Make this the current replica of the thread within the block, in which it traces or runs a step."""
        current.replica = current.keeper = self
        self._graph = _graph()
        try:
            yield
        finally:
            current.replica = current.keeper = None

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep only the layers' states within the block, a step of the program's own; do not change its losses."""
        current.keeper = self
        try:
            yield
        finally:
            current.keeper = None

    @property
    def is_in_its_graph(self) -> bool:
        """Whether the code is outside of the step's loops and conditions, where TensorFlow cannot combine replicas."""
        return self._graph is _graph()

    def selected(self, value: Any) -> Any:
        """Return ``value``, or zeros where this replica has no row."""
        import tensorflow as tf

        if self.has_rows is None:
            return value
        return tf.where(self.has_rows, value, tf.zeros_like(value))

    def whole(self, part: Any) -> Any:
        """Return the sum of all replicas' parts.

        The gradient with respect to this replica's part is divided by its share: see :meth:`gradients`.
        """
        import tensorflow as tf

        self.reduced = True
        share = tf.cast(self.share, part.dtype)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def summed(own: Any) -> tuple[Any, Callable[[Any], Any]]:
            return sum_over_replicas(own), lambda upstream: tf.math.divide_no_nan(upstream, share)

        return summed(self.selected(part))

    def mean(self, value: Any) -> Any:
        """Return the mean over replicas, weighted by rows, of a mean over this replica's rows."""
        import tensorflow as tf

        return self.whole(value * tf.cast(self.share, value.dtype))

    @property
    def by_rows(self) -> bool:
        """Whether this replica's gradients are those of a mean over its own rows."""
        return self.reduced or not self.scaled

    def all_reduced(self, reduce: Callable[[list[Any]], list[Any]], values: list[Any]) -> list[Any]:
        """Return the replicas' values reduced by ``reduce``, with a gradient that fits :meth:`gradients`.

        A value that a layer reduces over replicas depends on the rows of all of them. Each replica's gradient with
        respect to it is that of a mean over the replica's own rows. So these gradients are weighted by rows before they
        are reduced.
        """
        return all_reduced(reduce, values, own=self.selected, part=self._part, back=self._back)

    def added_up(self, own: Any) -> Any:
        """Return the sum of ``own`` over all replicas; floating-point sums have the gradient of :meth:`all_reduced`."""
        if not own.dtype.is_floating:
            return sum_over_replicas(self.selected(own))
        return self.all_reduced(_summed, [own])[0]

    def sum_of_parts(self, value: Any) -> Any:
        """Return the sum of a metric's variable over all replicas, with or without rows in this step."""
        import tensorflow as tf

        kind = sent_as(value.dtype)
        return tf.cast(sum_over_replicas(tf.identity(tf.cast(value, kind))), value.dtype)  # a read has no device

    def _part(self, upstream: Any) -> Any:
        """Return this replica's part of a sum of gradients: weighted by its rows, or zero without rows."""
        import tensorflow as tf

        return self.selected(upstream * tf.cast(self.share, upstream.dtype) if self.by_rows else upstream)

    def _back(self, added_up: Any) -> Any:
        """Convert a gradient that was added up over replicas to one of a mean over this replica's own rows."""
        import tensorflow as tf

        return tf.math.divide_no_nan(added_up, tf.cast(self.share, added_up.dtype)) if self.by_rows else added_up

    def on_all_rows(self, function: Callable[..., Any], arguments: Any, *, number: bool) -> Any:
        """Call ``function`` with the rows of all replicas and return its result.

        If ``number``, the result is one number, the same on all replicas. Each replica may weight it differently, so
        its upstream gradients are added up over replicas. Then each replica takes the gradient with respect to its own
        rows. Otherwise ``function`` returns one number per row, and the result has those of this replica's rows. The
        numbers of other replicas depend on this replica's rows too, so the gradients of all are added up first.
        """
        import keras
        import tensorflow as tf

        leaves = keras.tree.flatten(arguments)
        own = tf.stack([tf.shape(leaf, tf.int64)[0] for leaf in leaves])
        if self.has_rows is not None:
            own = tf.where(self.has_rows, own, tf.zeros_like(own))
        place, counts = of_each_replica(own)
        starts = tf.gather(tf.cumsum(counts, exclusive=True), place)
        ends = tf.reduce_sum(counts, axis=0)
        spans = [(starts[i], own[i], ends[i]) for i in range(len(leaves))]
        gathered = [self._gathered(leaf, span, number) for leaf, span in zip(leaves, spans, strict=True)]
        with as_one_process():
            made = function(*keras.tree.pack_sequence_as(arguments, gathered))
        if not number:
            return made[starts[-1] : starts[-1] + own[-1]]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def alike(value: Any) -> tuple[Any, Callable[[Any], Any]]:
            return tf.identity(value), lambda upstream: sum_over_replicas(self._part(upstream))

        return alike(made)

    def _gathered(self, values: Any, span: tuple[Any, Any, Any], number: bool) -> Any:
        """Return the rows of all replicas, with this replica's at the span's place.

        Each replica pads its rows with zeros for the other replicas' rows, and the results are added up.
        """
        import tensorflow as tf

        start, count, total = span
        before, after = start, total - start - count

        def placed(own: Any) -> Any:
            paddings = [[before, after], *[[0, 0]] * (own.shape.rank - 1)]
            whole = tf.pad(own[:count], paddings)
            return tf.ensure_shape(whole, [None, *own.shape[1:]])

        if not values.dtype.is_floating:
            sent = tf.int32 if values.dtype == tf.bool else tf.int64
            return tf.cast(sum_over_replicas(placed(tf.cast(values, sent))), values.dtype)
        wide = tf.cast(values, tf.float32) if values.dtype.size < tf.float32.size else values
        if not number:
            (summed,) = self.all_reduced(lambda given: [sum_over_replicas(one) for one in given], [placed(wide)])
            return tf.cast(summed, values.dtype)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def of_all(own: Any) -> tuple[Any, Callable[[Any], Any]]:
            def back(upstream: Any) -> Any:
                part = self._back(upstream[start : start + count])
                missing = tf.shape(own, tf.int64)[0] - count  # the placeholder row
                return tf.pad(part, [[0, missing], *[[0, 0]] * (own.shape.rank - 1)])

            return sum_over_replicas(placed(own)), back

        return tf.cast(of_all(wide), values.dtype)

    def result_of(self, metric: Any, compute: Callable[[], Any]) -> Any:
        """Return the result that ``compute`` makes of a metric's variables, added up over all replicas.

        A result within a loop or a condition of TensorFlow's is this replica's own.
        """
        import keras
        import tensorflow as tf
        from keras.src.backend.common.stateless_scope import get_stateless_scope

        if current.reads_later or not self.is_in_its_graph:
            value = compute()
            self.results[id(value)] = value, metric
            return value
        scope = get_stateless_scope()
        known = {} if scope is None else dict(scope.state_mapping)  # of a metric that uses others, or of the program
        own = [v for v in metric.variables if id(v) not in known and _is_of_each(v)]
        if not own:
            return compute()
        sums = self._sums_of(own)
        with keras.StatelessScope(list(zip(own, sums, strict=True)), initialize_variables=False) as whole:
            whole.state_mapping.update(known)
            made = keras.tree.map_structure(whole_value, compute())
        if not tf.executing_eagerly():
            self.known += [leaf.name for leaf in keras.tree.flatten(made) if isinstance(leaf, tf.Tensor)]
        return made

    def _sums_of(self, variables: list[Any]) -> list[Any]:
        """Return the values of metrics' variables over all replicas.

        If one of them has changed, all changed variables of the model's metrics are added up in one collective. A step
        usually asks for the results of all metrics.
        """
        import tensorflow as tf

        if any(id(v) not in self._sums for v in variables):
            of_metrics = [v for metric in self.metrics for v in metric.variables if _is_of_each(v)]
            changed = {id(v): v for v in [*variables, *of_metrics] if id(v) not in self._sums}
            kinds: dict[Any, list[Any]] = {}
            for variable in changed.values():
                kinds.setdefault(sent_as(tf.as_dtype(variable.dtype)), []).append(variable)
            for kind, some in kinds.items():
                own = [tf.cast(tf.reshape(tf.convert_to_tensor(v._value), [-1]), kind) for v in some]
                parts = tf.split(sum_over_replicas(tf.concat(own, axis=0)), [int(part.shape[0]) for part in own])
                for variable, part in zip(some, parts, strict=True):
                    self._sums[id(variable)] = tf.cast(tf.reshape(part, variable.shape), variable.dtype)
        return [self._sums[id(v)] for v in variables]

    @property
    def parts(self) -> set[str]:
        """Names of the resources of this replica's parts of the metrics' variables, in the graph that is traced."""
        graph = _graph()
        if graph is None or not self.is_in_its_graph:
            return set()
        variables = [v._value for metric in self.metrics for v in metric.variables if _is_of_each(v)]
        handles = {id(part.handle) for variable in variables for part in variable.values}
        return {inner.name for outer, inner in graph.captures if id(outer) in handles}

    def knows(self, value: Any) -> bool:
        """Return whether a tensor is known to be equal on all replicas."""
        import tensorflow as tf

        return not tf.executing_eagerly() and value.name in self.known

    def metrics_of(self, outputs: Any) -> dict[str, Any]:
        """Return the metrics whose own results are among a step's ``outputs``, by their names in it."""
        named = outputs.items() if isinstance(outputs, dict) else ()
        return {name: self.results[id(value)][1] for name, value in named if id(value) in self.results}

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return this replica's part of the sum that is the gradient of the global batch.

        The gradient of the global batch is the mean of the replicas' gradients, weighted by rows. That also holds for a
        mean over rows that the program computes itself, and for a term that is equal on all replicas, such as a
        regularizer.
        """
        if not self.by_rows and self.has_rows is None:
            return list(gradients)
        return [of_gradient(self._part, gradient) for gradient in gradients]

    def whole_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the global batch. An outer tape can differentiate them."""
        import tensorflow as tf

        self.has_whole_gradients |= bool(gradients)
        parts = self.gradients(gradients)
        dense = [place for place, one in enumerate(parts) if isinstance(one, tf.Tensor)]
        others = [place for place in range(len(parts)) if place not in dense]
        add_up_others = functools.partial(sum_gradients, sum_over_replicas)
        for places, add_up in ((dense, functools.partial(self.all_reduced, _summed)), (others, add_up_others)):
            if places:
                for place, whole in zip(places, add_up([parts[i] for i in places]), strict=True):
                    parts[place] = whole
        self.known += [one.name for one in parts if isinstance(one, tf.Tensor) and not tf.executing_eagerly()]
        return parts

    def alike(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients with a common value for all replicas, where they can be computed from sums and means.

        A program may have computed them from whole gradients and from numbers of its own rows.
        """
        found = [agreed(self, one, self.known) for one in gradients]
        return [one if whole is None else whole for one, whole in zip(gradients, found, strict=True)]

    def kept(self, variable: Any, value: Any) -> Any:
        """Return the value to assign to ``variable``: its current value if this replica has no row."""
        import tensorflow as tf

        self._sums.pop(id(variable), None)
        if self.applying or _SEED in variable.name:
            return value
        current = tf.convert_to_tensor(variable._value)
        of_layer = getattr(variable._value, "synchronization", None) != tf.VariableSynchronization.ON_READ
        whole = agreed(self, value, self.known, plain=False) if of_layer else None
        if whole is not None:
            return whole
        if of_layer and value.dtype != tf.string:
            self.moves.setdefault(id(variable), _Move(variable, current))
        if self.has_rows is None:
            return value
        return tf.where(self.has_rows, tf.cast(value, current.dtype), current)

    def _moves(self, *, floating: bool) -> list[_Move]:
        """Return the assignments in the graph that is being traced, or all of them if none is."""
        here = _graph()
        moves = [m for m in self.moves.values() if here is None or m.before.graph is here]
        return [m for m in moves if m.before.dtype.is_floating == floating]

    def moved(self) -> list[tuple[Any, Any, Any]]:
        """Return the assigned floating-point states of layers: variable, value before, and difference."""
        import tensorflow as tf

        moves = self._moves(floating=True)
        return [(m.variable, m.before, tf.convert_to_tensor(m.variable._value) - m.before) for m in moves]

    def level_counts(self, rows: Any) -> None:
        """Set the layers' integers and flags to those of the first replica that has ``rows``.

        Then a counter of steps counts the step on all workers, even on a worker without rows.
        """
        import tensorflow as tf

        moves = self._moves(floating=False)
        if not moves:
            return
        place, have_rows = of_each_replica(tf.cast(rows > 0, tf.int32))
        first = tf.argmax(have_rows, output_type=tf.int32) == place
        values = [tf.convert_to_tensor(m.variable._value) for m in moves]
        parts = [tf.reshape(tf.where(first, tf.cast(value, tf.int64), 0), [-1]) for value in values]
        whole = tf.split(sum_over_replicas(tf.concat(parts, axis=0)), [tf.size(part) for part in parts])
        for move, value, one in zip(moves, values, whole, strict=True):
            move.variable._value.assign(tf.cast(tf.reshape(one, tf.shape(value)), value.dtype))

    def level(self, rows: Any) -> None:
        """Move the layers' states by the mean of all replicas' moves, weighted by their ``rows``."""
        import tensorflow as tf

        self.level_counts(rows)
        if moved := self.moved():
            weight = tf.cast(rows, tf.float32)
            parts = [tf.where(weight > 0, tf.cast(move, tf.float32) * weight, 0.0) for _, _, move in moved]
            flat = tf.concat([[weight], *(tf.reshape(part, [-1]) for part in parts)], axis=0)
            total, *sums = tf.split(sum_over_replicas(flat), [1, *(tf.size(part) for part in parts)])
            for (variable, before, move), value in zip(moved, sums, strict=True):
                mean = tf.reshape(tf.math.divide_no_nan(value, total[0]), move.shape)
                variable._value.assign(before + tf.cast(mean, move.dtype))


def _summed(values: list[Any]) -> list[Any]:
    return list(sum_over_replicas(values))


def of_each_replica(value: Any) -> tuple[Any, Any]:
    """Return this replica's index, and the values of all replicas in the order of their indices."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    place = tf.cast(context.replica_id_in_sync_group, tf.int32)
    here = tf.one_hot(place, context.num_replicas_in_sync, dtype=value.dtype)
    return place, sum_over_replicas(tf.reshape(here, [-1, *[1] * value.shape.rank]) * value)


def _graph() -> Any:
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class _Thread(threading.local):
    replica: Replica | None = None  # each replica of a process runs in a thread
    keeper: Replica | None = None  # the same, but set in steps of the program's own too
    one_process = False  # the called function already gets the rows of all replicas
    adds_up = False  # a sum of this package is running, which must not change gradients
    first_value: Callable[[], Any] | None = None  # of the variable that is being created, if each worker makes it
    reads_later = False  # Keras collects the results of a step, and reads the metrics again at the end of the epoch


current = _Thread()
"""State of the current thread's computation."""


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Let Keras compute as in a single process within the block, since it gets the rows of all replicas."""
    replica, before = current.replica, current.one_process
    current.replica, current.one_process = None, True
    try:
        yield
    finally:
        current.replica, current.one_process = replica, before


def replica_of_step() -> Replica | None:
    """Return this thread's part of the current step; None outside of steps."""
    return current.replica


def replica_of_own_loop() -> Replica | None:
    """Return this thread's part of a step of the program's own; None in Keras' steps and outside of steps."""
    return current.keeper if current.replica is None else None


def replica_that_keeps_states() -> Replica | None:
    """Return the replica that keeps the layers' states in this thread's step, whether of Keras or of the program."""
    return current.keeper


def _is_of_each(variable: Any) -> bool:
    """Return whether each replica has its own part of a variable, and the whole is the sum of the parts."""
    import tensorflow as tf

    made = variable._value
    if not isinstance(made, tf.distribute.DistributedValues):
        return False
    on_read = made.synchronization == tf.VariableSynchronization.ON_READ
    return bool(on_read and made.aggregation == tf.VariableAggregation.SUM)


def whole_value(result: Any) -> Any:
    """Return a metric's result. If it is a variable, of which each replica has a part, return its whole value."""
    import keras
    import tensorflow as tf

    return tf.convert_to_tensor(result.value) if isinstance(result, keras.Variable) else result


def sent_as(kind: Any) -> Any:
    """Return the type in which numbers are sent. TensorFlow's collectives take few types, and not ``bfloat16``."""
    import tensorflow as tf

    if kind.is_floating and kind.size < tf.float32.size and kind != tf.float16:
        return tf.float32
    whole = (kind.is_integer or kind.is_bool) and kind not in (tf.int32, tf.int64)
    return tf.int64 if whole and kind != tf.uint64 else kind
