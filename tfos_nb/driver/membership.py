"""The driver's records of a cluster's nodes: who came, what each does, who failed first.

The :class:`Roster` sits behind the door. Its Desk methods are called in the door's thread; everything else may be
called from any thread. There is one lock, and one condition that is notified of each change that somebody waits for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tfos_nb.driver.feed_desk import FeedDesk
from tfos_nb.driver.node_record import Record
from tfos_nb.driver.placements import Answering
from tfos_nb.driver.rendezvous import JOINS, Failure, Gathering
from tfos_nb.errors import NodeFailed, PlanError, TfosError
from tfos_nb.runtime.control.door import Link
from tfos_nb.runtime.control.lifecycle import (
    Coordinating,
    FeedPlace,
    Following,
    MainRaised,
    MainReturned,
    MainStarted,
    NodeEnded,
    NodeUp,
    Refused,
    Reservation,
    Saving,
    Serving,
    StateHeld,
)
from tfos_nb.runtime.control.placement import QUESTIONS
from tfos_nb.runtime.control.plan import ClusterPlan, Role
from tfos_nb.runtime.control.processes import signal_name
from tfos_nb.runtime.control.reports import Heartbeat, History, LogLines
from tfos_nb.runtime.feed.ledger import FeedFrom, PassDone, WorkerThrough
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.node.spark_task import HoldsSlot, NodeThere, NodeWanted, SupervisorEnded
from tfos_nb.runtime.storage.shared_directory import PlaceSeen, PlacesSeen
from tfos_nb.state.cluster_state import NodeStatus

__all__ = ["Roster"]

logger = logging.getLogger(__name__)

_STOOD_STILL = 1.0  # seconds: this process was stopped, or its lock was held by somebody
_NEWS = (Heartbeat, LogLines)  # there are many of them, and whoever waits for what they tell looks once a second


class Roster(Gathering):
    """The records of one cluster.

    Parameters
    ----------
    plan : ClusterPlan
        Who should come.
    restarts : int
        How often the members may be gathered again.
    heartbeat_timeout : float
        Seconds of silence after which a node is held to be lost.
    """

    def __init__(self, plan: ClusterPlan, restarts: int = 0, heartbeat_timeout: float = 15.0) -> None:
        super().__init__(plan, restarts)
        self.heartbeat_timeout = heartbeat_timeout
        self.history = History(str(plan.chief_node), len(plan.nodes))
        self.feeds = FeedDesk(self.changed, [str(node) for node in plan.fed_nodes], self.send, self._place)
        self.answering = Answering(self._records, self._place, self.failures, self.feeds)
        self._places_seen = PlacesSeen()
        self._dismissed = False
        self._known: set[tuple[str, str, int]] = set()  # supervisors that have come, by node, machine and process
        self._answers: dict[type, Callable[[Record, Any], bool | str | None]] = {
            NodeThere: self._is_there,
            NodeWanted: self._is_wanted,
            HoldsSlot: lambda record, question: self._slot_use(record, question).value,
        }
        self._handlers: dict[type, Callable[[Record, Any], None]] = {
            NodeUp: self._node_up,
            MainStarted: self._main_started,
            Serving: self._serving,
            Coordinating: self._coordinates,
            Following: self._follows,
            Saving: self._saving,
            StateHeld: self._state_held,
            MainReturned: self._main_returned,
            MainRaised: self._main_raised,
            NodeEnded: self._node_ended,
            Heartbeat: self._heartbeat,
            LogLines: self._log_lines,
            PassDone: self._pass_done,
            FeedFrom: self._feed_from,
            PositionHeld: self._position_held,
            PlaceSeen: self._place_seen,
            WorkerThrough: self._worker_through,
            Reservation: self._reserved_anew,
        }

    # --- the Desk: called in the door's thread ---

    def arrived(self, link: Link, message: Reservation | Refused) -> None:
        """Take a supervisor's reservation, or its word that its executor cannot run a node."""
        if not isinstance(message, (Reservation, Refused)):
            raise ValueError(f"a node's stream begins with its reservation, not with a {type(message).__name__}")
        with self.changed:
            record = self._records.get(message.node)
            if record is None:
                raise ValueError(f"{message.node} is not in the plan")
            if record.reservation is not None:
                logger.info("a second %s came from %s and was sent away", message.node, message.host)
                link.end()
            elif isinstance(message, Refused):
                self._fail(record, PlanError(f"{message.node} on {message.host}: {message.reason}"))
                link.end()
            elif self._dismissed or record.parting:  # before it had come: its main is not to be called any more
                link.end()
            else:
                link.node = message.node
                self._let_go(record)  # what this attempt comes in place of
                record.link, record.supervisor = link, (message.machine, message.pid)
                self._reserve(record, message)
            self.changed.notify_all()

    def received(self, link: Link, message: Any) -> None:
        """Take any later message of a node."""
        with self.changed:
            record = self._records[link.node or ""]
            self._refuse_pretence(link.node, message)
            record.heard_at = time.monotonic()
            if record.reservation is not None or isinstance(message, (Reservation, LogLines)):
                self._handlers[type(message)](record, message)  # the rest is of the generation before
            elif isinstance(message, Heartbeat):
                for report in message.reports:
                    self.history.record_late(str(record.node), report)
            if not isinstance(message, _NEWS):
                self.changed.notify_all()

    def left(self, link: Link) -> None:
        """Learn that a node's stream is gone: without its last word, the node is lost."""
        with self.changed:
            record = self._records.get(link.node or "")
            if record is not None and record.link is link:
                record.link = None
                if record.ended is None:
                    self._lose(record, "its supervisor is gone: it was killed, or its host or its container has ended")
            self.changed.notify_all()

    def asked(self, message: Any) -> Any:
        """Answer a task."""
        if isinstance(message, SupervisorEnded):
            return self._supervisor_ended(message)
        if type(message) in self._answers:
            with self.changed:
                return self._answers[type(message)](self._records[message.node], message)
        if isinstance(message, QUESTIONS):
            with self.changed:
                return self.answering.asked(message)
        return self.feeds.asked(message)

    def ticked(self, late: float = 0.0) -> None:
        """Look for nodes that have been silent for too long; not for what this process was too late to hear."""
        now = time.monotonic()
        with self.changed:
            for record in self._records.values():
                if late > _STOOD_STILL and record.heard_at is not None:
                    record.heard_at = min(now, record.heard_at + late)
                silent = record.heard_at is not None and now - record.heard_at > self.heartbeat_timeout
                if silent and record.link is not None and not record.status.ended:
                    self._lose(
                        record,
                        f"no heartbeat for {self.heartbeat_timeout:g} s: its host or network is gone, or it is stopped",
                    )
            self.changed.notify_all()

    # --- what happens to a node; the lock is held ---

    def _refuse_pretence(self, node: str | None, message: Any) -> None:
        """Hear of a node from itself alone; how far the workers are, from the coordinator too."""
        spoken_of = getattr(message, "node", node)
        coordinates = isinstance(message, WorkerThrough) and node == str(self.plan.chief_node)
        if spoken_of != node and not (coordinates and spoken_of in self._records):
            raise ValueError(f"{node} sent a {type(message).__name__} of {spoken_of!r}")

    def _is_there(self, record: Record, question: NodeThere) -> bool:
        return record.link is not None and (record.ended is None or self.restarts_left > 0)

    def _is_wanted(self, record: Record, question: NodeWanted) -> bool | None:
        if self._dismissed or record.link is not None or record.parting:
            return False
        if record.reservation is None and (self.gatherings > 1 or record.absent):
            return record.failed_joins < JOINS
        return None if self.restarts_left > 0 else False

    def _reserve(self, record: Record, message: Reservation) -> None:
        record.reservation = message
        self._known.add((message.node, message.machine, message.pid))
        record.status, record.heard_at = NodeStatus.RESERVED, time.monotonic()
        if record.absent:
            self._start_late()
        else:
            self._start_if_complete()

    def _reserved_anew(self, record: Record, message: Reservation) -> None:
        if message.generation == self.generation and record.reservation is None:
            self._reserve(record, message)

    def _node_up(self, record: Record, message: NodeUp) -> None:
        record.up = message
        if message.feed is not None:
            self._feed_places[message.node] = message.feed

    def _main_started(self, record: Record, message: MainStarted) -> None:
        record.status = NodeStatus.TRAINING  # that it waits for rows, its heartbeat tells

    def _serving(self, record: Record, message: Serving) -> None:
        record.serving, record.status = True, NodeStatus.TRAINING
        self._tell_where(record)

    def _saving(self, record: Record, message: Saving) -> None:
        record.saving = message.going_on

    def _state_held(self, record: Record, message: StateHeld) -> None:
        self._can_join |= record is self._first and bool(self._joining() or self._leaving)

    def _main_returned(self, record: Record, message: MainReturned) -> None:
        record.result, record.returned, record.unread = message.result, True, not message.read
        record.status = NodeStatus.DONE
        record.forget_rate()
        if not message.serves and record.node.role is not Role.EVALUATOR:
            self._leavers[message.node] = record
            self._check_servers()

    def _coordinates(self, record: Record, message: Coordinating) -> None:
        self._coordinators[message.node] = record
        self._check_servers()

    def _follows(self, record: Record, message: Following) -> None:
        record.following = True
        self._start_late()

    def _check_servers(self) -> None:
        """Fail a node that left no server where the coordinator waits for one: TensorFlow would do so for ever."""
        waiting = next((one for one in self._coordinators.values() if not one.status.ended), None)
        if waiting is not None and self._leavers:
            left = next(iter(self._leavers.values()))
            cause = f"its main has returned and left no TensorFlow server, for which {waiting.node} waits: begin main "
            self._fail(left, self._error_of(left, cause + "with `if not ctx.is_chief: return ctx.serve()`"))

    def _main_raised(self, record: Record, message: MainRaised) -> None:
        record.raised = message
        self._fail(record, self._error_of(record, message.summary), message.collateral)

    def _node_ended(self, record: Record, message: NodeEnded) -> None:
        record.ended = message
        if record.parting:
            if not record.status.ended:
                record.status = NodeStatus.STOPPED
        elif record.raised is None:
            how = message.note or (
                f"killed by {message.signal}" if message.signal else f"exited with code {message.exit_code}"
            )
            memory = (
                f" at {message.memory_bytes / 2**30:.1f} GiB"
                if message.memory_bytes and message.signal == "SIGKILL"
                else ""
            )
            when = " after main had returned" if record.returned else ""
            unexplained = message.signal == "SIGKILL" and not message.note
            hint = "; if nobody did, the host was out of memory" if unexplained else ""
            self._fail(record, self._error_of(record, f"{how}{memory}{when}{hint}"), lost=True)

    def _heartbeat(self, record: Record, message: Heartbeat) -> None:
        now = time.monotonic()
        record.beat(message, now)
        for report in message.reports:
            record.take(report)
            self._look_at_loss(record)
            self.history.record(str(record.node), report)
        self._reports += len(message.reports) if record.node.role is not Role.EVALUATOR else 0
        if message.feed is not None:
            self._rows -= record.rows
            record.count_rows(message.feed.rows_out, now)
            self._rows += record.rows
        record.began |= record.rows > 0 or any(report.step != 0 for report in message.reports)  # 0 says what comes
        if record.status in (NodeStatus.FEEDING, NodeStatus.TRAINING):
            hungry = message.feed is not None and message.feed.hungry and record.node in self._fed
            waits = hungry and not record.began and not record.serving
            record.status = NodeStatus.FEEDING if waits else NodeStatus.TRAINING

    def _look_at_loss(self, record: Record) -> None:
        """Note in a node's log, once, that its loss has become NaN, and what it is elsewhere."""
        if record.told_of_nan or not math.isnan(record.metrics.get("loss", 0.0)):
            return
        record.told_of_nan = True
        report = record.report
        at = f" in epoch {report.epoch}" if report.epoch else f" at step {report.step}" if report.step else ""
        others = [
            f"; that of {other.node} is {other.metrics['loss']:g}"
            for other in self._records.values()
            if not math.isnan(other.metrics.get("loss", math.nan))
        ]
        self._log.add(str(record.node), (f"tfos_nb: the loss became NaN{at}{''.join(others[:1])}",))

    def _log_lines(self, record: Record, message: LogLines) -> None:
        self._log.add(str(record.node), message.lines)

    def _pass_done(self, record: Record, message: PassDone) -> None:
        self.feeds.pass_done(message)

    def _feed_from(self, record: Record, message: FeedFrom) -> None:
        self.feeds.wants_from(message)

    def _position_held(self, record: Record, message: PositionHeld) -> None:
        self.feeds.position_held(message)

    def _place_seen(self, record: Record, message: PlaceSeen) -> None:
        if told := self._places_seen.unlike(message):
            self._fail(record, PlanError(told))

    def _worker_through(self, record: Record, message: WorkerThrough) -> None:
        worker = self._records[message.node]
        worker.through = message.passes
        if worker.absent:
            self._take_in(worker)

    def _supervisor_ended(self, message: SupervisorEnded) -> None:
        with self.changed:
            record = self._records[message.node]
            said = message.text.splitlines()
            self._log.add(message.node, [f"[its supervisor ended with code {message.code}]", *said])
            if record.status is NodeStatus.LOST and message.code != 0:
                self._explain_loss(record, message)
            had_reserved = (message.node, message.machine, message.pid) in self._known
            counts = record.absent and not record.parting  # one that never comes is not wanted for ever
            if record.reservation is None and not had_reserved and (counts or not record.status.ended):
                cause = f"its supervisor ended with code {message.code} before it had reserved"
                error = NodeFailed(cause, node=message.node, log_tail=message.text)
                self._fail(record, error, lost=self.gatherings > 1)
            self.changed.notify_all()

    def _explain_loss(self, record: Record, message: SupervisorEnded) -> None:
        """The stream broke first; now its task tells how its supervisor ended."""
        how = signal_name(message.code) or f"code {message.code}"
        for index, failure in enumerate(self.failures):
            if failure.node == str(record.node):
                error = self._error_of(record, f"its supervisor ended with {how}", message.text)
                self.failures[index] = replace(failure, error=error)

    def _lose(self, record: Record, cause: str) -> None:
        if record.parting or record.status.ended:
            if not record.status.ended:
                record.status = NodeStatus.STOPPED
            record.saving = False  # nobody waits for what it was about to write
            return
        self._fail(record, self._error_of(record, cause), lost=True)
        if not record.absent:
            record.status = NodeStatus.LOST

    def _fail(self, record: Record, error: TfosError, collateral: bool = False, lost: bool = False) -> None:
        if record.absent:
            logger.info("%s could not join: %s", record.node, error)
            self._do_without(record)
            return
        record.status = NodeStatus.FAILED
        record.forget_rate()
        self.failures.append(Failure(error, str(record.node), collateral, lost))

    def _error_of(self, record: Record, cause: str, log_tail: str = "") -> NodeFailed:
        place, ended, raised = record.reservation, record.ended, record.raised
        return NodeFailed(
            cause,
            node=str(record.node),
            host=place.host if place else "",
            executor=place.executor if place else "",
            exit_code=ended.exit_code if ended else None,
            signal=ended.signal if ended else None,
            remote_traceback=raised.traceback if raised else "",
            log_tail=log_tail or (ended.log_tail if ended else ""),
        )

    def _place(self) -> Mapping[str, FeedPlace]:
        return self._feed_places

    # --- for the driver's threads ---

    def dismiss(self, message: Any) -> None:
        """Tell every node to go; from now on its end is no failure, and one that has not come is sent away."""
        with self.changed:
            self._dismissed = self.feeds.over = True
            for record in self._records.values():
                record.parting = True
                if record.reservation is None and not record.status.ended:
                    record.status = NodeStatus.STOPPED
            self.send(message)

    def mark_stopped(self) -> None:
        """Give the nodes that were not done a final state."""
        with self.changed:
            for record in self._records.values():
                if not record.status.ended:
                    record.status = NodeStatus.STOPPED
                record.forget_rate()
            self.changed.notify_all()
