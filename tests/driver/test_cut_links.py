"""Nodes that do not reach each other: the pair is found, one worker is left out, and joins when the link is back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest

from tests.driver.test_cluster_controller import Cluster, clock, make
from tfos_nb.driver.hangs.links import LinksFound
from tfos_nb.driver.membership.cut_links import CutLinks
from tfos_nb.driver.membership.members import Member
from tfos_nb.runtime.control.lifecycle import Reservation, Start, StartAgain, StateWanted
from tfos_nb.runtime.control.plan import Node
from tfos_nb.runtime.node.links import AskLinks, LinksSeen

__all__ = ["clock", "make"]

NODES = ("worker:0", "worker:1", "worker:2")


class Supervisors:
    """Three workers on hosts of their own, whose supervisors say which nodes they do not reach."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.unreached: dict[str, tuple[str, ...]] = {}
        self.dumb: set[str] = set()
        self.alone: set[str] = set()
        self.heard: dict[str, list[object]] = {node: [] for node in NODES}
        for number, node in enumerate(NODES):
            self.come(node, f"10.0.0.{number}")
        self.controller = cluster.controller
        self.controller.membership.restarts_left = 2

    def come(self, node: str, host: str, generation: int = 0) -> None:
        stream = self.cluster.streams[node] = self.cluster.client.attend()
        self.reserve(node, host, generation)
        threading.Thread(target=self._attend, args=(node, stream), daemon=True).start()

    def reserve(self, node: str, host: str, generation: int) -> None:
        reservation = Reservation(node, host, 1000 + generation, host, 0, 77, (), generation)
        self.cluster.streams[node].send(reservation)
        self.cluster.until(lambda: node not in self.cluster.controller.missing)

    def _attend(self, node: str, stream: object) -> None:
        for message in stream:  # type: ignore[attr-defined]
            self.heard[node].append(message)
            if isinstance(message, AskLinks) and node not in self.dumb:
                seen = LinksSeen(node, message.number, self.unreached.get(node, ()), node not in self.alone)
                stream.send(seen)  # type: ignore[attr-defined]

    def kinds(self, node: str) -> list[type]:
        return [type(message) for message in self.heard[node]]


@pytest.fixture
def workers(make: Callable[..., Cluster]) -> Supervisors:
    return Supervisors(make(3))


def cut(workers: Supervisors) -> None:
    workers.unreached = {"worker:1": ("worker:2",), "worker:2": ("worker:1",)}
    workers.controller.report_cut(workers.controller.look_at_links().used)


def test_a_pair_is_found_if_one_of_both_does_not_reach_the_other(workers: Supervisors) -> None:
    assert workers.controller.look_at_links() == LinksFound()
    workers.unreached = {"worker:2": ("worker:1",)}
    pair = frozenset([("worker:1", "worker:2")])
    assert workers.controller.look_at_links() == LinksFound(pair, pair)


def test_nodes_whose_tensorflow_does_not_listen_need_no_link_to_each_other(workers: Supervisors) -> None:
    workers.unreached, workers.alone = {"worker:2": ("worker:1",)}, {"worker:1", "worker:2"}
    assert workers.controller.look_at_links() == LinksFound(frozenset([("worker:1", "worker:2")]))


def test_a_node_that_the_driver_does_not_reach_either_is_no_cut_link(
    workers: Supervisors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfos_nb.driver.cluster_controller._PROBED_WITHIN", 0.3)
    workers.unreached, workers.dumb = {"worker:1": ("worker:2",)}, {"worker:2"}
    assert workers.controller.look_at_links() == LinksFound()


def test_the_failure_names_both_nodes_and_says_that_the_driver_reaches_them(workers: Supervisors) -> None:
    cut(workers)
    (failure,) = workers.controller.failures
    assert failure.lost
    assert str(failure.error) == (
        "worker:2 on 10.0.0.2 (executor 10.0.0.2): worker:1 on 10.0.0.1 and worker:2 on 10.0.0.2 do not reach each "
        "other, though the driver reaches both: their packets are lost on the way. Check the network and the firewalls "
        "between these hosts"
    )


def test_the_others_start_again_without_a_worker_that_joins_when_its_link_is_back(workers: Supervisors) -> None:
    cut(workers)
    controller, cluster = workers.controller, workers.cluster
    without = controller.to_leave_out(2)
    assert without == ("worker:2",)
    assert controller.to_leave_out(3) == ()
    assert controller.restart_all("cut", without)
    assert set(controller.missing) == set(NODES)
    for number, node in enumerate(NODES[:2]):
        workers.reserve(node, f"10.0.0.{number}", 2)
    cluster.until(lambda: workers.kinds("worker:1")[-1] is Start)
    start = workers.heard["worker:1"][-1]
    assert isinstance(start, Start)
    assert start.workers == (0, 1)
    assert StartAgain not in workers.kinds("worker:2"), "its supervisor is dropped"

    workers.come("worker:2", "10.0.0.2")  # its task has started another supervisor
    assert not controller.membership.awaits_state, "it would be cut off again"
    controller.restore_links()
    assert not controller.membership.awaits_state
    workers.unreached = {}
    controller.restore_links()
    assert controller.membership.awaits_state
    cluster.until(lambda: workers.kinds("worker:0")[-1] is StateWanted)


def test_a_worker_that_waits_for_its_link_keeps_its_supervisor_when_others_restart(workers: Supervisors) -> None:
    cut(workers)
    controller = workers.controller
    controller.restart_all("cut", ("worker:2",))
    for number, node in enumerate(NODES[:2]):
        workers.reserve(node, f"10.0.0.{number}", 2)
    workers.come("worker:2", "10.0.0.2")
    stream = controller.membership.members["worker:2"].stream
    controller.restart_all("another loss")
    assert controller.membership.members["worker:2"].stream == stream
    assert controller.membership.members["worker:2"].absent


def member(name: str, host: str) -> Member:
    return Member(Node.parse(name), reservation=Reservation(name, host, 1, "0", 0, 1))


def test_tasks_on_hosts_that_do_not_reach_a_node_send_no_rows_until_the_link_is_back() -> None:
    members: Mapping[str, Member] = {"worker:0": member("worker:0", "a"), "worker:1": member("worker:1", "b")}
    links = CutLinks()
    assert links.reaches_all("b", ["a"])
    links.cut([("worker:0", "worker:1")], members)
    links.restart(["worker:1"])
    links.restart(())  # after another loss
    assert not links.reaches_all("b", ["c", "a"])
    assert links.reaches_all("c", ["a"])
    links.restore(members["worker:1"])
    assert links.reaches_all("b", ["a"])


def test_links_that_were_waited_for_are_well_after_the_restart() -> None:
    members = {"worker:0": member("worker:0", "a"), "worker:1": member("worker:1", "b")}
    links = CutLinks()
    links.cut([("worker:0", "worker:1")], members)
    links.restart(())
    assert links.reaches_all("b", ["a"])
    assert not links.pairs
