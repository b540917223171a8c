"""The named queues of a node: each has passes of its own over the rows that were fed to it.

``train(df, qname="valid")`` feeds another queue than ``train(df)``, and a node reads each at its own pace. Most
clusters have one, ``"input"``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed.ledger import FeedBegins, FeedEnds, FeedSchema, MakeRoom
from tfos_nb.runtime.feed.passes import Intake
from tfos_nb.runtime.feed.supply import Supply

__all__ = ["DEFAULT_QUEUE", "FeedQueues", "check_queue"]

DEFAULT_QUEUE = "input"
_ANNOUNCED_WITHIN = 60.0


def check_queue(name: str, known: Sequence[str]) -> str:
    """Return the name of a queue.

    Raises
    ------
    FeedFailed
        If there is no such queue; the message names those that there are.
    """
    if name not in known:
        listed = ", ".join(repr(one) for one in known)
        raise FeedFailed(f"no queue {name!r}: this cluster has {listed}. Name it at the launch: queues=[{name!r}, …]")
    return name


class FeedQueues(Supply):
    """The rows of all queues of a node; by itself it is those of ``"input"``.

    Parameters
    ----------
    node, directory, buffer_bytes, spill_bytes, tell
        As :class:`Supply` takes them; the limits are those of each queue.
    names : sequence of str
        The queues.
    """

    def __init__(
        self,
        node: str,
        directory: str,
        buffer_bytes: int,
        spill_bytes: int,
        tell: Callable[[Any], object],
        *,
        names: Sequence[str] = (DEFAULT_QUEUE,),
    ) -> None:
        super().__init__(node, directory, buffer_bytes, spill_bytes, tell)
        self.names = tuple(names)
        self._told = threading.Condition()
        self._others = {
            name: Supply(node, directory, buffer_bytes, spill_bytes, tell) for name in names if name != DEFAULT_QUEUE
        }
        self._terminated: set[Supply] = set()
        self._by_feed: dict[int, Supply] = {}

    def of(self, name: str) -> Supply:
        """Return the rows of a queue."""
        check_queue(name, self.names)
        return self._others.get(name, self)

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        queue = self._others.get(begins.queue, self)
        Supply.begin(queue, begins)
        with self._told:
            self._by_feed[begins.feed] = queue
            self._told.notify_all()
            unwanted = queue in self._terminated
        if unwanted:
            queue.enough()

    def describe(self, schema: FeedSchema) -> None:
        """Learn what the rows of a feed look like."""
        Supply.describe(self._by_feed.get(schema.feed, self), schema)

    def end(self, ends: FeedEnds) -> None:
        """Learn that the share of a feed is complete."""
        Supply.end(self._by_feed.get(ends.feed, self), ends)

    def make_room(self, message: MakeRoom) -> None:
        """Take in more of a feed than was agreed."""
        Supply.make_room(self._by_feed.get(message.feed, self), message)

    def close(self) -> None:
        """Learn that no feed comes any more, to any queue."""
        super().close()
        for queue in self._others.values():
            queue.close()

    def stop(self) -> None:
        """Give out nothing more from any queue, and let every sender go."""
        super().stop()
        for queue in self._others.values():
            queue.stop()

    def terminate(self, name: str) -> None:
        """Want no more rows of a queue, now and later; the driver is told, and Spark reads no more for it."""
        queue = self.of(name)
        with self._told:
            self._terminated.add(queue)
        queue.enough()

    def intake(self, feed: int) -> Intake:
        """Return a feed's intake, waiting for the driver's word of it."""
        with self._told:
            self._told.wait_for(lambda: feed in self._by_feed, _ANNOUNCED_WITHIN)
            queue = self._by_feed.get(feed, self)
        return Supply.intake(queue, feed)

    def status(self) -> FeedStatus:
        """Return what a heartbeat says of all queues together."""
        found = [super().status(), *(queue.status() for queue in self._others.values())]
        return FeedStatus(
            sum(one.rows_in for one in found),
            sum(one.rows_out for one in found),
            sum(one.queued_bytes for one in found),
            any(one.hungry for one in found),
        )
