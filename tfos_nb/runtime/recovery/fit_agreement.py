"""Let the workers of a synchronous strategy agree on a state, and on numbers, by collectives.

Each worker has states in its own memory, and a new worker has none. All continue from the latest one. Its worker sends
it to those that do not have it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfos_nb.runtime.control.wire import expect
from tfos_nb.runtime.recovery.fit_contents import (
    StateMetadata,
    array_of,
    arrays_of,
    dtype_of,
    is_read_over_replicas,
    parts_of,
    value_of,
)
from tfos_nb.runtime.recovery.memory_state import State, StateVersion

__all__ = ["Agreed", "AnyWorker", "Totals", "WorkersBeside", "agree"]

_STEP_BITS, _GENERATION_BITS = 28, 12
_WORD = 8  # bytes of the integers as which other bytes are sent
_SHORT = 64  # words
_ATTRIBUTE = "_tfos_workers"  # of a strategy
_GROUPS_BESIDE, _GROUPS_OF_A_STRATEGY = 1 << 10, 1 << 10  # TensorFlow itself counts groups of devices from 1
_PIECE = (64 << 20) // _WORD  # of a sum, in words: each needs memory of its own on every device


@dataclass(frozen=True)
class Agreed:
    """The state from which all workers continue.

    Attributes
    ----------
    moment : StateVersion
        When it was saved.
    passes : int
        How many passes it includes.
    rest : StateMetadata
        What belongs to it beside its arrays.
    arrays : list of numpy.ndarray
        Its arrays: this worker's own, if it had the state, else those of the worker that sent it.
    others_follow : bool
        Whether it is the last state of a fit, and a worker has a state of a later one.
    """

    moment: StateVersion
    passes: int
    rest: StateMetadata
    arrays: list[Any]
    others_follow: bool = False


def agree(strategy: Any, own: State | None, fit: int = 0, last_fit: int = 0) -> Agreed | None:
    """Return the latest state of all workers; None if no worker has one. All workers must call it.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        Their strategy.
    own : State or None
        This worker's latest state of the fit.
    fit : int
        The fit's number.
    last_fit : int
        The last fit of which this worker has a state.
    """
    if strategy.num_replicas_in_sync == 1:
        latest, last = own, last_fit
    else:
        latest, last = _latest(_Workers.of(strategy), own, last_fit)
    if latest is None:
        return None
    rest = expect(StateMetadata, latest.rest)
    moment = replace(latest.moment, fit=fit)
    return Agreed(moment, latest.passes, rest, arrays_of(latest), rest.finished and last > fit)


def _latest(workers: _Workers, own: State | None, last_fit: int) -> tuple[State | None, int]:
    """Return the latest state, and the last fit of which any worker has one.

    The state is this worker's own, with callbacks and generators of its own, or the one that it was sent.
    """
    parts = [] if own is None else [own.rest, *own.data]
    mine = [0, 0, 0, 0] if own is None else [_number(own.moment), own.passes, len(own.rest), _words_of(parts)]
    all_of_them = workers.numbers([*mine, last_fit])
    last = int(all_of_them[:, -1].max())
    source = int(np.argmax(all_of_them[:, 0]))
    number, passes, size, words, _ = (int(one) for one in all_of_them[source])
    if not number or (all_of_them[:, 0] == number).all():
        return own, last
    sent = workers.sent(source, parts, words, wanted=mine[0] != number)
    if sent is None:
        return own, last
    rest = parts_in(sent, [size])[0].tobytes()
    index = expect(StateMetadata, rest).index
    sizes = [dtype_of(name).itemsize * math.prod(shape) for name, shape in index]
    return State(_moment(number), passes, index, parts_in(sent, [size, *sizes])[1:], rest), last


def joined(parts: Sequence[Any], words: int) -> Any:
    """Return the bytes of buffers as ``words`` integers, each buffer from a new integer on.

    Examples
    --------
    >>> [part.tobytes() for part in parts_in(joined([b"ab", b"", b"123456789"], 4), [2, 0, 9])]
    [b'ab', b'', b'123456789']
    """
    numbers = np.zeros(words, np.int64)
    free = numbers.view(np.uint8)
    for part in parts:
        found = np.frombuffer(part, np.uint8)
        free[: found.size] = found
        free = free[_words(found.size) * _WORD :]
    return numbers


def parts_in(numbers: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the first buffers of these sizes, in bytes, that :func:`joined` has joined."""
    rest, parts = numbers.view(np.uint8), []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[_words(size) * _WORD :]
    return parts


def _words_of(parts: Sequence[Any]) -> int:
    """Return how many integers buffers need."""
    return sum(_words(memoryview(part).nbytes) for part in parts)


