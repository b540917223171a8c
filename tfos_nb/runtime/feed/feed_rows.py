"""Rows of one feed on this node: which attempt may send them, the queue in memory, and the copy on disk.

::

    Flight server ──accept──▶ FeedRows ──┬─▶ queue in memory, bounded in bytes ──▶ first pass ─┐
    (one call a partition)               └─▶ spill file on local disk ───mmap────▶ replays ────┴─▶ ctx.dataset()

The first pass is handed out as it arrives. When the queue is full, the sender waits, and gRPC's flow control makes
Spark wait. If more passes were requested, the rows are also written to an Arrow stream file. The later passes read this
file by memory map, without Spark. The file has no name, so it disappears with the process, or with the supervisor if
the node may be started again.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.wire import encode, expect, message
from tfos_nb.runtime.feed.messages import SAME_VERSION, FeedEnds, Reached
from tfos_nb.runtime.feed.pass_schedule import FeedState
from tfos_nb.runtime.feed.passes import Shares
from tfos_nb.runtime.feed.spill import Spill
from tfos_nb.runtime.rows.fingerprint import KEEP_ROWS_ALIKE
from tfos_nb.runtime.rows.spans import Spans, merged, rows_within, without

__all__ = ["FeedRows", "Superseded"]

logger = logging.getLogger(__name__)

_EXTRA, _MOST_EXTRA = 64 << 20, 1 << 30  # bytes by which the queue may grow, each time and in total
_SILENT = 300.0  # seconds without a row of the current attempt after which an earlier one may continue


@message
@dataclass(frozen=True)
class _Note:
    """Note about a batch on the disk: which rows of a partition it has, and the fingerprint up to its last row."""

    partition: int
    spans: Spans
    known: tuple[int, int]

    @property
    def reached(self) -> Reached:
        """The position at the batch's end."""
        return Reached(self.spans[-1][1], *self.known)

    def rows(self) -> list[_Span]:
        """Return the batch's rows."""
        reached = self.reached
        return [_Span(self.partition, end, end - start, reached) for start, end in self.spans]


class _Span(NamedTuple):
    """Consecutive rows of a partition that end before ``end``, and the position at the end of their batch."""

    partition: int
    end: int
    rows: int
    reached: Reached


@dataclass
class _Walk:
    """A walk through the spans of a pass: states are saved again and again, each later in it.

    ``reached`` and ``known`` are of the ``rows`` rows in the first ``spans`` spans.
    """

    spans: int = 0
    rows: int = 0
    reached: dict[int, int] = field(default_factory=dict)
    known: dict[int, Reached] = field(default_factory=dict)

    def go(self, order: Sequence[_Span], rows: int) -> list[_Span] | None:
        """Go through all spans that the first ``rows`` rows fill; return what they have of the next one.

        None if there are not so many rows.
        """
        while self.rows < rows:
            if self.spans == len(order):
                return None
            span = order[self.spans]
            if self.rows + span.rows > rows:
                had = rows - self.rows
                return [span._replace(end=span.end - (span.rows - had), rows=had)]
            self.reached[span.partition], self.known[span.partition] = span.end, span.reached
            self.spans, self.rows = self.spans + 1, self.rows + span.rows
        return []


