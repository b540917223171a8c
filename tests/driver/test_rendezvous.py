"""Restarts after a loss: all nodes restart, or only the lost workers if a coordinator gives out the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.driver.test_cluster_controller import Cluster, clock, ended, make
from tfos_nb.runtime.control.lifecycle import (
    Following,
    Moved,
    Refused,
    Reservation,
    Serving,
    Start,
    StartAgain,
    StateHeld,
    Stop,
)
from tfos_nb.runtime.feed.messages import WorkerThrough
from tfos_nb.runtime.node.spark_task import HoldsSlot, NodeWanted, SupervisorEnded

__all__ = ["clock", "make"]

NODES = ("chief:0", "worker:0", "worker:1", "ps:0")


@pytest.fixture
def coordinated(make: Callable[..., Cluster]) -> Cluster:
    """A chief that coordinates two workers and a parameter server, which serve."""
    cluster = make(workers=2, ps=1, chief=True)
    cluster.controller.membership.restarts_left = 2
    cluster.bring_up(*NODES)
    for node in NODES[1:]:
        cluster.say(Serving(node))
    cluster.say(Following("chief:0"))
    return cluster


@pytest.fixture
def pair(make: Callable[..., Cluster]) -> Cluster:
    """Two workers that train together."""
    cluster = make(workers=2)
    cluster.controller.membership.restarts_left = 2
    cluster.bring_up("worker:0", "worker:1")
    return cluster


def heard(cluster: Cluster, node: str, kind: type) -> list[Any]:
    """Return the messages of one kind that a node has received, once all sent messages have arrived."""
    cluster.controller.send("the end of it", [node])
    found = []
    for message in cluster.streams[node]:
        if message == "the end of it":
            return found
        found += [message] if isinstance(message, kind) else []
    raise AssertionError(f"{node}'s stream has ended")


def come_again(cluster: Cluster, node: str, port: int) -> None:
    cluster.streams[node].send(Reservation(node, "10.0.0.9", port, "7", 0, 77, (), cluster.controller.generation))
    cluster.until(lambda: node not in cluster.controller.missing)


def test_only_a_lost_worker_restarts_and_the_coordinator_gets_its_new_address(coordinated: Cluster) -> None:
    coordinated.say(WorkerThrough("worker:1", 3), by="chief:0")
    coordinated.say(ended("worker:1", None, "SIGKILL"))
    assert not coordinated.controller.restart_all("it was killed")
    assert coordinated.controller.missing == ("worker:1",)
    assert coordinated.controller.generation == 1
    assert coordinated.controller.replaced["worker:1"].through == 3
    come_again(coordinated, "worker:1", 5000)
    coordinated.say(Serving("worker:1"))

    told = heard(coordinated, "worker:1", (StartAgain, Start))  # type: ignore[arg-type]
    assert [type(message) for message in told] == [Start, StartAgain, Start]
    assert told[-1].cluster_spec["worker"] == ["10.0.0.1:1001", "10.0.0.9:5000"]
    assert (told[-1].generation, told[-1].passes) == (1, 3)
    assert heard(coordinated, "chief:0", Moved) == [Moved("worker:1", "10.0.0.9:5000")]
    for node in ("worker:0", "ps:0"):
        assert heard(coordinated, node, (StartAgain, Moved)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("node", ["ps:0", "chief:0"])
def test_all_nodes_restart_after_the_loss_of_a_parameter_server_or_chief(coordinated: Cluster, node: str) -> None:
    coordinated.say(ended(node, None, "SIGKILL"))
    assert coordinated.controller.restart_all("it was killed")
    assert coordinated.controller.generation == 2
    assert set(coordinated.controller.missing) == set(NODES)


def test_all_nodes_restart_if_no_coordinator_follows(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2, ps=1, chief=True)
    cluster.bring_up(*NODES)
    cluster.say(Serving("worker:1"))
    cluster.say(ended("worker:1", None, "SIGKILL"))
    assert cluster.controller.restart_all("it was killed")


def test_all_nodes_restart_if_a_worker_is_silent(coordinated: Cluster) -> None:
    """Its process may still run, and TensorFlow would wait for its answer forever."""
    coordinated.clock.now += 100.0
    for node in ("chief:0", "worker:0", "ps:0"):
        coordinated.say(Serving(node))
    coordinated.controller.ticked()
    assert [failure.node for failure in coordinated.controller.failures] == ["worker:1"]
    assert coordinated.controller.restart_all("no heartbeat")
    assert coordinated.controller.generation == 2


def test_a_supervisor_that_falls_silent_before_its_next_reservation_is_given_up(pair: Cluster) -> None:
    """It has no reservation then, but its task must still be told to end it."""
    pair.say(ended("worker:0", None, "SIGKILL"))
    assert pair.controller.restart_all("it was killed")
    come_again(pair, "worker:1", 5001)
    pair.clock.now += 100.0
    pair.say(StateHeld("worker:1", waits=True))
    pair.controller.ticked()
    assert [failure.node for failure in pair.controller.failures] == ["worker:0"]
    assert pair.controller.asked(HoldsSlot("worker:0", 77)) == "hold"
    assert pair.controller.restart_all("no heartbeat")
    assert pair.controller.asked(HoldsSlot("worker:0", 77)) == "end"
    assert pair.controller.asked(HoldsSlot("worker:1", 77)) == "hold"
    come_late(pair, "worker:0")
    come_again(pair, "worker:1", 5002)
    assert pair.controller.all_reserved


def test_a_node_that_was_submitted_and_waits_for_a_slot_is_not_submitted_again(pair: Cluster) -> None:
    pair.controller.want_slot()
    assert pair.controller.asked(HoldsSlot("worker:1", 77)) == "leave"
    pair.streams["worker:1"].end()
    pair.until(lambda: pair.controller.failures)
    assert pair.controller.restart_all("its host is gone")
    assert pair.controller.without_supervisor == ("worker:1",)
    pair.controller.mark_submitted(["worker:1"], hold=False)
    assert pair.controller.without_supervisor == ()
    come_again(pair, "worker:0", 5000)
    pair.controller.continue_without_missing()
    assert pair.controller.take_to_resubmit() == []


def test_a_supervisor_in_another_container_may_have_the_pid_of_one_that_was_given_up(pair: Cluster) -> None:
    def come(machine: str) -> None:
        stream = pair.streams["worker:1"] = pair.client.attend()
        stream.send(Reservation("worker:1", "10.0.0.9", 5001, "7", 0, 77, (), pair.controller.generation, machine))
        pair.until(lambda: "worker:1" not in pair.controller.missing)

    pair.streams["worker:1"].end()
    pair.until(lambda: pair.controller.failures)
    assert pair.controller.restart_all("its host is gone")
    come("pod-b")
    pair.clock.now += 100.0
    pair.say(StateHeld("worker:0", waits=True))
    pair.controller.ticked()
    assert pair.controller.restart_all("no heartbeat")
    come("pod-c")
    assert pair.controller.asked(HoldsSlot("worker:1", 77, "pod-b")) == "end"
    assert pair.controller.asked(HoldsSlot("worker:1", 77, "pod-c")) == "hold"


# --- a slot for the rows


def test_the_first_task_that_asks_leaves_a_slot_that_the_rows_need(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2)
    cluster.bring_up("worker:0", "worker:1")
    assert cluster.controller.asked(HoldsSlot("worker:1")) == "hold"
    cluster.controller.want_slot()
    assert [cluster.controller.asked(HoldsSlot(node, 77)) for node in ("worker:1", "worker:0")] == ["leave", "hold"]
    assert cluster.controller.left_slots == ("worker:1",)
    cluster.controller.want_slot()
    cluster.clock.now += 100.0
    assert cluster.controller.asked(HoldsSlot("worker:0", 77)) == "hold", "it may be wanted no more"


def test_a_missing_node_keeps_its_slot_and_no_other_node_leaves_a_gpu_to_it(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(workers=2, gpus=1)
    cluster.reserve("worker:0")
    cluster.controller.want_slot()
    assert cluster.controller.asked(HoldsSlot("worker:1", 77)) == "hold", "nobody would notice if it never came"
    assert cluster.controller.asked(HoldsSlot("worker:0", 77)) == "hold", "worker:1 would be given its GPU"
    cluster.reserve("worker:1")
    assert cluster.controller.asked(HoldsSlot("worker:0", 77)) == "leave"


def test_a_node_without_a_task_is_submitted_again_once_its_supervisor_is_gone(pair: Cluster) -> None:
    pair.controller.want_slot()
    assert pair.controller.asked(HoldsSlot("worker:1", 77)) == "leave"
    pair.say(ended("worker:1", None, "SIGKILL"))
    assert pair.controller.restart_all("it was killed")
    assert pair.controller.without_supervisor == (), "its supervisor starts the next process"
    come_again(pair, "worker:0", 5000)
    come_again(pair, "worker:1", 5001)
    pair.streams["worker:1"].end()
    pair.until(lambda: pair.controller.failures)
    assert pair.controller.restart_all("its host is gone")
    assert pair.controller.without_supervisor == ("worker:1",)
    pair.controller.mark_submitted(["worker:1"], hold=True)
    assert (pair.controller.without_supervisor, pair.controller.left_slots) == ((), ())


def test_an_absent_node_without_a_task_is_submitted_until_it_was_lost_three_times(pair: Cluster) -> None:
    """Its task has left its slot, or nodes hold every slot. No rendezvous follows that would submit it again."""
    pair.controller.want_slot()
    assert pair.controller.asked(HoldsSlot("worker:1", 77)) == "leave"
    pair.say(ended("worker:1", None, "SIGKILL"))
    assert pair.controller.restart_all("it was killed")
    come_again(pair, "worker:0", 5000)
    assert pair.controller.take_to_resubmit() == []
    pair.controller.continue_without_missing()  # drops its supervisor, which was too slow
    for left in (True, True, False):
        assert pair.controller.take_to_resubmit() == ["worker:1"]
        pair.controller.mark_submitted(["worker:1"], hold=False)
        come_late(pair, "worker:1")
        pair.streams["worker:1"].end()
        pair.until(lambda: "worker:1" in pair.controller.missing)
        assert bool(pair.controller.membership.to_resubmit) is left
    assert pair.controller.missing == ("worker:1",)


@pytest.mark.parametrize("refused", [True, False], ids=["it is refused", "it dies"])
def test_an_absent_node_that_never_reserves_is_wanted_three_times(pair: Cluster, refused: bool) -> None:
    pair.say(ended("worker:1", None, "SIGKILL"))
    assert pair.controller.restart_all("it was killed")
    come_again(pair, "worker:0", 5000)
    pair.controller.continue_without_missing()
    for number in range(3):
        assert pair.controller.asked(NodeWanted("worker:1"))
        if refused:
            late = pair.streams[f"late {number}"] = pair.client.attend()
            late.send(Refused("worker:1", "10.0.0.9", "it has no TensorFlow"))
            pair.until(lambda number=number: pair.controller.membership.members["worker:1"].failed_joins > number)
        else:
            pair.controller.asked(SupervisorEnded("worker:1", 1, "No module named 'tensorflow'", 100 + number))
    assert not pair.controller.asked(NodeWanted("worker:1"))
    assert not pair.controller.failures, "the others go on"


# --- fewer nodes than the plan has


@pytest.fixture
def three(make: Callable[..., Cluster]) -> Cluster:
    """Three workers that train together: the first one is lost, and the others have restarted."""
    cluster = make(workers=3)
    cluster.controller.membership.restarts_left = 2
    cluster.bring_up("worker:0", "worker:1", "worker:2")
    cluster.say(ended("worker:0", None, "SIGKILL"))
    assert cluster.controller.restart_all("it was killed")
    come_again(cluster, "worker:1", 5001)
    assert not cluster.controller.are_enough(2)
    assert cluster.controller.some_are_coming
    come_again(cluster, "worker:2", 5002)
    return cluster


def start_told(cluster: Cluster, node: str) -> Start:
    told: list[Start] = heard(cluster, node, Start)
    return told[-1]


def test_the_others_continue_without_a_worker_that_does_not_come_back(three: Cluster) -> None:
    assert three.controller.are_enough(2)
    assert not three.controller.are_enough(3)
    assert three.controller.continue_without_missing() == ("worker:0",)
    assert three.controller.all_reserved
    told = start_told(three, "worker:2")
    assert told == Start({"worker": ["10.0.0.9:5001", "10.0.0.9:5002"]}, 2, 0, (1, 2))
    assert three.controller.first == "worker:1"
    assert three.controller.feeds.nodes == ["worker:1", "worker:2"]


def come_late(cluster: Cluster, node: str) -> None:
    """Connect as a new supervisor."""
    cluster.reserve(node, port=6000)


def test_a_late_worker_joins_once_a_state_has_been_saved(three: Cluster) -> None:
    three.controller.continue_without_missing()
    three.say(StateHeld("worker:1", waits=True))
    assert three.controller.changing == "", "it has not come"
    come_late(three, "worker:0")
    assert three.controller.changing == "", "it would undo what has been trained since the last state"
    assert three.controller.failures == []
    three.say(StateHeld("worker:2", waits=True))
    assert three.controller.changing == "", "that is not who saves"
    three.say(StateHeld("worker:1", waits=True))
    assert three.controller.changing == "worker:0 joined"

    three.controller.restart_with(three.controller.changing)
    assert three.controller.missing == ("worker:1", "worker:2")
    assert three.controller.restarts_left == 1, "that was no loss"
    come_again(three, "worker:1", 5003)
    come_again(three, "worker:2", 5004)
    told = start_told(three, "worker:0")
    assert told == Start({"worker": ["10.0.0.1:6000", "10.0.0.9:5003", "10.0.0.9:5004"]}, 3)
    assert three.controller.first == "worker:0"
    assert three.controller.feeds.nodes == ["worker:0", "worker:1", "worker:2"]


def test_a_worker_lost_before_it_joins_is_no_failure_and_is_wanted_three_times(three: Cluster) -> None:
    three.controller.continue_without_missing()
    for wanted in (True, True, False):
        come_late(three, "worker:0")
        three.say(ended("worker:0", None, "SIGKILL"))
        assert three.controller.failures == []
        assert three.controller.asked(NodeWanted("worker:0")) is wanted
    assert three.controller.all_reserved, "the others go on"


def test_workers_do_not_continue_without_a_chief(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2, chief=True)
    cluster.controller.membership.restarts_left = 1
    cluster.bring_up("chief:0", "worker:0", "worker:1")
    cluster.say(ended("chief:0", None, "SIGKILL"))
    cluster.controller.restart_all("it was killed")
    for node in ("worker:0", "worker:1"):
        come_again(cluster, node, 5000)
    assert not cluster.controller.are_enough(1)


# --- scaling


def scale(cluster: Cluster, workers: int) -> tuple[str, ...]:
    """Change the plan's number of workers; return the nodes that must be started."""
    plan = dataclasses.replace(cluster.controller.plan, workers=workers)
    lacking = cluster.controller.lacking(plan)
    cluster.controller.scale(plan)
    return lacking


