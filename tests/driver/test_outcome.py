"""Which failure is shown when several nodes fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.driver.test_cluster_controller import Cluster, clock, ended, make
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.lifecycle import MainRaised

__all__ = ["clock", "make"]

COLLATERAL = MainRaised("chief:0", "UnavailableError: failed to connect to all addresses", "…", collateral=True)


@pytest.fixture
def up(make: Callable[..., Cluster]) -> Cluster:
    cluster = make(workers=1, ps=1, chief=True)
    cluster.bring_up("chief:0", "worker:0", "ps:0")
    return cluster


def shown(cluster: Cluster, later: Callable[[], object]) -> TfosError | None:
    """Return the failure that is shown if ``later`` runs once it is asked for."""
    outcome, found = ClusterOutcome("c", cluster.controller), list[TfosError | None]()
    asks = threading.Event()

    def ask() -> None:
        with cluster.controller.changed:  # so that it waits before anything else happens
            asks.set()
            found.append(outcome.first_failure())

    asking = threading.Thread(target=ask)
    asking.start()
    asks.wait(10)
    with cluster.controller.changed:  # free only while the other thread waits
        later()
        cluster.controller.changed.notify_all()
    asking.join(20)
    return found[0]


def test_a_loss_that_is_reported_after_its_consequences_is_shown(up: Cluster) -> None:
    up.say(COLLATERAL)
    error = shown(up, lambda: up.say(ended("ps:0", None, "SIGKILL")))
    assert str(error).startswith("ps:0 ")
    assert "killed by SIGKILL" in str(error)


def test_nodes_that_fail_shortly_after_the_first_one_are_counted(up: Cluster) -> None:
    up.say(ended("ps:0", None, "SIGKILL"))
    error = shown(up, lambda: up.say(MainRaised("worker:0", "ValueError: no", "…")))
    assert str(error).startswith("ps:0 ")
    assert "(1 more failed after it)" in str(error)


def test_a_failure_that_only_a_peer_can_have_caused_is_shown_if_no_other_comes(up: Cluster) -> None:
    up.say(COLLATERAL)
    assert "failed to connect" in str(shown(up, lambda: None))


def reasoned(cluster: Cluster, *answers: str | None) -> tuple[str, list[str]]:
    """Return the shown failure if the cluster manager gives these answers in turn, and who was asked for."""
    outcome, asked = ClusterOutcome("c", cluster.controller), list[str]()
    left = iter(answers)

    def why(executor: str) -> str | None:
        asked.append(executor)
        return next(left, answers[-1])

    outcome.why_lost = why
    return str(outcome.first_failure()), asked


def test_a_lost_node_is_shown_with_the_cluster_managers_reason_once_it_says_it(up: Cluster) -> None:
    up.say(ended("ps:0", None, "SIGKILL"))
    error, asked = reasoned(up, "", "Kubernetes says of pod p: Evicted")
    assert ". Kubernetes says of pod p: Evicted" in error
    assert len(asked) == 2
    again, _ = reasoned(up, "Kubernetes says of pod p: Evicted")
    assert again.count("Evicted") == 1


def test_a_cluster_manager_that_never_says_why_is_asked_once(up: Cluster) -> None:
    up.say(ended("ps:0", None, "SIGKILL"))
    _, asked = reasoned(up, None)
    assert len(asked) == 1


def test_a_failure_of_the_program_is_not_the_cluster_managers(up: Cluster) -> None:
    up.say(MainRaised("worker:0", "ValueError: no", "…"))
    _, asked = reasoned(up, "Evicted")
    assert asked == []
