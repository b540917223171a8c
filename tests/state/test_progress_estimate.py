"""Estimates of the remaining training time, compared with runs whose end is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, StepReport
from tfos_nb.state.progress_estimate import ProgressEstimate


@dataclass
class Run:
    """A training that reports at most twice a second, and at each epoch's end."""

    epochs: int = 5
    steps: int = 100
    step_seconds: float = 0.2
    validation_seconds: float = 0.0
    validation_steps: int | None = None
    opening_seconds: float = 0.0
    known_length: bool = True
    start: float = 1000.0

    def reports(self) -> Iterator[StepReport]:
        now, told = self.start, 0.0
        for epoch in range(1, self.epochs + 1):
            known = self.steps if self.known_length or epoch > 1 else None
            now += self.opening_seconds
            for step in range(1, self.steps + 1):
                now += self.step_seconds
                if now - told >= 0.5:
                    told = now
                    yield StepReport(epoch, self.epochs, step, known, {"loss": 1.0}, time=now, phase=FIT)
            if self.validation_seconds:
                total = self.validation_steps
                for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                    step = int(share * (total or 40))
                    at = now + share * self.validation_seconds
                    yield StepReport(epoch, self.epochs, step, total, time=at, phase=EVALUATE)
                now += self.validation_seconds
                yield StepReport(epoch, self.epochs, self.steps, known, time=now, phase=FIT)
            yield StepReport(epoch, self.epochs, self.steps, self.steps, {}, True, now, FIT)
        yield StepReport(self.epochs, self.epochs, self.steps, self.steps, time=now, phase=OVER)


def reckoned(run: Run, pace: ProgressEstimate | None = None) -> list[tuple[float, float, float | None]]:
    """Return for each report but the last: the position in epochs, the true remaining time, and the estimate."""
    pace = ProgressEstimate() if pace is None else pace
    reports = list(run.reports())
    found = []
    for report in reports[:-1]:
        pace.take(report)
        position = (report.epoch or 0) - 1 + (report.step or 0) / run.steps * (report.phase == FIT)
        found.append((position, reports[-1].time - report.time, pace.seconds_left))
    pace.take(reports[-1])
    assert pace.seconds_left is None  # training is over
    return found


RUNS = {
    "steady": Run(),
    "short steps": Run(steps=20_000, step_seconds=0.001),
    "slow steps": Run(steps=8, step_seconds=7.0),
    "validation": Run(validation_seconds=30.0),
    "mostly validation": Run(steps=20, validation_seconds=60.0, validation_steps=40),
    "slow openings": Run(opening_seconds=10.0),
    "all of it, of unknown length": Run(validation_seconds=15.0, opening_seconds=5.0, known_length=False),
    "epochs too short to see a step of": Run(epochs=400, steps=3, step_seconds=0.05),
    "such, with a validation": Run(epochs=40, steps=3, step_seconds=0.05, validation_seconds=3.0),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_after_the_first_epoch_the_estimate_is_right_within_a_tenth(run: Run) -> None:
    found = reckoned(run)
    whole = found[0][1]
    late = [entry for entry in found if entry[0] >= 1.3 and whole - entry[1] > 1.0]
    for position, truth, left in late:
        assert left is not None, position
        assert abs(left - truth) <= 0.1 * whole + run.step_seconds + 0.01 * run.validation_seconds, (position, truth)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_the_estimate_is_never_negative_and_is_0_at_the_end(run: Run) -> None:
    found = reckoned(run)
    assert all(left is None or left >= 0 for _, _, left in found)
    assert found[-1][2] == pytest.approx(0.0, abs=1e-6)


def test_there_is_no_estimate_before_enough_is_known() -> None:
    pace = ProgressEstimate()
    assert pace.seconds_left is None
    pace.take(StepReport(1, 3, 1, 100, time=10.0))
    assert pace.seconds_left is None
    pace.take(StepReport(1, 3, 2, 100, time=10.2))
    assert pace.seconds_left is None  # a fifth of a second is too short for an estimate
    pace.take(StepReport(1, 3, 11, 100, time=12.0))
    assert pace.seconds_left == pytest.approx(0.2 * 289)


@pytest.mark.parametrize(
    "report",
    [
        StepReport(step=5, time=3.0),
        StepReport(1, None, 5, 10, time=3.0),
        StepReport(None, 3, 5, 10, time=3.0),
        StepReport(1, 3, 5, None, time=3.0),
        StepReport(1, 3, 5, 10),
        StepReport(1, 3, 0, 0, time=3.0),
    ],
    ids=repr,
)
def test_a_program_without_a_known_length_has_no_estimate(report: StepReport) -> None:
    pace = ProgressEstimate()
    for _ in range(3):
        pace.take(report)
    assert pace.seconds_left is None


def test_the_estimate_follows_a_changing_pace() -> None:
    pace = ProgressEstimate()
    for second in range(100):
        pace.take(StepReport(1, 2, 10 * second, 10_000, time=float(second)))
    assert pace.seconds_left == pytest.approx(1900, rel=0.01)
    for second in range(40):
        pace.take(StepReport(1, 2, 1000 + second, 10_000, time=100.0 + second))
    assert pace.seconds_left == pytest.approx(18_960, rel=0.05)


@pytest.mark.parametrize("again", [Run(start=5000.0), Run(epochs=9, start=5000.0), Run(start=100.0)], ids=repr)
def test_a_training_that_begins_again_gets_a_new_estimate(again: Run) -> None:
    pace = ProgressEstimate()
    for report in list(Run(step_seconds=2.0).reports())[:250]:
        pace.take(report)
    for position, truth, left in reckoned(again, pace):
        if position % 1 > 0.2:
            assert left == pytest.approx(truth, rel=0.1)


def test_a_longer_epoch_does_not_distort_the_estimate() -> None:
    pace = ProgressEstimate()
    for report in list(Run(epochs=3, steps=50).reports())[:-1]:
        if report.epoch == 1:
            pace.take(report)
    for step in range(1, 81):  # steps of the second epoch, for which 50 were expected
        pace.take(StepReport(2, 3, step, 50, {"loss": 1.0}, time=1010.0 + 0.2 * step, phase=FIT))
    assert pace.seconds_left is not None
    assert 9.0 <= pace.seconds_left <= 25.0


def test_the_first_validation_is_estimated_by_its_progress() -> None:
    for steps, left in ((40, 30.0), (None, None)):
        pace = ProgressEstimate()
        for step in range(1, 101):
            pace.take(StepReport(1, 1, step, 100, time=step / 10, phase=FIT))
        pace.take(StepReport(1, 1, 0, steps, time=10.0, phase=EVALUATE))
        pace.take(StepReport(1, 1, 10, steps, time=20.0, phase=EVALUATE))
        assert pace.seconds_left == (None if left is None else pytest.approx(left))


def test_the_users_evaluation_within_an_epoch_does_not_count_as_training() -> None:
    pace = ProgressEstimate()
    for step in range(1, 51):
        pace.take(StepReport(1, 1, step, 100, time=step / 10, phase=FIT))
    pace.take(StepReport(None, None, 1, None, time=5.5, phase=EVALUATE))
    pace.take(StepReport(None, None, 9, 9, time=60.0, phase=OVER))
    pace.take(StepReport(1, 1, 51, 100, time=60.1, phase=FIT))
    assert pace.seconds_left == pytest.approx(4.9, rel=0.01)
