"""The driver's records of a cluster's nodes, as its threads look at them and speak to the nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from tfos_nb.logbook import LogBook
from tfos_nb.record import Record
from tfos_nb.runtime.plan import ClusterPlan
from tfos_nb.state import LogLine, NodeState, NodeStatus

__all__ = ["Members"]


class Members:
    """The records of one cluster's nodes.

    Parameters
    ----------
    plan : ClusterPlan
        Who should come.

    Attributes
    ----------
    changed : threading.Condition
        Its lock guards all records; it is notified of every change that somebody may wait for.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.changed = threading.Condition(threading.RLock())
        self._records = {str(node): Record(node) for node in plan.nodes}
        self._log = LogBook(self._records)

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

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not reserved."""
        with self.changed:
            return tuple(name for name, record in self._records.items() if record.reservation is None)

    @property
    def all_take_rows(self) -> bool:
        """Whether every node that is fed has said where it takes rows."""
        with self.changed:
            return all(self._records[str(node)].up for node in self.plan.fed_nodes)

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
