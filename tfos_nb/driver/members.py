"""The driver's records of a cluster's nodes, as its threads look at them and speak to the nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tfos_nb.driver.node_record import Record
from tfos_nb.runtime.control.door import broadcast
from tfos_nb.runtime.control.plan import ClusterPlan, Node, Role
from tfos_nb.state.cluster_state import LogLine, NodeState, NodeStatus
from tfos_nb.state.log_buffer import LogBook

__all__ = ["Everyone", "Members"]

_Item = TypeVar("_Item")


class Everyone(Generic[_Item]):
    """Whether something holds for every one of some items, asked again and again while it comes to hold for them.

    The one for which it did not hold is asked first the next time. So while one holds all up, a question costs one
    look, and a thousand nodes that come one after another cost three thousand looks at the most, not a million.

    Parameters
    ----------
    items : sequence
        Whom to ask.
    holds : callable
        Says of one whether it holds.
    """

    def __init__(self, items: Sequence[_Item], holds: Callable[[_Item], object]) -> None:
        self._items = items
        self._holds = holds
        self._place = 0

    def __call__(self) -> bool:
        """Ask."""
        for _ in self._items:
            if not self._holds(self._items[self._place]):
                return False
            self._place = (self._place + 1) % len(self._items)
        return True


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
        self._rows = self._reports = 0
        self._fed = frozenset(plan.fed_nodes)
        self._gone = Everyone(list(self._records.values()), lambda one: one.link is None)
        self._count_on(self._records.values())

    def _count_on(self, records: Iterable[Record]) -> None:
        """Have these nodes be the cluster, all of them or those that are left."""
        self._present = list(records)
        finishing = [one for one in self._present if one.node.role is not Role.PS]
        self._training = [one for one in self._present if one.node.role is not Role.EVALUATOR]
        self._fed_records = [one for one in self._present if one.node in self._fed]
        self._first = finishing[0]
        self._reserved = Everyone(self._present, lambda one: one.reservation)
        self._up = Everyone(self._present, lambda one: one.up and one.status is not NodeStatus.STARTING)
        self._take_rows = Everyone(self._fed_records, lambda one: one.up)
        self._returned = Everyone(finishing, lambda one: one.returned or one.serving)
        self._through = Everyone(self._present, lambda one: one.status.ended or one.serving)
        self._at_rest = Everyone(self._present, lambda one: not one.saving or one.link is None)

    def _widen(self, plan: ClusterPlan) -> None:
        """Know of the nodes of another plan; the cluster does not count on the new ones yet. The lock is held."""
        self.plan = plan
        known = dict(self._records)
        self._records.clear()  # in its place: others hold on to it
        for name in map(str, plan.nodes):
            self._records[name] = known.pop(name) if name in known else Record(Node.parse(name), absent=True)
        self._records.update(known)
        self._log.expect(self._records)
        self._fed = frozenset(plan.fed_nodes)
        self._gone = Everyone(list(self._records.values()), lambda one: one.link is None)

    def send(self, message: Any, nodes: Iterable[str] | None = None) -> None:
        """Send a message to the named nodes, or to all."""
        with self.changed:
            named = self._records if nodes is None else nodes
            broadcast([link for name in named if (link := self._records[name].link) is not None], message)

    def send_to(self, node: str, message: Any) -> bool:
        """Send a message to one node; whether it has a stream."""
        with self.changed:
            link = self._records[node].link
            if link is not None:
                link.send(message)
            return link is not None

    @property
    def first(self) -> str:
        """The node that saves, and whose result is the cluster's: the chief, or who has its place."""
        with self.changed:
            return str(self._first.node)

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not reserved."""
        with self.changed:
            every = self._records.items()
            return tuple(name for name, record in every if record.reservation is None and not record.parting)

    @property
    def all_take_rows(self) -> bool:
        """Whether every node that is fed has said where it takes rows."""
        with self.changed:
            return self._take_rows()

    @property
    def all_reserved(self) -> bool:
        """Whether every node has reserved."""
        with self.changed:
            return self._reserved()

    @property
    def all_up(self) -> bool:
        """Whether ``main`` has been called on every node."""
        with self.changed:
            return self._up()

    @property
    def all_returned(self) -> bool:
        """Whether ``main`` has returned on every node that has to."""
        with self.changed:
            return self._first.returned and self._returned()

    @property
    def all_through(self) -> bool:
        """Whether no ``main`` runs any more, however it ended; one that serves counts as if it did not."""
        with self.changed:
            return self._through()

    @property
    def saving(self) -> bool:
        """Whether a node is writing a model."""
        with self.changed:
            return not self._at_rest()

    @property
    def all_gone(self) -> bool:
        """Whether no node has a stream any more."""
        with self.changed:
            return self._gone()

    @property
    def progress(self) -> tuple[int, int]:
        """How many rows all nodes have taken, and how often those that train have said how far they are."""
        with self.changed:
            return self._rows, self._reports

    def worked(self) -> dict[str, float]:
        """Return for how many seconds of a core each node that trains has computed so far."""
        with self.changed:
            return {str(record.node): record.worked for record in self._training}

    @property
    def unread(self) -> bool:
        """Whether ``main`` has returned on every node that is fed, and has asked for rows on none."""
        with self.changed:
            return all(record.returned and record.unread for record in self._fed_records)

    def sated(self) -> tuple[str, ...]:
        """Return the fed nodes for which rows wait."""
        with self.changed:
            return tuple(str(record.node) for record in self._fed_records if record.sated)

    def starved(self) -> tuple[str, ...]:
        """Return the fed nodes that wait for rows."""
        with self.changed:
            return tuple(str(one.node) for one in self._fed_records if not one.sated and not one.status.ended)

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

    @property
    def log_bytes(self) -> int:
        """Bytes that the kept lines take, about."""
        with self.changed:
            return self._log.size

    def shorten_logs(self, most: int | None = None) -> None:
        """Keep some of each node's last lines only; so many that they take at most these bytes, all together."""
        with self.changed:
            self._log.shorten(most)

    def log_tail(self, count: int) -> list[LogLine]:
        """Return the newest lines of all nodes, the oldest first."""
        with self.changed:
            return self._log.tail(count)

    def snapshot(self) -> tuple[NodeState, ...]:
        """Return every node's state now."""
        now = time.monotonic()
        with self.changed:
            return tuple(record.state(now) for name, record in self._records.items())
