"""Send a partition's rows from a Spark task: ask the driver which node gets which rows, and send them in pieces."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import operator
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pyarrow as pa
from pyarrow import flight

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.door import DoorAddress, DoorClient
from tfos_nb.runtime.control.processes import address_towards, is_here
from tfos_nb.runtime.control.wire import encode
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.transfer import FeedTicket, FewerRows, NodeHungUp, NodeStream
from tfos_nb.runtime.host.malloc import memory_kept
from tfos_nb.runtime.rows.balancing import PIECE_BYTES
from tfos_nb.runtime.rows.columns import first_lengths
from tfos_nb.runtime.rows.fingerprint import KEEP_ROWS_ALIKE, Fingerprint
from tfos_nb.runtime.rows.rdd_rows import batches_of_rows, size_of
from tfos_nb.runtime.rows.spans import end_of_span, from_row, merged, next_span

__all__ = ["DESCRIBED_SCHEMA", "ELSEWHERE", "NOT_SENT", "DescribeTask", "FeedTask"]

_ENOUGH_BYTES = 4 << 20  # for one node: with smaller pieces, half of a node's work was per piece instead of per row
_MOST_BYTES = 32 << 20  # that wait, for all nodes together
_HELD_BYTES, _HELD_PART = PIECE_BYTES, 5  # the most that is held back for other hosts' nodes, and of which part of all
_WAIT = 0.1  # seconds after which waiting rows are sent: a program may be waiting for them
_DECIDED_WITHIN, _LOOKS_EVERY = 20.0, 0.1  # seconds
_SLOT_KEPT = 3.0  # seconds without a row that another host sends
_TURN_EVERY = 0.2  # seconds between two checks whether it is this attempt's turn
_FREEZING_TASKS = 2
_tasks = itertools.count(1)  # of this process
SUMMARY_SCHEMA = "partition long, rows long"
DESCRIBED_SCHEMA = "schema binary"
NOT_SENT = -1
"""Row count of a partition that was given up, because the cluster is over or its nodes start again."""
ELSEWHERE = -2
"""Row count of a partition that a task on another host must send: this host does not reach all nodes."""


@dataclass(frozen=True)
class FeedTask:
    """Function of a Spark task that sends a partition to the nodes, and yields one row: the partition and its count.

    ``DataFrame.mapInArrow`` calls it with Arrow record batches, ``RDD.mapPartitions`` with rows (``rows=True``).
    """

    feed: int
    door: DoorAddress
    rows: bool = False

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Send one partition."""
        from pyspark import TaskContext

        _spare_the_collector()
        context = TaskContext.get()
        partition, attempt = (context.partitionId(), context.taskAttemptId()) if context is not None else (0, 0)
        keeping = contextlib.nullcontext() if self.rows else memory_kept()  # an RDD's rows are made by the user's code
        with keeping, DoorClient(self.door) as door:
            batches = batches_of_rows(items) if self.rows else items
            try:
                sent = _send_partition(self, partition, attempt, batches, door)
            except FewerRows:
                raise  # Spark retries: only Spark knows whether it delivered the whole input
            except _FeedIsOver:
                sent = NOT_SENT
            except _SentElsewhere as one:
                sent = ELSEWHERE if one.rows is None else one.rows
                if one.rows is None:
                    _keep_slot(self.feed, door)
            except (NodeHungUp, flight.FlightUnavailableError, grpc.RpcError) as error:
                if _is_refused(error) or _is_wanted(self.feed, door):
                    raise
                sent = NOT_SENT  # the driver knows which node is lost: another traceback would hide its message
            except FeedFailed as error:
                door.ask(messages.PartitionFailed(self.feed, partition, str(error)))
                raise
        if self.rows:
            yield partition, sent
        else:
            yield pa.RecordBatch.from_arrays([_one(partition), _one(sent)], names=["partition", "rows"])