def test_new_workers_start_in_order_and_join_once_the_coordinator_reports_them(coordinated: Cluster) -> None:
    assert scale(coordinated, 4) == ("worker:2", "worker:3")
    assert [state.node for state in coordinated.controller.snapshot()] == [*NODES[:3], "worker:2", "worker:3", "ps:0"]
    coordinated.reserve("worker:3", port=7003)
    assert heard(coordinated, "worker:3", Start) == [], "TensorFlow numbers the workers without gaps"
    coordinated.reserve("worker:2", port=7002)
    everybody = ["10.0.0.1:1001", "10.0.0.1:1002", "10.0.0.1:7002", "10.0.0.1:7003"]
    assert start_told(coordinated, "worker:2").cluster_spec["worker"] == everybody[:3]
    assert start_told(coordinated, "worker:3").cluster_spec["worker"] == everybody

    for node in ("worker:2", "worker:3"):
        coordinated.say(Serving(node))
    assert [one.node for one in heard(coordinated, "chief:0", Moved)] == ["worker:2", "worker:3"]
    assert coordinated.controller.feeds.nodes == ["worker:0", "worker:1"]
    coordinated.say(WorkerThrough("worker:2", 3), by="chief:0")
    assert coordinated.controller.feeds.nodes == ["worker:0", "worker:1", "worker:2"]
    assert (coordinated.controller.membership.admitted, coordinated.controller.replaced["worker:2"].through) == (
        ["worker:2"],
        3,
    )
    assert (coordinated.controller.generation, coordinated.controller.rendezvous) == (1, 2)
    assert coordinated.controller.changing == ""
    for node in NODES[1:]:
        assert heard(coordinated, node, (StartAgain, Moved)) == []  # type: ignore[arg-type]


