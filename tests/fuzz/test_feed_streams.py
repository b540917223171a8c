"""Invalid input to a node's Flight server: only its sender is refused, and the rows of others arrive once.

The node is a process of its own (``feeding_node.py``), with a reader that makes arrays of all rows as a dataset does.
If Arrow reads outside its memory, that process dies, and the tests notice it.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import ENVIRONMENT
from tests.fuzz.inputs import any_message, bytes_of_any_kind, examples, mutated
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.node_connection import connect
from tfos_nb.runtime.feed.shared_memory import BLOCK_BYTES
from tfos_nb.runtime.feed.transfer import FeedTicket, NodeStream, _Chunk
from tfos_nb.runtime.inference.serving import Failure, Ticket

SECONDS = 20.0
TOKEN = "5ec3e7" * 10
ROWS = 30
EXAMPLES = 80  # of one process: the blocks of a faulty sender are never given to another one
REFUSED = (pa.ArrowException, flight.FlightError)


def batch_of(partition: int, start: int, count: int) -> pa.RecordBatch:
    ids = range(partition * 1000 + start, partition * 1000 + start + count)
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(ids, pa.int64()),
            "x": pa.array([[number / 2, 0.5, 1.0] for number in ids], pa.list_(pa.float32())),
            "name": pa.array([f"row {number}" for number in ids], pa.string()),
        }
    )


def whole_stream(batch: pa.RecordBatch | None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        if batch is not None:
            stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


SCHEMA = batch_of(0, 0, 0).schema


class Node:
    """A node in a process of its own, and senders to it."""

    def __init__(self, directory: str) -> None:
        self._script = [sys.executable, "-m", "tests.fuzz.feeding_node", directory, TOKEN]
        self._partitions = self._examples = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._script, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._examples = 0
        place = self._said()
        self.place = FeedPlace(place["socket"], "127.0.0.1", place["port"], place["certificate"].encode())

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the node is dead: {self._process.wait(SECONDS)}"
        return json.loads(line)

    def ask(self) -> dict[str, Any]:
        """Return how many rows have come into the node, the ids that the reader has seen since, and its threads."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        said: dict[str, Any] = self._said()
        return said

    def begin(self) -> int:
        """Begin an example; return a partition of its own."""
        self._examples += 1
        if (
            self._examples > EXAMPLES or self._process.poll() is not None
        ):  # it died: hypothesis looks for a smaller example
            with contextlib.suppress(AssertionError):
                self.close()
            self._start()
        return self._new_partition()

    def _new_partition(self) -> int:
        self._partitions += 1
        return self._partitions

    def client(self, near: bool = True) -> flight.FlightClient:
        return connect(self.place, near)

    def options(self, token: bytes = TOKEN.encode()) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(headers=[(b"tfos-token", token)], timeout=SECONDS)

    def put(self, command: bytes, batches: list[tuple[pa.RecordBatch | None, bytes | None]], near: bool) -> None:
        """Send one stream of batches with their metadata; raise the node's error."""
        with self.client(near) as client:
            descriptor = flight.FlightDescriptor.for_command(command)
            writer, answers = client.do_put(descriptor, SCHEMA, self.options())
            with contextlib.suppress(*REFUSED):  # the node may have ended it: close() raises the reason
                for batch, metadata in batches:
                    if batch is None:
                        writer.write_metadata(metadata)
                    elif metadata is None:
                        writer.write_batch(batch)
                    else:
                        writer.write_with_metadata(batch, metadata)
                writer.done_writing()
                while answers.read() is not None:
                    pass
            writer.close()

    def exchange(self, command: bytes, rows: list[int]) -> list[Any]:
        """Send one stream of rows that want answers, -1 for a message without any; return the node's answers."""
        said = []
        with self.client() as client:
            writer, answers = client.do_exchange(flight.FlightDescriptor.for_command(command), self.options())
            with contextlib.suppress(*REFUSED):  # as above: reading the answers raises the reason
                writer.begin(SCHEMA)
                for count in rows:
                    if count < 0:
                        writer.write_metadata(b"no rows")
                    else:
                        writer.write_batch(batch_of(0, 0, count))
                writer.done_writing()
            with contextlib.suppress(StopIteration):
                while True:
                    said.append(wire.decode(answers.read_chunk().app_metadata.to_pybytes()))
        return said

    def check_serves(self, near: bool = True) -> None:
        """Check that each row of a valid sender arrives once and unchanged."""
        partition = self._new_partition()
        stream = NodeStream("worker:0", self.place, near, TOKEN, FeedTicket(1, partition), SCHEMA)
        try:
            for start in range(0, ROWS, 10):
                stream.write(((start, start + 10),), batch_of(partition, start, 10))
            stream.finish()
        finally:
            stream.close()
        seen = self.ask()["ids"]
        first = partition * 1000
        assert [one for one in seen if one // 1000 == partition] == list(range(first, first + ROWS))

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(SECONDS) == 0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(str(tmp_path_factory.mktemp("node")))
    yield node
    node.close()


@examples(40)
@given(command=bytes_of_any_kind | any_message.map(wire.encode), near=st.booleans(), exchange=st.booleans())
def test_a_stream_that_begins_with_invalid_bytes_is_refused(
    node: Node, command: bytes, near: bool, exchange: bool
) -> None:
    """Bytes that are no ticket, or a ticket for an unknown feed or queue, open no stream."""
    node.begin()
    with contextlib.suppress(ValueError):
        word = wire.decode(command)
        if isinstance(word, FeedTicket):
            command = wire.encode(replace(word, feed=2))
    with pytest.raises(REFUSED):
        if exchange:
            node.exchange(command, [0])
        else:
            node.put(command, [], near)
    node.check_serves(near)


@examples(25)
@given(path=st.lists(st.text(max_size=5), max_size=3), name=st.text(max_size=8))
def test_no_other_call_of_flight_is_answered(node: Node, path: list[str], name: str) -> None:
    """Paths, flights, actions and gets are refused: only the calls that a sender needs exist."""
    node.begin()
    descriptor = flight.FlightDescriptor.for_path(*path)
    with node.client() as client:
        for call in (
            lambda: client.do_get(flight.Ticket(name.encode()), node.options()).read_all(),
            lambda: list(client.do_action(flight.Action(name, b"x"), node.options())),
            lambda: list(client.list_flights(name.encode(), node.options())),
            lambda: client.get_flight_info(descriptor, node.options()),
            lambda: client.do_put(descriptor, SCHEMA, node.options())[0].close(),
        ):
            with pytest.raises((*REFUSED, NotImplementedError)):
                call()


RIGHT_SPANS = (((0, 4),), ((0, 2), (3, 5)), ((1, 3), (64, 66)), ((5, 6),), ((2**62, 2**62 + 1),))
WRONG_SPANS = (
    (), ((-1, 3),), ((4, 0),), ((0, 0),), ((0, 2), (2, 4)), ((3, 5), (0, 2)), ((0, 4), (0, 4)), ((0, 2**62),)
)  # fmt: skip
fingerprints = st.sampled_from([(0, 0), (0, 0), (0, 0), (4, 7), (-1, 2**62)])
chunks = st.builds(
    _Chunk,
    spans=st.sampled_from([*RIGHT_SPANS, *WRONG_SPANS]),
    follows=fingerprints,
    known=fingerprints,
    block=st.sampled_from([-1, -1, -2, 5000, 2**40]),
    size=st.sampled_from([0, 1, 16 << 20, -1, 2**62]),
    spent=st.booleans(),
    first=st.sampled_from([0, 0, 8, -8, 16 << 20, 2**62]),
)
right_or_not = chunks.map(wire.encode) | mutated(chunks.map(wire.encode))
metadata = chunks.map(wire.encode) | right_or_not | bytes_of_any_kind | any_message.map(wire.encode)


def taken(sent: list[tuple[int, bool, bytes | None]]) -> list[int]:
    """Return the rows of a stream that are announced correctly, up to the first batch that is not."""
    seen: list[int] = []
    reached, known = 0, (0, 0)
    for rows, alone, word in sent:
        try:
            chunk = wire.decode(word or b"")
        except ValueError:
            break
        if alone or not isinstance(chunk, _Chunk) or chunk.spans in WRONG_SPANS or chunk.block >= 0:
            break
        numbers = [number for first, end in chunk.spans if end - first <= 4 for number in range(first, end)]
        if len(numbers) != rows or numbers != sorted({*numbers}) or numbers[0] < reached or chunk.follows != known:
            break
        seen += range(rows)
        reached, known = numbers[-1] + 1, chunk.known
    return seen


@example(sent=[(4, False, wire.encode(_Chunk(((-1, 3),), (0, 0), (0, 0))))], near=True)
@examples(60)
@given(
    sent=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.none() | metadata), min_size=1, max_size=4),
    near=st.booleans(),
)
def test_batches_with_any_metadata_deliver_exactly_the_rows_that_were_announced(
    node: Node, sent: list[tuple[int, bool, bytes | None]], near: bool
) -> None:
    """Missing metadata or batches, blocks never granted and rows out of order are refused; earlier rows stay."""
    sent = [(rows, alone and word is not None, word) for rows, alone, word in sent]
    partition, before = node.begin(), node.ask()["rows"]
    batches = [(None if alone else batch_of(partition, 0, rows), word) for rows, alone, word in sent]
    with contextlib.suppress(*REFUSED):
        node.put(wire.encode(FeedTicket(1, partition)), batches, near)
    said = node.ask()
    assert said["ids"] == [partition * 1000 + row for row in taken(sent)]
    assert said["rows"] - before == len(said["ids"])
    node.check_serves(near)


