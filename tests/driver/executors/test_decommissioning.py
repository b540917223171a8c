"""Nodes leave executors that are about to end: they save a state first, so that no step is done twice."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from tests.waiting import until
from tfos_nb.driver.executors.decommissioning import DecommissionWatch
from tfos_nb.driver.membership.commands import Begin, EndStream, Tell, WriteLog
from tfos_nb.driver.membership.events import (
    ContinueWithout,
    ExecutorsLeave,
    MessageReceived,
    RestartWith,
    SlotAsked,
    StreamEnded,
    Submitted,
    SupervisorConnected,
)
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.runtime.control.lifecycle import MainStarted, NodeUp, Reservation, StartAgain, StateHeld, StateWanted
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.node.spark_task import HoldsSlot, SlotUse


class Cluster:
    """Workers that train, each on the executor with its number, or on the given executors."""

    def __init__(
        self, workers: int = 3, executors: str = "0123", restarts: int = 1, durable: bool = False, **plan: Any
    ) -> None:
        self.membership = Membership(ClusterPlan(workers, **plan), restarts, durable)
        self.streams = 0
        self.told: list[tuple[str, Any]] = []
        self.ended: list[int] = []
        self.begun: list[Begin] = []
        self.logged: list[str] = []
        for name, executor in zip(list(self.membership.members), executors, strict=False):
            self.apply(Submitted((name,), hold=True))
            self.come(name, executor)
        for name in self.membership.members:
            self.is_up(name)

    def apply(self, event: Any) -> Any:
        answer, commands = self.membership.apply(event)
        for one in commands:
            if isinstance(one, Tell):
                self.told += [(name, one.message) for name in one.nodes]
            elif isinstance(one, EndStream):
                self.ended.append(one.stream)
            elif isinstance(one, Begin):
                self.begun.append(one)
            elif isinstance(one, WriteLog):
                self.logged.append(one.node)
        return answer

    def come(self, name: str, executor: str) -> None:
        self.streams += 1
        self.apply(SupervisorConnected(self.streams, self.reservation(name, executor)))

    def come_again(self, name: str, executor: str) -> None:
        self.apply(MessageReceived(name, self.reservation(name, executor, self.membership.generation)))

    def reservation(self, name: str, executor: str, generation: int = 0) -> Reservation:
        return Reservation(name, "10.0.0.1", 5000 + self.streams, executor, 0, 70 + self.streams, (), generation)

    def is_up(self, name: str) -> None:
        self.apply(MessageReceived(name, NodeUp(name, 7, "2.21", "3.15", None)))
        self.apply(MessageReceived(name, MainStarted(name)))

    def is_asked(self) -> set[str]:
        """Return the nodes that were told since the last call that a state is wanted."""
        asked = {name for name, message in self.told if message == StateWanted(True)}
        self.told.clear()
        return asked

    def save(self, name: str = "worker:0") -> str:
        self.apply(MessageReceived(name, StateHeld(name, waits=True)))
        return self.membership.changing


def test_all_nodes_are_asked_for_a_state_and_the_node_leaves_after_it() -> None:
    cluster = Cluster()
    cluster.apply(ExecutorsLeave(frozenset("1")))
    assert cluster.is_asked() == {"worker:0", "worker:1", "worker:2"}
    assert cluster.logged == ["worker:1"]
    assert cluster.membership.changing == ""
    cluster.apply(MessageReceived("worker:0", StateHeld("worker:0")))
    assert cluster.membership.changing == "", "the nodes have not waited after that one"
    assert cluster.save() == "the executor of worker:1 is about to end"

    cluster.apply(RestartWith(cluster.membership.changing))
    assert {name for name, message in cluster.told if isinstance(message, StartAgain)} == {"worker:0", "worker:2"}
    assert cluster.ended == [2]
    assert cluster.membership.restarts_left == 1, "that was no loss"
    assert cluster.membership.without_supervisor == ("worker:1",)
    assert cluster.membership.failures == []


def test_the_task_of_a_node_that_has_left_ends_and_a_task_elsewhere_starts_it() -> None:
    cluster = Cluster()
    cluster.apply(ExecutorsLeave(frozenset("1")))
    cluster.save()
    cluster.apply(RestartWith("its executor ends"))
    cluster.told.clear()
    assert cluster.apply(SlotAsked(HoldsSlot("worker:1", 72, executor="1"), False)) is SlotUse.END, "it may be stopped"
    assert cluster.membership.is_wanted("worker:1", "1") is False
    assert cluster.membership.is_wanted("worker:1", "3") is True
    cluster.apply(Submitted(("worker:1",), hold=True))
    cluster.come("worker:1", "3")
    assert cluster.apply(SlotAsked(HoldsSlot("worker:1", executor="1"), False)) is SlotUse.LEAVE, "it is elsewhere"
    assert cluster.apply(SlotAsked(HoldsSlot("worker:1", 74, executor="3"), False)) is SlotUse.HOLD
    for name in ("worker:0", "worker:2"):
        cluster.come_again(name, name[-1])
    assert cluster.membership.present.all_reserved
    assert not cluster.is_asked(), "none is on an executor that ends"


def test_a_node_that_keeps_the_state_stays_until_another_node_has_it() -> None:
    cluster = Cluster(2, "00")
    cluster.apply(ExecutorsLeave(frozenset("0")))
    assert cluster.save() == "the executor of worker:1 is about to end"
    cluster.apply(RestartWith(cluster.membership.changing))
    assert cluster.ended == [2]
    cluster.is_asked()
    cluster.come("worker:1", "1")
    cluster.come_again("worker:0", "0")
    assert cluster.membership.present.all_reserved
    for name in ("worker:0", "worker:1"):
        cluster.is_up(name)
    assert cluster.is_asked() == {"worker:0", "worker:1"}
    assert cluster.save() == "the executor of worker:0 is about to end"


def test_a_lone_worker_stays_with_its_state() -> None:
    cluster = Cluster(1, "0")
    cluster.apply(ExecutorsLeave(frozenset("0")))
    assert not cluster.is_asked()
    assert cluster.save() == ""


@pytest.mark.parametrize("workers", [1, 2])
def test_all_workers_leave_at_once_if_their_state_is_on_a_disk(workers: int) -> None:
    cluster = Cluster(workers, "00", durable=True)
    cluster.apply(ExecutorsLeave(frozenset("0")))
    nodes = list(cluster.membership.members)
    assert cluster.is_asked() == set(nodes)
    assert cluster.save() == "; ".join(f"the executor of {name} is about to end" for name in nodes)
    cluster.apply(RestartWith(cluster.membership.changing))
    assert cluster.membership.without_supervisor == tuple(nodes)


@pytest.mark.parametrize("plan", [{"restarts": 0}, {"ps": 1, "chief": True, "executors": "23011"}], ids=str)
def test_no_state_is_asked_for_if_nodes_cannot_leave(plan: dict[str, Any]) -> None:
    cluster = Cluster(**plan)
    cluster.apply(ExecutorsLeave(frozenset("1")))
    assert not cluster.is_asked()
    assert cluster.logged, "its log tells of it"
    assert cluster.save() == ""


def test_the_other_nodes_continue_if_they_are_enough_and_the_node_joins_later() -> None:
    cluster = Cluster()
    cluster.apply(ExecutorsLeave(frozenset("1")))
    cluster.save()
    cluster.apply(RestartWith(cluster.membership.changing))
    cluster.apply(Submitted(("worker:1",), hold=False))
    for name in ("worker:0", "worker:2"):
        cluster.come_again(name, name[-1])
    assert cluster.apply(ContinueWithout()) == ("worker:1",)
    assert cluster.membership.to_resubmit == [], "Spark has been asked for it"
    for name in ("worker:0", "worker:2"):
        cluster.is_up(name)
    cluster.is_asked()
    cluster.come("worker:1", "3")
    assert cluster.is_asked() == {"worker:0", "worker:2"}
    assert cluster.save() == "worker:1 joined"


def test_no_state_is_wanted_once_no_node_joins_or_leaves_any_more() -> None:
    """The node that was to join is lost while the others save."""
    cluster = Cluster()
    cluster.apply(ExecutorsLeave(frozenset("1")))
    cluster.save()
    cluster.apply(RestartWith(cluster.membership.changing))
    for name in ("worker:0", "worker:2"):
        cluster.come_again(name, name[-1])
    cluster.apply(ContinueWithout())
    cluster.come("worker:1", "3")
    assert cluster.save() == "worker:1 joined"
    cluster.told.clear()
    cluster.apply(StreamEnded(cluster.streams))
    assert cluster.told == [("worker:0", StateWanted(False)), ("worker:2", StateWanted(False))]
    cluster.come("worker:1", "3")
    assert cluster.membership.changing == "", "the nodes have done steps since"


class _Spark:
    """A fake Spark that decommissions the given executors."""

    announces_ends = True

    def __init__(self) -> None:
        self.decommissioned: set[str] = set()
        self.asked: list[frozenset[str]] = []

    def ending(self, executors: Iterable[str]) -> frozenset[str]:
        self.asked.append(frozenset(executors))
        return frozenset(self.decommissioned & set(executors))

    def in_time(self, ask: Any) -> Any:
        return ask()

    def why_lost(self, executor: str) -> str:
        return f"Kubernetes says of pod p-exec-{executor}: deleted"


def test_spark_is_asked_about_the_nodes_executors_and_each_one_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spark, told, over = _Spark(), [], threading.Event()

    class Executors:
        def executors(self) -> frozenset[str]:
            return frozenset("12")

        def executors_leave(self, executors: frozenset[str]) -> None:
            told.append(executors)

    monkeypatch.setattr("tfos_nb.driver.executors.decommissioning.context_of", lambda session: spark)
    monkeypatch.setattr("tfos_nb.driver.executors.decommissioning._EVERY", 0.01)
    spark.decommissioned = {"0", "2"}
    watch = DecommissionWatch(None, Executors(), over)  # type: ignore[arg-type]
    watch.start()
    assert until(lambda: spark.asked[-1:] == [frozenset("1")])
    over.set()
    assert told == [frozenset("2")]
    assert caplog.messages == ["Spark decommissions executor 2: Kubernetes says of pod p-exec-2: deleted"]
    monkeypatch.setattr(_Spark, "why_lost", lambda self, executor: "")
    assert watch.why_lost("2") == "Kubernetes says of pod p-exec-2: deleted", "the pod may be gone by now"
