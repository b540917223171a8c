"""Rounds in which states within an epoch are saved beside the training."""

from __future__ import annotations

import itertools
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
from tfos_nb.runtime.recovery.state_rounds import Snapshot, StateRounds


class Training:
    """One worker whose steps take 10 ms of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(state_rounds.time, "perf_counter", lambda: self.now)
        self.request = SaveRequest()
        self.written: list[tuple[int, bool]] = []
        self.write_fails = False
        self.may_write = threading.Event()
        self.may_write.set()
        strategy = SimpleNamespace(num_replicas_in_sync=1, experimental_local_results=lambda one: (one,), extended=None)
        self.rounds = StateRounds(strategy, self.request, 1, self.write)
        self.rounds.sum_up([])
        self.has_position, self.cost, self.seconds, self.longer = True, 0.0, 0.01, 0.0
        self.has_saved = False

    def write(self, snapshot: Snapshot, arrays: list[Any], rest: bytes) -> bool:
        assert self.may_write.wait(30)
        self.written.append((snapshot.moment.step, snapshot.position.waits))
        return not self.write_fails

    def step(self) -> bool:
        """Make a step, and save after it if that is due; return whether no step may follow."""
        self.rounds.step_begins()
        self.now += self.seconds + self.has_saved * self.longer
        self.has_saved = False
        if not self.rounds.step_has_ended():
            return False
        self.rounds.finish()
        self.has_saved = True
        moment = StateVersion(0, 1, self.rounds.steps)
        snapshot = Snapshot(moment, 0, [np.arange(3.0)], StateMetadata(1), PositionHeld("worker:0", 1, moment.name, {}))
        return self.rounds.save(snapshot if self.has_position else None, began=self.now - self.cost)

    def steps_until(self, step: int) -> Iterator[bool]:
        while self.rounds.steps < step:
            yield self.step()


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(monkeypatch)


@pytest.mark.parametrize(
    ("seconds", "cost", "wanted"),
    [
        (0.05, 0.0, 2),  # not more often than every 0.1 s
        (0.1, 0.006, 20),  # 0.3 % of the time
        (0.01, 0.0014, 40),
        (0.02, 0.004, 40),
        (0.05, 0.008, 40),
        (0.01, 0.005, 50),  # 1 %
        (0.01, 0.02, 200),
        (0.3, 0.03, 34),
        (2.0, 0.1, 17),
    ],
)
def test_training_goes_on_while_a_state_is_written(
    training: Training, seconds: float, cost: float, wanted: int
) -> None:
    training.seconds, training.cost = seconds, cost
    list(training.steps_until(60 + 10 * wanted))
    training.rounds.finish()
    saved = [step for step, _ in training.written]
    interval = saved[-1] - saved[-2]
    assert interval >= wanted, "and a thread's own milliseconds count, too"
    list(training.steps_until(saved[-1] + interval - 3))
    training.may_write.clear()
    with ThreadPoolExecutor(1) as beside:
        going = beside.submit(lambda: list(training.steps_until(saved[-1] + 2 * interval - 3)))
        assert not any(going.result(30)), "no step waits until the next state is due"
        training.may_write.set()
    list(training.steps_until(saved[-1] + 5 * interval))
    training.rounds.finish()
    again = [step for step, _ in training.written][len(saved) :]
    assert all(abs(later - before - interval) <= 2 for before, later in itertools.pairwise(again))


def test_what_a_state_costs_the_next_step_counts_too(training: Training) -> None:
    training.longer = 0.012
    list(training.steps_until(1200))
    training.rounds.finish()
    saved = [step for step, _ in training.written]
    assert 115 <= saved[-1] - saved[-2] <= 135, "1 % of the time"


@pytest.mark.parametrize("cost", [0.0, 0.5], ids=["saved often", "seldom, as it takes long"])
def test_a_state_that_the_driver_wants_is_saved_within_half_a_second_and_waited_for(
    training: Training, cost: float
) -> None:
    training.cost = cost
    list(training.steps_until(200))
    training.request.change(True)
    answers = list(training.steps_until(200 + 51))
    waited = [number for number, waits in enumerate(answers, 201) if waits]
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
    assert training.rounds.save(snapshot, began=training.now, is_last=True)
    assert training.written[-1] == (25, False)
    training.write_fails = True
    assert not training.rounds.save(snapshot, began=training.now, is_last=True)


def test_nobody_waits_for_the_driver_after_a_state_that_could_not_be_written(training: Training) -> None:
    list(training.steps_until(42))
    training.request.change(True)
    training.write_fails = True
    assert not any(training.steps_until(100))
    training.write_fails = False
    assert any(training.steps_until(102)), "it is tried again after each step"