def _words(size: int) -> int:
    """Return how many integers so many bytes need."""
    return -(-size // _WORD)


def _number(moment: StateVersion) -> int:
    """Return a number that is greater for a later moment of the same fit.

    Examples
    --------
    >>> _moment(_number(StateVersion(7, 2, 40)))
    StateVersion(fit=0, epoch=7, generation=2, step=40)
    """
    return (moment.epoch << _GENERATION_BITS | moment.generation) << _STEP_BITS | moment.step


def _moment(number: int) -> StateVersion:
    before, step = divmod(number, 1 << _STEP_BITS)
    epoch, generation = divmod(before, 1 << _GENERATION_BITS)
    return StateVersion(epoch, generation, step)


class _Workers:
    """The workers of a strategy, which send integers to each other. All of them must make the same calls.

    What is sent is a sum, to which the others add zeros: sums are what every strategy has. All bytes go as integers of
    one type, for a function of TensorFlow with a sum for each array of a state takes longer to trace than to run.

    Attributes
    ----------
    count, index : int
        How many workers there are, and which one this is.
    """

    def __init__(self, strategy: Any) -> None:
        import tensorflow as tf

        self._strategy = strategy
        self._replicas = len(strategy.extended.worker_devices)  # of this worker
        self.count = strategy.num_replicas_in_sync // self._replicas
        self.index = int(getattr(strategy.extended, "_id_in_cluster", 0))
        self._on_all = tf.function(self._run, autograph=False)
        self._groups = itertools.count(1)

    @classmethod
    def of(cls, strategy: Any) -> _Workers:
        """Return those of a strategy, always the same: their function is traced once."""
        found: _Workers | None = getattr(strategy, _ATTRIBUTE, None)
        if found is None:
            found = cls(strategy)
            setattr(strategy, _ATTRIBUTE, found)
        return found

    def another_group(self) -> int:
        """Return the key of another group of the same workers' devices."""
        base = getattr(self._strategy.extended, "_collective_key_base", 0)  # by which TensorFlow tells strategies apart
        return (_GROUPS_BESIDE + int(base)) * _GROUPS_OF_A_STRATEGY + next(self._groups)

    def numbers(self, mine: Sequence[int]) -> Any:
        """Return the numbers of all workers, a row for each."""
        table = np.zeros((self.count, len(mine)), np.int64)
        table[self.index] = mine
        return self.total(table.reshape(-1)).reshape(table.shape)

    def sent(self, source: int, parts: Sequence[Any], words: int, wanted: bool) -> Any:
        """Return the joined buffers of a worker, of so many words and more; None unless they are ``wanted``."""
        pieces = max(1, -(-words // _PIECE))
        size = -(-words // pieces)  # of all pieces, since each size is traced
        given = joined(parts, size * pieces) if self.index == source else None
        kept, nothing = np.empty(size * pieces if wanted else 0, np.int64), np.zeros(size, np.int64)
        for start in range(0, size * pieces, size):
            piece = self.total(nothing if given is None else given[start : start + size])
            if wanted:
                kept[start : start + size] = piece
        return kept if wanted else None

    def total(self, words: Any) -> Any:
        """Return the sum of the vectors of all workers. Short ones are sent with one length, for which it is traced."""
        import tensorflow as tf

        size = len(words)
        if size < _SHORT:
            words = np.pad(words, (0, _SHORT - size))
        return self._on_all(tf.constant(words, tf.int64)).numpy()[:size]

    def _run(self, words: Any) -> Any:
        return parts_of(self._strategy, self._strategy.run(self._on_replica, args=(words,)))[0]

    def _on_replica(self, words: Any) -> Any:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        is_first = tf.cast(context.replica_id_in_sync_group, tf.int32) % self._replicas == 0  # of its worker
        return context.all_reduce(tf.distribute.ReduceOp.SUM, words * tf.cast(is_first, tf.int64))


class AnyWorker:
    """Tell all workers whether any of them says yes. All workers must ask after the same step.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._workers = _Workers.of(strategy) if strategy.num_replicas_in_sync > 1 else None

    def says(self, mine: bool) -> bool:
        """Return whether this worker or another one says yes."""
        return mine if self._workers is None else bool(self._workers.total([int(mine)])[0])


class WorkersBeside:
    """The workers of a strategy, which add up vectors in other threads than the training's.

    TensorFlow numbers the sums of a group of devices as they are made. So those of two threads would be mixed up, and
    each thread has a group of its own: the workers' CPUs. All workers make this object after the same steps, and the
    same calls of it in the same order.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.

    Attributes
    ----------
    count, index : int
        How many workers there are, and which one this is.
    """

    def __init__(self, strategy: Any) -> None:
        workers = _Workers.of(strategy) if strategy.num_replicas_in_sync > 1 else None
        self.count: int = workers.count if workers is not None else 1
        self.index: int = workers.index if workers is not None else 0
        self._group = workers.another_group() if workers is not None else 0
        self._sums = 0
        self._on_cpus: dict[tuple[tuple[str, int], ...], Any] = {}  # by the vectors' types and lengths

    def total(self, vectors: Sequence[Any]) -> list[Any]:
        """Return the sums of vectors of all workers."""
        import tensorflow as tf

        if self.count == 1:
            return list(vectors)
        kind = tuple((vector.dtype.name, len(vector)) for vector in vectors)
        if kind not in self._on_cpus:
            given = [tf.TensorSpec((), tf.int32), *(tf.TensorSpec((length,), name) for name, length in kind)]
            self._on_cpus[kind] = tf.function(self._run, autograph=False).get_concrete_function(*given)
        first, self._sums = self._sums, self._sums + len(vectors)
        totals = self._on_cpus[kind](tf.constant(first), *map(tf.constant, vectors))
        return [total.numpy() for total in totals]

    def _run(self, first: Any, *vectors: Any) -> list[Any]:
        import tensorflow as tf

        group = {"group_key": self._group, "group_size": self.count, "ordering_token": []}
        how = {"merge_op": "Add", "final_op": "Id", "communication_hint": "ring"}
        with tf.device("/device:CPU:0"):
            return [
                tf.raw_ops.CollectiveReduceV2(input=vector, instance_key=first + place, **group, **how)
                for place, vector in enumerate(vectors)
            ]


@dataclass(frozen=True)
class Taken:
    """What a worker brings to :meth:`Totals.read`: numbers, and the values of variables on each of its devices."""

    numbers: tuple[float, ...]
    values: tuple[tuple[Any, ...], ...]


class Totals:
    """Variables over all replicas, with the means of the workers' own numbers.

    :meth:`take` belongs between two steps, and takes only what the next step changes. :meth:`read` waits for the other
    workers. It may do so in another thread, while the training goes on. All workers read what they have taken after
    the same steps, in the same order.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.
    variables : sequence of tf.Variable
        Variables of metrics, each replica's own or equal on all.
    workers : WorkersBeside
        The workers.
    """

    def __init__(self, strategy: Any, variables: Sequence[Any], workers: WorkersBeside) -> None:
        self._strategy = strategy
        self._variables = list(variables)
        self._counted = [place for place, one in enumerate(variables) if is_read_over_replicas(one)]
        self._workers = workers

    def take(self, numbers: Sequence[float]) -> Taken:
        """Return this worker's numbers, and its variables' values; not copied on a CPU (:func:`array_of`)."""
        values = (tuple(value_of(part) for part in parts_of(self._strategy, one)) for one in self._variables)
        return Taken(tuple(numbers), tuple(values))

    def read(self, taken: Taken) -> tuple[list[Any], list[float]]:
        """Return the variables' values, as NumPy arrays, and the means of the workers' numbers."""
        arrays = [array_of(parts[0]) for parts in taken.values]
        own = [self._of_this_worker(self._variables[place], taken.values[place]) for place in self._counted]
        numbers, *own = _summed([np.asarray(taken.numbers, np.float64), *own], self._workers.total)
        for place, total in zip(self._counted, own, strict=True):
            arrays[place] = total.astype(arrays[place].dtype)
        return arrays, (numbers / self._workers.count).tolist()

    def _of_this_worker(self, variable: Any, parts: Sequence[Any]) -> Any:
        """Return what this worker's replicas add to the value of all."""
        import tensorflow as tf

        kind = np.float64 if variable.dtype.is_floating else np.int64
        values = [array_of(part).astype(kind) for part in parts]
        if variable.aggregation == tf.VariableAggregation.SUM:
            return np.sum(values, axis=0)
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return (np.sum(values, axis=0) / self._strategy.num_replicas_in_sync).astype(kind)
        return np.zeros_like(values[0]) if self._workers.index else values[0]


def _summed(arrays: Sequence[Any], total: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Return the sums of arrays of all workers, by a function that adds up vectors: one of each type."""
    types = list(dict.fromkeys(one.dtype for one in arrays))
    vectors = [np.concatenate([one.ravel() for one in arrays if one.dtype == kind]) for kind in types]
    left, found = dict(zip(types, total(vectors), strict=True)), []
    for one in arrays:
        found.append(left[one.dtype][: one.size].reshape(one.shape))
        left[one.dtype] = left[one.dtype][one.size :]
    return found
