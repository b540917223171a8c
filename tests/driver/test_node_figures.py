"""The figures of a node: its phase, its newest metrics, its curves and its GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tfos_nb.driver.membership.members import Member
from tfos_nb.driver.node_figures import NodeFigures
from tfos_nb.runtime.control.lifecycle import Reservation
from tfos_nb.runtime.control.plan import Node
from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, GpuFigures, Heartbeat, StepReport
from tfos_nb.state.cluster_state import GpuUse, NodeState, NodeStatus


def after(*reports: StepReport, **changes: Any) -> NodeState:
    figures, member = NodeFigures(), Member(Node.parse("worker:0"), status=NodeStatus.TRAINING)
    for report in reports:
        figures.take(report)
    for name, value in changes.items():
        setattr(member if hasattr(member, name) else figures, name, value)
    return figures.state(member, 0.0)


def fit(epoch: int, step: int, time: float = 0.0, **metrics: float) -> StepReport:
    return StepReport(epoch, 3, step, 10, metrics, step == 10, time, FIT)


def test_a_validation_has_its_own_steps_and_the_epoch_of_its_training() -> None:
    training = [fit(2, step, loss=0.5) for step in (1, 9)]
    state = after(*training, StepReport(2, 3, 4, 80, {"val_loss": 0.7}, phase=EVALUATE))
    assert (state.phase, state.epoch, state.epochs, state.step, state.steps) == ("evaluate", 2, 3, 4, 80)
    assert state.metrics == {"loss": 0.5, "val_loss": 0.7}
    assert state.curves == {"loss": (0.5, 0.5)}  # a validation's running means belong to no curve
    state = after(*training, StepReport(2, 3, 4, 80, phase=EVALUATE), fit(2, 10, val_loss=0.6, loss=0.4))
    assert (state.phase, state.epoch, state.step, state.steps) == ("fit", 2, 10, 10)
    assert state.curves == {"loss": (0.5, 0.5, 0.4), "val_loss": (0.6,)}


def test_after_an_evaluation_the_end_of_the_training_is_shown_again() -> None:
    done = StepReport(3, 3, 10, 10, phase=OVER)
    evaluation = StepReport(None, None, 4, 8, {"test_loss": 0.9}, phase=EVALUATE)
    state = after(fit(3, 10, loss=0.5), done, evaluation)
    assert (state.phase, state.epoch, state.epochs, state.step, state.steps) == ("evaluate", 3, 3, 4, 8)
    state = after(fit(3, 10, loss=0.5), done, evaluation, StepReport(None, None, 8, 8, {"test_loss": 0.8}, phase=OVER))
    assert (state.phase, state.epoch, state.epochs, state.step, state.steps) == ("", 3, 3, 10, 10)
    assert state.metrics == {"loss": 0.5, "test_loss": 0.8}


@pytest.mark.parametrize("status", [status for status in NodeStatus if status.ended])
def test_a_node_that_ended_has_no_phase_and_no_time_left(status: NodeStatus) -> None:
    reports = [fit(1, step, time=float(step), loss=1.0) for step in range(1, 5)]
    assert after(*reports).seconds_left == pytest.approx(26.0)
    state = after(*reports, status=status)
    assert (state.phase, state.seconds_left, state.step) == ("", None, 4)


def test_a_metric_stays_until_a_newer_value_arrives_or_a_new_training_begins() -> None:
    first = [fit(1, 10, loss=0.5, val_loss=0.6), fit(2, 1, loss=0.4)]
    assert after(*first).metrics == {"loss": 0.4, "val_loss": 0.6}
    assert after(*first, fit(1, 1, loss=2.0)).metrics == {"loss": 2.0}


def test_the_curves_are_of_the_first_shown_metrics_in_any_order_of_arrival() -> None:
    state = after(fit(1, 1, val_loss=1, val_b=2, c=3), fit(1, 2, loss=5, b=6, c=7), fit(1, 3, a=4, loss=5))
    assert list(state.curves) == ["loss", "a", "b", "c"]
    assert list(state.metrics) == ["loss", "a", "b", "c", "val_loss", "val_b"]
    assert state.curves["c"] == (3, 7)


def test_the_curves_are_of_the_loss_and_of_the_first_three_other_metrics() -> None:
    state = after(fit(1, 1, a=1, b=2, c=3, d=4), fit(1, 2, d=4, a=2, loss=0.5))
    assert list(state.curves) == ["loss", "a", "b", "c"]
    assert state.curves["a"] == (1, 2)
    assert next(iter(state.metrics)) == "loss"


def test_a_report_of_only_a_phase_adds_no_point_to_a_curve() -> None:
    assert after(fit(1, 1, loss=1.0), fit(1, 2), StepReport(1, 3, 2, 10, phase=OVER)).curves == {"loss": (1.0,)}


def test_a_program_that_names_each_steps_metric_differently_takes_bounded_memory() -> None:
    state = after(*[fit(1, step, **{f"metric_{step}": 1.0}) for step in range(1000)])
    assert len(state.metrics) <= 100
    assert state.metrics["metric_999"] == 1.0
    assert len(state.curves) == 3


def test_gpus_are_shown_while_the_node_lives() -> None:
    figures = (GpuFigures("NVIDIA A100", 87.0, 1, 2), GpuFigures("NVIDIA A100"))
    beat = Heartbeat("worker:0", 1.0, 2, (), None, figures)
    place = Reservation("worker:0", "h", 1, "0", 0, 77, ("0", "1"))
    state = after(heartbeat=beat, reservation=place)
    assert state.gpus == ("0", "1")
    assert state.gpu_use == (GpuUse("NVIDIA A100", 87.0, 1, 2), GpuUse("NVIDIA A100"))
    assert after(heartbeat=beat, status=NodeStatus.DONE).gpu_use == (GpuUse("NVIDIA A100"),) * 2  # only the names stay


def test_a_node_that_starts_says_whether_it_imports_tensorflow() -> None:
    cold = Reservation("worker:0", "h", 1, "0", 0, 77)
    warm = Reservation("worker:0", "h", 1, "0", 0, 77, warm=True)
    for status in (NodeStatus.RESERVED, NodeStatus.STARTING):
        assert after(reservation=cold, status=status).detail == "imports TensorFlow"
        assert after(reservation=warm, status=status).detail == "from a warm process"
    assert after(reservation=cold, status=NodeStatus.TRAINING).detail == ""
    assert after(status=NodeStatus.PLANNED).detail == ""
