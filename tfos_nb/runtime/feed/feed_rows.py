"""The rows of one feed on this node: who may send them, those that wait in memory, and those that are kept on disk.

::

    Flight server ──accept──▶ FeedRows ──┬─▶ queue in memory, bounded in bytes ──▶ first pass ─┐
    (one call a partition)               └─▶ spill file on local disk ───mmap────▶ replays ────┴─▶ ctx.dataset()

The first pass is given out as it comes in; when the queue is full, the sender waits, and gRPC's flow control makes
Spark wait. If more passes were asked for, the rows are also written to an Arrow stream file, which the later passes
read by memory map: Spark is not asked again. The file has no name, so nothing of it stays behind, however the process
ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.batching import Shares
from tfos_nb.runtime.feed.ledger import FeedEnds, Reached
from tfos_nb.runtime.feed.pass_schedule import FeedState
from tfos_nb.runtime.feed.spill import Spill
from tfos_nb.runtime.rows.spans import Spans, merged, rows_within

__all__ = ["FeedRows", "Superseded"]

logger = logging.getLogger(__name__)

_EXTRA, _MOST_EXTRA = 64 << 20, 1 << 30  # bytes by which more rows may wait, at a time and altogether
_SILENT = 300.0  # seconds without a row of an attempt that has its turn, after which an earlier one may go on


class _Span(NamedTuple):
    """Rows of a partition that lie together: so many up to ``end``, and how far the batch that had them went."""

    partition: int
    end: int
    rows: int
    reached: Reached


@dataclass
class _Lane:
    """A partition's rows on this node, which come from one of Spark's attempts at it at a time.

    Spark may have two at work, which need not read the rows in the same order. The later one comes first: an earlier
    one's turn is when that one's stream has ended, or has been silent for long.
    """

    reached: Reached = field(default_factory=Reached)
    attempt: int = 0
    streaming: bool = False
    moved: float = 0.0  # when its attempt was heard last, of the monotonic clock
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_for(self, attempt: int, now: float) -> bool:
        """Return whether an attempt may send the rows from now on."""
        return attempt >= self.attempt or not self.streaming or now - self.moved >= _SILENT


class FeedRows:
    """The rows of one feed on this node.

    Parameters
    ----------
    state : FeedState
        What the schedule knows of the feed: it is only read here, under the lock of ``changed``.
    changed : threading.Condition
        The queue's one condition; everything that waits here waits on it.
    limit : int
        Bytes that may wait in memory.
    spill : Spill or None
        Where the rows are kept for replays.
    """

    def __init__(self, state: FeedState, changed: threading.Condition, limit: int, spill: Spill | None) -> None:
        self.feed = state.begins.feed
        self.spill = spill
        self.rows_in = 0
        self.queued_bytes = 0
        self._state = state
        self._discarding = False
        self._changed = changed
        self._turn = threading.Lock()  # one sender at a time: a replay has the rows in the first pass' order
        self._limit = limit
        self._extra = 0
        self._queue: deque[pa.RecordBatch] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._order: list[_Span] = []  # as the rows are given out

    @property
    def ended(self) -> FeedEnds | None:
        """What the driver said at the end of the share."""
        return self._state.ended

    def lane(self, partition: int) -> _Lane:
        """Return the place of a partition."""
        with self._changed:
            return self._lanes.setdefault(partition, _Lane())

    def open(self, partition: int, attempt: int) -> _Lane:
        """Take a partition's rows of this attempt from now on, until :meth:`leave` or a later one comes.

        Raises
        ------
        Superseded
            If it is a later one's turn.
        """
        lane = self.lane(partition)
        with lane.lock:
            now = time.monotonic()
            if not lane.is_for(attempt, now):
                raise _superseded(partition, attempt, lane.attempt)
            lane.attempt, lane.streaming, lane.moved = attempt, True, now
        return lane

    def leave(self, partition: int, attempt: int) -> None:
        """Learn that an attempt's stream has ended."""
        lane = self.lane(partition)
        with lane.lock:
            if lane.attempt == attempt:
                lane.streaming = False

    def accept(
        self, partition: int, spans: Spans, batch: pa.RecordBatch, *, attempt: int = 0, known: tuple[int, int] = (0, 0)
    ) -> None:
        """Take these rows of a partition.

        Blocks while the queue is full. ``known`` is of how many of an attempt's rows it has a fingerprint, and that.

        Raises
        ------
        FeedFailed
            If a partition has no such rows, they are not those that came, or some are here already.
        Superseded
            If another attempt sends the partition now.
        """
        if partition < 0 or spans != merged(spans) or not spans or spans[0][0] < 0:
            raise FeedFailed(f"there are no rows {spans} of partition {partition}")
        if rows_within(spans, 0, spans[-1][1]) != batch.num_rows:
            raise FeedFailed(f"rows {spans} of partition {partition} were announced, and {batch.num_rows} came")
        lane = self.lane(partition)
        with lane.lock:
            if attempt != lane.attempt:
                raise _superseded(partition, attempt, lane.attempt)
            if spans[0][0] < lane.reached.row:
                raise FeedFailed(f"rows {spans} of partition {partition} came, and those before {lane.reached.row} had")
            reached = Reached(spans[-1][1], *known)
            self._put([_Span(partition, end, end - start, reached) for start, end in spans], batch)
            lane.reached, lane.moved = reached, time.monotonic()

    def _put(self, spans: list[_Span], batch: pa.RecordBatch) -> None:
        size = batch.nbytes
        with self._turn:
            self._await_room(size)
            if self.spill is not None:
                self.spill.write(batch)
            with self._changed:
                self._order += spans
                self.rows_in += batch.num_rows
                if not self._discarding:
                    self._queue.append(batch)
                    self.queued_bytes += size
                self._changed.notify_all()

    def _await_room(self, size: int) -> None:
        with self._changed:
            while self._queue and self.queued_bytes + size > self._limit + self._extra and not self._discarding:
                self._changed.wait()

    def make_room(self) -> None:
        """Let more rows wait in memory: a task that brings them has those for which another node waits behind them."""
        with self._changed:
            if not self._extra:
                logger.warning("more rows wait here than buffer_bytes allows: another node waits for those behind them")
            if self._extra < _MOST_EXTRA:
                self._extra += _EXTRA
            self._changed.notify_all()

    def discard(self) -> None:
        """Want no more of the first pass: what waits and what still comes is dropped (the spill goes on)."""
        with self._changed:
            self._discarding = True
            self._queue.clear()
            self.queued_bytes = 0
            self._changed.notify_all()

    def seal(self) -> None:
        """Write no more rows to disk: all are there."""
        if self.spill is not None:
            self.spill.seal()

    def free(self) -> None:
        """Give the disk space back; a replay that goes on has hold of the file."""
        if self.spill is not None:
            self.spill.close()

    def forget_order(self) -> None:
        """Forget which rows came when: :meth:`reached` is not asked any more."""
        with self._changed:
            self._order.clear()

    def reached(self, rows: int) -> tuple[dict[int, int], dict[int, Reached]]:
        """Return how far the first ``rows`` rows of a pass go in each partition: the row behind the last of them.

        The second dictionary has the fingerprint at the end of the batch that the last of them came in.

        Raises
        ------
        ValueError
            If there are not so many.
        """
        reached: dict[int, int] = {}
        known: dict[int, Reached] = {}
        with self._changed:
            for span in self._order:
                if rows <= 0:
                    break
                reached[span.partition] = span.end - max(0, span.rows - rows)
                known[span.partition] = span.reached
                rows -= span.rows
        if rows > 0:
            raise ValueError(f"{self.rows_in} rows have come in this pass, {rows} less than that")
        return reached, known

    def first_pass(self) -> Iterator[pa.RecordBatch]:
        """Give out the rows as they come, until the driver says that the share is complete."""
        rows = 0
        while (batch := self._take()) is not None:
            rows += batch.num_rows
            yield batch
        if self.ended is not None and not self._discarding and rows != self.ended.rows:
            raise FeedFailed(f"{rows} rows came in feed {self.feed}, but {self.ended.rows} were sent")

    def replay(self) -> Iterator[pa.RecordBatch]:
        """Give out the rows once more, from disk.

        Raises
        ------
        FeedFailed
            If they were not kept.
        """
        if self.spill is None or not self.spill.whole:
            raise FeedFailed(f"feed {self.feed} was not kept, so it cannot be replayed")
        return self.spill.batches()

    def shares(self) -> Shares | None:
        """Return how many rows all nodes have in a pass; None while the driver has not said so."""
        ended = self.ended
        if ended is None:
            return None
        return Shares(ended.rows, max(ended.total, ended.rows), max(ended.most, ended.rows))

    def _take(self) -> pa.RecordBatch | None:
        with self._changed:
            while not self._queue and self.ended is None and not self._discarding:
                self._changed.wait()
            if not self._queue:
                return None
            batch = self._queue.popleft()
            self.queued_bytes -= batch.nbytes
            self._changed.notify_all()
            return batch


class Superseded(FeedFailed):
    """Another attempt of Spark's sends the partition."""


def _superseded(partition: int, attempt: int, by: int) -> Superseded:
    return Superseded(f"attempt {by} at partition {partition} sends its rows, and attempt {attempt} has to wait")