class _Order:
    """The rows of a feed in the order in which a pass hands them out."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._ends = array("q")  # for each of them, the rows up to its end
        self._walk = _Walk()

    def add(self, spans: Iterable[_Span]) -> None:
        """Append rows."""
        for span in spans:
            self._spans.append(span)
            self._ends.append((self._ends[-1] if self._ends else 0) + span.rows)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._ends[-1] if self._ends else 0

    def reached(self, rows: int) -> tuple[dict[int, int], dict[int, Reached]] | None:
        """Return the position that the first ``rows`` rows reach in each partition; None if there are not so many."""
        if self._walk.rows > rows:
            self._walk = _Walk()
        more = self._walk.go(self._spans, rows)
        if more is None:
            return None
        reached, known = dict(self._walk.reached), dict(self._walk.known)
        for span in more:
            reached[span.partition], known[span.partition] = span.end, span.reached
        return reached, known

    def at(self, positions: Iterable[int]) -> dict[int, Spans]:
        """Return the rows at these positions, by partition."""
        found: dict[int, list[tuple[int, int]]] = {}
        for position in positions:
            place = bisect.bisect_right(self._ends, position)
            span = self._spans[place]
            row = span.end - (self._ends[place] - position)
            found.setdefault(span.partition, []).append((row, row + 1))
        return {partition: merged(rows) for partition, rows in found.items()}


@dataclass
class _Lane:
    """State of one partition's rows on this node, which come from one of Spark's attempts at a time.

    Spark may run two attempts, which need not read the rows in the same order. The later one has precedence. An earlier
    one may send only when the later one's stream has ended, or has been silent for a long time.
    """

    reached: Reached = field(default_factory=Reached)
    attempt: int = 0
    streaming: bool = False
    begun: bool = False  # whether a batch of this stream has come
    moved: float = 0.0  # monotonic time of its attempt's last message
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_for(self, attempt: int, now: float) -> bool:
        """Return whether an attempt may send the rows from now on."""
        return attempt >= self.attempt or not self.streaming or now - self.moved >= _SILENT

    def is_followed_by(self, follows: tuple[int, int]) -> bool:
        """Return whether a batch that comes after rows of this fingerprint comes after the rows that are here.

        The first batch of a stream may begin a new chain, since not all rows need to be read again.
        """
        here = self.reached.rows, self.reached.fingerprint
        return follows == here or (not self.begun and follows == (0, 0))


class FeedRows:
    """The rows of one feed on this node.

    Parameters
    ----------
    state : FeedState
        The schedule's state of the feed. It is only read here, under the lock of ``changed``.
    changed : threading.Condition
        The queue's one condition; all waiting here uses it.
    limit : int
        Bytes that may wait in memory.
    spill : Spill or None
        Where the rows are kept for replays. If the feed was delivered to an earlier process of the node, they are
        there already.
    """

    def __init__(self, state: FeedState, changed: threading.Condition, limit: int, spill: Spill | None) -> None:
        self.feed = state.begins.feed
        self.spill = spill
        self.rows_in = 0
        self.queued_bytes = 0
        self._state = state
        self._discarding = False
        self._changed = changed
        self._turn = threading.Lock()  # one sender at a time, so that a replay has the same order as the first pass
        self._limit = limit
        self._extra = 0
        self._queue: deque[pa.RecordBatch] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._order = _Order()
        self._again = again = state.begins.again
        self._held = again.held if again is not None else {}
        self._rest = _Order() if self._held else self._order  # of the first pass
        self._is_here = again is not None and again.kept
        if self._is_here and spill is not None:
            self._take_up(spill)

    def _take_up(self, spill: Spill) -> None:
        """Learn from the notes of the process before which rows these are."""
        for note in spill.notes():
            noted = expect(_Note, note)
            self._order.add(noted.rows())
            self._lanes[noted.partition] = _Lane(noted.reached)
        self.rows_in = self._order.rows

    @property
    def validates(self) -> bool:
        """Whether they are validation rows."""
        return self._state.begins.validates

    @property
    def ended(self) -> FeedEnds | None:
        """The driver's message at the end of the share, or None before it."""
        return self._state.ended

    def lane(self, partition: int) -> _Lane:
        """Return the state of a partition."""
        with self._changed:
            return self._lanes.setdefault(partition, _Lane())

    def open(self, partition: int, attempt: int) -> _Lane:
        """Take a partition's rows of this attempt from now on, until :meth:`leave` or a later one comes.

        Raises
        ------
        Superseded
            If a later attempt has its turn.
        """
        lane = self.lane(partition)
        with lane.lock:
            now = time.monotonic()
            if not lane.is_for(attempt, now):
                raise _superseded(partition, attempt, lane.attempt)
            lane.attempt, lane.streaming, lane.begun, lane.moved = attempt, True, False, now
        return lane

    def leave(self, partition: int, attempt: int) -> None:
        """Record that an attempt's stream has ended."""
        lane = self.lane(partition)
        with lane.lock:
            if lane.attempt == attempt:
                lane.streaming = False

    def accept(
        self,
        partition: int,
        spans: Spans,
        batch: pa.RecordBatch,
        *,
        attempt: int = 0,
        follows: tuple[int, int] | None = None,
        known: tuple[int, int] = (0, 0),
    ) -> None:
        """Take these rows of a partition.

        Blocks while the queue is full. ``follows`` and ``known`` are the attempt's fingerprints before and behind these
        rows, each after the number of rows that it covers. Without ``follows`` they are not compared.

        Raises
        ------
        FeedFailed
            If the row numbers are impossible, differ from the number of rows that came, or were received before, or if
            ``follows`` is not the fingerprint of the rows that are here.
        Superseded
            If another attempt sends the partition now.
        """
        if partition < 0 or spans != merged(spans) or not spans or spans[0][0] < 0:
            raise FeedFailed(
                f"row numbers of partition {partition} must be 0 or more and ascend, got {spans}. {SAME_VERSION}"
            )
        if rows_within(spans, 0, spans[-1][1]) != batch.num_rows:
            raise FeedFailed(
                f"rows {spans} of partition {partition} were announced, and {batch.num_rows} came. {SAME_VERSION}"
            )
        if self._is_here:
            raise FeedFailed(
                f"rows {spans} of partition {partition} came, and this node has kept its {self.rows_in} rows: there "
                f"are more than before. {KEEP_ROWS_ALIKE}"
            )
        lane = self.lane(partition)
        with lane.lock:
            if attempt != lane.attempt:
                raise _superseded(partition, attempt, lane.attempt)
            if spans[0][0] < lane.reached.row:
                raise FeedFailed(
                    f"rows {spans} of partition {partition} came again: those before {lane.reached.row} are here. "
                    f"{SAME_VERSION}"
                )
            if follows is not None and not lane.is_followed_by(follows):
                raise FeedFailed(
                    f"rows {spans} of partition {partition} do not follow the {lane.reached.rows} rows that are here: "
                    f"their attempt has read other rows before them. {KEEP_ROWS_ALIKE}"
                )
            lane.begun = True
            note = _Note(partition, spans, known)
            self._put(note, batch)
            lane.reached, lane.moved = note.reached, time.monotonic()

    def _put(self, note: _Note, batch: pa.RecordBatch) -> None:
        size, spans = batch.nbytes, note.rows()
        with self._turn:
            self._await_room(size)
            if self.spill is not None:
                self.spill.write(batch, encode(note))
            with self._changed:
                self._order.add(spans)
                self.rows_in += batch.num_rows
                for part in self._parts_of_rest(spans, batch) if self._held else [batch]:
                    if not self._discarding:
                        self._queue.append(part)
                        self.queued_bytes += part.nbytes
                self._changed.notify_all()

    def _parts_of_rest(self, spans: Iterable[_Span], batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield a batch's rows without those that the restored state includes, which only later passes read."""
        first = 0  # row of the batch
        for span in spans:
            start = span.end - span.rows
            for begin, end in without(((start, span.end),), self._held.get(span.partition, ())):
                self._rest.add([span._replace(end=end, rows=end - begin)])
                yield batch.slice(first + begin - start, end - begin)
            first += span.rows

    def _await_room(self, size: int) -> None:
        with self._changed:
            while self._queue and self.queued_bytes + size > self._limit + self._extra and not self._discarding:
                self._changed.wait()

    def make_room(self) -> None:
        """Let more rows wait in memory: another node waits for rows that their task can send only after them."""
        with self._changed:
            if not self._extra:
                logger.warning("more rows wait here than buffer_bytes allows: another node waits for rows after them")
            if self._extra < _MOST_EXTRA:
                self._extra += _EXTRA
            self._changed.notify_all()

    def discard(self) -> None:
        """Drop the rest of the first pass, both waiting rows and those still to come; the spill continues."""
        with self._changed:
            self._discarding = True
            self._queue.clear()
            self.queued_bytes = 0
            self._changed.notify_all()

    def seal(self) -> None:
        """End the file on disk: all rows are in it."""
        if self.spill is not None:
            self.spill.seal()

    def free(self) -> None:
        """Release the disk space; a running replay keeps its own handle of the file."""
        if self.spill is not None:
            self.spill.close()

    def forget_order(self) -> None:
        """Forget the order of the rows, and drop any that still come: the program is past this feed."""
        self.discard()
        with self._changed:
            self._order, self._rest = _Order(), _Order()
            self._lanes.clear()

    @property
    def lacks_held(self) -> bool:
        """Whether the first pass is the rest of one: without the rows that the restored state includes."""
        return bool(self._held)

    def reached(self, rows: int, *, rest: bool = False) -> tuple[dict[int, int], dict[int, Reached]]:
        """Return the position that the first ``rows`` rows of a pass reach in each partition: the row after the last.

        The second dictionary has the fingerprint at the end of the batch that the last of them came in. ``rest``: the
        pass is one of the rows that :attr:`lacks_held` tells of.

        Raises
        ------
        ValueError
            If fewer rows have come.
        """
        with self._changed:
            order = self._rest if rest else self._order
            found = order.reached(rows)
            if found is None:
                raise ValueError(f"rows must be at most the {order.rows} that have come in this pass, got {rows}")
            return found

    def rows_at(self, positions: Iterable[int], *, rest: bool = False) -> dict[int, Spans]:
        """Return by partition the rows at these positions of a pass, which must have come."""
        with self._changed:
            return (self._rest if rest else self._order).at(positions)

    def first_pass(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as they come, until the driver says that the share is complete."""
        if self._is_here:
            yield from self.replay()
            return
        rows = 0
        while (batch := self._take()) is not None:
            rows += batch.num_rows
            yield batch
        if self.ended is not None and not self._discarding and not self.is_whole(rows):
            raise FeedFailed(f"{rows} rows came in feed {self.feed}, but {self.ended.rows} were sent: train again")

    def is_whole(self, rows: int) -> bool:
        """Whether a first pass of so many rows had all of them: otherwise some were dropped, or will come."""
        held = self._again.position.rows if self._again is not None and self._held else 0
        counted = self.ended or self._again
        return counted is not None and rows + held == counted.rows

    def replay(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows once more, from disk.

        Raises
        ------
        FeedFailed
            If they were not kept.
        """
        if self.spill is None or not self.spill.whole:
            raise FeedFailed(
                f"the rows of feed {self.feed} were not kept on disk, so they cannot be replayed: free space there, or "
                "raise spill_bytes"
            )
        return self.spill.batches()

    def shares(self) -> Shares | None:
        """Return the row counts of all nodes in a pass; None until the driver has sent them."""
        ended = self.ended or self._again
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
    """Another of Spark's attempts sends the partition."""


def _superseded(partition: int, attempt: int, by: int) -> Superseded:
    return Superseded(f"attempt {by} sends the rows of partition {partition}; attempt {attempt} must wait")
