"""Thread that lives as long as a cluster, and alone decides its outcome.

It waits until the nodes reserve, return or fail. Then it dismisses them, frees their slots and closes the door. The
user's calls wait for its decision, all on the controller's one condition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.ended_doors import ended_doors
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import ClusterClosed, TfosError
from tfos_nb.runtime.control.door import Door, DoorAddress
from tfos_nb.runtime.control.lifecycle import EndNode, Stop
from tfos_nb.runtime.control.placement import COMPUTED_LATE
from tfos_nb.spark.action_errors import action_errors
from tfos_nb.state.cluster_state import WITHOUT, ClusterStatus

__all__ = ["CLUSTER_TRANSITIONS", "ClusterLifecycle", "shown_status"]

logger = logging.getLogger(__name__)

CLUSTER_TRANSITIONS: Mapping[ClusterStatus, Mapping[ClusterStatus, str]] = MappingProxyType(
    {
        ClusterStatus.PLANNED: {ClusterStatus.STARTING: "Spark is about to be asked for the nodes"},
        ClusterStatus.STARTING: {
            ClusterStatus.RUNNING: "main was called on every node",
            ClusterStatus.RECOVERING: "a node was lost, and restarts are left",
            ClusterStatus.STOPPING: "the nodes did not come, one failed, or the user stops it",
        },
        ClusterStatus.RUNNING: {
            ClusterStatus.RECOVERING: "a node was lost, and restarts are left; or nodes join or leave",
            ClusterStatus.STOPPING: "every main has returned, one node failed, or the user stops it",
        },
        ClusterStatus.RECOVERING: {
            ClusterStatus.RUNNING: "main was called on every node",
            ClusterStatus.STOPPING: "the nodes did not come, one failed, or the user stops it",
        },
        ClusterStatus.STOPPING: {
            ClusterStatus.DONE: "nothing runs any more, and every main had returned",
            ClusterStatus.FAILED: "nothing runs any more, and a node had failed",
            ClusterStatus.STOPPED: "nothing runs any more, and the user had stopped it",
        },
        ClusterStatus.DONE: {},
        ClusterStatus.FAILED: {},
        ClusterStatus.STOPPED: {},
    }
)
"""The allowed changes of a cluster's status, with the cause of each."""
_LEAVING = 5.0  # seconds beyond the grace in which nodes must be gone
_PATIENCE = 3.0  # seconds in which a supervisor must have started another process
_SHORTEST_WAIT, _LONGEST_WAIT = 1.0, 3.0  # seconds in which Spark may start a lost node's replacement
_LOOK_AT_LINKS_EVERY = 1.0  # seconds
_AFTER_SAVING = 3.0  # seconds in which main must return when its model is written


class Jobs(Protocol):
    """Interface to a cluster's Spark jobs; :class:`tfos_nb.spark.session.SparkJobs` implements it."""

    def cancel_all(self) -> bool:
        """Cancel the running jobs; return whether all of them have ended."""

    def cancel_stage(self, stage: int, reason: str) -> None:
        """Cancel a stage of a job of the user's, which fails with this reason. Does not wait."""

    def wait_for_slots(self) -> None:
        """Wait until no task holds a slot, at most as long as Spark takes to end tasks."""


def shown_status(decided: ClusterStatus, *, about_to_recover: bool, all_up: bool) -> ClusterStatus:
    """Return the status that a user sees.

    It follows from the last decision, from whether a recovery is about to begin, and from the state of the nodes.

    Examples
    --------
    >>> shown_status(ClusterStatus.STARTING, about_to_recover=False, all_up=True)
    <ClusterStatus.RUNNING: 'RUNNING'>
    """
    if decided not in (ClusterStatus.STARTING, ClusterStatus.RECOVERING):
        return decided
    if about_to_recover:  # the recovery first waits a moment, in case other nodes fail for the same cause
        return ClusterStatus.RECOVERING
    return ClusterStatus.RUNNING if all_up else decided


