"""Who comes again after a loss: all nodes, or where a coordinator gives out the steps, the lost ones alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.test_roster import Cluster, clock, ended, make
from tfos_nb.runtime.ledger import WorkerThrough
from tfos_nb.runtime.lifecycle import Following, Moved, Regather, Reservation, Serving, Start

__all__ = ["clock", "make"]

NODES = ("chief:0", "worker:0", "worker:1", "ps:0")


@pytest.fixture
def coordinated(make: Callable[..., Cluster]) -> Cluster:
    """A chief that coordinates two workers and a parameter server, which serve."""
    cluster = make(workers=2, ps=1, chief=True)
    cluster.roster.restarts_left = 2
    cluster.bring_up(*NODES)
    for node in NODES[1:]:
        cluster.say(Serving(node))
    cluster.say(Following("chief:0"))
    return cluster


def heard(cluster: Cluster, node: str, kind: type) -> list[Any]:
    """Return what a node has been told of one kind, when all that was on its way is there."""
    cluster.roster.send("the end of it", [node])
    found = []
    for message in cluster.streams[node]:
        if message == "the end of it":
            return found
        found += [message] if isinstance(message, kind) else []
    raise AssertionError(f"{node}'s stream has ended")


def come_again(cluster: Cluster, node: str, port: int) -> None:
    cluster.streams[node].send(Reservation(node, "10.0.0.9", port, "7", 0, 77, (), cluster.roster.generation))
    cluster.until(lambda: node not in cluster.roster.missing)


def test_a_lost_worker_alone_is_asked_for_anew_and_its_coordinator_is_told_where_it_is(coordinated: Cluster) -> None:
    coordinated.say(WorkerThrough("worker:1", 3), by="chief:0")
    coordinated.say(ended("worker:1", None, "SIGKILL"))
    assert not coordinated.roster.gather_again("it was killed")
    assert coordinated.roster.missing == ("worker:1",)
    assert coordinated.roster.generation == 1
    assert coordinated.roster.replaced["worker:1"].through == 3
    come_again(coordinated, "worker:1", 5000)
    coordinated.say(Serving("worker:1"))

    told = heard(coordinated, "worker:1", (Regather, Start))  # type: ignore[arg-type]
    assert [type(message) for message in told] == [Start, Regather, Start]
    assert told[-1].cluster_spec["worker"] == ["10.0.0.1:1001", "10.0.0.9:5000"]
    assert (told[-1].generation, told[-1].passes) == (1, 3)
    assert heard(coordinated, "chief:0", Moved) == [Moved("worker:1", "10.0.0.9:5000")]
    for node in ("worker:0", "ps:0"):
        assert heard(coordinated, node, (Regather, Moved)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("node", ["ps:0", "chief:0"])
def test_a_lost_parameter_server_or_chief_means_that_all_come_again(coordinated: Cluster, node: str) -> None:
    coordinated.say(ended(node, None, "SIGKILL"))
    assert coordinated.roster.gather_again("it was killed")
    assert coordinated.roster.generation == 2
    assert set(coordinated.roster.missing) == set(NODES)


def test_all_come_again_where_no_coordinator_follows(make: Callable[..., Cluster]) -> None:
    cluster = make(workers=2, ps=1, chief=True)
    cluster.bring_up(*NODES)
    cluster.say(Serving("worker:1"))
    cluster.say(ended("worker:1", None, "SIGKILL"))
    assert cluster.roster.gather_again("it was killed")


def test_a_worker_that_is_silent_means_that_all_come_again(coordinated: Cluster) -> None:
    """Its process may live, and TensorFlow waits for its answer for ever."""
    coordinated.clock.now += 100.0
    for node in ("chief:0", "worker:0", "ps:0"):
        coordinated.say(Serving(node))
    coordinated.roster.ticked()
    assert [failure.node for failure in coordinated.roster.failures] == ["worker:1"]
    assert coordinated.roster.gather_again("no heartbeat")
    assert coordinated.roster.generation == 2
