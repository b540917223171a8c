"""The hang watch: when a training counts as hanging, and when it continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from tfos_nb.driver.hangs.explanation import Finding, Situation
from tfos_nb.driver.hangs.links import LinksFound
from tfos_nb.driver.hangs.stragglers import Mark
from tfos_nb.driver.hangs.watch import HangWatch
from tfos_nb.runtime.node.stacks import StacksTaken

COMPILES = StacksTaken(
    "worker:0",
    1,
    "Thread (main) 0x01 (most recent call first):\n"
    '  File "/usr/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute',
)


SLEEPS = StacksTaken(
    "worker:0", 1, 'Thread (main) 0x01 (most recent call first):\n  File "/home/ann/train.py", line 7 in main'
)

STEPS_WITH_ALL = StacksTaken(
    "worker:0",
    1,
    f'{COMPILES.text}\n  File "/home/ann/tfos_nb/runtime/keras/replicas/collective_calls.py", line 21 '
    "in call_with_all_workers",
)


class Nodes:
    """Two nodes: the second is stopped."""

    def __init__(self) -> None:
        self.steps: int | None = 0
        self.written: list[Sequence[Finding]] = []
        self.returned: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.starts = False
        self.cpu_seconds = 0.0
        self.moves_when_asked = self.compiles = self.is_alone = self.goes_on_alone = False
        self.letter = "T"
        self.has_rows_left = True
        self.of_steps: dict[str, Mark] = {}
        self.slow: list[dict[str, str]] = []
        self.asked: list[Collection[str] | None] = []

    def marks(self) -> Mapping[str, Any] | None:
        return None if self.steps is None else {"worker:0": self.steps, "worker:1": self.steps}

    def worked(self) -> Mapping[str, float]:
        return {"worker:0": self.cpu_seconds, "worker:1": self.cpu_seconds}

    @property
    def some_are_stopped(self) -> bool:
        return self.letter == "T"

    def stacks(self, timeout: float, nodes: Collection[str] | None = None) -> Mapping[str, StacksTaken]:
        self.asked.append(nodes)
        if self.moves_when_asked and self.steps is not None:
            self.steps += 1
        return {"worker:1": StacksTaken("worker:1", 1, "", self.letter)}

    def situations(self, stacks: Mapping[str, StacksTaken]) -> list[Situation]:
        if self.compiles:
            return [Situation("worker:0", cpu_percent=90.0, stacks=COMPILES)]
        if self.is_alone:
            return [Situation("worker:0", cpu_percent=1.0, stacks=STEPS_WITH_ALL)]
        if self.goes_on_alone:
            return [Situation("worker:0", cpu_percent=1.0, stacks=SLEEPS)]
        names = "worker:0", "worker:1"
        return [Situation(name, waits_for_rows=name == "worker:0", stacks=stacks.get(name)) for name in names]

    heartbeat_timeout = 15.0

    def start_marks(self) -> None:
        """No node needs a link to another."""

    def look_at_links(self) -> LinksFound:
        return LinksFound()

    def describe_cut(self, pairs: Collection[Any]) -> str:
        return ""

    def report_cut(self, pairs: Collection[Any]) -> None:
        raise AssertionError

    def restore_links(self) -> None:
        raise AssertionError

    def write_findings(self, findings: Sequence[Finding]) -> None:
        self.written.append(findings)

    def step_marks(self) -> Mapping[str, Mark]:
        return self.of_steps

    def show_slow(self, texts: Mapping[str, str]) -> None:
        self.slow.append(dict(texts))

    def fail(self, node: str, cause: str) -> None:
        self.failed.append((node, cause))


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def watch(nodes: Nodes) -> HangWatch:
    watch = HangWatch("clicks", nodes, threading.Event())
    watch._moved = watch._asked = 0.0
    return watch


def look(watch: HangWatch, seconds: range) -> None:
    """Look once a second."""
    for second in seconds:
        watch.look(float(second))


def test_a_stopped_process_is_reported_once_and_soon(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    look(watch, range(1, 31))
    (record,) = caplog.records
    told = "worker:1 is behind: it was stopped by a signal (SIGSTOP). cluster.stacks() shows more"
    assert record.getMessage() == f"cluster clicks: no step for 4 s: {told}", "its peers end before ten"
    assert len(nodes.written) == 1
    nodes.steps = 1
    watch.look(31.0)
    assert caplog.records[-1].getMessage() == "cluster clicks: continues after 30 s"
    assert not nodes.written[-1]


def test_a_training_with_slow_steps_gets_the_time_of_five_steps(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    nodes.letter = "S"
    for second in range(1, 41):
        nodes.steps = second // 8
        watch.look(float(second))
    look(watch, range(41, 78))
    assert not caplog.records
    look(watch, range(78, 84))
    assert len(caplog.records) == 1


def test_a_hang_that_was_reported_does_not_make_the_next_one_wait_longer(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.letter = "S"
    for second in range(1, 11):
        nodes.steps = second
        watch.look(float(second))
    look(watch, range(11, 611))
    nodes.steps = 11
    watch.look(611.0)
    reported = len(caplog.records)
    look(watch, range(612, 623))
    assert len(caplog.records) == reported + 1, "after ten seconds again"


def test_nodes_that_are_still_before_their_first_step_are_reported(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.starts = nodes.goes_on_alone = True
    nodes.letter = "S"
    for second in range(1, 30):  # a long start: it computes
        nodes.cpu_seconds += 0.4
        watch.look(float(second))
    assert not caplog.records
    look(watch, range(30, 60))
    (record,) = caplog.records
    assert record.getMessage() == (
        "cluster clicks: no step for 42 s: worker:0 is behind: it is in your program, line 7 of train.py, in main; "
        "for 13 s it has been at the same line, and used no CPU. cluster.stacks() shows more"
    )

    nodes.cpu_seconds += 30  # it goes on, and may compile for long
    look(watch, range(60, 90))
    assert len(caplog.records) == 3, "it is told again once it is still again"
    assert caplog.records[1].getMessage().startswith("cluster clicks: continues after 6")


def test_the_time_until_the_first_step_is_no_usual_time(nodes: Nodes, watch: HangWatch) -> None:
    nodes.starts, nodes.letter = True, "S"
    watch.look(1.0)
    nodes.starts, nodes.steps = False, 1  # its first row
    watch.look(2.0)
    for second, steps in ((9, 2), (10, 3)):  # TensorFlow traces the first step
        nodes.steps = steps
        watch.look(float(second))
    assert watch._usual == 1.0


def test_nodes_that_wait_before_their_first_step_are_asked_less_often_if_they_are_many(
    nodes: Nodes, watch: HangWatch
) -> None:
    nodes.starts, nodes.letter, nodes.cpu_seconds = True, "S", 0.0
    for second in range(1, 300):
        nodes.cpu_seconds += 1.0
        watch.look(float(second))
    few, nodes.asked = len(nodes.asked), []
    watch._marks = many = dict.fromkeys(map(str, range(5000)), 0)
    nodes.marks = lambda: many  # type: ignore[method-assign]
    for second in range(300, 600):
        nodes.cpu_seconds += 1.0
        watch.look(float(second))
    assert (few, len(nodes.asked)) == (43, 6)


def test_nodes_without_expected_progress_do_not_hang(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.steps = None
    look(watch, range(60))
    assert not caplog.records


def test_nodes_that_move_while_they_are_asked_are_not_reported(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.moves_when_asked = True
    look(watch, range(60))
    assert not [record for record in caplog.records if "no step" in record.getMessage()]


def test_nodes_that_all_compute_are_not_reported(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.compiles = True
    look(watch, range(60))
    assert not caplog.records
    nodes.compiles, nodes.letter = False, "S"
    look(watch, range(60, 75))
    assert len(caplog.records) == 1
    nodes.steps = None
    watch.look(75.0)
    assert not nodes.written[-1]
    assert len(caplog.records) == 1, "a cluster that ends does not go on"


def test_a_program_that_goes_on_alone_after_its_last_row_does_not_hang(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.goes_on_alone, nodes.has_rows_left, nodes.letter = True, False, "S"
    look(watch, range(60))
    assert not caplog.records
    nodes.has_rows_left = True
    look(watch, range(60, 75))
    (record,) = caplog.records
    assert "worker:0 is behind: it is in your program, line 7 of train.py, in main" in record.getMessage()


def test_ten_seconds_without_a_step_are_reported(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.letter = "S"
    look(watch, range(1, 11))
    assert not caplog.records
    watch.look(11.0)
    assert "no step for 10 s: worker:1 is behind: it did not answer" in caplog.text


def test_a_wait_for_a_node_whose_main_has_returned_is_ended_once_seen_twice(nodes: Nodes, watch: HangWatch) -> None:
    nodes.letter, nodes.is_alone, nodes.returned = "S", True, ["worker:1"]
    look(watch, range(1, 12))
    assert len(nodes.written) == 1
    assert not nodes.failed
    look(watch, range(12, 60))
    ((node, cause),) = nodes.failed
    assert node == "worker:0"
    assert cause.startswith("waits in TensorFlow for the other nodes, and main of worker:1 has returned")


def test_an_endless_wait_is_found_before_the_time_of_five_slow_steps(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.letter, nodes.returned = "S", ["worker:1"]
    watch._usual, watch._marks = 8.0, nodes.marks()
    look(watch, range(1, 40))
    assert not caplog.records
    nodes.is_alone = True
    look(watch, range(40, 52))
    assert len(nodes.failed) == 1


def test_an_endless_wait_is_found_after_another_report(nodes: Nodes, watch: HangWatch) -> None:
    nodes.letter, nodes.returned = "S", ["worker:1"]
    look(watch, range(1, 16))
    assert len(nodes.written) == 1
    nodes.is_alone = True
    look(watch, range(16, 30))
    assert len(nodes.failed) == 1


def test_a_node_that_moves_between_two_looks_is_not_ended(nodes: Nodes, watch: HangWatch) -> None:
    nodes.letter, nodes.is_alone, nodes.returned = "S", True, ["worker:1"]
    look(watch, range(1, 12))
    nodes.moves_when_asked = True
    look(watch, range(12, 60))
    nodes.moves_when_asked, nodes.returned = False, []
    look(watch, range(60, 100))
    assert not nodes.failed


def test_a_slow_worker_is_reported_once_and_again_when_it_is_fast(
    nodes: Nodes, watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited = 0.0
    for second in range(60):
        waited += 0.8 if second < 30 else 0.0
        nodes.of_steps = {"worker:0": Mark(second, second, waited), "worker:1": Mark(second, second, 0.1)}
        watch.look_for_stragglers()
    told = "worker:1 is slow: its own part of a step is 100%, that of the others 20%"
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"cluster clicks: {told}")
    assert last == "cluster clicks: worker:1 is no longer slow"
    assert [list(texts) for texts in nodes.slow] == [["worker:1"], []]
    assert nodes.asked == [["worker:1"]] * 5
    assert nodes.slow[0]["worker:1"].startswith(told.removeprefix("worker:1 "))
