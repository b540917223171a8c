"""Decide the outcome of a cluster, and deliver the same outcome to every waiting caller.

A :class:`ClusterOutcome` is shared by the cluster's own thread, which decides, and by the callers that wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.launching import error_of_job
from tfos_nb.errors import SPARK_ENDED, ClusterClosed, NodeFailed, RendezvousTimeout, TfosError
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.lifecycle import Stop
from tfos_nb.spark.session import Job

__all__ = ["ClusterOutcome"]

_SETTLE = 0.5  # seconds to wait after a failure: the node that caused it may report later
_SETTLE_LOSS = 0.1  # the same before a restart: one cause, such as a host's end, may take several nodes
_SETTLE_REASON = 2.0  # the same, for the cluster manager's reason
_SETTLE_COLLATERAL = 3.0  # the same, when all failures so far were caused by a peer


class ClusterOutcome:
    """Outcome of one cluster, and the facts that decide it.

    Attributes
    ----------
    over : threading.Event
        Set when nothing of the cluster runs any more.
    error : TfosError or None
        The error that every caller receives from then on.
    stop : Stop or None
        The user's request to stop it.
    jobs : callable
        Returns the nodes' Spark jobs. Set once, when they are submitted.
    why_lost : callable
        Returns why the cluster manager has ended an executor, by its name; empty if it does not say that yet, None if
        it never does. Set once.
    why_missing : callable
        Returns why executors of missing nodes do not come; empty if nobody says. Set once.
    """

    def __init__(self, name: str, controller: ClusterController) -> None:
        self.name = name
        self.over = threading.Event()
        self.error: TfosError | None = None
        self.stop: Stop | None = None
        self.jobs: Callable[[], Sequence[Job[Any]]] = tuple
        self.why_lost: Callable[[str], str | None] = _unknown
        self.why_missing: Callable[[], str] = str
        self._controller = controller
        self._changed = controller.changed

    @property
    def failing(self) -> bool:
        """Whether the cluster is about to end before its nodes are done."""
        return bool(self._controller.failures) or self.stop is not None

    @property
    def at_once(self) -> bool:
        """Whether the user wants the end now."""
        return self.stop is not None and self.stop.grace <= 0

    @property
    def lost_job(self) -> Job[Any] | None:
        """A Spark job of the nodes that ended by an error."""
        return next((job for job in self.jobs() if job.done.is_set() and job.error is not None), None)

    def wake(self) -> None:
        """Notify all waiting threads."""
        with self._changed:
            self._changed.notify_all()

    def ask_to_stop(self, stop: Stop) -> None:
        """Request a stop; a later request counts only if it is more urgent."""
        with self._changed:
            if self.stop is not None and stop.grace < self.stop.grace:
                self._controller.send(stop)
            if self.stop is None or stop.grace < self.stop.grace:
                self.stop = stop
            self._changed.notify_all()

    def decide(self, error: TfosError | None) -> None:
        """Set the error that every caller receives from now on; None if the cluster has ended well."""
        with self._changed:
            self.error = error

    def end(self) -> None:
        """Release everybody who waits for the end: nothing of the cluster runs any more."""
        with self._changed:
            self.over.set()
            self._changed.notify_all()

    def abort(self, error: TfosError) -> None:
        """Add an error of the whole cluster to its failures."""
        self._controller.abort(error)

    def wait_for(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for a condition, a failure, a stop, or a node job's error; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: reached() or self.failing or self.lost_job is not None, timeout)

    def raise_outcome(self) -> None:
        """Wait for the end, and raise the outcome as an error."""
        self.over.wait()
        raise self.error or ClusterClosed(f"cluster {self.name} has ended")

    def await_decision(self, rendezvous: int) -> bool:
        """Wait until the consequence of a failure is decided; return whether nodes start again."""
        with self._changed:
            self._changed.wait_for(lambda: self.over.is_set() or self._controller.rendezvous != rendezvous)
            return self._controller.rendezvous != rendezvous

    @property
    def may_go_on(self) -> bool:
        """Whether all failures are losses of nodes, or caused by these, and a restart is left."""
        own = [failure for failure in self._controller.failures if not failure.collateral]
        if self.stop is not None or self._controller.restarts_left <= 0:
            return False
        if not self._controller.failures:
            ended = self._error_of_lost_job()
            return ended is not None and not str(ended).startswith(SPARK_ENDED)
        return all(failure.lost for failure in own)

    def rendezvous_timeout(self, timeout: float, address: DoorAddress) -> RendezvousTimeout:
        """Return the error that says which nodes never came."""
        missing, total = self._controller.missing, len(self._controller.plan.nodes)
        came = f"{total - len(missing)} of {total} nodes reserved within {timeout:g} s; missing: {', '.join(missing)}"
        if why := self.why_missing():
            return RendezvousTimeout(f"{came}. {why}", missing)
        return RendezvousTimeout(
            f"{came}. Spark did not start their tasks, or their executors cannot reach the driver at {address.host}:"
            f"{address.port}. Find the job of cluster {self.name} in Spark's UI; if a firewall is between them, set "
            "TFOS_SERVER_HOST and TFOS_SERVER_PORT",
            missing,
        )

    def first_failure(self) -> TfosError | None:
        """Return the failure to show: the first one that no peer caused; None without a failure."""
        if not self._controller.failures:
            return self._error_of_lost_job()
        with self._changed:
            if not self._has_own_cause():
                self._changed.wait_for(self._has_own_cause, _SETTLE_COLLATERAL)
            elif self._controller.failures[0].node:
                self._changed.wait_for(lambda: False, _SETTLE_LOSS if self.may_go_on else _SETTLE)
            failures = self._controller.failures  # with those that came in the meantime
        first = next((failure for failure in failures if not failure.collateral), failures[0])
        if first.lost and isinstance(first.error, NodeFailed) and (reason := self._why_lost(first.error.executor)):
            first.error.because(reason)
        others = len({failure.node for failure in failures if failure.node} - {first.node})
        return first.error.counting(others) if others and isinstance(first.error, NodeFailed) else first.error

    def _why_lost(self, executor: str) -> str | None:
        """Ask why an executor has ended. Kubernetes may need a moment to say it, for which a recovery does not wait."""
        deadline, never = time.monotonic() + (0.0 if self.may_go_on else _SETTLE_REASON), threading.Event()
        while (reason := self.why_lost(executor)) == "" and time.monotonic() < deadline:
            never.wait(_SETTLE)
        return reason

    @property
    def is_of_peers(self) -> bool:
        """Whether all failures were caused by a peer, so that none says why."""
        return bool(self._controller.failures) and not self._has_own_cause()

    def _has_own_cause(self) -> bool:
        return any(not failure.collateral for failure in self._controller.failures)

    def _error_of_lost_job(self) -> TfosError | None:
        job = self.lost_job
        if job is None or job.error is None or self._controller.all_returned or self.stop is not None:
            return None
        return error_of_job(job.error, "Spark ended the nodes' job")


def _unknown(executor: str) -> None:
    """Stand for a cluster manager that does not say it."""
