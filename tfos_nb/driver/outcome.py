"""How a cluster ends: what is waited for, whose failure is shown, and what every caller then gets to hear.

A :class:`ClusterOutcome` is shared by a cluster's own thread, which decides, and by the callers that wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.driver.cluster_desk import ClusterDesk
from tfos_nb.driver.launching import error_of_job
from tfos_nb.errors import SPARK_ENDED, ClusterClosed, NodeFailed, RendezvousTimeout, TfosError
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.lifecycle import Stop
from tfos_nb.spark.session import Job

__all__ = ["ClusterOutcome"]

_SETTLE = 0.5  # seconds in which a node that failed for its own reason may come after one that failed because of it
_SETTLE_LOSS = 0.1  # the same, where all start again: in which others are lost by the same cause, such as a host's end
_SETTLE_COLLATERAL = 3.0  # the same, when all that failed so far failed because of a peer


class ClusterOutcome:
    """What has been decided of one cluster, and what would decide it.

    Attributes
    ----------
    over : threading.Event
        Set when nothing of the cluster runs any more.
    error : TfosError or None
        What every caller gets to hear from then on.
    stop : Stop or None
        The user's wish to end it.
    jobs : callable
        Returns the nodes' Spark jobs.
    """

    def __init__(self, name: str, desk: ClusterDesk) -> None:
        self.name = name
        self.over = threading.Event()
        self.error: TfosError | None = None
        self.stop: Stop | None = None
        self.jobs: Callable[[], Sequence[Job[Any]]] = tuple
        self._desk = desk
        self._changed = desk.changed

    @property
    def failing(self) -> bool:
        """Whether the cluster is about to end before its nodes are done."""
        return bool(self._desk.failures) or self.stop is not None

    @property
    def at_once(self) -> bool:
        """Whether the user wants the end now."""
        return self.stop is not None and self.stop.grace <= 0

    @property
    def lost_job(self) -> Job[Any] | None:
        """A Spark job of the nodes that ended by an error."""
        return next((job for job in self.jobs() if job.done.is_set() and job.error is not None), None)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def ask_to_stop(self, stop: Stop) -> None:
        """Wish for the end; a later wish counts if it is more urgent."""
        with self._changed:
            if self.stop is not None and stop.grace < self.stop.grace:
                self._desk.send(stop)
            if self.stop is None or stop.grace < self.stop.grace:
                self.stop = stop
            self._changed.notify_all()

    def abort(self, error: TfosError) -> None:
        """Make an error of the whole cluster one of its failures."""
        self._desk.abort(error)

    def wait_for(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for something, a failure, a stop, or a node job's error; False if the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: reached() or self.failing or self.lost_job is not None, timeout)

    def raise_outcome(self) -> None:
        """Wait for the end, and raise what it was."""
        self.over.wait()
        raise self.error or ClusterClosed(f"cluster {self.name} has ended")

    def await_decision(self, rendezvous: int) -> bool:
        """Wait until it is known how a failure after a rendezvous ends; whether nodes start again."""
        with self._changed:
            self._changed.wait_for(lambda: self.over.is_set() or self._desk.rendezvous != rendezvous)
            return self._desk.rendezvous != rendezvous

    @property
    def may_go_on(self) -> bool:
        """Whether all that failed did so for the loss of nodes, and they may be gathered once more."""
        own = [failure for failure in self._desk.failures if not failure.collateral]
        if self.stop is not None or self._desk.restarts_left <= 0:
            return False
        if not self._desk.failures:
            ended = self._error_of_lost_job()
            return ended is not None and not str(ended).startswith(SPARK_ENDED)
        return all(failure.lost for failure in own)

    def rendezvous_timeout(self, timeout: float, address: DoorAddress) -> RendezvousTimeout:
        """Say which nodes never came."""
        missing, total = self._desk.missing, len(self._desk.plan.nodes)
        return RendezvousTimeout(
            f"{total - len(missing)} of {total} nodes reserved within {timeout:g} s; missing: {', '.join(missing)}. "
            f"Spark did not start their tasks, or their executors cannot reach the driver at {address.host}:"
            f"{address.port}: look at Spark's UI for the job of cluster {self.name}; set TFOS_SERVER_HOST and "
            "TFOS_SERVER_PORT if a firewall stands between",
            missing,
        )

    def first_failure(self) -> TfosError | None:
        """Choose the failure to show: the first of those that no peer caused. None if there is none."""
        failures = self._desk.failures
        if not failures:
            return self._error_of_lost_job()
        with self._changed:
            if not self._has_own_cause():
                self._changed.wait_for(self._has_own_cause, _SETTLE_COLLATERAL)
            elif failures[0].node:
                self._changed.wait_for(lambda: False, _SETTLE_LOSS if self.may_go_on else _SETTLE)
        first = next((failure for failure in failures if not failure.collateral), failures[0])
        others = len({failure.node for failure in failures if failure.node} - {first.node})
        return first.error.counting(others) if others and isinstance(first.error, NodeFailed) else first.error

    def _has_own_cause(self) -> bool:
        return any(not failure.collateral for failure in self._desk.failures)

    def _error_of_lost_job(self) -> TfosError | None:
        job = self.lost_job
        if job is None or job.error is None or self._desk.all_returned or self.stop is not None:
            return None
        return error_of_job(job.error, "Spark ended the nodes' job")
