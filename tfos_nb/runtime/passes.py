"""A node's share of the rows, and the passes over it.

::

    Flight server ──accept──▶ Intake ──┬─▶ queue in memory, bounded in bytes ──▶ first pass ─┐
    (one call a partition)             └─▶ spill file on local disk ───mmap────▶ replays ────┴─▶ ctx.dataset()

One :class:`Intake` holds one feed. The first pass is given out as it comes in; when the queue is full, the sender
waits,
and gRPC's flow control makes Spark wait. If more passes were asked for, the rows are also written to an Arrow stream
file, which the later passes read by memory map: Spark is not asked again. The file has no name, so nothing of it stays
behind, however the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.ledger import FeedBegins, FeedEnds, FeedFrom, FeedSchema, PassDone
from tfos_nb.runtime.reports import FeedStatus

__all__ = ["Intake", "Passes", "Spill", "Tell"]

Tell = Callable[[PassDone | FeedFrom], object]

logger = logging.getLogger(__name__)

_ANNOUNCED_WITHIN = 60.0  # seconds between a feed's first row and the driver's word of it, by another way


class Spill:
    """An Arrow stream on local disk, written once and read by memory map as often as wanted.

    Parameters
    ----------
    directory : str
        Where to write.
    limit : int
        The most bytes to write; beyond it the spill gives up, and :attr:`whole` is False.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self._fd, path = tempfile.mkstemp(prefix="tfos_nb-spill-", dir=directory)
        self._path = f"/proc/self/fd/{self._fd}"
        if os.path.exists(self._path):
            os.unlink(path)
        else:  # no /proc: the name has to stay until close
            self._path = path
        self._limit = limit
        self._lock = threading.Lock()
        self._sink: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._sealed = False
        self.bytes = 0
        self.whole = True

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch; a full disk ends the spill, not the training."""
        with self._lock:
            if not self.whole or self._sealed:
                return
            try:
                self._append(batch)
            except OSError as error:
                self._give_up(f"the disk took no more: {error}")

    def _append(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(self._path, mode="wb")
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
        self._writer.write_batch(batch)
        self.bytes += batch.nbytes
        if self.bytes > self._limit:
            self._give_up(f"more than spill_bytes={self._limit}")

    def _give_up(self, reason: str) -> None:
        logger.warning("rows are not kept for the later epochs (%s): Spark will be asked again", reason)
        self.whole = False
        self._end_writing()
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)

    def _end_writing(self) -> None:
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()
            if self._sink is not None:
                self._sink.close()
        self._writer = self._sink = None

    def seal(self) -> None:
        """End the file; from now on it is only read."""
        with self._lock:
            self._sealed = True
            self._end_writing()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all, without a copy.

        The memory may be written to, and the file stays as it is: TensorFlow takes a tensor that only one operation
        still needs for that operation's result, so it writes into what it was given to read.
        """
        if self.bytes:
            with open(self._path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            yield from pa.ipc.open_stream(pa.py_buffer(mapped))  # each buffer keeps the mapping

    def close(self) -> None:
        """Give the disk space back."""
        self.seal()
        fd, self._fd = self._fd, -1  # once: the number may be somebody else's by then
        with contextlib.suppress(OSError):
            os.close(fd)
            if not self._path.startswith("/proc/"):
                os.unlink(self._path)


@dataclass
class _Lane:
    """How far this node has come in one partition: the next row, and the fingerprint of the one before it.

    The pair is replaced as one, since another attempt may read it at any time.
    """

    reached: tuple[int, int] = (0, 0)
    lock: threading.Lock = field(default_factory=threading.Lock)


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
        self._changed = changed
        self._turn = threading.Lock()  # one sender at a time: a replay has the rows in the first pass' order
        self._limit = limit
        self._queue: deque[pa.RecordBatch] = deque()
        self._lanes: dict[int, _Lane] = {}

    def lane(self, partition: int) -> _Lane:
        """Return the place of a partition."""
        with self._changed:
            return self._lanes.setdefault(partition, _Lane())

    def accept(self, partition: int, start: int, fingerprint: int, batch: pa.RecordBatch) -> None:
        """Take rows ``start …`` of a partition, but for those that have been taken before.

        Blocks while the queue is full. ``fingerprint`` is that of the last row.

        Raises
        ------
        FeedFailed
            If a partition has no such rows.
        """
        if partition < 0 or start < 0:
            raise FeedFailed(f"there is no row {start} of partition {partition}")
        lane = self.lane(partition)
        end = start + batch.num_rows
        with lane.lock:
            row, _ = lane.reached
            if end <= row:
                return
            if start < row:
                batch = batch.slice(row - start)
            self._put(batch)
            lane.reached = (end, fingerprint)

    def _put(self, batch: pa.RecordBatch) -> None:
        size = batch.nbytes
        with self._turn:
            self._await_room(size)
            if self.spill is not None:
                self.spill.write(batch)
            with self._changed:
                self.rows_in += batch.num_rows
                if not self.discarding:
                    self._queue.append(batch)
                    self.queued_bytes += size
                self._changed.notify_all()

    def _await_room(self, size: int) -> None:
        with self._changed:
            while self._queue and self.queued_bytes + size > self._limit and not self.discarding:
                self._changed.wait()

    def discard(self) -> None:
        """Want no more of the first pass: what waits and what still comes is dropped (the spill goes on)."""
        with self._changed:
            self.discarding = True
            self._queue.clear()
            self.queued_bytes = 0
            self._changed.notify_all()

    def first_pass(self) -> Iterator[pa.RecordBatch]:
        """Give out the rows as they come, until the driver says that the share is complete."""
        rows = 0
        while (batch := self._take()) is not None:
            rows += batch.num_rows
            yield batch
        if self.ended is not None and not self.discarding and rows != self.ended.rows:
            raise FeedFailed(f"{rows} rows came in feed {self.feed}, but {self.ended.rows} were sent")

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


@dataclass(frozen=True)
class _Pass:
    intake: Intake
    number: int
    last: bool


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
            self._queue.append(_Pass(intake, 1, last=False))
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
            if intake.spill is not None:
                if ends.replays:
                    intake.spill.seal()
                else:  # another node could not keep its rows, so nobody replays
                    intake.spill.close()
            intake.ended = ends
            for number in range(ends.replays):
                self._queue.append(_Pass(intake, number + 2, last=number + 1 == ends.replays))
            self._changed.notify_all()

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

    def next_pass(self) -> Iterator[pa.RecordBatch] | None:
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
            turn = self._queue.popleft()
        return self._run(turn)

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
        if turn.last and turn.intake.spill is not None:
            turn.intake.spill.close()
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
