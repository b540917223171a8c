"""Relay between nodes and a driver that they cannot reach: a process in the cluster, emptied by short Spark jobs.

::

    node ──TLS of the driver's door──▶ Relay, a process on an executor ◀──ask: Exchange── ExchangeTask, a short task
                                                                                             │ a row
                                       the driver's Door ◀──loopback── Carrier ◀─────────────┘

The relay passes bytes on and cannot read them: TLS begins at the node and ends at the driver's door, whose certificate
the node has from its task. It has a door of its own for the exchanges, with another key and token. When Spark retries a
task, an exchange is made twice but counts once: the frames of each direction are numbered, and kept until the other
side has confirmed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.admission import descriptors_left, raise_descriptors
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorClient
from tfos_nb.runtime.control.processes import path_variable, read_frame, start_module, write_frame
from tfos_nb.runtime.control.wire import message

__all__ = ["Exchange", "ExchangeTask", "Exchanged", "Frames", "Relay", "RelayPlace", "RelayTask", "Taken"]

PLACE_SCHEMA, ANSWER_SCHEMA = "place binary", "answer binary"
_PIECE = 256 << 10  # bytes of a frame, at most
_MOST_AT_ONCE = 8 << 20  # bytes of an exchange, approximately
_MOST_WAITING = 32 << 20  # bytes that wait in one direction; beyond this no connection is read
_LONGEST = 0.5  # seconds that a task waits for frames to bring back
_LOOKS_EVERY = 0.02
_LEAVES_AFTER = 0.5  # seconds, so that the answer is sent first
_MOST_CONNECTIONS = 20_000
_BUFFER = 4 << 10  # bytes; of each connection twice as many are read when no more should be
_ENDS_WITHIN = 10.0  # seconds after it has closed its output
_ALONE = 60.0

Frame = tuple[int, bytes]
"""A connection's number, and bytes from it; empty bytes mark its end."""


@message
@dataclass(frozen=True)
class Exchange:
    """Question of a driver: its ``frames``, the first one's number, and how many relay frames it has ``taken``."""

    taken: int
    first: int
    frames: tuple[Frame, ...] = field(default=(), repr=False)
    over: bool = False


@message
@dataclass(frozen=True)
class Exchanged:
    """The relay's answer, with the same fields for its own frames."""

    taken: int
    first: int
    frames: tuple[Frame, ...] = field(default=(), repr=False)


@message
@dataclass(frozen=True)
class RelayPlace:
    """Address at which nodes reach the relay, and the door for exchanges with it."""

    host: str
    port: int
    exchange_port: int
    certificate: bytes = field(repr=False)
    token: str = field(repr=False)

    @property
    def exchanges(self) -> DoorAddress:
        """The relay's own door."""
        return DoorAddress(self.host, self.exchange_port, self.certificate, self.token)