def rows_in(memory: bytes) -> int:
    """Return how many valid rows a sender wrote into a block; -1 for invalid content."""
    try:
        batch = pa.ipc.open_stream(pa.py_buffer(memory)).read_next_batch()
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
    except (AssertionError, pa.ArrowException, StopIteration, OSError):
        return -1
    return int(batch.num_rows)


WHOLE = whole_stream(batch_of(0, 0, 3))
WITHOUT_A_BATCH = whole_stream(None)


@example(written=WITHOUT_A_BATCH, size=None)
@examples(60)
@given(
    written=st.sampled_from([WHOLE, WITHOUT_A_BATCH, b""]) | st.binary(max_size=64) | mutated(st.just(WHOLE)),
    size=st.none() | st.sampled_from([0, -1, 1, 8, 500, 4096, (16 << 20) + 1]),
)
def test_a_granted_block_with_any_content_delivers_its_rows_or_an_error(
    node: Node, written: bytes, size: int | None
) -> None:
    """Noise, a stream without a batch, mutated rows and wrong sizes cause neither a normal end nor a crash."""
    partition, memory = node.begin(), written.ljust(4096, b"\0")
    stream = NodeStream("worker:0", node.place, True, TOKEN, FeedTicket(1, partition), SCHEMA)
    try:
        grant = stream._answer()
        assert stream._blocks is not None
        assert grant.block >= 0, "there are more blocks than examples"
        stream._blocks._memory[grant.block * BLOCK_BYTES : grant.block * BLOCK_BYTES + len(memory)] = memory
        chunk = _Chunk(((0, 3),), (0, 0), (0, 0), grant.block, len(written) if size is None else size)
        expected = rows_in(memory[: chunk.size]) if 0 < chunk.size <= BLOCK_BYTES else -1
        reached = -1
        with contextlib.suppress(*REFUSED):
            stream._writer.write_with_metadata(stream._nothing, wire.encode(chunk))
            stream._writer.done_writing()
            reached = stream._next_position().reached.row
        assert reached == expected
    finally:
        with contextlib.suppress(*REFUSED):
            stream.close()
    node.check_serves()