def test_a_new_worker_that_is_lost_before_it_joins_is_started_again(coordinated: Cluster) -> None:
    scale(coordinated, 3)
    coordinated.reserve("worker:2", port=7002)
    coordinated.say(Serving("worker:2"))
    coordinated.say(ended("worker:2", None, "SIGKILL"))
    assert coordinated.controller.failures == []
    assert coordinated.controller.asked(NodeWanted("worker:2")) is True
    coordinated.reserve("worker:2", port=7009)
    coordinated.say(Serving("worker:2"))
    assert [one.address for one in heard(coordinated, "chief:0", Moved)] == ["10.0.0.1:7002", "10.0.0.1:7009"]


def test_new_workers_that_wait_for_a_lost_coordinator_restart_with_all_nodes(coordinated: Cluster) -> None:
    scale(coordinated, 3)
    coordinated.reserve("worker:2", port=7002)
    coordinated.say(ended("chief:0", None, "SIGKILL"))
    assert coordinated.controller.restart_all("it was killed")
    assert [one.generation for one in heard(coordinated, "worker:2", StartAgain)] == [2]
    assert set(coordinated.controller.missing) == {*NODES, "worker:2"}
    assert coordinated.controller.feeds.nodes == ["worker:0", "worker:1", "worker:2"]


