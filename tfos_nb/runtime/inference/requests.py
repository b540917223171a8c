"""Queues of a node for inference: rows that wait for ``main``, and results that wait to be sent.

A :class:`Stream` is one attempt at one partition. :mod:`tfos_nb.runtime.inference.serving` receives its rows and sends
its results. A :class:`RequestQueue` has the streams of one named queue. Results belong to the rows that ``main`` took
first and that have no results yet, which are called owed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.inference.answers import Answers
from tfos_nb.runtime.rows.batches import take_rows
from tfos_nb.runtime.rows.columns import first_lengths

__all__ = ["Piece", "RequestQueue", "Stream"]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one stream that ``main`` has taken."""

    stream: Stream
    rows: pa.RecordBatch


class Stream:
    """One attempt at one partition, on the node. All attributes are guarded by the queue's condition.

    Parameters
    ----------
    partition : int
        Number of the partition.
    schema : pyarrow.Schema or None
        Schema of the results. None: results are encoded.
    changed : threading.Condition
        Condition of the queue.
    limit : int
        Maximum bytes of rows and results that wait in the stream.
    """

    def __init__(self, partition: int, schema: pa.Schema | None, changed: threading.Condition, limit: int) -> None:
        self.partition = partition
        self.schema = schema
        self.lengths: dict[str, tuple[int, ...]] = {}
        self.ended = False  # the task has sent all rows
        self.gone = False  # the task has closed the connection
        self.full = False  # a block of the task does not fit
        self.failure = ""  # why there will be no more results
        self.cause_known = True  # False: only the driver knows the cause of the failure
        self.waiting = 0  # rows that main has not taken
        self.owed = 0  # rows that main has taken and not answered
        self.answers: deque[tuple[int, pa.RecordBatch]] = deque()
        self._changed = changed
        self._limit = limit
        self._row_bytes = self._answer_bytes = 0
        self._blocks: deque[pa.RecordBatch] = deque()

    def put(self, block: pa.RecordBatch) -> None:
        """Add a block of rows from the task. Waits until it fits; a block that is larger than the limit fits alone."""
        with self._changed:
            if not self.lengths:
                self.lengths = first_lengths(block)
            while self._is_too_much(block.nbytes) and not self.failure:
                self.full = True
                self._changed.notify_all()
                self._changed.wait()
            self.full = False
            if not self.failure and block.num_rows:
                self._blocks.append(block)
                self._row_bytes += block.nbytes
                self.waiting += block.num_rows
                self._changed.notify_all()

    def _is_too_much(self, more: int) -> bool:
        held = self._row_bytes + self._answer_bytes
        return bool(held) and held + more > self._limit

    def end(self, gone: bool = False) -> None:
        """Mark the stream as ended: the task has sent all rows, or with ``gone`` has closed the connection."""
        with self._changed:
            self.ended = True
            if gone:
                self.gone, self.waiting = True, 0
                self._blocks.clear()
                self.answers.clear()
            self._changed.notify_all()

    def is_ready(self, count: int) -> bool:
        """Return whether ``count`` rows can be taken now, or fewer if waiting would not bring more."""
        return bool(self.waiting) and (self.waiting >= count or self.ended or self.full)

    @property
    def settled(self) -> bool:
        """Whether no more rows will arrive before main takes those that wait."""
        return self.ended or self.full

    @property
    def drained(self) -> bool:
        """Whether the stream has ended and main has taken all its rows."""
        return self.ended and not self.waiting

    def cut(self, count: int) -> Piece:
        """Take the next rows, at most ``count``."""
        piece = Piece(self, take_rows(self._blocks, min(count, self.waiting)))
        self.waiting -= piece.rows.num_rows
        self.owed += piece.rows.num_rows
        self._row_bytes = sum(block.nbytes for block in self._blocks)
        return piece

    def answer(self, rows: int, results: pa.RecordBatch) -> None:
        """Add the results of the ``rows`` owed rows that were taken first."""
        self.owed -= rows
        if not self.gone and not self.failure:
            self.answers.append((rows, results))
            self._answer_bytes += results.nbytes

    def next_answer(self) -> tuple[int, pa.RecordBatch] | None:
        """Take the next results to send, with their number; None if there are none yet."""
        if not self.answers:
            return None
        rows, results = self.answers.popleft()
        self._answer_bytes -= results.nbytes
        self._changed.notify_all()
        return rows, results

    @property
    def complete(self) -> bool:
        """Whether every row has been answered, and every result has been taken for sending."""
        return self.ended and not self.waiting and not self.owed and not self.answers


