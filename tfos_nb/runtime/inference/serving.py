"""Both ends of the connection for inference: Spark's task, and the node.

::

    Spark task "InferTask" ── question: which node? ──▶ door (tfos_nb.runtime.control.placement)
         │  ▲
         │  └── results, in the order of the rows ──────┐
         └───── Arrow Flight DoExchange, one per task ─▶ RequestQueue in the node ──▶ main: takes rows, answers them

One Flight stream (https://arrow.apache.org/docs/format/Flight.html) serves one attempt at one partition. The task sends
record batches. On the same stream, the node sends batches of results, each with the number of rows that it answers. Or
it sends a :class:`Failure`, which says why there will be no more results. A second attempt at a partition is another
stream: its rows are answered again, and the results of the first are discarded. So results stay in order and each row
has one, even if Spark repeats tasks.

The bytes of rows and results that wait in the node are limited for each stream. At the limit the task waits, and so
does Spark. If rows wait and ``main`` neither takes nor answers any for ``timeout`` seconds, the stream fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
import pyarrow as pa
import pyarrow.flight as flight

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import DoorAddress, DoorClient
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.node_connection import connect
from tfos_nb.runtime.control.placement import COMPUTED_LATE, AskPlaces, ClaimNode, InferencePlaces, ReleaseNode
from tfos_nb.runtime.control.processes import is_here
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.feed.messages import check_queue
from tfos_nb.runtime.inference.answers import PLAIN, listed
from tfos_nb.runtime.inference.requests import RequestQueue, Stream
from tfos_nb.runtime.rows.batch_validation import valid_batch
from tfos_nb.runtime.rows.batches import take_rows
from tfos_nb.runtime.rows.rdd_rows import batches_of_rows, size_of

__all__ = ["InferTask", "RequestExchange"]


_STREAM_BYTES = 32 << 20
_PIECE_BYTES = 4 << 20
_TOKEN_HEADER = b"tfos-token"
_ENDING_SECONDS = 60.0
_WHY_SECONDS = 3.0


@message
@dataclass(frozen=True)
class Ticket:
    """Command of a stream (Flight descriptor), sent by the task.

    Attributes
    ----------
    queue : str
        Queue from which ``main`` takes the rows.
    partition, attempt : int
        Partition, and id of Spark's task attempt.
    schema : bytes
        Schema of the results in Arrow's encoding; empty if there is none.
    timeout : float
        Seconds for which rows may wait without progress.
    """

    queue: str
    partition: int
    attempt: int
    schema: bytes
    timeout: float


@message
@dataclass(frozen=True)
class Answered:
    """Metadata of a batch of results: the number of rows that it answers."""

    rows: int


@message
@dataclass(frozen=True)
class Failure:
    """Last message of a stream from the node: why there will be no more results.

    ``cause_known`` is False if the node ends without knowing why. The task then asks the driver.
    """

    text: str
    cause_known: bool = True


# --- the node's end ---------------------------------------------------------------------------------------------


class RequestExchange:
    """Request queues of a node, and the node's end of all streams.

    Parameters
    ----------
    node : str
        Name of this node.
    queues : sequence of str
        Names of the queues.
    buffer_bytes : int
        Maximum bytes that wait in one stream; at most 32 MiB are used.
    """

    def __init__(self, node: str, queues: Sequence[str], buffer_bytes: int) -> None:
        limit = min(buffer_bytes, _STREAM_BYTES)
        self._node = node
        self._queues: Mapping[str, RequestQueue] = {name: RequestQueue(node, name, limit) for name in queues}

    def of(self, name: str) -> RequestQueue:
        """Return a queue by its name."""
        check_queue(name, tuple(self._queues))
        return self._queues[name]

    def close(self) -> None:
        """Accept no new streams, because no more rows will come."""
        for queue in self._queues.values():
            queue.close()

    def stop(self, reason: str = "") -> None:
        """Fail all streams. An empty reason means that only the driver knows it."""
        text = reason or f"{self._node} takes no more rows: its main has ended, or was asked to end"
        for queue in self._queues.values():
            queue.stop(text, bool(reason))

    def exchange(self, command: bytes, reader: Any, writer: Any) -> None:
        """Serve one stream. This thread, which is that of the Flight call, reads rows; another one writes results."""
        ticket = wire.expect(Ticket, command)
        queue = self.of(ticket.queue)
        schema = pa.ipc.read_schema(pa.py_buffer(ticket.schema)) if ticket.schema else None
        stream = queue.open(ticket.partition, schema, ticket.timeout)
        writing = threading.Thread(
            target=_write, args=(writer, queue, stream, ticket.timeout), name="tfos_nb results", daemon=True
        )
        writing.start()
        try:
            while True:
                stream.put(valid_batch(reader.read_chunk().data, reader.schema))
        except BaseException as error:  # end the stream after any error, or the writing thread would wait forever
            stream.end(gone=not isinstance(error, StopIteration))
            if not isinstance(error, (StopIteration, pa.ArrowException, flight.FlightError, OSError)):
                raise
        finally:
            writing.join()  # Flight closes the writer when this call returns
            queue.leave(stream)


def _write(writer: Any, queue: RequestQueue, stream: Stream, timeout: float) -> None:
    try:
        writer.begin(PLAIN if stream.schema is None else stream.schema)
        while (answer := queue.await_answer(stream, timeout)) is not None:
            rows, results = answer
            writer.write_with_metadata(results, pa.py_buffer(wire.encode(Answered(rows))))
        if stream.failure:
            writer.write_metadata(pa.py_buffer(wire.encode(Failure(stream.failure, stream.cause_known))))
    except (pa.ArrowException, flight.FlightError, OSError):
        stream.end(gone=True)  # the task has closed the connection


# --- the Spark task's end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferTask:
    """Spark task that sends the rows of a partition to a node and returns the results.

    ``DataFrame.mapInArrow`` calls it with record batches, and ``RDD.mapPartitions`` with rows (``rows=True``).

    Parameters
    ----------
    door : DoorAddress
        Address of the driver.
    cluster : str
        Name of the cluster, for messages.
    inference : str
        Unique name of this call of ``inference()``.
    queue : str
        Queue from which ``main`` takes the rows.
    timeout : float
        Seconds for which rows may wait while ``main`` neither takes nor answers any.
    schema : bytes
        Schema of the results in Arrow's encoding; empty for an RDD.
    names : tuple of str
        Names of the columns, in the order of the batches' columns.
    sent : tuple of int
        Positions of the columns that are sent to the node.
    keep : bool
        Whether the result has all input columns, before the results.
    rows : bool
        Whether the input is rows of an RDD, not record batches.
    """

    door: DoorAddress
    cluster: str
    inference: str
    queue: str
    timeout: float
    schema: bytes = b""
    names: tuple[str, ...] = ()
    sent: tuple[int, ...] = ()
    keep: bool = False
    rows: bool = False

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Return the results of one partition. An empty partition needs no node."""
        batches = (batch for batch in (batches_of_rows(items) if self.rows else items) if batch.num_rows)
        first = next(iter(batches), None)
        if first is None:
            return
        with _Exchange(self, self._to_send(first).schema) as exchange:
            yield from exchange.results(first, batches)

    def _to_send(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.rows:
            return batch
        return pa.RecordBatch.from_arrays(
            [batch.column(place) for place in self.sent], names=[self.names[place] for place in self.sent]
        )

    def pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yield slices of about 4 MiB of a batch: the columns to send, and all columns."""
        count = max(1, int(_PIECE_BYTES * batch.num_rows / max(1, size_of(batch))))
        for start in range(0, batch.num_rows, count):
            piece = batch.slice(start, count)
            yield self._to_send(piece), piece

    def ticket(self, partition: int, attempt: int) -> Ticket:
        """Return the command for a stream."""
        return Ticket(self.queue, partition, attempt, self.schema, self.timeout)


class _Exchange:
    """One attempt at one partition, in Spark's task. A thread sends the rows, and the task's own thread reads results.

    With ``keep``, the rows are stored until their results arrive.
    """

    def __init__(self, task: InferTask, schema: pa.Schema) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        self._task = task
        self._partition = context.partitionId() if context is not None else 0
        attempt = int(context.taskAttemptId()) if context is not None else 0
        stage = int(context.stageId()) if context is not None else -1
        self._claim = ClaimNode(task.inference, self._partition, attempt, (), stage)
        self._sent = self._received = 0
        self._kept: deque[pa.RecordBatch] = deque()
        self._error: BaseException | None = None
        self._leaving = threading.Event()
        self._door = DoorClient(task.door)
        try:
            places = self._places()
            local = tuple(name for name, place in places.items() if is_here(place.boot, place.socket))
            self._claim = replace(self._claim, local=local)
            self.node = str(self._ask(self._claim))
            if self.node not in places:
                raise FeedFailed(
                    f"no node of cluster {task.cluster} answers rows any more: the last one has just ended; launch "
                    "the cluster again"
                )
            self._client = connect(places[self.node], self.node in local)
            self._writer, self._reader = self._begun(task.ticket(self._partition, attempt))
        except BaseException:
            self._door.close()
            raise
        self._schema = schema
        self._sending: threading.Thread | None = None

    def _begun(self, ticket: Ticket) -> Any:
        """Open the stream. If the node has just ended, this fails, or the reading of a result does."""
        options = flight.FlightCallOptions(headers=[(_TOKEN_HEADER, self._task.door.token.encode())])
        try:
            return self._client.do_exchange(flight.FlightDescriptor.for_command(wire.encode(ticket)), options)
        except (pa.ArrowException, flight.FlightError) as error:
            self._ask_why(f"{self.node} did not accept partition {self._partition}: {str(error).splitlines()[0]:.200}")

    def _places(self) -> dict[str, FeedPlace]:
        answer: InferencePlaces = self._ask(AskPlaces(self._task.queue, self._claim.stage))
        if answer.refused:
            raise FeedFailed(answer.refused)
        return answer.places

    def _ask(self, question: Any) -> Any:
        try:
            return self._door.ask(question)
        except grpc.RpcError as error:
            address = self._task.door
            raise FeedFailed(
                f"cluster {self._task.cluster} cannot be reached at {address.host}:{address.port}, so it has ended: "
                f"{COMPUTED_LATE} ({error.code()})"
            ) from None

    def results(self, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        """Send all rows, and yield the results as they arrive.

        Raises
        ------
        FeedFailed
            If the node ends, or does not answer every row.
        """
        self._sending = threading.Thread(target=self._send, args=(first, batches), name="tfos_nb rows", daemon=True)
        self._sending.start()
        while (results := self._next()) is not None:
            yield from self._given(results)
        self._sending.join()
        if self._error is not None:
            raise self._error
        if self._received != self._sent:
            raise FeedFailed(
                f"{self.node} ended after {self._received} results for {self._sent} rows of partition "
                f"{self._partition}: main must reply to all rows before it returns"
            )

    def _next(self) -> tuple[int, pa.RecordBatch] | None:
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            return None
        except (pa.ArrowException, flight.FlightError) as error:
            if self._error is not None:
                raise self._error from None
            left = f"{self._sent - self._received} rows of partition {self._partition}"
            self._ask_why(f"{self.node} ended while {left} had no result: {str(error).splitlines()[0]:.200}")
        word = wire.decode(chunk.app_metadata.to_pybytes())
        if isinstance(word, Failure):
            if word.cause_known:
                raise FeedFailed(word.text)
            self._ask_why(word.text)
        self._received += word.rows
        return word.rows, chunk.data

    def _ask_why(self, text: str) -> NoReturn:
        """Raise FeedFailed with the cause of a node's end from the driver, or with ``text`` if it knows none.

        The driver is asked for up to 3 s, because it may learn the cause a little later than this task.
        """
        never = threading.Event()
        deadline = time.monotonic() + _WHY_SECONDS
        while time.monotonic() < deadline:
            try:
                answer: InferencePlaces = self._door.ask(AskPlaces(self._task.queue, self._claim.stage))
            except grpc.RpcError:
                break
            if answer.refused:
                raise FeedFailed(answer.refused)
            never.wait(0.25)
        raise FeedFailed(text)

    def _given(self, results: tuple[int, pa.RecordBatch]) -> Iterator[Any]:
        rows, batch = results
        if self._task.rows:
            yield from listed(batch.column(0)[0].as_py())
        elif self._task.keep:
            columns = [*self._rows_kept(rows).columns, *batch.columns]
            names = [f"c{place}" for place in range(len(columns))]  # Spark ignores names and takes columns by position
            yield pa.RecordBatch.from_arrays(columns, names=names)
        else:
            yield batch

    def _rows_kept(self, count: int) -> pa.RecordBatch:
        return take_rows(self._kept, count)

    def _send(self, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]) -> None:
        """Send every row. Runs in its own thread, because results arrive before the last row is sent."""
        try:
            self._writer.begin(self._schema)
            self._send_batch(first)
            while not self._leaving.is_set() and (batch := next(batches, None)) is not None:
                self._send_batch(batch)
            self._writer.done_writing()
        except (pa.ArrowException, flight.FlightError):
            pass  # reading the results raises the same error
        except BaseException as error:  # noqa: BLE001 - the task's own thread raises it
            self._error = error
            self._reader.cancel()

    def _send_batch(self, batch: pa.RecordBatch) -> None:
        for sent, kept in self._task.pieces(batch):
            if self._task.keep:
                self._kept.append(kept)
            self._sent += sent.num_rows
            self._writer.write_batch(sent)

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._leaving.set()
            self._reader.cancel()
        if self._sending is not None:
            self._sending.join(_ENDING_SECONDS)  # only one thread may read Spark's input
        with contextlib.suppress(pa.ArrowException, flight.FlightError):
            self._writer.close()
        with contextlib.suppress(grpc.RpcError):
            claim = self._claim
            self._door.ask(ReleaseNode(claim.inference, claim.partition, claim.attempt), timeout=5.0)
        self._client.close()
        self._door.close()
