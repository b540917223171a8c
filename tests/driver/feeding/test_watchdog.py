"""The feed watchdog: it gives up nodes that do nothing, and waits for nodes that are only slow."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tfos_nb.driver.feeding.watchdog import FeedWatchdog, WithoutSlot
from tfos_nb.spark.contexts.pending_slots import Busy, PendingSlots, expect
from tfos_nb.spark.slots import SlotCounts

TIMEOUT = 10.0


class Nodes:
    """A fake controller, feed and clock for the watchdog."""

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

    def nodes_with_rows(self) -> tuple[str, ...]:
        return self.full

    def worked(self) -> dict[str, float]:
        return dict(self.seconds)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr("tfos_nb.driver.feeding.watchdog.time", SimpleNamespace(monotonic=nodes.monotonic))
    return nodes


def stood(
    nodes: Nodes, seconds: int, cores: float = 0.0, spike: float = 0.0, **changes: int
) -> tuple[float | None, float]:
    """Let seconds pass; return when the watchdog gave up, if it did, and for how long no row has moved."""
    watchdog: Any = FeedWatchdog(nodes, nodes, TIMEOUT)  # type: ignore[arg-type]
    quiet = 0.0
    for second in range(1, seconds + 1):
        nodes.now += 1
        nodes.seconds["worker:1"] += cores
        nodes.seconds["worker:0"] += spike if second == 3 else 0.0
        for name, value in changes.items():
            setattr(nodes, name, value * second)
        quiet = watchdog.look()
        if watchdog.for_good:
            return second, quiet
    return None, quiet


def test_nodes_that_do_nothing_are_given_up_after_the_timeout(nodes: Nodes) -> None:
    assert stood(nodes, 100) == (TIMEOUT + 1, TIMEOUT + 1)


@pytest.mark.parametrize("moves", ["moved", "rows"])
def test_a_feed_whose_rows_move_is_not_given_up(nodes: Nodes, moves: str) -> None:
    assert stood(nodes, 100, **{moves: 1}) == (None, 0)


def test_a_feed_without_waiting_rows_is_not_given_up(nodes: Nodes) -> None:
    nodes.full = ()
    assert stood(nodes, 100) == (None, 0)


def test_the_feed_waits_for_nodes_that_report_but_take_no_rows(nodes: Nodes) -> None:
    assert stood(nodes, 100, reports=1) == (None, 100)


def test_the_feed_waits_for_nodes_that_compute_and_logs_it_once(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    assert stood(nodes, 100, cores=0.3) == (None, 100)
    assert caplog.messages == [
        "worker:0 took no row for 10 s, in epoch 1; the feed keeps waiting, because the nodes compute"
    ]


def test_the_feed_waits_for_nodes_that_save(nodes: Nodes) -> None:
    nodes.saving = True
    assert stood(nodes, 100) == (None, 100)


def test_a_short_moment_of_work_does_not_prevent_the_timeout(nodes: Nodes) -> None:
    assert stood(nodes, 100, cores=0.1, spike=1.5) == (TIMEOUT + 1, TIMEOUT + 1)


# --- no slot for the feeding tasks


class Spark:
    """A fake Spark, controller, job, feed and clock for a feed without a slot."""

    def __init__(self) -> None:
        self.now = 0.0
        self.moved, self.epoch = 0, 2
        self.wanted = self.asked = 0
        self.over = False
        self.done = SimpleNamespace(is_set=lambda: self.over)
        nodes = Busy("nodes", 2, 2, 0)
        expect(PendingSlots("nodes", 2, 1, 0, lambda: 0, lambda: 0, lambda: self.over))
        self.found: SlotCounts | None = SlotCounts(0, 2, 2, (nodes,))

    def monotonic(self) -> float:
        return self.now

    def room(self, job: Any) -> SlotCounts | None:
        self.asked += 1
        return self.found

    def want_slot(self) -> None:
        self.wanted += 1


@pytest.fixture
def spark_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spark]:
    spark = Spark()
    monkeypatch.setattr("tfos_nb.driver.feeding.watchdog.time", SimpleNamespace(monotonic=spark.monotonic))
    yield spark
    spark.over = True


def waited(spark: Spark, seconds: int, **changes: int) -> str:
    watch: Any = WithoutSlot(spark, spark, spark, spark, TIMEOUT)  # type: ignore[arg-type]
    for second in range(2 * seconds):
        spark.now += 0.5
        for name, value in changes.items():
            setattr(spark, name, value * second)
        if told := watch.look():
            return str(told)
    return ""


def test_if_nodes_hold_all_slots_one_is_requested_and_a_warning_is_logged_once(
    spark_of: Spark, caplog: pytest.LogCaptureFixture
) -> None:
    assert waited(spark_of, 30) == ""
    assert spark_of.wanted == spark_of.asked == 5 + 27, "each half second at first, here, and then each second"
    said = "the rows of epoch 2 wait for Spark: none of its 2 slots is free for the tasks that bring them. Tasks that"
    assert caplog.messages == [f"{said} run: 2 of 'nodes'"]


def test_no_slot_is_requested_while_other_jobs_hold_slots(spark_of: Spark, caplog: pytest.LogCaptureFixture) -> None:
    spark_of.found = SlotCounts(0, 2, 2, (Busy("nodes", 1, 1, 0), Busy("a query", 1, 1, 0)))
    assert waited(spark_of, 30) == ""
    assert spark_of.wanted == 0
    assert "1 of 'nodes', 1 of 'a query'" in caplog.text


@pytest.mark.parametrize(
    "room", [SlotCounts(1, 2, 2, ()), SlotCounts(0, 3, 2, ()), None], ids=["runs", "free", "unknown"]
)
def test_no_slot_is_requested_if_tasks_run_or_can_run_or_nothing_is_known(
    spark_of: Spark, room: SlotCounts | None, caplog: pytest.LogCaptureFixture
) -> None:
    spark_of.found = room
    assert waited(spark_of, 30) == ""
    assert (spark_of.wanted, caplog.messages) == (0, [])


def test_spark_is_not_asked_while_rows_move(spark_of: Spark) -> None:
    assert waited(spark_of, 30, moved=1) == ""
    assert spark_of.asked <= 1


def test_a_feed_without_any_executor_fails_after_the_timeout(spark_of: Spark, caplog: pytest.LogCaptureFixture) -> None:
    spark_of.found = SlotCounts(0, 0, 0, ())
    told = waited(spark_of, 30)
    assert told.startswith("the rows of epoch 2 waited 10 s for Spark, which has no executor any more")
    assert spark_of.wanted == 0


def test_where_spark_starts_executors_no_node_leaves_its_slot_and_the_rows_wait_for_one(spark_of: Spark) -> None:
    spark_of.found = SlotCounts(0, 2, 2, (Busy("nodes", 2, 2, 0),), grows=True)
    told = waited(spark_of, 30)
    assert told.startswith("the rows of epoch 2 waited 10 s for an executor: nodes hold all 2 slots")
    assert "spark.dynamicAllocation.maxExecutors" in told
    assert spark_of.wanted == 0


def test_rows_wait_without_an_end_for_the_slots_of_other_jobs_where_spark_starts_executors(spark_of: Spark) -> None:
    spark_of.found = SlotCounts(0, 2, 2, (Busy("nodes", 1, 1, 0), Busy("a query", 1, 1, 0)), grows=True)
    assert waited(spark_of, 30) == ""