@dataclass(frozen=True)
class DescribeTask:
    """Function of a Spark task that yields one row: a partition's schema, and the lengths of its first row's lists.

    ``DataFrame.mapInArrow`` and ``RDD.mapPartitions`` call it, as :class:`FeedTask`.
    """

    rows: bool = False

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Look at the first rows of one partition; without rows, yield nothing."""
        for batch in batches_of_rows(items) if self.rows else items:
            if batch.num_rows:
                found = encode(messages.FeedSchema(0, batch.schema.serialize().to_pybytes(), first_lengths(batch)))
                yield (found,) if self.rows else pa.RecordBatch.from_pydict({"schema": pa.array([found], pa.binary())})
                return


def _one(number: int) -> pa.Array:
    """Return an array of one integer. Arrow's conversion of Python's numbers imports pandas, in half a second."""
    return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(number.to_bytes(8, sys.byteorder, signed=True))])


class _FeedIsOver(Exception):
    """The driver does not want the rows any more."""


class _SentElsewhere(Exception):
    """A task on another host must send the partition, or has sent it: then ``rows`` are its rows."""

    def __init__(self, rows: int | None) -> None:
        super().__init__("this host does not reach all nodes")
        self.rows = rows


def _keep_slot(feed: int, door: DoorClient) -> None:
    """Keep this slot while other hosts send rows: Spark would give it one partition after another."""
    moved: int | None = -1
    since, never = time.monotonic(), threading.Event()
    while time.monotonic() - since < _SLOT_KEPT:
        before, moved = moved, door.ask(messages.RowsMoved(feed))
        if moved is None:
            return
        if moved != before:
            since = time.monotonic()
        never.wait(_TURN_EVERY)


def _is_refused(error: Exception) -> bool:
    """Whether the driver answered, and refused the message."""
    gone = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, grpc.Call) and error.code() not in gone


def _is_wanted(feed: int, door: DoorClient) -> bool:
    """Wait for the driver's decision about a lost node; return whether the feed continues."""
    deadline, never = time.monotonic() + _DECIDED_WITHIN, threading.Event()
    try:
        while wanted := bool(door.ask(messages.StillFed(feed))):
            if time.monotonic() > deadline:
                break
            never.wait(_LOOKS_EVERY)
    except grpc.RpcError:
        return False  # the door is closed, and the cluster is over
    return wanted


def _spare_the_collector() -> None:
    """Exclude imported objects from garbage collection, which PySpark runs after every task.

    Collecting them took a quarter of a task's time. Only the first two tasks of a process do so, since the first one
    still imports some: garbage that exists at that time is never collected.
    """
    if next(_tasks) <= _FREEZING_TASKS:
        gc.freeze()


def _send_partition(
    task: FeedTask, partition: int, attempt: int, batches: Iterable[pa.RecordBatch], door: DoorClient
) -> int:
    sender: _PartitionSender | None = None
    with contextlib.ExitStack() as stack:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            if sender is None:
                sender = stack.enter_context(_PartitionSender(task, partition, attempt, batch, door))
            sender.send(batch)
        return sender.finish() if sender is not None else 0


@dataclass
class _Waiting:
    """Rows of a node that wait, because they are too few to be sent alone."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0

    def add(self, start: int, rows: pa.RecordBatch, size: int) -> None:
        """Add the rows that begin at ``start``, of ``size`` bytes."""
        self.spans.append((start, start + rows.num_rows))
        self.batches.append(rows)
        self.size += size

    def together(self) -> pa.RecordBatch:
        """Return them as one batch."""
        first, *others = self.batches
        pool = pa.system_memory_pool()  # see malloc.memory_kept
        return pa.concat_batches(self.batches, memory_pool=pool) if others else first


@dataclass
class _UnclaimedRows:
    """Rows that were read but not claimed yet, in their order."""

    parts: deque[tuple[int, pa.RecordBatch, int]] = field(default_factory=deque)  # first row, rows, bytes of a row
    rows: int = 0

    def add(self, start: int, batch: pa.RecordBatch, row_bytes: int) -> None:
        """Add the rows that begin at ``start``."""
        self.parts.append((start, batch, row_bytes))
        self.rows += batch.num_rows

    def behind(self, count: int) -> int:
        """Return the number of the row after the first ``count`` of them."""
        for start, batch, _ in self.parts:
            if count <= batch.num_rows:
                return start + count
            count -= batch.num_rows
        raise ValueError(f"{count} more rows were asked for than the {self.rows} rows in hand")

    def take(self, before: int, room: int) -> tuple[int, pa.RecordBatch, int]:
        """Return the first consecutive rows before row ``before`` that fit into ``room`` bytes; at least one row."""
        start, batch, row_bytes = self.parts.popleft()
        count = min(before - start, batch.num_rows, max(1, room // row_bytes))
        if count < batch.num_rows:
            self.parts.appendleft((start + count, batch.slice(count), row_bytes))
        self.rows -= count
        return start, batch.slice(0, count), row_bytes


def _bytes_of_a_row(batch: pa.RecordBatch) -> int:
    return 1 + int(size_of(batch)) // int(batch.num_rows)


class _RowCheck:
    """Compare rows with those that were fed before the nodes' state was saved."""

    def __init__(self, partition: int, rows: messages.KnownRows) -> None:
        self._partition = partition
        self._rows = rows
        self._fingerprint = Fingerprint()

    def compare(self, start: int, batch: pa.RecordBatch) -> None:
        """Add the rows that begin at ``start``; compare once the last row of a fingerprint has been read.

        Raises
        ------
        FeedFailed
            If the rows differ.
        """
        spans, (_, last) = self._rows.spans, self._rows.spans[-1]
        end = start + batch.num_rows
        if start >= last:
            return
        for first, behind in from_row(spans, start, end):
            self._fingerprint.add(batch.slice(first - start, behind - first))
        if end >= last and self._fingerprint.value != self._rows.fingerprint:
            raise FeedFailed(
                f"partition {self._partition} gave other rows when Spark read it again: the nodes' saved state was "
                f"trained on some of the rows before row {last}, and these differ or are in another order. "
                f"{KEEP_ROWS_ALIKE}"
            )