def field(number: int, content: bytes) -> bytes:
    """Encode a bytes field of a protocol buffer."""
    head, size = (number << 3) | 2, len(content)
    out = b""
    for value in (head, size):
        while value > 0x7F:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        out += bytes([value])
    return out + content


class Recorder:
    """Records what a valid sender sends to a node, as gRPC messages: ticket and schema, then a batch."""

    def __init__(self) -> None:
        reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(whole_stream(batch_of(0, 0, 4))))
        self.schema, self.batch = reader.read_next_message(), reader.read_next_message()

    def messages(self, partition: int, head: bytes, body: bytes, word: bytes) -> list[bytes]:
        ticket = field(2, wire.encode(FeedTicket(1, partition)))
        descriptor = b"\x08\x02" + ticket
        first = field(1, descriptor) + field(2, self.schema.metadata.to_pybytes())
        return [first, field(2, head) + field(3, word) + field(1000, body)]


RIGHT = Recorder()
HEAD, BODY = RIGHT.batch.metadata.to_pybytes(), RIGHT.batch.body.to_pybytes()


@st.composite
def with_another_word(draw: st.DrawFn, body: bytes) -> bytes:
    """Draw a buffer in which a number of four bytes is changed: usually an offset, to a distant one."""
    at = 4 * draw(st.integers(0, len(body) // 4 - 1))
    word = draw(st.sampled_from([-1, -5, 1, 2, 100, 10**8, 2**31 - 1, -(2**31), 3 * 10**8]))
    return body[:at] + struct.pack("<i", word) + body[at + 4 :]


@examples(120)
@given(head=st.just(HEAD) | mutated(st.just(HEAD)), body=with_another_word(BODY) | mutated(st.just(BODY)))
def test_rows_with_changed_bytes_do_not_kill_the_node(node: Node, head: bytes, body: bytes) -> None:
    """Arrow's header and buffers arrive by gRPC with mutated bytes: any offsets, lengths and types.

    The node's reader makes arrays of all accepted rows, so it would follow the offsets.
    """
    partition = node.begin()
    word = wire.encode(_Chunk(((0, 4),), (0, 0), (0, 0)))
    with grpc.insecure_channel(f"unix:{node.place.socket}") as channel:
        call = channel.stream_stream("/arrow.flight.protocol.FlightService/DoPut")
        sent = iter(RIGHT.messages(partition, head, body, word))
        with contextlib.suppress(grpc.RpcError):
            list(call(sent, metadata=(("tfos-token", TOKEN),), timeout=SECONDS))
    node.check_serves()


tickets = st.builds(
    Ticket, st.just("input"), st.integers(-1, 2), st.integers(0, 2),
    st.sampled_from([b"", SCHEMA.serialize().to_pybytes()]) | st.binary(max_size=9),
    st.sampled_from([math.nan, -1.0, 0.0, -math.inf, 0.05]),
)  # fmt: skip


@example(ticket=Ticket("input", 0, 0, b"", math.nan), rows=[1])
@example(ticket=Ticket("input", 0, 0, b"", 0.05), rows=[-1])
@examples(40)
@given(ticket=tickets, rows=st.lists(st.integers(-1, 3), max_size=3))
def test_a_stream_that_wants_answers_is_told_why_it_gets_none(node: Node, ticket: Ticket, rows: list[int]) -> None:
    """Invalid times, results without a schema and messages without rows get an error, as a message or of the call.

    In this node nobody answers. No thread of such a stream is left.
    """
    node.begin()
    try:
        said = node.exchange(wire.encode(ticket), rows)
    except flight.FlightTimedOutError:
        raise
    except REFUSED as error:
        said = [Failure(str(error))]
    assert [type(word) for word in said] in ([[Failure]] if any(rows) else [[], [Failure]])
    if not ticket.timeout > 0:
        assert "neither taken" not in said[0].text, "that such a time has run out is not held against the others"
    assert node.ask()["results_threads"] == 0


@examples(30)
@given(token=st.binary(max_size=8).map(bytes.hex) | st.sampled_from([TOKEN[:-1], f"{TOKEN}0", TOKEN.upper(), "0" * 60]))
def test_a_client_without_the_token_is_only_told_that_it_has_no_token(node: Node, token: str) -> None:
    node.begin()
    before = node.ask()["rows"]
    with node.client() as client, pytest.raises(REFUSED) as caught:
        descriptor = flight.FlightDescriptor.for_command(wire.encode(FeedTicket(1, 0)))
        writer, answers = client.do_put(descriptor, SCHEMA, node.options(token.encode()))
        answers.read()
        writer.close()
    assert TOKEN not in str(caught.value)
    assert "no valid token" in str(caught.value)
    assert node.ask()["rows"] == before
