"""Rounds in which states within an epoch are saved beside the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.recovery import state_rounds
from tfos_nb.runtime.recovery.fit_contents import StateMetadata
from tfos_nb.runtime.recovery.memory_state import StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.state_rounds import Answer, Snapshot, StateRounds

STEP = 0.01  # seconds


class Training:
    """One worker whose steps take 10 ms of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(state_rounds.time, "perf_counter", lambda: self.now)
        self.request = SaveRequest()
        self.written: list[tuple[int, bool]] = []
        self.may_write = threading.Event()
        self.may_write.set()
        strategy = SimpleNamespace(num_replicas_in_sync=1, experimental_local_results=lambda one: (one,), extended=None)
        self.rounds = StateRounds(strategy, self.request, 1, self.write)
        self.rounds.sum_up([])
        self.has_position, self.cost = True, 0.0

    def write(self, snapshot: Snapshot, arrays: list[Any], rest: bytes) -> None:
        assert self.may_write.wait(30)
        self.written.append((snapshot.moment.step, snapshot.position.waits))

    def step(self) -> Answer | None:
        """Make a step, and save after it if that is due; return the answer that was waited for."""
        self.rounds.step_begins()
        self.now += STEP
        if not self.rounds.step_has_ended():
            return None
        self.rounds.finish()
        moment = StateVersion(0, 1, self.rounds.steps)
        snapshot = Snapshot(moment, 0, [np.arange(3.0)], StateMetadata(1), PositionHeld("worker:0", 1, moment.name, {}))
        return self.rounds.save(snapshot if self.has_position else None, 0, began=self.now - self.cost)

    def steps_until(self, step: int) -> Iterator[Answer | None]:
        while self.rounds.steps < step:
            yield self.step()


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(monkeypatch)


def test_training_goes_on_while_a_state_is_written(training: Training) -> None:
    list(training.steps_until(30))
    training.rounds.finish()
    assert training.written[:2] == [(2, False), (10, False)]
    done = len(training.written)
    training.may_write.clear()
    with ThreadPoolExecutor(1) as beside:
        going = beside.submit(lambda: list(training.steps_until(39)))
        assert going.result(30) == [None] * 9, "within 0.1 s after the save, no step waits"
        assert len(training.written) == done
        training.may_write.set()
    list(training.steps_until(50))
    training.rounds.finish()
    assert len(training.written) > done


@pytest.mark.parametrize("cost", [0.0, 0.5], ids=["saved often", "seldom, as it takes long"])
def test_a_state_that_the_driver_wants_is_saved_within_half_a_second_and_waited_for(
    training: Training, cost: float
) -> None:
    training.cost = cost
    list(training.steps_until(200))
    training.request.change(True)
    answers = list(training.steps_until(200 + 51))
    waited = [number for number, answer in enumerate(answers, 201) if answer is not None]
    assert waited, "the workers wait for that state"
    step, waits = training.written[[one[0] for one in training.written].index(waited[0])]
    assert (step, waits) == (waited[0], True)
    assert not any(waits for step, waits in training.written if step < waited[0]), "no step runs after it"


def test_a_state_whose_rows_are_not_known_is_not_written_and_tried_again_soon(training: Training) -> None:
    list(training.steps_until(42))
    training.rounds.finish()
    before = list(training.written)
    training.has_position = False
    list(training.steps_until(80))
    training.rounds.finish()
    assert training.written == before
    training.has_position = True
    list(training.steps_until(100))
    training.rounds.finish()
    assert len(training.written) > len(before)


def test_the_last_state_is_waited_for(training: Training) -> None:
    list(training.steps_until(25))
    training.rounds.finish()
    snapshot = Snapshot(StateVersion(0, 1, 25), 0, [np.arange(3.0)], StateMetadata(1), PositionHeld("a", 1, "", {}))
    answer = training.rounds.save(snapshot, 0, began=training.now, is_last=True)
    assert answer is not None
    assert answer.is_saved
    assert training.written[-1] == (25, False)
