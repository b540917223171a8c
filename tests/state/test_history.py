"""The history is like Keras' own, counts repeated training once, and has the whole training curve."""

from __future__ import annotations

import copy
import pickle

import pytest

from tfos_nb.runtime.control.reports import PAST, StepReport
from tfos_nb.state.history import History


def filled() -> History:
    history = History("worker:0")
    for epoch, loss in enumerate((0.5, 0.25), 1):
        history.record("worker:0", StepReport(epoch=epoch, step=1, metrics={"loss": 9.0}))
        history.record("worker:1", StepReport(epoch=epoch, step=4, metrics={"loss": 7.0}, epoch_end=True))
        history.record(
            "worker:0", StepReport(epoch=epoch, step=4, metrics={"loss": loss, "acc": epoch / 2}, epoch_end=True)
        )
    return history


def test_the_history_has_the_chiefs_metrics_at_the_end_of_each_epoch() -> None:
    history = filled()
    assert dict(history) == {"loss": [0.5, 0.25], "acc": [0.5, 1.0]}
    assert (list(history), len(history), "loss" in history, "epoch" in history) == (["loss", "acc"], 2, True, False)
    assert history.epochs == [{"epoch": 1, "loss": 0.5, "acc": 0.5}, {"epoch": 2, "loss": 0.25, "acc": 1.0}]


def test_a_history_can_be_pickled_and_copied() -> None:
    history = filled()
    history.begin_anew()
    for made in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history), copy.copy(history)):
        assert (dict(made), made.points(), made.steps("worker:1")) == (
            dict(history),
            history.points(),
            history.steps("worker:1"),
        )
        made.record("worker:0", StepReport(epoch=3, step=4, metrics={"loss": 0.1}, epoch_end=True))
    assert history["loss"] == [0.5, 0.25]


def test_the_steps_of_each_node_are_kept() -> None:
    history = filled()
    assert [report.step for report in history.steps()] == [1, 4, 1, 4]
    assert [report.metrics["loss"] for report in history.steps("worker:1")] == [7.0, 7.0]
    assert history.steps("worker:9") == []


def test_epochs_without_a_number_are_counted() -> None:
    history = History("worker:0")
    for _ in range(2):
        history.record("worker:0", StepReport(metrics={"loss": 1.0}, epoch_end=True))
    assert [epoch["epoch"] for epoch in history.epochs] == [1, 2]


def test_a_metric_reported_later_has_fewer_values() -> None:
    history = History("worker:0")
    history.record("worker:0", StepReport(epoch=1, metrics={"loss": 1.0}, epoch_end=True))
    history.record("worker:0", StepReport(epoch=2, metrics={"loss": 0.5, "val_loss": 0.7}, epoch_end=True))
    assert dict(history) == {"loss": [1.0, 0.5], "val_loss": [0.7]}


def test_the_history_contains_only_training() -> None:
    history = filled()
    before = history.steps()
    for report in (
        StepReport(2, 2, 1, 9, {"val_loss": 0.5}, phase="evaluate"),
        StepReport(2, 2, 4, 4, phase="fit"),
        StepReport(step=9, metrics={"test_loss": 0.5}, phase="over"),
    ):
        history.record("worker:0", report)
    assert history.steps() == before
    history.record("worker:0", StepReport(3, 3, 1, 4, {"loss": 0.5}, phase="fit"))
    assert len(history.steps()) == len(before) + 1


def test_an_empty_history_says_so() -> None:
    history = History("worker:0")
    assert (dict(history), repr(history)) == ({}, "<History 0 epochs: nothing reported>")
    with pytest.raises(KeyError):
        history["loss"]
    history.record("worker:0", StepReport(step=1, metrics={"loss": 1.0}))
    history.record("worker:0", StepReport(step=2, metrics={"loss": 0.5, "acc": 1.0}))
    assert repr(history) == "<History 0 epochs, 2 steps: loss, acc>"
    assert repr(filled()) == "<History 2 epochs: loss, acc>"


def test_repeated_epochs_are_in_the_history_once() -> None:
    history = History("worker:0")
    for epoch, loss in ((1, 0.9), (2, 0.8), (3, 0.7)):
        history.record("worker:0", StepReport(epoch=epoch, metrics={"loss": loss}, epoch_end=True))
    history.begin_anew()
    for epoch, loss in ((3, 0.6), (4, 0.5)):  # the state was that of epoch 2
        history.record("worker:0", StepReport(epoch=epoch, metrics={"loss": loss}, epoch_end=True))
    assert history["loss"] == [0.9, 0.8, 0.6, 0.5]
    history.record("worker:0", StepReport(epoch=1, metrics={"loss": 0.1}, epoch_end=True))
    assert history["loss"] == [0.9, 0.8, 0.6, 0.5, 0.1], "another fit goes on behind it"


# --- the training curve


def fit(history: History, epochs: range, *, steps: int = 4, first: int = 1, node: str = "worker:0") -> None:
    """Record a fit's reports: one a step and one at each epoch's end; the first epoch begins at step ``first``."""
    for epoch in epochs:
        for step in range(first if epoch == epochs[0] else 1, steps + 1):
            history.record(node, StepReport(epoch, epochs[-1], step, steps, {"loss": loss(epoch, step)}, phase="fit"))
        ends = {"loss": loss(epoch, steps), "val_loss": loss(epoch, steps) + 0.1}
        history.record(node, StepReport(epoch, epochs[-1], steps, steps, ends, epoch_end=True, phase="fit"))