def test_a_new_synchronous_worker_joins_once_a_state_has_been_saved(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=1)
    cluster.bring_up("worker:0")
    assert scale(cluster, 2) == ("worker:1",)
    cluster.say(StateHeld("worker:0", waits=True))
    cluster.reserve("worker:1", port=7001)
    assert cluster.controller.changing == ""
    cluster.say(StateHeld("worker:0", waits=True))
    assert cluster.controller.changing == "worker:1 joined"
    cluster.controller.restart_with("worker:1 joined")
    come_again(cluster, "worker:0", 5000)
    told = Start({"worker": ["10.0.0.9:5000", "10.0.0.1:7001"]}, 2)
    assert [start_told(cluster, node) for node in ("worker:0", "worker:1")] == [told, told]


def test_a_worker_removed_from_the_plan_leaves_once_a_state_has_been_saved(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2)
    cluster.controller.membership.restarts_left = 1
    cluster.bring_up("worker:0", "worker:1")
    assert scale(cluster, 1) == ()
    assert cluster.controller.changing == ""
    cluster.say(StateHeld("worker:0", waits=True))
    assert cluster.controller.changing == "worker:1 not wanted any more"
    cluster.controller.restart_with(cluster.controller.changing)
    assert [one.grace for one in heard(cluster, "worker:1", Stop)] == [0.0]
    assert heard(cluster, "worker:1", StartAgain) == []
    assert cluster.controller.missing == ("worker:0",)
    cluster.streams["worker:1"].end()
    cluster.until(lambda: cluster.state("worker:1").status.ended)
    assert cluster.controller.asked(NodeWanted("worker:1")) is False
    come_again(cluster, "worker:0", 5000)
    assert cluster.controller.all_reserved
    assert cluster.controller.feeds.nodes == ["worker:0"]
    assert cluster.controller.failures == []

    again = cluster.client.attend()
    again.send(Reservation("worker:1", "10.0.0.1", 7000, "1", 0, 77, ()))
    assert list(again) == [], "Spark runs its task again, and it is sent away"
    again.end()

    assert scale(cluster, 2) == ("worker:1",), "it may come back"
    cluster.reserve("worker:1", port=7001)
    cluster.say(StateHeld("worker:0", waits=True))
    assert cluster.controller.changing == "worker:1 joined"


