"""When rows wait in vain, and when the nodes that leave them are only slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos_nb.training import _Standstill

TIMEOUT = 10.0


class Nodes:
    """What a standstill asks of a roster and of a feed, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.moved = self.rows = self.reports = 0
        self.epoch = 1
        self.full: tuple[str, ...] = ("worker:0",)
        self.saving = False
        self.seconds = {"worker:0": 0.0, "worker:1": 0.0}

    def monotonic(self) -> float:
        return self.now

    @property
    def progress(self) -> tuple[int, int]:
        return self.rows, self.reports

    def sated(self) -> tuple[str, ...]:
        return self.full

    def worked(self) -> dict[str, float]:
        return dict(self.seconds)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr("tfos_nb.training.time", SimpleNamespace(monotonic=nodes.monotonic))
    return nodes


def stood(
    nodes: Nodes, seconds: int, cores: float = 0.0, spike: float = 0.0, **changes: int
) -> tuple[float | None, float]:
    """Let seconds pass; return after how many it was for good, and for how long no row has moved."""
    standstill: Any = _Standstill(nodes, nodes, TIMEOUT)  # type: ignore[arg-type]
    quiet = 0.0
    for second in range(1, seconds + 1):
        nodes.now += 1
        nodes.seconds["worker:1"] += cores
        nodes.seconds["worker:0"] += spike if second == 3 else 0.0
        for name, value in changes.items():
            setattr(nodes, name, value * second)
        quiet = standstill.look()
        if standstill.for_good:
            return second, quiet
    return None, quiet


def test_nodes_that_do_nothing_are_given_up_after_the_timeout(nodes: Nodes) -> None:
    assert stood(nodes, 100) == (TIMEOUT + 1, TIMEOUT + 1)


@pytest.mark.parametrize("moves", ["moved", "rows"])
def test_a_feed_that_moves_is_none(nodes: Nodes, moves: str) -> None:
    assert stood(nodes, 100, **{moves: 1}) == (None, 0)


def test_where_no_rows_wait_there_is_none(nodes: Nodes) -> None:
    nodes.full = ()
    assert stood(nodes, 100) == (None, 0)


def test_nodes_that_report_are_waited_for_and_rows_have_not_moved(nodes: Nodes) -> None:
    assert stood(nodes, 100, reports=1) == (None, 100)


def test_nodes_that_compute_are_waited_for_and_it_is_said_once(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    assert stood(nodes, 100, cores=0.3) == (None, 100)
    assert caplog.messages == [
        "worker:0 took no row for 10 s, in epoch 1; but the nodes compute, so they are waited for"
    ]


def test_nodes_that_save_are_waited_for(nodes: Nodes) -> None:
    nodes.saving = True
    assert stood(nodes, 100) == (None, 100)


def test_a_moment_of_work_is_none(nodes: Nodes) -> None:
    assert stood(nodes, 100, cores=0.1, spike=1.5) == (TIMEOUT + 1, TIMEOUT + 1)
