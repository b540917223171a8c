"""Transfer rows from a Spark task to a node: both ends.

::

    Spark task "FeedTask" (tfos_nb.runtime.feed.feed_task) ── question: where? ──▶ door (tfos_nb.runtime.feed.messages)
         │
         └── Arrow Flight DoPut, one stream a (partition, node) ──▶ FeedServer in the node ──▶ FeedRows

The protocol of one stream has four steps. The sender names the partition. The node answers with its position in it: the
rows that it has from an earlier attempt. The sender writes record batches, each with the numbers of its rows. At the
end, the node acknowledges the position reached; only then is the partition done. A sender that follows a failed one
skips the rows before the node's position, and compares their fingerprint with the node's. Every batch carries the
fingerprint of the rows before it, which the node compares with its own. A batch may contain several pieces of a
partition; the rows between them belong to other nodes.

On the same host, the stream is a unix socket in a private directory, and the rows are passed in shared memory
(:mod:`tfos_nb.runtime.feed.shared_memory`). The socket then carries empty batches that say where the rows are. The node
grants a block for each batch, two ahead. Between hosts, the stream uses TLS with the node's own certificate, pinned.
The cluster's token is in the header of every call.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.admission import UnauthenticatedPeers
from tfos_nb.runtime.control.identity import Identity
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.node_connection import connect
from tfos_nb.runtime.control.processes import boot, host_and_port
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.feed.feed_rows import Superseded
from tfos_nb.runtime.feed.messages import SAME_VERSION, Reached
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.row_queues import RowQueues
from tfos_nb.runtime.feed.shared_memory import BLOCK_BYTES, BlockPool, BlockWriter, Grant, PoolPlace, Written
from tfos_nb.runtime.rows.batch_validation import valid_batch
from tfos_nb.runtime.rows.fingerprint import KEEP_ROWS_ALIKE, Fingerprint
from tfos_nb.runtime.rows.spans import Spans, from_row, rows_within

__all__ = ["FeedServer", "FeedTicket", "FewerRows", "NodeStream"]

Exchange = Callable[[bytes, Any, Any], None]

_TOKEN_HEADER = "tfos-token"  # noqa: S105 - the header's name, not a secret
_GRANTED_AHEAD = 2
_LOOK_EVERY = 2.0


@message
@dataclass(frozen=True)
class FeedTicket:
    """First message of a stream: the feed, the partition, and the Spark attempt that sends it.

    ``attempt`` is Spark's ``TaskContext.taskAttemptId``, which grows with each attempt that starts.
    """

    feed: int
    partition: int
    attempt: int = 0


@message
@dataclass(frozen=True)
class _Position:
    """The node's answer: its position in the partition, and whether all rows are kept on disk.

    ``pool`` is the pool whose blocks it grants, if it has one.
    """

    reached: Reached
    spilled: bool
    pool: PoolPlace | None = None


@message
@dataclass(frozen=True)
class _Chunk:
    """Metadata of every batch: which rows of the partition it contains, in order.

    ``known``: row count and fingerprint up to the last row here. ``follows``: the same before the first row; (0, 0)
    restarts. The rows are in ``size`` bytes of ``block``, beginning at byte ``first``. If ``block`` is -1, they are in
    the batch itself. ``spent``: the sender has used its grant and needs a new one.
    """

    spans: Spans
    follows: tuple[int, int]
    known: tuple[int, int]
    block: int = -1
    size: int = 0
    spent: bool = False
    first: int = 0


# --- the node's end -----------------------------------------------------------------------------------------------


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = (headers.get(_TOKEN_HEADER) or [""])[0]
        if not hmac.compare_digest(str(given).encode(), self._token.encode()):
            raise flight.FlightUnauthenticatedError("no valid token")


class _Listener(flight.FlightServerBase):  # type: ignore[misc]
    """Server on one address of a node. A node has two; the one for its own host has a pool of blocks."""

    def __init__(
        self, location: str, queues: RowQueue | RowQueues, token: str, identity: Identity | None, pool: BlockPool | None
    ) -> None:
        tls = [(identity.certificate, identity.key)] if identity else None
        super().__init__(location, middleware={"token": _TokenCheck(token)}, tls_certificates=tls)
        self._queues = queues
        self._pool = pool
        self.exchange: Exchange | None = None
        self.strangers = UnauthenticatedPeers(self.port) if identity else None

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take one partition's rows from one sender."""
        self._know(context)
        try:
            self._take(descriptor, reader, writer)
        except Superseded as error:
            raise flight.FlightCancelledError(str(error)) from None  # the sender recognizes this type

    def _take(self, descriptor: Any, reader: Any, writer: Any) -> None:
        ticket = wire.expect(FeedTicket, descriptor.command)
        feed = self._queues.feed_rows(ticket.feed)
        lane = feed.open(ticket.partition, ticket.attempt)
        try:
            self._take_from(ticket, feed, lane, reader, writer)
        finally:
            feed.leave(ticket.partition, ticket.attempt)

    def _take_from(self, ticket: FeedTicket, feed: Any, lane: Any, reader: Any, writer: Any) -> None:
        self._tell(writer, lane, feed)
        grants = _Grants(self._pool, writer)
        with contextlib.suppress(StopIteration):
            while True:
                piece = reader.read_chunk()
                chunk = wire.expect(_Chunk, piece.app_metadata)
                rows = valid_batch(piece.data if chunk.block < 0 else grants.used(chunk), reader.schema)
                feed.accept(
                    ticket.partition,
                    chunk.spans,
                    rows,
                    attempt=ticket.attempt,
                    follows=chunk.follows,
                    known=chunk.known,
                )
                del rows  # otherwise this thread holds the block until the next batch
                if chunk.spent:
                    grants.next()
        grants.end()  # not after an error: the sender may still be writing into a block
        self._tell(writer, lane, feed)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take rows and return answers: see :mod:`tfos_nb.runtime.inference.serving`."""
        self._know(context)
        if self.exchange is None:
            raise FeedFailed("this node does not answer rows of cluster.inference(): only workers and a chief do")
        self.exchange(descriptor.command, reader, writer)

    def _know(self, context: Any) -> None:
        if self.strangers is not None:
            self.strangers.has_called(context.peer())

    def _tell(self, writer: Any, lane: Any, feed: Any) -> None:
        kept = feed.spill is not None and feed.spill.whole
        place = self._pool.place if self._pool is not None else None
        writer.write(pa.py_buffer(wire.encode(_Position(lane.reached, kept, place))))


class _Grants:
    """The blocks that one sender may write into."""

    def __init__(self, pool: BlockPool | None, writer: Any) -> None:
        self._pool, self._writer = pool, writer
        self._granted: list[int] = []
        for _ in range(_GRANTED_AHEAD):
            self.next()

    def next(self) -> None:
        """Grant one more block, if one is free."""
        if self._pool is not None:
            block = self._pool.take()
            if block >= 0:
                self._granted.append(block)
            self._writer.write(pa.py_buffer(wire.encode(Grant(block))))

    def used(self, chunk: _Chunk) -> pa.RecordBatch:
        """Return the rows of a block."""
        end = chunk.first + chunk.size
        if self._pool is None or chunk.block not in self._granted or not 0 <= chunk.first < end <= BLOCK_BYTES:
            raise FeedFailed(f"bytes {chunk.first} to {end} of block {chunk.block} were not granted. {SAME_VERSION}")
        self._granted.remove(chunk.block)
        return self._pool.lend(chunk.block, Written(chunk.first, chunk.size))

    def end(self) -> None:
        """Take back the blocks that the sender did not use."""
        while self._pool is not None and self._granted:
            self._pool.give_back(self._granted.pop())


class FeedServer:
    """Servers on which a node takes rows: a unix socket and a TLS port.

    Parameters
    ----------
    queues : RowQueues, or a RowQueue
        Where the rows go.
    directory : str
        A private directory for the socket.
    host : str
        The address by which other hosts reach this one.
    token : str
        The cluster's.
    """

    def __init__(self, queues: RowQueue | RowQueues, *, directory: str, host: str, token: str) -> None:
        identity = Identity.create()
        path = os.path.join(directory, "feed.sock")
        self._pool = BlockPool.create(queues.buffer_bytes)
        self._near = _Listener(f"grpc+unix://{path}", queues, token, None, self._pool)
        self._far = _Listener(f"grpc+tls://{host_and_port(host, 0)}", queues, token, identity, None)
        self.place = FeedPlace(path, host, self._far.port, identity.certificate, boot())
        self._look_due = 0.0

    def answer_with(self, exchange: Exchange) -> None:
        """Set the handler for rows that want answers."""
        self._near.exchange = self._far.exchange = exchange

    def look(self, now: float) -> None:
        """Disconnect unauthenticated peers; one thread calls this about every second, with the monotonic time."""
        if self._far.strangers is not None and now >= self._look_due:
            self._look_due = now + _LOOK_EVERY
            self._far.strangers.look(now)

    def close(self) -> None:
        """Stop taking rows."""
        self._near.shutdown()
        self._far.shutdown()
        if self._pool is not None:
            self._pool.close()


# --- the Spark task's end -----------------------------------------------------------------------------------------


class FewerRows(FeedFailed):
    """A node has more rows of a partition than this attempt read: its input was interrupted, or has changed."""


class NodeHungUp(FeedFailed):
    """A node ended the stream without a message: its process has ended, or is about to."""


@dataclass
class NodeStream:
    """A DoPut stream to one node."""

    node: str
    place: FeedPlace = field(repr=False)
    near: bool
    token: str = field(repr=False)
    ticket: FeedTicket
    schema: pa.Schema = field(repr=False)

    def __post_init__(self) -> None:
        self._offered = self._sent = 0
        self._fingerprint = Fingerprint()
        self._open()

    def _open(self) -> None:
        self._client = connect(self.place, self.near)
        try:
            self._begin()
        except BaseException:
            self._client.close()
            raise

    def _begin(self) -> None:
        options = flight.FlightCallOptions(headers=[(_TOKEN_HEADER.encode(), self.token.encode())])
        descriptor = flight.FlightDescriptor.for_command(wire.encode(self.ticket))
        self._writer, self._answers = self._client.do_put(descriptor, self.schema, options)
        self._position = self._next_position()
        self._blocks = BlockWriter.open(self._position.pool)
        self._grant: Grant | None = None
        # Not by from_pylist, with which Arrow imports pandas, in half a second.
        self._nothing = pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in self.schema], schema=self.schema)
        self._is_known = self._position.reached.row == 0  # whether the rows that the node has were compared

    def reopen(self) -> None:
        """Continue after another attempt had its turn.

        Raises
        ------
        pyarrow.flight.FlightCancelledError
            If the other attempt still has its turn.
        NodeHungUp
            If rows of this attempt were in transit when the other one came, and that one did not send them.
        """
        self.close()
        self._open()
        if self._position.reached.row < self._sent:
            raise NodeHungUp(
                f"{self.node} has {self._position.reached.row} rows of partition {self.ticket.partition}: later rows "
                "were in transit when a newer attempt of Spark's took over; Spark reads the partition again"
            )

    def write(self, spans: Spans, batch: pa.RecordBatch) -> None:
        """Send these rows of the partition, except those that the node has already.

        Raises
        ------
        pyarrow.flight.FlightCancelledError
            If it is another attempt's turn. The rows may be sent again after :meth:`reopen`.
        """
        before = self._offered, self._fingerprint.copy()
        try:
            self._write(spans, batch)
        except flight.FlightCancelledError:
            self._offered, self._fingerprint = before
            raise

    def _write(self, spans: Spans, batch: pa.RecordBatch) -> None:
        known, self._offered = self._position.reached.row, spans[-1][1]
        known_here = rows_within(spans, 0, known)
        self._fingerprint.add(batch.slice(0, known_here))
        new = from_row(spans, known)
        if not new:
            return
        self._compare()
        batch, follows = batch.slice(known_here), self._fingerprint.at
        self._fingerprint.add(batch)
        chunk = _Chunk(new, follows, self._fingerprint.at)
        chunk = self._hand_over(chunk, batch)
        try:
            self._writer.write_with_metadata(batch if chunk.block < 0 else self._nothing, wire.encode(chunk))
        except (pa.ArrowException, flight.FlightError):
            self._writer.close()  # raises what the node said
            raise
        self._sent = self._offered

    def _compare(self) -> None:
        """Compare the node's rows with those that this attempt has read, once all of them were read."""
        if self._is_known:
            return
        self._is_known, position = True, self._position.reached
        if self._fingerprint.rows != position.rows:
            self._fingerprint = Fingerprint()  # not all rows are read again: after a loss the driver skips some
        elif self._fingerprint.value != position.fingerprint:
            raise FeedFailed(
                f"partition {self.ticket.partition} gave other rows when Spark ran it again: the first {position.row} "
                f"rows differ from those that were fed before, or are in another order. {KEEP_ROWS_ALIKE}"
            )

    def _hand_over(self, chunk: _Chunk, batch: pa.RecordBatch) -> _Chunk:
        """Put the rows into a block, if the node has granted one."""
        if self._blocks is None or batch.nbytes > BLOCK_BYTES:
            return chunk
        if self._grant is None:
            self._grant = self._answer()
        if self._grant.block < 0:
            self._grant = None
            return replace(chunk, spent=True)
        written = self._blocks.write(self._grant.block, batch)
        if written is None:
            return chunk  # they do not fit: the block is for the next ones
        block, self._grant = self._grant.block, None
        return replace(chunk, block=block, first=written.first, size=written.size, spent=True)

    def finish(self) -> bool:
        """Wait for the node's acknowledgement; return whether the node keeps the rows."""
        if self._offered < self._position.reached.row:
            raise FewerRows(
                f"partition {self.ticket.partition} gave fewer rows when Spark ran it again: {self.node} has row "
                f"{self._position.reached.row} already, and the last one now is {self._offered}. {KEEP_ROWS_ALIKE}"
            )
        self._compare()
        self._writer.done_writing()
        position = self._next_position()
        if position.reached.row < self._sent:
            raise FeedFailed(
                f"{self.node} has {position.reached.row} rows of partition {self.ticket.partition}, but {self._sent} "
                "were sent: train again"
            )
        return position.spilled

    def _next_position(self) -> _Position:
        """Wait for the node's position; ignore unused grants before it."""
        while not isinstance(answer := self._answer(), _Position):
            pass
        return answer

    def _answer(self) -> Any:
        buffer = self._answers.read()
        if buffer is None:
            self._writer.close()  # raises what the node said
            raise NodeHungUp(
                f"{self.node} hung up while partition {self.ticket.partition} was being fed; its log says why: "
                f"cluster.logs('{self.node}')"
            )
        return wire.decode(buffer.to_pybytes())

    def close(self) -> None:
        """Close the stream. The node keeps the rows that it has."""
        with contextlib.suppress(pa.ArrowException, flight.FlightError):
            self._writer.close()
        self._client.close()