def test_a_removed_worker_that_is_wanted_again_before_it_leaves_stays(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2)
    cluster.bring_up("worker:0", "worker:1")
    scale(cluster, 1)
    assert scale(cluster, 2) == ()
    cluster.say(StateHeld("worker:0", waits=True))
    assert cluster.controller.changing == ""


def test_a_new_worker_that_is_removed_before_it_joins_is_told_to_stop(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=1)
    cluster.bring_up("worker:0")
    scale(cluster, 2)
    cluster.reserve("worker:1", port=7001)
    scale(cluster, 1)
    assert len(heard(cluster, "worker:1", Stop)) == 1
    cluster.say(StateHeld("worker:0", waits=True))
    assert cluster.controller.changing == ""


def test_a_new_worker_waits_until_a_lost_one_is_back(coordinated: Cluster) -> None:
    """The address of the lost worker is not known before that."""
    coordinated.say(ended("worker:1", None, "SIGKILL"))
    assert not coordinated.controller.restart_all("it was killed")
    assert scale(coordinated, 3) == ("worker:2",)
    coordinated.reserve("worker:2", port=7002)
    assert heard(coordinated, "worker:2", Start) == []
    come_again(coordinated, "worker:1", 5000)
    everybody = ["10.0.0.1:1001", "10.0.0.9:5000", "10.0.0.1:7002"]
    assert start_told(coordinated, "worker:2").cluster_spec["worker"] == everybody
