"""The driver's records of a cluster's nodes: who came, what each does, who failed first.

The :class:`Roster` sits behind the door. Its Desk methods are called in the door's thread; everything else may be
called from
any thread. There is one lock, and one condition that is notified of every change that somebody may wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tfos_nb.answering import Answering
from tfos_nb.errors import NodeFailed, PlanError, TfosError
from tfos_nb.feeding import FeedDesk
from tfos_nb.logbook import LogBook
from tfos_nb.record import Record
from tfos_nb.runtime.door import Link
from tfos_nb.runtime.ledger import FeedFrom, PassDone
from tfos_nb.runtime.lifecycle import (
    MainRaised,
    MainReturned,
    MainStarted,
    NodeEnded,
    NodeUp,
    Refused,
    Regather,
    Reservation,
    Saving,
    Serving,
    Start,
)
from tfos_nb.runtime.node import NodeThere, NodeWanted, SupervisorEnded
from tfos_nb.runtime.placement import QUESTIONS
from tfos_nb.runtime.plan import ClusterPlan
from tfos_nb.runtime.process import signal_name
from tfos_nb.runtime.reports import Heartbeat, History, LogLines
from tfos_nb.state import LogLine, NodeState, NodeStatus

__all__ = ["Failure", "Roster"]

logger = logging.getLogger(__name__)

_HEARTBEAT_LIMIT = 15.0


@dataclass(frozen=True)
class Failure:
    """One node's failure.

    ``collateral`` marks one that only happened because a peer had gone; ``lost`` one of the node itself, its process,
    its host or its network, and not of the program.
    """

    error: TfosError
    node: str
    collateral: bool
    lost: bool = False


class Roster:
    """The records of one cluster.

    Parameters
    ----------
    plan : ClusterPlan
        Who should come.
    restarts : int
        How often the members may be gathered again.

    Attributes
    ----------
    generation : int
        How often they were gathered, from 1.
    """

    def __init__(self, plan: ClusterPlan, restarts: int = 0) -> None:
        self.plan = plan
        self.generation = 1
        self.restarts_left = restarts
        self.changed = threading.Condition(threading.RLock())
        self.history = History(str(plan.chief_node))
        self.failures: list[Failure] = []
        self.feeds = FeedDesk(self.changed, [str(node) for node in plan.fed_nodes], self.send, self._place)
        self._records = {str(node): Record(node) for node in plan.nodes}
        self.answering = Answering(self._records, self._place, self.failures, self.feeds)
        self._log = LogBook(self._records)
        self._dismissed = False
        self._handlers: dict[type, Callable[[Record, Any], None]] = {
            NodeUp: self._node_up,
            MainStarted: self._main_started,
            Serving: self._serving,
            Saving: self._saving,
            MainReturned: self._main_returned,
            MainRaised: self._main_raised,
            NodeEnded: self._node_ended,
            Heartbeat: self._heartbeat,
            LogLines: self._log_lines,
            PassDone: self._pass_done,
            FeedFrom: self._feed_from,
            Reservation: self._reserved_anew,
        }

    # --- the Desk: called in the door's thread ---

    def arrived(self, link: Link, message: Reservation | Refused) -> None:
        """Take a supervisor's reservation, or its word that its executor cannot run a node."""
        with self.changed:
            record = self._records.get(message.node)
            if record is None:
                raise ValueError(f"{message.node} is not in the plan")
            if isinstance(message, Refused):
                self._fail(record, PlanError(f"{message.node} on {message.host}: {message.reason}"))
                link.end()
            elif self._dismissed:  # before it had come: its main is not to be called any more
                link.end()
            elif record.reservation is not None:
                logger.info("a second %s came from %s and was sent away", message.node, message.host)
                link.end()
            else:
                link.node = message.node
                record.link = link
                self._reserve(record, message)
            self.changed.notify_all()

    def received(self, link: Link, message: Any) -> None:
        """Take any later message of a node."""
        with self.changed:
            record = self._records[link.node or ""]
            record.heard_at = time.monotonic()
            if record.reservation is not None or isinstance(message, (Reservation, LogLines)):
                self._handlers[type(message)](record, message)  # the rest is of the generation before
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
        if isinstance(message, (NodeThere, NodeWanted)):
            with self.changed:
                record = self._records[message.node]
                return self._is_there(record) if isinstance(message, NodeThere) else self._is_wanted(record)
        if isinstance(message, QUESTIONS):
            with self.changed:
                return self.answering.asked(message)
        return self.feeds.asked(message)

    def ticked(self) -> None:
        """Look for nodes that have been silent for too long."""
        now = time.monotonic()
        with self.changed:
            for record in self._records.values():
                silent = record.heard_at is not None and now - record.heard_at > _HEARTBEAT_LIMIT
                if silent and record.link is not None and not record.status.ended:
                    self._lose(
                        record,
                        f"no heartbeat for {_HEARTBEAT_LIMIT:.0f} s: its host or network is gone, or it is stopped",
                    )
            self.changed.notify_all()

    # --- what happens to a node; the lock is held ---

    def _is_there(self, record: Record) -> bool:
        return record.link is not None and (record.ended is None or self.restarts_left > 0)

    def _is_wanted(self, record: Record) -> bool | None:
        if self._dismissed or record.link is not None:
            return False
        if self.generation > 1 and record.reservation is None:
            return True
        return None if self.restarts_left > 0 else False

    def _reserve(self, record: Record, message: Reservation) -> None:
        record.reservation = message
        record.status, record.heard_at = NodeStatus.RESERVED, time.monotonic()
        self._start_if_complete()

    def _reserved_anew(self, record: Record, message: Reservation) -> None:
        if message.generation == self.generation and record.reservation is None:
            self._reserve(record, message)

    def _start_if_complete(self) -> None:
        if any(record.reservation is None for record in self._records.values()):
            return
        spec: dict[str, list[str]] = {}
        for record in self._records.values():
            assert record.reservation is not None
            address = f"{record.reservation.host}:{record.reservation.port}"
            spec.setdefault(record.node.role.value, []).append(address)
            record.status = NodeStatus.STARTING
        if self.generation > 1:
            self.feeds.describe_again()  # before main is called, which may want to know at once
        self.send(Start(spec, self.generation))

    def _node_up(self, record: Record, message: NodeUp) -> None:
        record.up = message

    def _main_started(self, record: Record, message: MainStarted) -> None:
        record.status = NodeStatus.TRAINING  # that it waits for rows, its heartbeat tells

    def _serving(self, record: Record, message: Serving) -> None:
        record.serving, record.status = True, NodeStatus.TRAINING

    def _saving(self, record: Record, message: Saving) -> None:
        record.saving = message.going_on

    def _main_returned(self, record: Record, message: MainReturned) -> None:
        record.result, record.returned = message.result, True
        record.status = NodeStatus.DONE
        record.forget_rate()

    def _main_raised(self, record: Record, message: MainRaised) -> None:
        record.raised = message
        self._fail(record, self._error_of(record, message.summary), message.collateral)

    def _node_ended(self, record: Record, message: NodeEnded) -> None:
        record.ended = message
        if record.parting:
            if not record.status.ended:
                record.status = NodeStatus.STOPPED
        elif record.raised is None:
            how = f"killed by {message.signal}" if message.signal else f"exited with code {message.exit_code}"
            memory = (
                f" at {message.memory_bytes / 2**30:.1f} GiB"
                if message.memory_bytes and message.signal == "SIGKILL"
                else ""
            )
            when = " after main had returned" if record.returned else ""
            hint = "; if nobody did, the host was out of memory" if message.signal == "SIGKILL" else ""
            self._fail(record, self._error_of(record, f"{how}{memory}{when}{hint}"), lost=True)

    def _heartbeat(self, record: Record, message: Heartbeat) -> None:
        record.heartbeat = message
        for report in message.reports:
            record.take(report)
            self.history.record(str(record.node), report)
        if message.feed is not None:
            record.count_rows(message.feed.rows_out, time.monotonic())
        record.began |= record.rows > 0 or any(report.step != 0 for report in message.reports)  # 0 says what comes
        if record.status in (NodeStatus.FEEDING, NodeStatus.TRAINING):
            hungry = message.feed is not None and message.feed.hungry and record.node in self.plan.fed_nodes
            waits = hungry and not record.began and not record.serving
            record.status = NodeStatus.FEEDING if waits else NodeStatus.TRAINING

    def _log_lines(self, record: Record, message: LogLines) -> None:
        self._log.add(str(record.node), message.lines)

    def _pass_done(self, record: Record, message: PassDone) -> None:
        self.feeds.pass_done(message)

    def _feed_from(self, record: Record, message: FeedFrom) -> None:
        self.feeds.wants_from(message)

    def _supervisor_ended(self, message: SupervisorEnded) -> None:
        with self.changed:
            record = self._records[message.node]
            said = message.text.splitlines()
            self._log.add(message.node, [f"[its supervisor ended with code {message.code}]", *said])
            if record.status is NodeStatus.LOST and message.code != 0:
                self._explain_loss(record, message)
            if record.reservation is None and not record.status.ended:
                cause = f"its supervisor ended with code {message.code} before it had reserved"
                error = NodeFailed(cause, node=message.node, log_tail=message.text)
                self._fail(record, error, lost=self.generation > 1)
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
            return
        self._fail(record, self._error_of(record, cause), lost=True)
        record.status = NodeStatus.LOST

    def _fail(self, record: Record, error: TfosError, collateral: bool = False, lost: bool = False) -> None:
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

    def _place(self) -> dict[str, Any]:
        return {name: record.up.feed for name, record in self._records.items() if record.up and record.up.feed}

    # --- for the driver's threads ---

    def send(self, message: Any, nodes: Iterable[str] | None = None) -> None:
        """Send a message to the named nodes, or to all."""
        with self.changed:
            for name in self._records if nodes is None else nodes:
                link = self._records[name].link
                if link is not None:
                    link.send(message)

    def send_to(self, node: str, message: Any) -> bool:
        """Send a message to one node; whether it has a stream."""
        with self.changed:
            link = self._records[node].link
            if link is not None:
                link.send(message)
            return link is not None

    def regather(self, cause: str) -> None:
        """Gather the members anew: those that are there start another process, those that are not are waited for."""
        with self.changed:
            self.generation += 1
            self.restarts_left -= 1
            self.failures.clear()
            self.feeds.regathered()
            for record in self._records.values():
                if record.status is NodeStatus.LOST and record.link is not None:
                    record.link.end()  # it is silent: should it wake, it hears that it is not needed
                    record.link = None
                record.begin_anew()
            self.send(Regather(self.generation, cause))
            self.changed.notify_all()

    def dismiss(self, message: Any) -> None:
        """Tell every node to go; from now on its end is no failure, and one that has not come is sent away."""
        with self.changed:
            self._dismissed = True
            for record in self._records.values():
                record.parting = True
                if record.reservation is None and not record.status.ended:
                    record.status = NodeStatus.STOPPED
            self.send(message)

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not reserved."""
        with self.changed:
            return tuple(name for name, record in self._records.items() if record.reservation is None)

    @property
    def all_up(self) -> bool:
        """Whether ``main`` has been called on every node."""
        with self.changed:
            return all(record.up and record.status is not NodeStatus.STARTING for record in self._records.values())

    @property
    def all_returned(self) -> bool:
        """Whether ``main`` has returned on every node that has to."""
        with self.changed:
            records = [self._records[str(node)] for node in self.plan.finishing_nodes]
            return records[0].returned and all(record.returned or record.serving for record in records)

    @property
    def all_through(self) -> bool:
        """Whether no ``main`` runs any more, however it ended; one that serves counts as if it did not."""
        with self.changed:
            return all(record.status.ended or record.serving for record in self._records.values())

    @property
    def saving(self) -> bool:
        """Whether a node is writing a model."""
        with self.changed:
            return any(record.saving and record.link is not None for record in self._records.values())

    @property
    def all_gone(self) -> bool:
        """Whether no node has a stream any more."""
        with self.changed:
            return all(record.link is None for record in self._records.values())

    @property
    def rows_taken(self) -> int:
        """How many rows all nodes have taken, as their heartbeats tell."""
        with self.changed:
            return sum(record.rows for record in self._records.values())

    def sated(self) -> tuple[str, ...]:
        """Return the fed nodes for which rows wait."""
        with self.changed:
            records = [self._records[str(node)] for node in self.plan.fed_nodes]
            return tuple(str(record.node) for record in records if record.sated)

    def is_over(self, node: str) -> bool:
        """Whether a node takes no more rows: its main has returned, or it has ended."""
        with self.changed:
            return self._records[node].status.ended

    def mark_stopped(self) -> None:
        """Give the nodes that were not done a final state."""
        with self.changed:
            for record in self._records.values():
                if not record.status.ended:
                    record.status = NodeStatus.STOPPED
                record.forget_rate()
            self.changed.notify_all()

    def results(self) -> dict[str, bytes]:
        """Return what came back from each node, still encoded."""
        with self.changed:
            return {name: record.result for name, record in self._records.items() if record.result is not None}

    def logs(self, node: str) -> list[str]:
        """Return the lines that a node wrote of late."""
        with self.changed:
            return self._log.texts(node)

    def log_lines(self, node: str, after: float | None = None, limit: int | None = None) -> list[LogLine]:
        """Return a node's kept lines: the newest ones, or the first ones after the time of a line."""
        with self.changed:
            return self._log.lines(node, after, limit)

    def log_tail(self, count: int) -> list[LogLine]:
        """Return the newest lines of all nodes, the oldest first."""
        with self.changed:
            return self._log.tail(count)

    def snapshot(self) -> tuple[NodeState, ...]:
        """Return every node's state now."""
        now = time.monotonic()
        with self.changed:
            return tuple(record.state(now) for name, record in self._records.items())
