"""Let the workers of a synchronous strategy agree on a state, and on numbers, by collectives.

Each worker has states in its own memory, and a new worker has none. All continue from the latest one. Its worker sends
it to those that do not have it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.control.wire import expect
from tfos_nb.runtime.recovery.fit_contents import (
    StateMetadata,
    arrays_of,
    dtype_of,
    is_read_over_replicas,
    own_value,
    parts_of,
)
from tfos_nb.runtime.recovery.memory_state import State, StateVersion

__all__ = ["Agreed", "AnyWorker", "Totals", "agree"]

_STEP_BITS, _GENERATION_BITS = 28, 12
_WORD = 8  # bytes of the numbers as which other bytes are sent


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
    """

    moment: StateVersion
    passes: int
    rest: StateMetadata
    arrays: list[Any]


def agree(strategy: Any, own: State | None) -> Agreed | None:
    """Return the latest state of all workers; None if no worker has one. All workers must call it."""
    if strategy.num_replicas_in_sync == 1:
        return None if own is None else Agreed(own.moment, own.passes, _rest(own.rest), arrays_of(own))
    packed = own.rest if own is not None else b""
    mine = [0, 0, 0] if own is None else [_number(own.moment), own.passes, len(packed)]
    all_of_them = _by_replica(strategy, mine)
    source = int(np.argmax(all_of_them[:, 0]))
    number, passes, size = (int(one) for one in all_of_them[source])
    if not number:
        return None
    has_it = own is not None and mine[0] == number
    arrays = arrays_of(own) if own is not None and has_it else None
    if (all_of_them[:, 0] != number).any():
        words = -(-size // _WORD)
        padded = np.frombuffer(packed.ljust(words * _WORD, b"\0")[: words * _WORD], np.int64)
        packed = _sent(strategy, source, [padded])[0].tobytes()[:size]
        zeros = [np.zeros(shape, dtype_of(name)) for name, shape in _rest(packed).index]
        sent = _sent(strategy, source, arrays if arrays is not None else zeros)
        arrays = arrays if arrays is not None else sent
    assert arrays is not None, "this worker has the state, or was sent it"
    rest = own.rest if own is not None and has_it else packed  # callbacks and generators of its own
    return Agreed(_moment(number), passes, _rest(rest), arrays)


def _rest(packed: bytes) -> StateMetadata:
    return expect(StateMetadata, packed)


def _number(moment: StateVersion) -> int:
    """Return a number that is greater for a later moment.

    Examples
    --------
    >>> _moment(_number(StateVersion(7, 2, 40)))
    StateVersion(epoch=7, generation=2, step=40)
    """
    return (moment.epoch << _GENERATION_BITS | moment.generation) << _STEP_BITS | moment.step


def _moment(number: int) -> StateVersion:
    before, step = divmod(number, 1 << _STEP_BITS)
    epoch, generation = divmod(before, 1 << _GENERATION_BITS)
    return StateVersion(epoch, generation, step)


def _by_replica(strategy: Any, numbers: Sequence[int]) -> Any:
    """Return the numbers of all replicas, a row for each."""
    import tensorflow as tf

    mine = tf.constant([numbers], tf.int64)

    def on_replica() -> Any:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        place = tf.one_hot(replica, context.num_replicas_in_sync, dtype=tf.int64)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * mine)

    return own_value(strategy, strategy.run(tf.function(on_replica, autograph=False)))


def _sent(strategy: Any, source: int, arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays of a replica; all replicas give arrays of the same types and shapes."""
    import tensorflow as tf

    mine = [tf.convert_to_tensor(array) for array in arrays]  # captured, and no constants of the graph

    def on_replica() -> list[Any]:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        total = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
        sent = []
        for array in mine:
            wide = array if array.dtype.is_floating else tf.cast(array, tf.int64)
            sent.append(tf.cast(total(tf.where(source == replica, wide, tf.zeros_like(wide))), array.dtype))
        return sent

    found = strategy.run(tf.function(on_replica, autograph=False))
    return [own_value(strategy, one) for one in found]


class AnyWorker:
    """Tell all workers whether any of them says yes. All workers must ask after the same step.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        import tensorflow as tf

        self._strategy = strategy
        self._on_all = tf.function(self._run, autograph=False)

    def says(self, mine: bool) -> bool:
        """Return whether this worker or another one says yes."""
        import tensorflow as tf

        if self._strategy.num_replicas_in_sync == 1:
            return mine
        return bool(self._on_all(tf.constant(float(mine))) > 0)

    def _run(self, mine: Any) -> Any:
        return parts_of(self._strategy, self._strategy.run(self._on_replica, args=(mine,)))[0]

    @staticmethod
    def _on_replica(mine: Any) -> Any:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        # An argument of the function is on no device, and all_reduce would not know where to put the sum.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(mine))


class Totals:
    """Read variables over all replicas, with the mean of each worker's own numbers, in one step.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.
    variables : sequence of tf.Variable
        Variables of metrics, each replica's own or equal on all.
    """

    def __init__(self, strategy: Any, variables: Sequence[Any]) -> None:
        import tensorflow as tf

        self._strategy = strategy
        self._variables = list(variables)
        self._counted = [one for one in variables if is_read_over_replicas(one)]
        self._on_all = tf.function(self._run, autograph=False)

    def read(self, numbers: Sequence[float]) -> tuple[list[Any], list[float]]:
        """Return the variables' values, as NumPy arrays, and the means of the workers' numbers."""
        import tensorflow as tf

        if self._strategy.num_replicas_in_sync == 1:
            return [own_value(self._strategy, one) for one in self._variables], list(numbers)
        totals, means = self._on_all(tf.constant(list(numbers), tf.float64))
        found = iter([one.numpy() for one in totals])
        counted = {id(one) for one in self._counted}
        values = [next(found) if id(one) in counted else own_value(self._strategy, one) for one in self._variables]
        return values, means.numpy().tolist()

    def _run(self, numbers: Any) -> Any:
        import tensorflow as tf

        found = self._strategy.run(self._on_replica, args=(numbers,))
        return tf.nest.map_structure(lambda one: parts_of(self._strategy, one)[0], found)

    def _on_replica(self, numbers: Any) -> tuple[list[Any], Any]:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        flat = [self._part(one) for one in self._counted]
        real = [tf.cast(part, tf.float64) for part in flat if part.dtype.is_floating]
        whole = [tf.cast(part, tf.int64) for part in flat if not part.dtype.is_floating]
        total = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
        sums = {True: total(tf.concat([numbers / replicas, *real], 0))}
        if whole:
            sums[False] = total(tf.concat(whole, 0))
        start, values = {True: numbers.shape[0], False: 0}, []
        for part, variable in zip(flat, self._counted, strict=True):
            kind, size = part.dtype.is_floating, part.shape[0]
            summed = sums[kind][start[kind] : start[kind] + size]
            start[kind] += size
            values.append(tf.cast(tf.reshape(summed, variable.shape), variable.dtype))
        return values, sums[True][: numbers.shape[0]]

    @staticmethod
    def _part(variable: Any) -> Any:
        """Return what this replica adds to the value of all, as a vector."""
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        value = tf.reshape(tf.convert_to_tensor(variable), [-1])
        if value.dtype == tf.bool:
            value = tf.cast(value, tf.int64)
        if variable.aggregation == tf.VariableAggregation.SUM:
            return value
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return value / tf.cast(context.num_replicas_in_sync, value.dtype)
        first = tf.equal(tf.cast(context.replica_id_in_sync_group, tf.int32), 0)
        return tf.where(first, value, tf.zeros_like(value))
