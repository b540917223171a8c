"""Many nodes at once: all connect, all are stopped, a loss is reported, and the driver's work grows linearly.

The nodes are simulated in a process of their own and use the real door. The tests count the driver's operations.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet_driver import Driver
from benchmarks.fleet_nodes import Fleet
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.feed_controller import FeedController
from tfos_nb.driver.ledger import FeedLedger
from tfos_nb.driver.membership.machine import CheckAll, Membership
from tfos_nb.errors import NodeFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Link
from tfos_nb.runtime.control.lifecycle import FeedPlace, MainReturned, MainStarted, NodeUp, Reservation, Start
from tfos_nb.runtime.control.plan import ClusterPlan, Node
from tfos_nb.runtime.control.reports import (
    FeedStatus,
    Heartbeat,
    LogLines,
    StepReport,
    silent_after,
    tick_among,
)
from tfos_nb.runtime.feed import messages
from tfos_nb.state.cluster_state import NodeState, NodeStatus
from tfos_nb.state.history import History
from tfos_nb.state.log_buffer import LogBook
from tfos_nb.widgets.words.problems import problem_first

NODES, SECONDS = 100, 30.0
SCHEMA = pa.schema([("x", pa.float32())]).serialize().to_pybytes()


@contextmanager
def gathered(nodes: int) -> Iterator[tuple[Driver, Fleet]]:
    driver = Driver(nodes)
    try:
        with Fleet([str(node) for node in driver.plan.nodes], driver.address, processes=1) as fleet:
            fleet.hear("ready", SECONDS)
            fleet.order("come")
            fleet.hear("started", SECONDS)
            fleet.order("up")
            driver.until(lambda: driver.controller.all_up, "all up", SECONDS)
            yield driver, fleet
    finally:
        driver.close()


def test_a_hundred_nodes_connect_and_a_graceful_stop_reaches_all_of_them() -> None:
    with gathered(NODES) as (driver, fleet):
        driver.ask_to_stop(SECONDS)
        fleet.hear("stopped", SECONDS)
        assert driver.outcome.over.wait(SECONDS)
        assert {node.status for node in driver.snapshot().nodes} == {NodeStatus.DONE}


def test_one_lost_node_of_a_hundred_is_named_and_the_others_are_stopped() -> None:
    with gathered(NODES) as (driver, fleet):
        fleet.order("lose", name="worker:42")
        fleet.hear("stopped", SECONDS)
        assert driver.outcome.over.wait(SECONDS)
        assert isinstance(driver.outcome.error, NodeFailed)
        assert "worker:42" in str(driver.outcome.error)
        states = {node.node: node.status for node in driver.snapshot().nodes}
        assert states.pop("worker:42") is NodeStatus.LOST
        assert set(states.values()) == {NodeStatus.STOPPED}


# --- number of operations -------------------------------------------------------------------------


class Counted:
    """Items that count how often they are looked at."""

    def __init__(self, count: int) -> None:
        self.held = [False] * count
        self.looks = 0

    def look(self, place: int) -> bool:
        self.looks += 1
        return self.held[place]


@pytest.mark.parametrize("order", ["first to last", "last to first", "even before odd"])
def test_check_all_after_each_of_many_changes_costs_at_most_three_looks_per_item(order: str) -> None:
    count = 500
    counted = Counted(count)
    everyone = CheckAll(range(count), counted.look)
    coming = {
        "first to last": list(range(count)),
        "last to first": list(reversed(range(count))),
        "even before odd": [*range(0, count, 2), *range(1, count, 2)],
    }[order]
    for place in coming[:-1]:
        counted.held[place] = True
        assert not everyone()
    counted.held[coming[-1]] = True
    assert everyone()
    assert counted.looks <= 3 * count


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans())))
def test_check_all_gives_the_same_answer_as_a_check_of_every_item(changes: list[tuple[int, bool]]) -> None:
    counted = Counted(5)
    everyone = CheckAll(range(5), counted.look)
    for place, holds in changes:
        counted.held[place] = holds
        assert everyone() == all(counted.held)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def come(controller: ClusterController, loop: asyncio.AbstractEventLoop) -> list[Link]:
    """Let all nodes reserve and start."""
    links = [Link(loop) for _ in controller.plan.nodes]
    for number, (link, node) in enumerate(zip(links, controller.plan.nodes, strict=True)):
        controller.arrived(link, Reservation(str(node), "10.0.0.1", 1000 + number, str(number), 0, 7))
    for link in links:
        place = FeedPlace("/s", "10.0.0.1", 1, b"")
        controller.received(link, NodeUp(link.node or "", 7, "2.21", "3.15", place))
        controller.received(link, MainStarted(link.node or ""))
    return links


def test_a_message_to_all_is_encoded_once(monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
    encoded: list[Any] = []
    encode = wire.encode

    def counting(message: Any) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(wire, "encode", counting)
    come(ClusterController(ClusterPlan(50)), loop)
    assert [type(message) for message in encoded if isinstance(message, Start)] == [Start]


def test_heartbeats_and_log_lines_wake_no_waiter_and_a_returning_main_does(loop: asyncio.AbstractEventLoop) -> None:
    controller = ClusterController(ClusterPlan(3))
    links = come(controller, loop)
    looked = threading.Semaphore(0)
    looks: list[int] = []

    def look() -> bool:
        looks.append(len(looks))
        looked.release()
        return controller.all_returned

    def wait() -> None:
        with controller.changed:
            controller.changed.wait_for(look, SECONDS)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert looked.acquire(timeout=SECONDS)
    for step in range(20):
        for link in links:
            name = link.node or ""
            controller.received(link, Heartbeat(name, 1.0, 1, (StepReport(1, 1, step),), FeedStatus(step, step)))
            controller.received(link, LogLines(name, ("a line",)))
    for link in links:
        with controller.changed:  # the waiter looks before the next one returns, or with it
            controller.received(link, MainReturned(link.node or "", b""))
    waiter.join(SECONDS)
    assert not waiter.is_alive()
    assert len(looks) <= 1 + len(links)


def test_printing_a_plan_makes_its_nodes_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    post_init = Node.__init__

    def counting(self: Node, *arguments: Any) -> None:
        nonlocal made
        made += 1
        post_init(self, *arguments)

    monkeypatch.setattr(Node, "__init__", counting)
    plan = ClusterPlan(200, ps=10, driver_ps_nodes=True)
    assert len(str(plan).splitlines()) == 213
    assert len(plan.spark_nodes) == 201
    assert made <= 10 * 211


def test_heartbeats_of_nodes_that_wait_for_rows_do_not_read_the_plan(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop
) -> None:
    controller = ClusterController(ClusterPlan(20))
    links = come(controller, loop)
    monkeypatch.setattr(ClusterPlan, "nodes", property(lambda plan: pytest.fail("it has as many nodes as beat")))
    for link in links:
        controller.received(link, Heartbeat(link.node or "", 1.0, 1, (), FeedStatus(waits_for_rows=True)))
    assert {state.status for state in controller.snapshot()} == {NodeStatus.FEEDING}


# --- the ledger -----------------------------------------------------------------------------------


def controller_of(count: int) -> FeedController:
    membership = Membership(ClusterPlan(count))
    for number, name in enumerate(membership.present.fed_names):
        membership.feed_places[name] = FeedPlace("/s", f"10.0.0.{number // 4}", 1, b"c" * 600)
    return FeedController(threading.Condition(threading.RLock()), membership, lambda message, to: None)


def test_a_task_gets_the_addresses_on_its_host_and_of_the_nodes_that_it_asks_for() -> None:
    controller = controller_of(100)
    controller.begin(1, False, 1, 1)
    told = controller.asked(messages.OpenPartition(1, 0, SCHEMA, {}, "10.0.0.2"))
    assert (set(told.places), told.nodes) == ({"worker:8", "worker:9", "worker:10", "worker:11"}, 100)
    assert controller.asked(messages.OpenPartition(1, 1, SCHEMA, {}, "192.168.0.1")).places == {}
    asked = controller.asked(messages.WherePlaces(1, ("worker:50", "worker:3")))
    assert {name: place.host for name, place in asked.places.items()} == {
        "worker:50": "10.0.0.12",
        "worker:3": "10.0.0.0",
    }


def test_the_answer_to_a_task_does_not_grow_with_the_cluster() -> None:
    sizes = []
    for count in (50, 250):
        controller = controller_of(count)
        controller.begin(1, False, 1, 1)
        sizes.append(len(wire.encode(controller.asked(messages.OpenPartition(1, 0, SCHEMA, {}, "10.0.0.2")))))
    assert sizes[1] <= sizes[0] + 16


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), max_size=30))
def test_with_very_many_nodes_those_with_the_fewest_rows_get_the_next_ones(claims: list[tuple[int, int]]) -> None:
    """Compare the ledger's heap with a search of all nodes."""
    books, ends = FeedLedger(1, [f"worker:{number}" for number in range(200)]), [0] * 4
    for partition, rows in claims:
        before = dict(books.claimed)
        answer = books.claim(messages.ClaimRows(1, partition, ends[partition], rows))
        ends[partition] += rows
        some = set(answer.nodes)
        assert len(some) == max(1, rows // 64)
        assert max(before[name] for name in some) <= min(before[name] for name in before.keys() - some)
        assert sum(books.claimed.values()) == sum(ends)


def test_nodes_of_a_large_cluster_send_one_heartbeat_a_second_and_of_a_small_one_two() -> None:
    assert [tick_among(nodes) for nodes in (1, 499, 500, 1500)] == [0.5, 0.5, 1.0, 1.0]


def test_heartbeats_of_very_many_nodes_are_rarer_but_well_within_the_timeout() -> None:
    assert [tick_among(nodes) for nodes in (3000, 4500)] == [2.0, 3.0]
    assert [tick_among(100_000, timeout) for timeout in (2.0, 15.0, 60.0)] == [1.0, 3.75, 15.0]


@pytest.mark.parametrize("nodes", [1, 1500, 3000, 5000, 20_000, 100_000])
def test_no_node_is_called_silent_if_it_sends_every_heartbeat(nodes: int) -> None:
    assert all(silent_after(nodes) >= 2 * tick_among(nodes, timeout) for timeout in (2.0, 15.0, 60.0, 600.0))


def test_a_node_among_thousands_is_silent_after_a_missed_heartbeat() -> None:
    nodes = [NodeState(f"worker:{number}", NodeStatus.TRAINING, heartbeat_age=5.5) for number in range(5000)]
    nodes[7] = replace(nodes[7], heartbeat_age=8.0)
    found = problem_first(tuple(nodes))
    assert [(node.node, wrong) for node, wrong in found if wrong] == [("worker:7", "silent")]
    assert problem_first(tuple(nodes[:2]))[0][1] == "silent"


# --- memory ---------------------------------------------------------------------------------------


def test_with_many_nodes_fewer_steps_and_log_lines_of_each_are_kept() -> None:
    history = History("worker:0", nodes=5000)
    book = LogBook([f"worker:{number}" for number in range(5000)])
    for step in range(500):
        for node in ("worker:0", "worker:1"):
            history.record(node, StepReport(1, 1, step))
        book.add("worker:1", [f"line {step}"])
    assert len(history.steps("worker:0")) == 500
    assert [report.step for report in history.steps("worker:1")] == list(range(400, 500))
    assert book.texts("worker:1") == [f"line {number}" for number in range(300, 500)]
