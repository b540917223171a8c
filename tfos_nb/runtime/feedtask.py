"""What a Spark task does with a partition: ask where its rows belong, and send them there, some segments at once."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pyarrow as pa
from pyarrow import flight

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime import ledger
from tfos_nb.runtime.columns import first_lengths
from tfos_nb.runtime.door import DoorAddress, DoorClient
from tfos_nb.runtime.feed import FeedTicket, FewerRows, NodeHungUp, NodeStream
from tfos_nb.runtime.malloc import memory_kept
from tfos_nb.runtime.process import address_towards
from tfos_nb.runtime.rows import batches_of_rows, size_of
from tfos_nb.runtime.segments import PIECE_BYTES, Segments
from tfos_nb.runtime.spans import end_of_span, merged, next_span

__all__ = ["NOT_SENT", "FeedTask"]

_CLAIMED_AHEAD = 16
_ENOUGH_BYTES = 4 << 20  # for one node: half of its work was by the piece, not by the row, with smaller ones
_MOST_BYTES = 32 << 20  # that wait, for all nodes together
_WAIT = 0.1  # seconds since rows were sent last: a program may be waiting for those that have come since
_DECIDED_WITHIN, _LOOKS_EVERY = 20.0, 0.1  # seconds
SUMMARY_SCHEMA = "partition long, rows long"
NOT_SENT = -1
"""The rows of a partition that was given up: the cluster is over, or its members are gathered anew."""


@dataclass(frozen=True)
class FeedTask:
    """What a Spark task does with a partition: send it to the nodes. Yields one row: the partition and its row count.

    Called with Arrow record batches by ``DataFrame.mapInArrow``, with rows by ``RDD.mapPartitions`` (``rows=True``).
    """

    feed: int
    door: DoorAddress
    rows: bool = False

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Send one partition."""
        from pyspark import TaskContext

        _spare_the_collector()
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        keeping = contextlib.nullcontext() if self.rows else memory_kept()  # what makes rows is the user's own Python
        with keeping, DoorClient(self.door) as door:
            batches = batches_of_rows(items) if self.rows else items
            try:
                sent = _send_partition(self, partition, batches, door)
            except FewerRows:
                raise  # Spark tries again: it knows whether it gave all there is
            except _FeedIsOver:
                sent = NOT_SENT
            except (NodeHungUp, flight.FlightUnavailableError, grpc.RpcError) as error:
                if _is_refused(error) or _is_wanted(self.feed, door):
                    raise
                sent = NOT_SENT  # the driver knows which node has gone: another traceback would bury what it says
            except FeedFailed as error:
                door.ask(ledger.PartitionFailed(self.feed, partition, str(error)))
                raise
        if self.rows:
            yield partition, sent
        else:
            yield pa.RecordBatch.from_pydict(
                {"partition": pa.array([partition], pa.int64()), "rows": pa.array([sent], pa.int64())}
            )


class _FeedIsOver(Exception):
    """The driver has no use for the rows any more."""


def _is_refused(error: Exception) -> bool:
    """Whether the driver is there, and does not take what it was told."""
    gone = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call) and error.code() not in gone


def _is_wanted(feed: int, door: DoorClient) -> bool:
    """Wait for what the driver makes of a node that is gone; whether the feed is to go on all the same."""
    deadline, never = time.monotonic() + _DECIDED_WITHIN, threading.Event()
    try:
        while wanted := bool(door.ask(ledger.StillFed(feed))):
            if time.monotonic() > deadline:
                break
            never.wait(_LOOKS_EVERY)
    except grpc.RpcError:
        return False  # the door is closed, and the cluster is over
    return wanted


@functools.cache
def _spare_the_collector() -> None:
    """Have the garbage collector pass over what was imported: PySpark calls it after every task.

    That took a quarter of the time of a task. Once a process, since what is garbage now is never looked at again.
    """
    gc.freeze()


def _send_partition(task: FeedTask, partition: int, batches: Iterable[pa.RecordBatch], door: DoorClient) -> int:
    sender: _PartitionSender | None = None
    with contextlib.ExitStack() as stack:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            if sender is None:
                sender = stack.enter_context(_PartitionSender(task, partition, batch, door))
            sender.send(batch)
        return sender.finish() if sender is not None else 0


