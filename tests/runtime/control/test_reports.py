"""A report may be lost but never blocks the program; the end of an epoch is never lost."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.reports import (
    FeedStatus,
    GpuFigures,
    Heartbeat,
    ReportBox,
    Reporter,
    StepReport,
)

SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Reporter, ReportBox]]:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    box = ReportBox(ours)
    reporter = Reporter(theirs)
    yield reporter, box
    reporter.close()
    theirs.close()
    ours.close()


def deliver(reporter: Reporter, box: ReportBox) -> None:
    """Take everything that was sent: the box runs until it receives an empty datagram, which means a closed socket."""
    reporter.flush()
    reporter._socket.setblocking(True)
    taker = threading.Thread(target=box.run, daemon=True)
    taker.start()
    reporter._socket.send(b"")
    taker.join(SECONDS)
    assert not taker.is_alive()
    reporter._socket.setblocking(False)


def test_the_newest_step_and_every_end_of_an_epoch_arrive(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    for epoch in (1, 2):
        for step in (1, 2, 3):
            reporter.step(epoch=epoch, epochs=2, step=step, steps=3, epoch_end=step == 3, loss=1 / step)
    reporter.step(epoch=3, step=1)
    reporter.step(epoch=3, step=2)
    deliver(reporter, box)
    reports, feed = box.empty()
    assert [(report.epoch, report.step, report.epoch_end) for report in reports] == [
        (1, 3, True),
        (2, 3, True),
        (3, 2, False),
    ]
    assert feed is None
    assert box.empty() == ((), None)


def test_the_newest_state_of_the_feed_is_kept(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    reporter.send(FeedStatus(1, 0, 8, False))
    reporter.send(FeedStatus(2, 1, 0, True))
    deliver(reporter, box)
    assert box.empty() == ((), FeedStatus(2, 1, 0, True))
    assert box.empty() == ((), FeedStatus(2, 1, 0, True))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5), (2, 2.0), (np.float32(0.5), 0.5), (np.array(3), 3.0), (True, 1.0),
        ("abc", None), (None, None), ([1, 2], None),
    ],
    ids=repr,
)  # fmt: skip
def test_a_metric_that_is_not_a_number_is_left_out(
    ends: tuple[Reporter, ReportBox], value: Any, number: float | None
) -> None:
    reporter, box = ends
    reporter.step(step=1, metric=value, loss=1.0)
    deliver(reporter, box)
    [report], _ = box.empty()
    assert report.metrics == ({"loss": 1.0} if number is None else {"metric": number, "loss": 1.0})
    assert report.time > 0


def test_a_metric_may_be_nan_or_infinite(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    reporter.step(loss=math.nan, rate=math.inf)
    deliver(reporter, box)
    [report], _ = box.empty()
    assert math.isnan(report.metrics["loss"])
    assert report.metrics["rate"] == math.inf


def test_a_program_does_not_wait_for_a_supervisor_that_is_behind(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    for step in range(10_000):
        reporter.send(StepReport(step=step))
    assert 0 < reporter.dropped < 10_000
    deliver(reporter, box)
    [report], _ = box.empty()
    assert report.step == 10_000 - reporter.dropped - 1
    before = reporter.dropped
    reporter.step(step=1, epoch_end=True)
    assert reporter.dropped == before  # there is room again


def test_a_burst_of_epoch_ends_is_kept_without_blocking_the_program(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    for epoch in range(1, 2501):
        reporter.step(epoch=epoch, epoch_end=True, loss=1 / epoch)
    assert reporter._waiting, "they are more than the socket takes"
    taker = threading.Thread(target=box.run, daemon=True)
    taker.start()
    reporter.close()
    box.close()
    taker.join(SECONDS)
    counts, found = [], []
    while reports := box.empty()[0]:
        counts.append(len(reports))
        found += [report.epoch for report in reports]
    assert (counts, found, reporter.dropped) == ([1000, 1000, 500], list(range(1, 2501)), 0)


def test_a_program_keeps_running_without_its_supervisor() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reporter = Reporter(theirs)
    ours.close()
    reporter.step(step=1, loss=0.5)
    assert reporter.dropped == 1
    theirs.close()
    reporter.step(step=2, epoch_end=True)
    assert reporter.dropped == 2


class Weighed:
    """A metric that is not computed yet, as on a GPU: converting it to a number means waiting."""

    def __init__(self, value: float, weighed: list[float]) -> None:
        self.value, self.weighed = value, weighed

    def __float__(self) -> float:
        self.weighed.append(self.value)
        return self.value


def test_metrics_of_skipped_steps_are_not_converted_and_the_newest_step_arrives(
    ends: tuple[Reporter, ReportBox],
) -> None:
    reporter, box = ends
    weighed: list[float] = []
    arrived = threading.Event()
    take = box._take

    def taking(report: Any) -> None:
        take(report)
        if report.step == 999:
            arrived.set()

    box._take = taking  # type: ignore[method-assign]
    threading.Thread(target=box.run, daemon=True).start()
    for step in range(1000):
        reporter.step(step=step, loss=Weighed(step, weighed))
    assert arrived.wait(SECONDS)  # no step follows it, and nothing flushes the reporter
    assert (weighed[0], weighed[-1]) == (0, 999)
    assert len(weighed) < 500


def test_an_epochs_end_is_never_held_back(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    for epoch in range(1, 21):
        reporter.step(epoch=epoch, step=9)
        reporter.step(epoch=epoch, step=10, epoch_end=True, loss=1 / epoch)
    deliver(reporter, box)
    reports, _ = box.empty()
    assert [report.epoch for report in reports] == list(range(1, 21))


def test_a_metric_may_be_called_phase(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    reporter.step(step=1, phase=np.float32(0.5), epoch_end=True)
    reporter.step(step=2, phase="evaluate")
    deliver(reporter, box)
    first, second = box.empty()[0]
    assert (first.phase, first.metrics) == ("", {"phase": 0.5})
    assert (second.phase, second.metrics) == ("evaluate", {})


def test_a_count_may_be_a_numpy_integer(ends: tuple[Reporter, ReportBox]) -> None:
    reporter, box = ends
    reporter.step(epoch=np.array(2), step=np.int64(7), steps="many", loss=1.0)
    deliver(reporter, box)
    [report], _ = box.empty()
    assert (report.epoch, report.step, report.steps) == (2, 7, None)
    assert type(report.epoch) is int


def test_a_heartbeat_carries_the_gpu_figures() -> None:
    beat = Heartbeat("worker:0", 1.0, 2, (), None, (GpuFigures("NVIDIA A100", 87.0, 1, 2), GpuFigures("NVIDIA A100")))
    assert wire.decode(wire.encode(beat)) == beat


def test_the_box_ends_when_its_socket_closes() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    taker = threading.Thread(target=ReportBox(ours).run, daemon=True)
    taker.start()
    ours.shutdown(socket.SHUT_RDWR)
    taker.join(SECONDS)
    assert not taker.is_alive()
    ours.close()
    theirs.close()
