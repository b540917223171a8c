"""What workers send each other of a state, as sums of integers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tfos_nb.runtime.control.wire import encode
from tfos_nb.runtime.recovery import fit_agreement
from tfos_nb.runtime.recovery.fit_agreement import Totals, _latest, _Workers, joined, parts_in
from tfos_nb.runtime.recovery.fit_contents import StateMetadata, arrays_of, shapes_of
from tfos_nb.runtime.recovery.memory_state import State, StateVersion

ARRAYS = [
    np.array([1.5, float("nan"), -0.0, float("inf")], np.float32),
    np.array(7, np.int64),
    np.zeros((0, 3), np.float64),
    np.array([[True], [False], [True]]),
    np.array([0.1, 3.0, -2.0], ml_dtypes.bfloat16),
    np.arange(300, dtype=np.uint8).reshape(3, 100),
    np.array([2**63 + 5], np.uint64),
]


def test_the_bytes_of_arrays_of_any_type_come_as_they_were() -> None:
    sent = joined([array.tobytes() for array in ARRAYS], 100)
    for array, part in zip(ARRAYS, parts_in(sent, [array.nbytes for array in ARRAYS]), strict=True):
        came = part.view(array.dtype).reshape(array.shape)
        assert came.tobytes() == array.tobytes()
        assert (came.dtype, came.shape) == (array.dtype, array.shape)


class Meeting:
    """Adds up what several threads bring, and counts the sums."""

    def __init__(self, workers: int) -> None:
        self.brought: dict[int, Any] = {}
        self.sums: list[int] = []
        self._all = threading.Barrier(workers)

    def total(self, index: int, words: Any) -> Any:
        self.brought[index] = words.copy()
        self._all.wait(30)
        total = sum(self.brought.values())
        self._all.wait(30)
        if index == 0:
            self.sums.append(len(words))
        return total


class Worker(_Workers):
    """A worker whose sums need no strategy."""

    def __init__(self, index: int, count: int, meeting: Meeting) -> None:
        self.index, self.count, self._meeting = index, count, meeting

    def total(self, words: Any) -> Any:
        return self._meeting.total(self.index, words)


@pytest.mark.parametrize("most", [5, 8, 1000])
def test_one_worker_sends_its_state_in_pieces_and_those_that_want_it_get_it(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(fit_agreement, "_PIECE", most)
    state = [b"callbacks and more", np.arange(9.0).tobytes(), b"", b"x"]
    words, meeting = 3 + 9 + 0 + 1, Meeting(3)

    def take_part(index: int) -> tuple[Any, Any]:
        worker = Worker(index, 3, meeting)
        numbers = worker.numbers([index, -index])
        return numbers, worker.sent(1, state if index == 1 else [b"an older one"], words, wanted=index == 2)

    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(take_part, range(3)))
    assert all(numbers.tolist() == [[0, 0], [1, -1], [2, -2]] for numbers, _ in told)
    assert [sent is None for _, sent in told] == [True, True, False]
    assert [part.tobytes() for part in parts_in(told[2][1], [len(part) for part in state])] == state
    assert max(meeting.sums[1:]) <= most
    assert len(set(meeting.sums[1:])) == 1, "each size is traced"


def state(step: int, arrays: list[Any]) -> State:
    index = shapes_of(arrays)
    rest = encode(StateMetadata(index=index))
    return State(StateVersion(1, 1, step), 1, index, [memoryview(array.tobytes()) for array in arrays], rest)


def test_a_worker_without_the_latest_state_is_sent_it() -> None:
    newest, meeting = state(8, ARRAYS), Meeting(3)
    own = [state(4, ARRAYS[:2]), newest, None]
    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(lambda index: _latest(Worker(index, 3, meeting), own[index], index - 1), range(3)))
    assert told[1][0] is newest
    for one, last_fit in told:
        assert last_fit == 1
        assert one is not None
        assert (one.moment, one.passes, one.index, one.rest) == (newest.moment, 1, newest.index, newest.rest)
        assert [found.tobytes() for found in arrays_of(one)] == [array.tobytes() for array in ARRAYS]


@pytest.mark.parametrize("own", [state(8, ARRAYS), None], ids=["equal", "none"])
def test_equal_states_are_not_sent_and_without_one_there_is_nothing_to_agree_on(own: State | None) -> None:
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda index: _latest(Worker(index, 2, meeting), own, 0), range(2)))
    assert told == [(own, 0), (own, 0)]
    assert len(meeting.sums) == 1


class Sums:
    """Adds up what several workers bring, in place of a collective."""

    def __init__(self, workers: int) -> None:
        self._brought: list[Any] = [None] * workers
        self._all = threading.Barrier(workers)

    def of(self, worker: int, *vectors: Any) -> list[Any]:
        self._brought[worker] = vectors
        self._all.wait(30)
        totals = [sum(parts[1:], parts[0]) for parts in zip(*self._brought, strict=True)]
        self._all.wait(30)
        return totals


class Replicas:
    """A strategy with two replicas on each of two workers, whose variables have a part for each."""

    num_replicas_in_sync = 4

    def experimental_local_results(self, variable: Any) -> Any:
        return variable.values


class OfReplicas:
    """A variable with a value of its own on each of a worker's replicas."""

    def __init__(self, parts: list[Any], aggregation: Any, kind: str = "float32") -> None:
        import tensorflow as tf

        self.values = [tf.Variable(part, dtype=kind) for part in parts]
        self.synchronization, self.aggregation = tf.VariableSynchronization.ON_READ, aggregation
        self.dtype, self.shape = self.values[0].dtype, self.values[0].shape


def test_metrics_are_those_of_all_replicas_and_are_taken_before_they_are_added_up() -> None:
    import tensorflow as tf

    of, sums = tf.VariableAggregation, Sums(2)

    def take_part(index: int) -> tuple[list[Any], list[float]]:
        workers: Any = SimpleNamespace(count=2, index=index, total=lambda vectors: sums.of(index, *vectors))
        variables = [
            OfReplicas([[1.5, 2.0 + index], [0.25, 0.0]], of.SUM),
            OfReplicas([10 + index, 20], of.SUM, "int64"),
            OfReplicas([1.0, 3.0 + index], of.MEAN, "bfloat16"),
            OfReplicas([[7.0 + index], [9.0]], of.ONLY_FIRST_REPLICA),
        ]
        totals = Totals(Replicas(), variables, workers)
        taken = totals.take([float(index), 5.0])
        for variable in variables:
            for part in variable.values:
                part.assign_add(tf.ones_like(part))  # the next step
        return totals.read(taken)

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(take_part, range(2)))
    for arrays, means in both:
        assert means == [0.5, 5.0]
        assert [array.tolist() for array in arrays] == [[3.5, 5.0], 61, 2.25, [7.0]]
        assert [array.dtype.name for array in arrays] == ["float32", "int64", "bfloat16", "float32"]
