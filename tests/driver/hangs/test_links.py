"""The watch for cut links: when nodes are asked, and when a cut link is reported."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from tfos_nb.driver.hangs.explanation import Situation
from tfos_nb.driver.hangs.links import LinksFound, LinkWatch
from tfos_nb.runtime.node.links import Pair
from tfos_nb.runtime.node.stacks import StacksTaken

PAIR = ("worker:0", "worker:1")


class Nodes:
    """Two nodes that wait for each other."""

    heartbeat_timeout = 15.0

    def __init__(self) -> None:
        self.steps: int | None = 0
        self.cut: frozenset[Pair] = frozenset([PAIR])
        self.serve = True
        self.cpu = 1.0
        self.asked: list[float] = []
        self.reported: list[tuple[float, Collection[Pair]]] = []
        self.restored = 0
        self.now = 0.0

    def start_marks(self) -> Mapping[str, Any] | None:
        return None if self.steps is None else {"worker:0": self.steps}

    def look_at_links(self) -> LinksFound:
        self.asked.append(self.now)
        return LinksFound(self.cut, self.cut if self.serve else frozenset())

    def stacks(self, timeout: float, nodes: Collection[str] | None = None) -> Mapping[str, StacksTaken]:
        return {}

    def situations(self, stacks: Mapping[str, StacksTaken]) -> list[Situation]:
        text = (
            "Thread (main) 0x01 (most recent call first):\n"
            '  File "/usr/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute'
        )
        return [Situation(name, cpu_percent=self.cpu, stacks=StacksTaken(name, 1, text)) for name in PAIR]

    def describe_cut(self, pairs: Collection[Pair]) -> str:
        return f"{sorted(pairs)} are cut"

    def report_cut(self, pairs: Collection[Pair]) -> None:
        self.reported.append((self.now, pairs))

    def restore_links(self) -> None:
        self.restored += 1


def look(nodes: Nodes, watch: LinkWatch, seconds: range) -> None:
    """Look once a second."""
    for second in seconds:
        nodes.now = float(second)
        watch.look(nodes.now)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def watch(nodes: Nodes) -> LinkWatch:
    return LinkWatch("clicks", nodes)


def test_a_cut_link_is_logged_once_and_reported_after_the_heartbeats_timeout(
    nodes: Nodes, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    look(nodes, watch, range(16))
    (record,) = caplog.records
    assert record.getMessage() == f"cluster clicks: no step for 10 s: {[PAIR]} are cut"
    assert nodes.reported == [(15.0, {PAIR})]


def test_a_link_that_was_cut_only_once_is_not_reported(nodes: Nodes, watch: LinkWatch) -> None:
    look(nodes, watch, range(11))
    nodes.cut = frozenset()
    look(nodes, watch, range(11, 60))
    assert nodes.reported == []


def test_nodes_that_do_not_serve_yet_are_asked_again_soon(nodes: Nodes, watch: LinkWatch) -> None:
    nodes.serve = False
    look(nodes, watch, range(35))
    assert nodes.asked == [10.0, 20.0, 30.0]
    assert nodes.reported == []
    nodes.serve = True
    look(nodes, watch, range(35, 42))
    assert nodes.reported == [(41.0, {PAIR})]


def test_nodes_that_move_are_not_asked(nodes: Nodes, watch: LinkWatch) -> None:
    for second in range(60):
        nodes.steps = second // 9
        watch.look(float(second))
    assert nodes.asked == []


def test_nodes_that_need_no_link_are_not_asked(nodes: Nodes, watch: LinkWatch) -> None:
    nodes.steps = None
    look(nodes, watch, range(60))
    assert nodes.asked == []


def test_nodes_whose_links_are_well_are_asked_less_and_less_often(nodes: Nodes, watch: LinkWatch) -> None:
    nodes.cut = frozenset()
    look(nodes, watch, range(1, 1200))
    assert nodes.asked == [11.0, 31.0, 71.0, 151.0, 311.0, 611.0, 911.0]


def test_a_cut_link_is_no_failure_of_nodes_that_compute(
    nodes: Nodes, watch: LinkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    nodes.cpu = 90.0
    look(nodes, watch, range(60))
    assert nodes.reported == []
    assert not caplog.records


def test_nodes_that_were_left_out_are_looked_at_every_five_seconds(nodes: Nodes, watch: LinkWatch) -> None:
    look(nodes, watch, range(20))
    assert nodes.restored == 4