class ClusterLifecycle:
    """Life of a cluster, from the opened door to the closed one.

    Parameters
    ----------
    name : str
        The cluster's.
    controller, outcome, jobs, settings
        What it watches, where it records the outcome, which jobs it cancels, and its timeouts.

    Attributes
    ----------
    status : ClusterStatus
        The status that was decided last.
    cause : str
        Why the nodes were started again the last time; empty if they were not.
    """

    def __init__(
        self, name: str, controller: ClusterController, outcome: ClusterOutcome, jobs: Jobs, settings: Settings
    ) -> None:
        self.status = ClusterStatus.PLANNED
        self.cause = ""
        self._name = name
        self._controller = controller
        self._changed = controller.changed
        self._outcome = outcome
        self._jobs = jobs
        self._settings = settings
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._starts_within = _LONGEST_WAIT
        self._stopped = False
        self._at_end: list[Callable[[], object]] = []
        self._at_outcome: list[Callable[[], object]] = []
        self._at_rendezvous: list[Callable[[], object]] = []
        self._at_resubmission: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._live, name=f"tfos_nb cluster {name}", daemon=True)

    def _become(self, status: ClusterStatus) -> None:
        """Change the decided status. RUNNING follows from the nodes' states, so it is never decided."""
        shown = self.status, ClusterStatus.RUNNING
        assert status is self.status or any(status in CLUSTER_TRANSITIONS[one] for one in shown), (self.status, status)
        self.status = status

    def at_end(self, action: Callable[[], object]) -> None:
        """Register an action to run when the door is closed."""
        self._at_end.append(action)

    def at_outcome(self, action: Callable[[], object]) -> None:
        """Register an action to run when the outcome is decided, before any caller that waits for it goes on."""
        self._at_outcome.append(action)

    def at_rendezvous(self, action: Callable[[], object]) -> None:
        """Register an action to run whenever the nodes have been asked to start again."""
        self._at_rendezvous.append(action)

    def at_resubmission(self, action: Callable[[], object]) -> None:
        """Register an action to run whenever an absent node has neither a task nor a supervisor to start it."""
        self._at_resubmission.append(action)

    def abandon(self, door: Door) -> None:
        """Clean up after the nodes could not be submitted to Spark."""
        try:
            self._jobs.cancel_all()
        finally:
            for action in self._at_end:
                action()
            door.close()

    def begin(self) -> None:
        """Start the cluster's clock."""
        self._started_at = time.monotonic()
        self._become(ClusterStatus.STARTING)

    def run(self, door: Door, address: DoorAddress) -> None:
        """Watch the nodes, which have been submitted to Spark, until the end."""
        self._door, self._address = door, address
        self._thread.start()

    @property
    def elapsed(self) -> float:
        """Seconds since it began, up to its end."""
        until = self._ended_at or time.monotonic()
        return until - self._started_at if self._started_at is not None else 0.0

    def join(self) -> None:
        """Wait for the end, from any other thread."""
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._outcome.over.wait()
            self._thread.join()

    def _live(self) -> None:
        try:
            error = self._until_done()
        except Exception as unexpected:
            logger.exception("cluster %s", self._name)
            error = TfosError(f"internal error in tfos_nb: {unexpected!r}; report it with cluster.events()")
        try:
            self._dismiss(error)
        finally:
            self._finish(error)

    def _until_done(self) -> TfosError | None:
        """Wait until the nodes are done or have failed finally; restart them as often as allowed."""
        while True:
            error = self._until_failure()
            if error is None and self._bring_back():
                continue
            if error is not None and self._outcome.is_of_peers:
                self._controller.blame_links()
                error = self._outcome.first_failure()
            if error is not None and not self._await_links(error):
                return error
            with self._changed:
                unchanged = not self._controller.has_late_pending
                if error is None and (unchanged or self._outcome.failing or self._controller.all_returned):
                    return None
                if error is not None and not self._outcome.may_go_on:
                    return error
                what = self._go_on(error)
            logger.warning("cluster %s %s", self._name, what)
            for action in self._at_rendezvous:
                action()

    def _to_leave_out(self) -> tuple[str, ...]:
        """Return the workers without which the others reach each other; empty if there must be more workers."""
        least = self._settings.min_workers
        return self._controller.to_leave_out(least) if least else ()

    def _await_links(self, error: TfosError) -> bool:
        """Wait until the nodes reach each other, if all of them are needed; return whether they may start again."""
        if not self._controller.has_cut_links or not self._outcome.may_go_on or self._to_leave_out():
            return True
        timeout = self._settings.rendezvous_timeout
        logger.warning("cluster %s waits at most %g s until its nodes reach each other: %s", self._name, timeout, error)
        until = time.monotonic() + timeout
        while self._controller.look_at_links().cut:
            with self._changed:
                stopped = self._changed.wait_for(lambda: self._outcome.stop is not None, _LOOK_AT_LINKS_EVERY)
            if stopped or time.monotonic() >= until:
                return False
        return True

    def _bring_back(self) -> bool:
        """Submit absent nodes to Spark again that nothing else would start; return whether some exist."""
        alone = self._controller.take_to_resubmit()
        if not alone or self._outcome.failing or self._controller.all_returned:
            return False
        logger.info("cluster %s asks Spark for %s again", self._name, ", ".join(alone))
        for action in self._at_resubmission:
            action()
        return True

    def _go_on(self, error: TfosError | None) -> str:
        """Continue after a loss, or with other nodes; return a description. The lock is held."""
        late, changing = self._controller.take_late(), self._controller.changing
        if error is None and late:
            return f"gives steps to {', '.join(late)}"
        self._become(ClusterStatus.RECOVERING)
        self.cause = str(error or changing)
        if error is None:
            self._controller.restart_with(changing)
            return f"changes: {changing}"
        without = self._to_leave_out()
        if without:
            first, *rest = self.cause.splitlines()
            self.cause = "\n".join([f"{first}{WITHOUT}{', '.join(without)}", *rest])
        if self._controller.restart_all(self.cause, without):
            return f"continues without {', '.join(without)}: {error}" if without else f"starts its nodes again: {error}"
        return f"continues, and replaces its lost nodes: {error}"

    def _until_failure(self) -> TfosError | None:
        """Wait until the nodes are done, one has failed, or others can join or leave."""
        timeout = self._settings.rendezvous_timeout
        if self._settings.min_workers and self._controller.rendezvous > 1:
            self._shrink(self._settings.min_workers, timeout)
        if not self._outcome.wait_for(lambda: self._controller.all_reserved, timeout):
            return self._outcome.rendezvous_timeout(timeout, self._address)
        controller = self._controller
        if controller.rendezvous == 1:
            self._starts_within = min(_LONGEST_WAIT, max(_SHORTEST_WAIT, self.elapsed))
        self._outcome.wait_for(lambda: controller.all_returned or controller.has_pending, None)
        return self._outcome.first_failure()

    def _shrink(self, least: int, timeout: float) -> None:
        """Continue without nodes that do not come back in time, as soon as the others are enough.

        If Spark starts the replacement of a lost node as quickly as the first nodes, it is waited for: all nodes would
        start again for one that joins later.
        """
        self._outcome.wait_for(lambda: not self._controller.some_are_coming, _PATIENCE)
        self._outcome.wait_for(lambda: self._controller.all_reserved, self._starts_within)
        enough = self._outcome.wait_for(lambda: self._controller.are_enough(least), timeout)
        if enough and not self._outcome.failing and self._outcome.lost_job is None:
            without = ", ".join(self._controller.continue_without_missing())
            if without:
                first, *rest = self.cause.splitlines()
                self.cause = "\n".join([f"{first}{WITHOUT}{without}", *rest])
                logger.warning("cluster %s continues without %s", self._name, without)

    def _dismiss(self, error: TfosError | None) -> None:
        with self._changed:
            self._become(ClusterStatus.STOPPING)
            self._changed.notify_all()
        grace, stop = 0.0, self._outcome.stop
        if not self._controller.all_reserved:
            self._jobs.cancel_all()  # tasks that wait for a slot would start nodes without a cluster
        if error is not None:
            with self._changed:
                reason = action_errors.reason_for(error)
                self._controller.answering.end(reason, self._jobs.cancel_stage, at_once=True)
            self._controller.dismiss(Stop("another node failed", 0.0))
        elif stop is not None:
            self._stopped = True  # when a stop is requested later, every main has returned: nothing is left to stop
            grace = self._stop_politely(stop)
        else:
            self._controller.dismiss(EndNode())
        with self._changed:
            self._changed.wait_for(lambda: self._controller.all_gone, grace + _LEAVING)
            # A node's task ends after its supervisor. Only then is the process gone and the slot free.
            patience = _LEAVING * (3 if self._controller.all_gone else 2)
            # A frozen supervisor receives nothing: its task kills it at its next question.
            self._controller.give_up_all()
            self._changed.wait_for(lambda: all(job.done.is_set() for job in self._outcome.jobs()), patience)
        self._jobs.cancel_all()
        self._jobs.wait_for_slots()
        self._close_door(error)
        for action in self._at_end:
            action()

    def _close_door(self, error: TfosError | None) -> None:
        """Close the door, or leave it open where tasks of a lazy result may still ask for the reason."""
        answering = self._controller.answering
        if not answering.may_be_asked or self._address.relayed:  # a relay would hold a slot
            self._door.close()
            return
        if error is None:
            reason = action_errors.reason_for(ClusterClosed(f"cluster {self._name} has ended: {COMPUTED_LATE}"))
            with self._changed:
                answering.end(reason, self._jobs.cancel_stage, at_once=False)
        self._door.close_tunnel()
        ended_doors.keep(self._door.close)

    def _stop_politely(self, stop: Stop) -> float:
        """Wait for every main to return. No node is dismissed earlier: a peer that saves may still need the others.

        Returns the seconds of the grace that are left.
        """
        deadline = time.monotonic() + stop.grace
        self._controller.dismiss(stop)
        with self._changed:
            self._changed.wait_for(lambda: self._controller.all_through or self._outcome.at_once, stop.grace)
            # Saving may take any time: half a model is useless. The user can still end the cluster at once.
            if self._controller.saving:
                self._changed.wait_for(lambda: not self._controller.saving or self._outcome.at_once)
                self._changed.wait_for(lambda: self._controller.all_through or self._outcome.at_once, _AFTER_SAVING)
        if not self._outcome.at_once:
            self._controller.send(EndNode())
        return max(0.0, deadline - time.monotonic())

    def _finish(self, error: TfosError | None) -> None:
        self._controller.mark_stopped()
        stopped = error is None and self._stopped
        with self._changed:
            self._ended_at = time.monotonic()
            if stopped and not self._controller.all_returned:
                self._outcome.decide(ClusterClosed(f"cluster {self._name} was stopped before its nodes were done"))
            else:
                self._outcome.decide(error)
            failed = ClusterStatus.FAILED if error is not None else ClusterStatus.DONE
            self._become(ClusterStatus.STOPPED if stopped else failed)
        try:
            for action in self._at_outcome:
                action()
        finally:
            self._outcome.end()
