"""Named queues of a node: each has its own passes over the rows that were fed to it.

``train(df, qname="valid")`` feeds another queue than ``train(df)``, and a node reads each at its own pace. Most
clusters have only one, ``"input"``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed.feed_rows import FeedRows
from tfos_nb.runtime.feed.kept_rows import KeptRows
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema, MakeRoom, check_queue
from tfos_nb.runtime.feed.pass_schedule import Told
from tfos_nb.runtime.feed.row_queue import ANNOUNCED_WITHIN, RowQueue

__all__ = ["DEFAULT_QUEUE", "RowQueues"]

DEFAULT_QUEUE = "input"
_FEEDS_KNOWN = 256  # a stream has no end


class RowQueues:
    """Rows of all queues of a node.

    Parameters
    ----------
    node, directory, buffer_bytes, spill_bytes, tell
        As :class:`RowQueue` takes them; the limits are those of each queue.
    names : sequence of str
        The queues. ``"input"`` always exists.
    kept, kept_validation : KeptRows, optional
        Where the rows of ``"input"``, and its validation rows, are kept for a later process of the node.
    """

    def __init__(
        self,
        node: str,
        directory: str,
        buffer_bytes: int,
        spill_bytes: int,
        tell: Callable[[Told], object],
        *,
        names: Sequence[str] = (DEFAULT_QUEUE,),
        kept: KeptRows | None = None,
        kept_validation: KeptRows | None = None,
    ) -> None:
        self.names = tuple(names)
        self.buffer_bytes = buffer_bytes
        limits = buffer_bytes, spill_bytes
        others = {name: RowQueue(node, directory, *limits, tell) for name in {*names} - {DEFAULT_QUEUE}}
        default = RowQueue(node, directory, *limits, tell, kept=kept, kept_validation=kept_validation)
        self._queues = {DEFAULT_QUEUE: default, **others}
        self._told = threading.Condition()
        self._terminated: set[RowQueue] = set()
        self._by_feed: dict[int, RowQueue] = {}

    @property
    def default(self) -> RowQueue:
        """The queue that ``train`` feeds without ``qname``."""
        return self._queues[DEFAULT_QUEUE]

    def of(self, name: str) -> RowQueue:
        """Return the rows of a queue."""
        check_queue(name, self.names)
        return self._queues[name]

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        queue = self._queues.get(begins.queue, self.default)
        queue.begin(begins)
        with self._told:
            self._by_feed[begins.feed] = queue
            while len(self._by_feed) > _FEEDS_KNOWN:
                del self._by_feed[next(iter(self._by_feed))]
            self._told.notify_all()
            unwanted = queue in self._terminated
        if unwanted:
            queue.enough()

    def describe(self, schema: FeedSchema) -> None:
        """Record the schema of a feed's rows."""
        self._queue_of(schema.feed).describe(schema)

    def end(self, ends: FeedEnds) -> None:
        """Record that the share of a feed is complete."""
        self._queue_of(ends.feed).end(ends)

    def make_room(self, message: MakeRoom) -> None:
        """Let more rows of a feed wait than the limit allows."""
        self._queue_of(message.feed).make_room(message)

    def _queue_of(self, feed: int) -> RowQueue:
        return self._by_feed.get(feed, self.default)

    def close(self) -> None:
        """Record that no feed will come any more, to any queue."""
        for queue in self._queues.values():
            queue.close()

    def stop(self) -> None:
        """Hand out no more passes of any queue, and release every waiting sender."""
        for queue in self._queues.values():
            queue.stop()

    def terminate(self, name: str) -> None:
        """Stop feeding a queue, also in later calls. The driver is notified and cancels reading."""
        queue = self.of(name)
        with self._told:
            self._terminated.add(queue)
        queue.enough()

    def feed_rows(self, feed: int) -> FeedRows:
        """Return the rows of a feed; wait until the driver has announced it."""
        with self._told:
            self._told.wait_for(lambda: feed in self._by_feed, ANNOUNCED_WITHIN)
            queue = self._queue_of(feed)
        return queue.feed_rows(feed)

    def status(self) -> FeedStatus:
        """Return the status of all queues together for a heartbeat."""
        found = [queue.status() for queue in self._queues.values()]
        return FeedStatus(
            sum(one.rows_in for one in found),
            sum(one.rows_out for one in found),
            sum(one.queued_bytes for one in found),
            any(one.waits_for_rows for one in found),
            validated=sum(one.validated for one in found),
        )
