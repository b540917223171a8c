"""Kubernetes' reasons while nodes wait for executors: kept for the error, and the end of a wait that is in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tfos_nb.driver.executors import missing
from tfos_nb.driver.executors.missing import MissingExecutors
from tfos_nb.errors import RendezvousTimeout
from tfos_nb.spark.contexts.pods import Missing

PATIENCE = 20.0
WAITS = Missing("Kubernetes says of pod p: Unschedulable: no host", coming=True, kinds=frozenset({"Unschedulable"}))
WRONG = Missing("Kubernetes says of pod p: ErrImagePull: no image", coming=False, kinds=frozenset({"ErrImagePull"}))


class Cluster:
    """A fake context, controller and outcome: ``said`` is Kubernetes' answer."""

    has_pods = True

    def __init__(self, said: Missing, rendezvous: int = 1) -> None:
        self.said, self.rendezvous = said, rendezvous
        self.missing: tuple[str, ...] = ("worker:1",)
        self.without_slot, self.grows = 1, False
        self.over = threading.Event()
        self.asked = threading.Semaphore(0)
        self.aborted: list[Exception] = []

    @contextmanager
    def executors_to_come(self) -> Iterator[Callable[[], Missing]]:
        def ask() -> Missing:
            self.asked.release()
            return self.said

        yield ask

    def abort(self, error: Exception) -> None:
        self.aborted.append(error)
        self.over.set()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(missing, "context_of", lambda cluster: cluster)


def watched(cluster: Cluster, questions: int) -> MissingExecutors:
    """Start the watch, and wait until it has asked so often."""
    one: Any = cluster
    watch = MissingExecutors(one, one, one, lambda: cluster.without_slot)
    watch.start()
    for _ in range(questions):
        assert cluster.asked.acquire(timeout=PATIENCE)
    return watch


def test_the_first_rendezvous_ends_when_somebody_has_to_mend_something() -> None:
    cluster = Cluster(WRONG)
    watched(cluster, 3)
    assert cluster.over.wait(PATIENCE)
    (error,) = cluster.aborted
    assert isinstance(error, RendezvousTimeout)
    assert str(error) == "worker:1 cannot start. Kubernetes says of pod p: ErrImagePull: no image"
    assert error.missing == ("worker:1",)


@pytest.mark.parametrize(
    ("said", "rendezvous", "without_slot"),
    [(WAITS, 1, 1), (WRONG, 2, 1), (WRONG, 1, 0)],
    ids=["a host may come", "others may go on", "it is another cluster's"],
)
def test_what_is_said_is_kept_for_the_error_while_nodes_are_missing(
    said: Missing, rendezvous: int, without_slot: int
) -> None:
    cluster = Cluster(said, rendezvous)
    cluster.without_slot = without_slot
    watch = watched(cluster, 8)
    assert (watch.why(), cluster.aborted) == (said.text, [])
    cluster.missing = ()
    assert watch.why() == ""
    cluster.over.set()


def test_nobody_is_asked_where_executors_are_no_pods() -> None:
    cluster = Cluster(WRONG)
    cluster.has_pods, cluster.without_slot = False, 0
    before = threading.active_count()
    watch: Any = watched(cluster, 0)
    assert (threading.active_count(), watch.why()) == (before, "")


@pytest.mark.parametrize(
    ("waiting", "grows", "told"),
    [
        (
            1,
            True,
            "Spark has not started its task: dynamic allocation has asked for an executor, and none came. See in",
        ),
        (2, True, "Spark has not started 2 of their tasks: dynamic allocation has asked for an executor"),
        (2, False, "Spark has not started 2 of their tasks: no slot is free. See in Spark's UI"),
    ],
)
def test_tasks_that_wait_for_a_slot_are_named(waiting: int, grows: bool, told: str) -> None:
    cluster = Cluster(WRONG)
    cluster.has_pods, cluster.without_slot, cluster.grows = False, waiting, grows
    assert watched(cluster, 0).why().startswith(told)


def test_the_error_of_a_rendezvous_has_the_reason() -> None:
    from tfos_nb.driver.outcome import ClusterOutcome

    plan = SimpleNamespace(nodes=("worker:0", "worker:1"))
    controller: Any = SimpleNamespace(missing=("worker:1",), plan=plan, changed=threading.Condition())
    outcome, nowhere = ClusterOutcome("mnist", controller), Any
    outcome.why_missing = lambda: WAITS.text
    error = outcome.rendezvous_timeout(120.0, nowhere)
    assert str(error) == f"1 of 2 nodes reserved within 120 s; missing: worker:1. {WAITS.text}"