@dataclass
class _Waiting:
    """Rows of a node that are too few yet to be sent on their own."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0

    def add(self, start: int, rows: pa.RecordBatch, size: int) -> None:
        """Take the rows from ``start`` on, of so many bytes."""
        self.spans.append((start, start + rows.num_rows))
        self.batches.append(rows)
        self.size += size

    def together(self) -> pa.RecordBatch:
        """Return them as one."""
        first, *others = self.batches
        pool = pa.system_memory_pool()  # see malloc.memory_kept
        return pa.concat_batches(self.batches, memory_pool=pool) if others else first


def _bytes_of_a_row(batch: pa.RecordBatch) -> int:
    return 1 + int(size_of(batch)) // int(batch.num_rows)


class _PartitionSender:
    """One attempt at one partition."""

    def __init__(self, task: FeedTask, partition: int, first: pa.RecordBatch, door: DoorClient) -> None:
        self._task, self._partition, self._door = task, partition, door
        schema = first.schema.serialize().to_pybytes()
        here = address_towards(task.door.host, task.door.port)
        self._row_bytes = _bytes_of_a_row(first)
        opens = ledger.OpenPartition(task.feed, partition, schema, first_lengths(first), here, self._row_bytes)
        answer = self._ask_places(opens)
        if answer.nodes == 0:
            raise _FeedIsOver
        self._places, self._skip, self._segments = answer.places, answer.skip, Segments(answer.largest)
        self._local = tuple(node for node, place in answer.places.items() if os.path.exists(place.socket))
        self._only = next(iter(answer.places)) if answer.nodes == 1 else None
        self._streams: dict[str, NodeStream] = {}
        self._row = 0
        self._segment_end = 0
        self._ahead: deque[str] = deque()
        self._node = ""
        self._waiting: defaultdict[str, _Waiting] = defaultdict(_Waiting)
        self._waiting_bytes = 0
        self._sent_at = -math.inf  # the first batch goes at once

    def _ask_places(self, question: ledger.OpenPartition | ledger.WherePlaces) -> ledger.Places:
        answer: ledger.Places = self._door.ask(question)
        if answer.refused:
            raise FeedFailed(answer.refused)
        return answer

    def send(self, batch: pa.RecordBatch) -> None:
        """Send a batch's rows to their nodes; what is too little to be sent on its own waits for the next batch."""
        self._row_bytes = _bytes_of_a_row(batch)
        offset = 0
        while offset < batch.num_rows:
            if skipped := self._skip_rows(batch.num_rows - offset):
                offset += skipped
                continue
            if self._row >= self._segment_end:
                self._begin_segment()
            count = min(batch.num_rows - offset, self._fitting())
            self._put_by(batch.slice(offset, count))
            offset += count
        if time.monotonic() - self._sent_at > _WAIT:
            self._send_all()

    def _skip_rows(self, there: int) -> int:
        """Pass over rows that no node wants; return how many of those that are there."""
        count = min(there, end_of_span(self._skip, self._row) - self._row)
        if count:
            self._row += count
            self._segment_end = 0  # of a segment in which the next row lies, perhaps not as the first
            self._ahead.clear()
        return count

    def _fitting(self) -> int:
        """Return how many rows more can go with those of the segment's node that wait; they go if that is none."""
        if self._waiting[self._node].size + self._row_bytes > PIECE_BYTES:
            self._send_all()
        room = PIECE_BYTES - self._waiting[self._node].size
        until = min(self._segment_end, next_span(self._skip, self._row) or self._segment_end)
        return min(until - self._row, max(1, room // self._row_bytes))

    def _begin_segment(self) -> None:
        if self._only is not None:
            self._node, self._segment_end = self._only, sys.maxsize
        else:
            self._node, self._segment_end = self._next_node(), self._segments.end(self._row)

    def _put_by(self, rows: pa.RecordBatch) -> None:
        """Take rows of the segment that go on where the last ones ended; send what waits if it is enough now."""
        waiting, size = self._waiting[self._node], rows.num_rows * self._row_bytes
        waiting.add(self._row, rows, size)
        self._row += rows.num_rows
        self._waiting_bytes += size
        if waiting.size >= _ENOUGH_BYTES or self._waiting_bytes >= _MOST_BYTES:
            self._send_all()

    def _send_all(self) -> None:
        """Send what waits, of all nodes: one that is full may be waiting for another, which waits for its rows."""
        for node, waiting in self._waiting.items():
            if waiting.batches:
                rows = waiting.together()
                self._stream(node, rows.schema).write(merged(waiting.spans), rows)
        self._waiting.clear()
        self._waiting_bytes, self._sent_at = 0, time.monotonic()

    def _next_node(self) -> str:
        """Return the next segment's node; the door is asked for those of some segments at once."""
        if not self._ahead:
            start = self._segments.start(self._row)
            claim = ledger.ClaimSegments(self._task.feed, self._partition, start, _CLAIMED_AHEAD, self._local)
            self._ahead.extend(self._door.ask(claim))
            unknown = tuple(sorted(set(self._ahead) - self._places.keys()))
            if unknown:
                self._places |= self._ask_places(ledger.WherePlaces(self._task.feed, unknown)).places
        return self._ahead.popleft()

    def _stream(self, node: str, schema: pa.Schema) -> NodeStream:
        if node not in self._streams:
            ticket = FeedTicket(self._task.feed, self._partition)
            place, token = self._places[node], self._task.door.token
            self._streams[node] = NodeStream(node, place, node in self._local, token, ticket, schema)
        return self._streams[node]

    def finish(self) -> int:
        """Wait until every node has acknowledged its rows; tell the driver; return how many rows there were.

        The input may have been broken off, which cannot be seen from here: see :mod:`tfos_nb.runtime.ledger`.
        """
        self._send_all()
        spilled = all([stream.finish() for stream in self._streams.values()])  # noqa: C419 - every one has to
        self._door.ask(ledger.PartitionDone(self._task.feed, self._partition, self._row, spilled))
        return self._row

    def __enter__(self) -> _PartitionSender:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams.values():
            stream.close()