class _PartitionSender:
    """One attempt at one partition."""

    def __init__(self, task: FeedTask, partition: int, attempt: int, first: pa.RecordBatch, door: DoorClient) -> None:
        self._task, self._partition, self._attempt, self._door = task, partition, attempt, door
        schema = first.schema.serialize().to_pybytes()
        here = address_towards(task.door.host, task.door.port)
        answer = self._ask_places(messages.OpenPartition(task.feed, partition, schema, first_lengths(first), here))
        self._places, self._skip = answer.places, answer.skip
        self._known = [_RowCheck(partition, rows) for rows in answer.known]
        self._local = tuple(node for node, place in answer.places.items() if is_here(place.boot, place.socket))
        self._far = answer.nodes - len(self._local)
        self._only = next(iter(answer.places)) if answer.nodes == 1 else None
        self._streams: dict[str, NodeStream] = {}
        self._left: set[str] = set()  # nodes that take the rows of another attempt
        self._row = self._claimed = self._seen = 0
        self._row_bytes = 1
        self._in_hand = _UnclaimedRows()
        self._waiting: defaultdict[str, _Waiting] = defaultdict(_Waiting)
        self._waiting_bytes = 0
        self._sent_at = -math.inf  # the first batch is sent at once

    def _ask_places(self, question: messages.OpenPartition | messages.WherePlaces) -> messages.Places:
        answer: messages.Places = self._door.ask(question)
        if answer.refused:
            raise FeedFailed(answer.refused)
        if answer.nodes == 0:
            raise _FeedIsOver
        if answer.elsewhere:
            raise _SentElsewhere(answer.sent)
        return answer

    def send(self, batch: pa.RecordBatch) -> None:
        """Send a batch's rows to their nodes; pieces that are too small wait for the next batch."""
        self._row_bytes = _bytes_of_a_row(batch)
        self._read(batch)
        late = time.monotonic() - self._sent_at > _WAIT
        held = self._to_hold()
        size = (self._in_hand.rows - held) * self._row_bytes
        if late or self._only or size >= _ENOUGH_BYTES or size + self._waiting_bytes >= _MOST_BYTES:
            self._deal(held)
        if late:
            self._send_all()

    def _read(self, batch: pa.RecordBatch) -> None:
        """Take a batch's rows in hand, except those that no node wants."""
        for known in self._known:
            known.compare(self._row, batch)
        offset, there = 0, batch.num_rows
        while offset < there:
            wanted = end_of_span(self._skip, self._row)
            count = min(there - offset, wanted - self._row)
            if not count:
                count = min(there - offset, (next_span(self._skip, self._row) or self._row + there) - self._row)
                self._in_hand.add(self._row, batch.slice(offset, count), self._row_bytes)
                self._seen += count
            self._row += count
            offset += count

    def _to_hold(self) -> int:
        """Return how many rows to hold back, so that the nodes on this host may get ahead of the others.

        None are held back without other nodes, or with so many that each could get ahead by only a few rows. Of a
        partition whose rows come slowly, four fifths of the rows are sent at once.
        """
        if not 0 < self._far <= 4 * len(self._local):
            return 0
        return min(self._seen // _HELD_PART, _HELD_BYTES // self._row_bytes, self._in_hand.rows)

    def _deal(self, held: int) -> None:
        """Claim the rows in hand, except those that are held back, and queue them for their nodes."""
        count = self._in_hand.rows - held
        if count > 0:
            for before, node in self._whose(self._in_hand.behind(count), held):
                while self._in_hand.parts and self._in_hand.parts[0][0] < before:
                    self._put_by(node, before)

    def _whose(self, end: int, held: int) -> Iterable[tuple[int, str]]:
        """Claim the rows before ``end``; yield the end of each piece and its node."""
        if self._only is not None:
            return [(end, self._only)]
        fitting = max(1, PIECE_BYTES // max(row_bytes for _, _, row_bytes in self._in_hand.parts))
        start, self._claimed = self._claimed, end
        question = messages.ClaimRows(self._task.feed, self._partition, start, end - start, held, fitting, self._local)
        answer: messages.Claimed = self._door.ask(question)
        unknown = tuple(sorted(set(answer.nodes) - self._places.keys()))
        if unknown:
            self._places |= self._ask_places(messages.WherePlaces(self._task.feed, unknown)).places
        return zip(answer.ends, answer.nodes, strict=True)

    def _put_by(self, node: str, before: int) -> None:
        """Queue the rows before ``before`` for a node; send its waiting rows whenever they are enough."""
        if self._waiting[node].size + self._in_hand.parts[0][2] > PIECE_BYTES:
            self._send_all()
        waiting = self._waiting[node]
        start, rows, row_bytes = self._in_hand.take(before, PIECE_BYTES - waiting.size)
        size = rows.num_rows * row_bytes
        waiting.add(start, rows, size)
        self._waiting_bytes += size
        if waiting.size >= _ENOUGH_BYTES or self._waiting_bytes >= _MOST_BYTES:
            self._send_all()

    def _send_all(self) -> None:
        """Send the waiting rows of all nodes: a full node may wait for another one, which waits for its rows."""
        for node, waiting in self._waiting.items():
            if waiting.batches:
                rows = waiting.together()
                self._in_turn(node, rows.schema, operator.methodcaller("write", merged(waiting.spans), rows))
        self._waiting.clear()
        self._waiting_bytes, self._sent_at = 0, time.monotonic()

    def _in_turn(self, node: str, schema: pa.Schema, use: Callable[[NodeStream], Any]) -> Any:
        """Use a node's stream; wait while another of Spark's attempts has its turn.

        When that attempt completes the partition, Spark ends this one.
        """
        never = threading.Event()
        while True:
            with contextlib.suppress(flight.FlightCancelledError):
                if node in self._left:
                    self._streams[node].reopen()
                    self._left.discard(node)
                return use(self._stream(node, schema))
            if node in self._streams:
                self._left.add(node)
            if not self._door.ask(messages.StillFed(self._task.feed)):
                raise _FeedIsOver
            never.wait(_TURN_EVERY)

    def _stream(self, node: str, schema: pa.Schema) -> NodeStream:
        if node not in self._streams:
            ticket = FeedTicket(self._task.feed, self._partition, self._attempt)
            place, token = self._places[node], self._task.door.token
            self._streams[node] = NodeStream(node, place, node in self._local, token, ticket, schema)
        return self._streams[node]

    def finish(self) -> int:
        """Wait until every node has acknowledged its rows; tell the driver; return the number of rows.

        The input may have been interrupted, which cannot be seen from here: see :mod:`tfos_nb.runtime.feed.messages`.
        """
        self._deal(held=0)
        self._send_all()
        kept = [self._in_turn(node, stream.schema, NodeStream.finish) for node, stream in self._streams.items()]
        self._door.ask(messages.PartitionDone(self._task.feed, self._partition, self._row, all(kept)))
        return self._row

    def __enter__(self) -> _PartitionSender:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams.values():
            stream.close()
