"""A node's share of the rows, and the passes over it.

::

    Flight server ──accept──▶ Intake ──┬─▶ queue in memory, bounded in bytes ──▶ first pass ─┐
    (one call a partition)             └─▶ spill file on local disk ───mmap────▶ replays ────┴─▶ ctx.dataset()

One :class:`Intake` holds one feed. The first pass is given out as it comes in; when the queue is full, the sender
waits, and gRPC's flow control makes Spark wait. If more passes were asked for, the rows are also written to an Arrow
stream file, which the later passes read by memory map: Spark is not asked again. The file has no name, so nothing of it
stays behind, however the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed.batching import Pass, Shares
from tfos_nb.runtime.feed.ledger import FeedBegins, FeedEnds, FeedFrom, FeedSchema, MakeRoom, PassDone, Reached
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.feed.spill import Spill
from tfos_nb.runtime.rows.spans import Spans, merged, rows_within

__all__ = ["Intake", "Passes", "Superseded", "Tell"]

Tell = Callable[[PassDone | FeedFrom | PositionHeld], object]

logger = logging.getLogger(__name__)

_EXTRA, _MOST_EXTRA = 64 << 20, 1 << 30  # bytes by which more rows may wait, at a time and altogether
_SILENT = 300.0  # seconds without a row of an attempt that has its turn, after which an earlier one may go on
_ANNOUNCED_WITHIN = 60.0  # seconds between a feed's first row and the driver's word of it, by another way


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


class Intake:
    """The rows of one feed on this node.

    Parameters
    ----------
    begins : FeedBegins
        What the driver announced.
    changed : threading.Condition
        The node's one condition; everything that waits here waits on it.
    limit : int
        Bytes that may wait in memory.
    spill : Spill or None
        Where the rows are kept for replays.
    """

    def __init__(self, begins: FeedBegins, changed: threading.Condition, limit: int, spill: Spill | None) -> None:
        self.feed = begins.feed
        self.spill = spill
        self.rows_in = 0
        self.queued_bytes = 0
        self.ended: FeedEnds | None = None
        self.discarding = False
        self.through = 0  # passes
        self._changed = changed
        self._turn = threading.Lock()  # one sender at a time: a replay has the rows in the first pass' order
        self._limit = limit
        self._extra = 0
        self._queue: deque[pa.RecordBatch] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._order: list[_Span] = []  # as the rows are given out

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
                if not self.discarding:
                    self._queue.append(batch)
                    self.queued_bytes += size
                self._changed.notify_all()

    def _await_room(self, size: int) -> None:
        with self._changed:
            while self._queue and self.queued_bytes + size > self._limit + self._extra and not self.discarding:
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
            self.discarding = True
            self._queue.clear()
            self.queued_bytes = 0
            self._changed.notify_all()

    def free_if_through(self) -> None:
        """Give the disk space back when the last pass has been made. The lock is held."""
        if self.spill is not None and self.ended is not None and self.through > self.ended.replays:
            self.spill.close()

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
        if self.ended is not None and not self.discarding and rows != self.ended.rows:
            raise FeedFailed(f"{rows} rows came in feed {self.feed}, but {self.ended.rows} were sent")

    def shares(self) -> Shares | None:
        """Return how many rows all nodes have in a pass; None while the driver has not said so."""
        ended = self.ended
        if ended is None:
            return None
        return Shares(ended.rows, max(ended.total, ended.rows), max(ended.most, ended.rows))

    def _take(self) -> pa.RecordBatch | None:
        with self._changed:
            while not self._queue and self.ended is None and not self.discarding:
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


@dataclass(frozen=True)
class _Pass:
    intake: Intake
    number: int


class Passes:
    """All passes that this node's dataset goes through, in order.

    Parameters
    ----------
    node : str
        This node.
    directory : str
        Where to spill.
    buffer_bytes, spill_bytes : int
        The most bytes that wait in memory, and that are kept on disk.
    tell : callable
        Called with a :class:`PassDone` after each pass.
    """

    def __init__(
        self,
        node: str,
        directory: str,
        buffer_bytes: int,
        spill_bytes: int,
        tell: Tell,
    ) -> None:
        self._node = node
        self._directory = directory
        self.buffer_bytes = buffer_bytes
        self._spill_bytes = spill_bytes
        self._tell = tell
        self._changed = threading.Condition()
        self._intakes: dict[int, Intake] = {}
        self._queue: deque[_Pass] = deque()
        self._schema: FeedSchema | None = None
        self._turn: _Pass | None = None  # that was begun last
        self._closed = False
        self.rows_out = 0
        self.missed = 0  # passes that were asked for when no more were to come
        self.hungry = False

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        spill = Spill(self._directory, self._spill_bytes) if begins.spill else None
        with self._changed:
            intake = Intake(begins, self._changed, self.buffer_bytes, spill)
            intake.discarding = self._closed
            self._intakes[begins.feed] = intake
            self._queue.append(_Pass(intake, 1))
            self._changed.notify_all()

    def describe(self, schema: FeedSchema) -> None:
        """Learn what the rows look like."""
        with self._changed:
            self._schema = schema
            self._changed.notify_all()

    def end(self, ends: FeedEnds) -> None:
        """Learn that the share is complete, and how often to go through it again."""
        with self._changed:
            intake = self._intakes[ends.feed]
            if intake.ended is not None:  # there are fewer passes than was said
                self._cut(intake, ends)
                return
            if intake.spill is not None:
                if ends.replays:
                    intake.spill.seal()
                else:  # another node could not keep its rows, so nobody replays
                    intake.spill.close()
            intake.ended = ends
            self._queue.extend(_Pass(intake, number + 2) for number in range(ends.replays))
            self._changed.notify_all()

    def _cut(self, intake: Intake, ends: FeedEnds) -> None:
        intake.ended, most = ends, 1 + ends.replays
        self._queue = deque(turn for turn in self._queue if turn.intake is not intake or turn.number <= most)
        intake.free_if_through()
        self._changed.notify_all()

    def make_room(self, message: MakeRoom) -> None:
        """Take in more of a feed than was agreed, if it has begun here."""
        with self._changed:
            intake = self._intakes.get(message.feed)
            if intake is not None:
                intake.make_room()

    def close(self) -> None:
        """Learn that no feed comes any more; the passes that wait are still given out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out nothing more and let every sender go."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            for intake in self._intakes.values():
                intake.discard()
            self._changed.notify_all()

    def intake(self, feed: int) -> Intake:
        """Return a feed's intake, waiting for the driver's word of it."""
        with self._changed:
            if not self._changed.wait_for(lambda: feed in self._intakes, _ANNOUNCED_WITHIN):
                raise FeedFailed(f"{self._node} was not told of feed {feed} within {_ANNOUNCED_WITHIN:.0f} s")
            return self._intakes[feed]

    def schema(self) -> FeedSchema | None:
        """Wait for the first row anywhere; None if no feed will come."""
        with self._changed:
            self.hungry = True
            self._changed.wait_for(lambda: self._schema is not None or self._closed)
            self.hungry = False
            return self._schema

    def next_pass(self) -> Pass | None:
        """Wait for the next pass and return its batches; None if there is none any more."""
        with self._changed:
            self.hungry = True
            self._changed.wait_for(lambda: self._queue or self._closed)
            self.hungry = False
            if not self._queue:
                self.missed += 1
                if self.rows_out:
                    logger.warning("the rows were fed for fewer passes than are asked for: this one is empty")
                return None
            turn = self._turn = self._queue.popleft()
        return Pass(self._run(turn), turn.intake.shares)

    def _run(self, turn: _Pass) -> Iterator[pa.RecordBatch]:
        intake, rows = turn.intake, 0
        source = intake.first_pass() if turn.number == 1 else _replay(intake)
        try:
            for batch in source:
                rows += batch.num_rows
                self.rows_out += batch.num_rows
                yield batch
        except GeneratorExit:
            logger.info("pass %d of feed %d was left after %d rows", turn.number, intake.feed, rows)
            if turn.number == 1:
                intake.discard()
            self._done(turn, rows)
            raise
        self._done(turn, rows)

    def _done(self, turn: _Pass, rows: int) -> None:
        with self._changed:
            turn.intake.through = turn.number
            turn.intake.free_if_through()
        self._tell(PassDone(self._node, turn.intake.feed, turn.number, rows))

    def status(self) -> FeedStatus:
        """Return what a heartbeat says of the feed."""
        with self._changed:
            intakes = self._intakes.values()
            hungry = self.hungry or any(not i.queued_bytes and i.ended is None for i in intakes)
            return FeedStatus(
                sum(i.rows_in for i in intakes), self.rows_out, sum(i.queued_bytes for i in intakes), hungry
            )


def _replay(intake: Intake) -> Iterator[pa.RecordBatch]:
    if intake.spill is None or not intake.spill.whole:
        raise FeedFailed(f"feed {intake.feed} was not kept, so it cannot be replayed")
    return intake.spill.batches()