class Frames:
    """Frames of one direction, kept until the other side has them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Frame] = deque()
        self._first = 0
        self._bytes = 0

    def put(self, connection: int, data: bytes) -> None:
        """Add bytes from a connection; empty bytes mark its end."""
        with self._lock:
            self._kept.append((connection, data))
            self._bytes += len(data)

    def next_ones(self) -> tuple[int, tuple[Frame, ...]]:
        """Return the number of the first frame that the other side may not have, and some frames from it on."""
        with self._lock:
            size, chosen = 0, []
            for frame in self._kept:
                if size > _MOST_AT_ONCE:
                    break
                chosen.append(frame)
                size += len(frame[1])
            return self._first, tuple(chosen)

    def taken(self, count: int) -> None:
        """Drop the frames that the other side has."""
        with self._lock:
            while self._first < count and self._kept:
                self._bytes -= len(self._kept.popleft()[1])
                self._first += 1

    @property
    def full(self) -> bool:
        """Whether so many bytes wait that no more should be read."""
        return self._bytes > _MOST_WAITING

    def __len__(self) -> int:
        return len(self._kept)


class Taken:
    """Frames of the other side, each once and in order."""

    def __init__(self) -> None:
        self.count = 0

    def new_of(self, first: int, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """Return the frames that have not come before.

        Raises
        ------
        ValueError
            If earlier frames are missing.
        """
        if first > self.count:
            raise ValueError(f"frame {first} came, but frame {self.count} was expected")
        new = frames[self.count - first :]
        self.count += len(new)
        return new


class Relay:
    """Take connections of nodes, and the driver's exchanges, all in the thread of one asyncio loop.

    It is also the handler of its own door, whose thread only passes the questions on.

    Parameters
    ----------
    alone : float
        Seconds without an exchange after which it ends, because its driver must be gone.
    """

    def __init__(self, alone: float = _ALONE) -> None:
        self._alone = alone
        self._outgoing, self._taken = Frames(), Taken()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._connections = 0
        self._most = min(_MOST_CONNECTIONS, descriptors_left())
        self._asked_at = time.monotonic()
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def serve(self, host: str) -> None:
        """Print its address, and relay until the driver has gone."""
        door = Door(self, host=host, bind="0.0.0.0")  # noqa: S104 - the driver's tasks come from any executor
        server = await asyncio.start_server(self._connected, "0.0.0.0", 0, limit=_BUFFER)  # noqa: S104 - as the nodes do
        own = door.open()
        place = RelayPlace(host, server.sockets[0].getsockname()[1], own.port, own.certificate, own.token)
        write_frame(sys.stdout.buffer, place)
        sys.stdout.close()
        async with server:
            await self._over.wait()
        door.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= self._most:
            writer.close()
            return
        self._connections += 1
        number = self._connections
        self._writers[number] = writer
        self._outgoing.put(number, b"\0")  # announces the connection to the other side
        try:
            while data := await reader.read(_PIECE):
                self._outgoing.put(number, data)
                while self._outgoing.full:  # counts the bytes of all connections
                    await asyncio.sleep(_LOOKS_EVERY)
        except OSError:
            pass
        self._outgoing.put(number, b"")

    def _take(self, question: Exchange) -> None:
        for number, data in self._taken.new_of(question.first, question.frames):
            writer = self._writers.get(number)
            if writer is None:
                continue
            if data:
                writer.write(data)
            else:
                self._writers.pop(number).close()
        if question.over:
            self._loop.call_later(_LEAVES_AFTER, self._over.set)

    # --- the handler, in its door's thread ---

    def asked(self, question: Any) -> Exchanged:
        """Take a driver's frames, and return those of the nodes."""
        if not isinstance(question, Exchange):
            raise ValueError(f"a relay answers only Exchange questions, got a {type(question).__name__}")
        self._asked_at = time.monotonic()
        self._outgoing.taken(question.taken)
        first, frames = self._outgoing.next_ones()
        taking = asyncio.run_coroutine_threadsafe(self._taking(question), self._loop)
        return Exchanged(taking.result(), first, frames)

    async def _taking(self, question: Exchange) -> int:
        self._take(question)
        return self._taken.count

    def ticked(self, late: float) -> None:
        """End the relay after a long time without an exchange."""
        if time.monotonic() - self._asked_at > self._alone:
            self._loop.call_soon_threadsafe(self._over.set)

    def arrived(self, link: Any, message: Any) -> None:
        """Refuse a stream: a relay has none."""
        link.end()

    def received(self, link: Any, message: Any) -> None:
        """Do nothing: a relay has no streams."""

    def left(self, link: Any) -> None:
        """Do nothing: a relay has no streams."""


@dataclass(frozen=True)
class RelayTask:
    """Barrier task that starts a relay on its executor, and returns its address at once; the relay stays.

    Spark tells barrier tasks the names by which executors are reached.
    """

    python_path: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Start it."""
        from pyspark import BarrierTaskContext

        deque(batches, maxlen=0)
        host = BarrierTaskContext.get().getTaskInfos()[0].address.rpartition(":")[0]
        path = path_variable(*self.python_path)
        env = {**os.environ, "PYTHONPATH": path}
        relay = start_module("tfos_nb.runtime.control.relay", env=env, arguments=(host,), stdout=subprocess.PIPE)
        assert relay.stdout is not None, "stdout was set to a pipe"
        with relay.stdout as told:
            place = read_frame(told)
        if not isinstance(place, RelayPlace):
            raise TfosError(f"the relay did not start on {host}: exit code {relay.wait(_ENDS_WITHIN)}")
        yield pa.RecordBatch.from_pydict({"place": pa.array([wire.encode(place)], pa.binary())})


@dataclass(frozen=True)
class ExchangeTask:
    """Task that makes one exchange; if the relay has no frames yet, it waits a moment for some."""

    relay: DoorAddress
    exchange: bytes = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Make it."""
        deque(batches, maxlen=0)
        question, deadline, never = wire.expect(Exchange, self.exchange), time.monotonic() + _LONGEST, threading.Event()
        with DoorClient(self.relay) as relay:
            answer = relay.ask(question)
            question = replace(question, frames=())
            while not answer.frames and not question.over and time.monotonic() < deadline:
                never.wait(_LOOKS_EVERY)
                answer = relay.ask(question)
        yield pa.RecordBatch.from_pydict({"answer": pa.array([wire.encode(answer)], pa.binary())})


async def _main(host: str, alone: float = _ALONE) -> None:
    raise_descriptors()
    await Relay(alone).serve(host)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(sys.argv[1], *map(float, sys.argv[2:])))