def loss(epoch: int, step: int) -> float:
    return round(1 / (epoch + step / 10), 4)


def past(epoch: int) -> StepReport:
    return StepReport(epoch, 9, 4, 4, {"loss": 1.0 / epoch}, True, phase=PAST)


def test_the_epochs_of_an_earlier_cluster_come_first_and_once() -> None:
    history = History("worker:0")
    for epoch in (1, 2):
        history.record_past("worker:0", past(epoch))
    history.begin_anew()  # nodes that were lost before their first step
    for epoch in (1, 2):
        history.record_past("worker:0", past(epoch))
    history.record("worker:0", StepReport(3, 9, 2, 4, {"loss": 0.3}))
    history.record("worker:0", StepReport(3, 9, 4, 4, {"loss": 0.25}, epoch_end=True))
    history.begin_anew()  # this cluster's own, too, are told again then
    for epoch in (1, 2, 3):
        history.record_past("worker:0", past(epoch))
        history.record_late("worker:0", past(epoch + 1))
    history.record("worker:0", StepReport(4, 9, 4, 4, {"loss": 0.2}, epoch_end=True))
    assert history["loss"] == [1.0, 0.5, 0.25, 0.2]
    assert [(point.epoch, point.step) for point in history.points()] == [(1, 4), (2, 8), (3, 10), (3, 12), (4, 16)]


def test_steps_are_counted_across_epochs() -> None:
    history = History("worker:0")
    fit(history, range(1, 4))
    points = history.points()
    assert [point.step for point in points] == list(range(1, 13)), "an epoch's end is at its last step"
    assert [point.step for point in points if point.ends_epoch] == [4, 8, 12]
    assert [point.epoch for point in points] == [1] * 4 + [2] * 4 + [3] * 4
    assert points[3].metrics == {"loss": loss(1, 4), "val_loss": loss(1, 4) + 0.1}


def test_a_second_fit_is_counted_after_the_first() -> None:
    history = History("worker:0")
    fit(history, range(1, 3))
    fit(history, range(1, 3))
    points = history.points()
    assert [point.step for point in points] == list(range(1, 17))
    assert [point.epoch for point in points if point.ends_epoch] == [1, 2, 3, 4]
    assert {point.generation for point in points} == {1}, "nothing was lost"


def test_repeated_steps_within_an_epoch_count_once() -> None:
    history = History("worker:0")
    fit(history, range(1, 3))
    for step in (1, 2, 3):
        history.record("worker:0", StepReport(3, 4, step, 4, {"loss": 9.0}, phase="fit"))
    history.begin_anew()
    fit(history, range(3, 5), first=2)  # the state was that of epoch 3, step 1
    points = history.points()
    assert [point.step for point in points] == list(range(1, 17))
    assert [point.generation for point in points] == [1] * 9 + [2] * 7
    assert [point.metrics["loss"] for point in points].count(9.0) == 1


def test_repeated_epochs_count_once() -> None:
    history = History("worker:0")
    fit(history, range(1, 4))
    history.begin_anew()
    history.record_late("worker:0", StepReport(4, 5, 4, 4, {"loss": 7.0}, epoch_end=True, phase="fit"))
    fit(history, range(3, 6))  # the state was that of epoch 2
    points = history.points()
    assert [point.step for point in points] == list(range(1, 21))
    assert [point.epoch for point in points if point.ends_epoch] == [1, 2, 3, 4, 5]
    assert [point.generation for point in points if point.ends_epoch] == [1, 1, 2, 2, 2]


def test_the_curve_continues_when_another_node_becomes_the_chief() -> None:
    history = History("worker:0")
    fit(history, range(1, 3))
    history.begin_anew()
    history.follow("worker:1")
    fit(history, range(3, 4), node="worker:1")
    assert [point.step for point in history.points()] == list(range(1, 13))
    assert [point.step for point in history.points("worker:0")] == list(range(1, 9))


def test_a_loop_without_epochs_has_its_steps() -> None:
    history = History("worker:0")
    for step in (1, 2, 3, 1, 2):
        history.record("worker:0", StepReport(step=step, metrics={"loss": 1.0}))
    assert [point.step for point in history.points()] == [1, 2, 3, 4, 5]


def test_epochs_without_steps_count_as_one_step_each() -> None:
    history = History("worker:0")
    for epoch in (1, 2):
        history.record("worker:0", StepReport(epoch, metrics={"loss": 1.0}, epoch_end=True))
    assert [(point.epoch, point.step) for point in history.points()] == [(1, 1), (2, 2)]


def test_epochs_without_numbers_are_counted_in_the_curve() -> None:
    history = History("worker:0")
    for _ in range(2):
        history.record("worker:0", StepReport(metrics={"loss": 1.0}, epoch_end=True))
    assert [(point.epoch, point.step) for point in history.points()] == [(1, 1), (2, 2)]


def test_a_long_training_keeps_points_from_first_to_last_step() -> None:
    history = History("worker:0")
    for epoch in range(1, 51):
        for step in range(1, 1001):
            report = StepReport(epoch, 50, step, 1000, {"loss": 1.0}, epoch_end=step == 1000)
            history.record("worker:0", report)
    points = history.points()
    assert (points[0].step < 10, points[-1].step) == (True, 50_000)
    assert 5_000 < len(points) <= 10_050
    assert sum(point.ends_epoch for point in points) == 50