class RequestQueue:
    """Streams of one named queue, from which ``main`` takes rows and to which it returns results.

    Parameters
    ----------
    node, name : str
        Names of the node and of the queue.
    limit : int
        Maximum bytes that wait in each stream.
    """

    def __init__(self, node: str, name: str, limit: int) -> None:
        self.name = name
        self._node = node
        self._limit = limit
        self._changed = threading.Condition()
        self._streams: list[Stream] = []
        self._owed: deque[tuple[Stream, int]] = deque()
        self._closed = False
        self._broken = ""
        self._moved = 0
        self._asked = False
        self._stalled = (-1, "")
        self._cause_known = True

    # --- main's side ---

    def take(self, count: int, *, across: bool = False, strict: bool = True, ahead: bool = False) -> list[Piece] | None:
        """Wait for rows and take at most ``count``; fewer only at the end of a partition, or if its buffer is full.

        Parameters
        ----------
        count : int
            Maximum number of rows.
        across : bool
            Whether the rows may come from several partitions.
        strict : bool
            Whether all rows taken before must have results.
        ahead : bool
            If not ``strict``: whether even the rows of a partition that has ended may lack results. A program that
            takes rows in one thread and answers in another needs this.

        Returns
        -------
        list of Piece or None
            None at the end of the queue.

        Raises
        ------
        FeedFailed
            If rows taken before have no results.
        """
        with self._changed:
            self._asked = True
            while True:
                self._refuse_owing(strict, ahead)
                pieces = self._ready(count, across)
                if pieces:
                    self._moved += 1
                    self._owed.extend((piece.stream, piece.rows.num_rows) for piece in pieces)
                    self._changed.notify_all()
                    return pieces
                if self._over():
                    return None
                self._changed.wait()

    def _over(self) -> bool:
        return bool(self._broken) or (self._closed and all(stream.drained for stream in self._streams))

    def _ready(self, count: int, across: bool) -> list[Piece]:
        if not across:
            ready = next((stream for stream in self._streams if stream.is_ready(count)), None)
            return [ready.cut(count)] if ready is not None else []
        waiting = sum(stream.waiting for stream in self._streams)
        if not waiting or (waiting < count and not all(stream.settled for stream in self._streams)):
            return []
        pieces, left = [], count
        for stream in self._streams:
            if stream.waiting and left:
                pieces.append(stream.cut(left))
                left -= pieces[-1].rows.num_rows
        return pieces

    def _refuse_owing(self, strict: bool, ahead: bool) -> None:
        for stream, rows in self._owed:
            if strict or (stream.drained and not stream.gone and not ahead):
                text = (
                    f"{self._node}: main asks for more rows, but {rows} of partition {stream.partition} have no "
                    "result: return one result for each row first"
                )
                self._break(text)
                raise FeedFailed(text)

    def answer(self, results: Any) -> None:
        """Add results of the owed rows that were taken first.

        Raises
        ------
        FeedFailed
            If there are more results than owed rows, or they do not fit the schema. All streams then fail.
        """
        try:
            self._answer(Answers(results))
        except FeedFailed as error:
            text = f"{self._node}: {error}"
            self.stop(text)
            raise FeedFailed(text) from None

    def _answer(self, given: Answers) -> None:
        with self._changed:
            parts = self._shared_out(given.count)
        start = 0
        for stream, rows in parts:
            batch = given.cut(start, rows, stream.schema)
            with self._changed:
                stream.answer(rows, batch)
                self._moved += 1
                self._changed.notify_all()
            start += rows

    def _shared_out(self, count: int) -> list[tuple[Stream, int]]:
        """Remove the next ``count`` owed rows, and return how many belong to which stream."""
        owed = sum(rows for _, rows in self._owed)
        if count > owed:
            places = sorted({stream.partition for stream, _ in self._owed})
            of = f" of partition {', '.join(map(str, places))}" if places else ""
            raise FeedFailed(
                f"main must return one result for each row, got {count} results for {owed} rows{of}: reply to each "
                "batch once"
            )
        parts = []
        while count:
            stream, rows = self._owed.popleft()
            taken = min(rows, count)
            if taken < rows:
                self._owed.appendleft((stream, rows - taken))
            parts.append((stream, taken))
            count -= taken
        return parts

    # --- the wire's side ---

    def open(self, partition: int, schema: pa.Schema | None, timeout: float) -> Stream:
        """Add and return a new stream. If the queue has failed or is closed, the stream has its failure already.

        Parameters
        ----------
        partition : int
            Number of the partition.
        schema : pyarrow.Schema or None
            Schema of the results.
        timeout : float
            Seconds for which rows may wait without progress; see :meth:`await_answer`.

        Raises
        ------
        FeedFailed
            If ``timeout`` is not positive. Such a stream would time out at once, and so would all later ones.
        """
        if not timeout > 0:
            raise FeedFailed(f"timeout must be a positive number of seconds, got {timeout:g}")
        with self._changed:
            stream = Stream(partition, schema, self._changed, self._limit)
            over = f"{self._node} accepts no more rows, because the driver has ended the feeds" if self._closed else ""
            # Spark repeats a failed task. If main has made no progress since a timeout, do not wait again.
            stream.failure = self._broken or over or (self._stalled[1] if self._stalled[0] == self._moved else "")
            stream.cause_known = self._cause_known or not self._broken
            if not stream.failure:
                self._streams.append(stream)
            return stream

    def leave(self, stream: Stream) -> None:
        """Remove a stream that has ended."""
        with self._changed:
            if stream in self._streams:
                self._streams.remove(stream)
            self._changed.notify_all()

    def await_answer(self, stream: Stream, timeout: float) -> tuple[int, pa.RecordBatch] | None:
        """Wait for results of a stream, and return them with their number.

        Return None at the end of the stream, or if ``stream.failure`` is set. It is set if ``main`` neither takes nor
        answers any row of the queue for ``timeout`` seconds, while rows of this stream wait.
        """
        with self._changed:
            mark, since = self._moved, time.monotonic()
            while not stream.failure and not stream.gone and not stream.complete:
                answer = stream.next_answer()
                if answer is not None:
                    return answer
                if self._moved != mark or not (stream.waiting or stream.owed):
                    mark, since = self._moved, time.monotonic()
                left = since + timeout - time.monotonic()
                if left <= 0:
                    self._stalled = (self._moved, self._stall(stream, timeout))
                    self._fail([stream], self._stalled[1])
                self._changed.wait(min(max(left, 0.0), 60.0))
            return None

    def _stall(self, stream: Stream, timeout: float) -> str:
        rows = stream.waiting + stream.owed
        hint = ". main has asked for none: take them with ctx.requests(), or ctx.get_data_feed(train_mode=False), "
        hint = "" if self._asked else f"{hint}from queue {self.name!r}"
        return (
            f"{self._node}: {rows} rows of partition {stream.partition} were neither taken nor answered for "
            f"{timeout:g} s{hint}"
        )

    def _fail(self, streams: Sequence[Stream], text: str) -> None:
        for stream in streams:
            stream.failure = stream.failure or text
        self._changed.notify_all()

    def close(self) -> None:
        """Accept no new streams. Existing streams are still answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self, reason: str, cause_known: bool = True) -> None:
        """Fail all streams, and all later ones, with a reason. ``cause_known``: see :class:`Stream`."""
        with self._changed:
            self._break(reason, cause_known)

    def _break(self, reason: str, cause_known: bool = True) -> None:
        if not self._broken:
            self._broken, self._cause_known = reason, cause_known
        for stream in self._streams:
            stream.cause_known = self._cause_known or bool(stream.failure)
        self._fail(self._streams, self._broken)
