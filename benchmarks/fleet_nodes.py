"""Simulated nodes, many in a process: each has its own connection and stream to a real Door, and no TensorFlow.

A node sends the same messages as a supervisor: it reserves, comes up, sends heartbeats with a step's report, writes
lines, obeys Stop and EndNode. :class:`Fleet` is the other end: it starts the processes, sends orders, and reads the
answers. Orders and answers are lines of JSON, sent through pipes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.session import ROOT

if TYPE_CHECKING:
    from tfos_nb.runtime.control.door import DoorAddress

__all__ = ["Fleet"]

AT_ONCE = 32
"""Connections that a process opens at the same time; Spark does not start all tasks in the same millisecond either."""

LINES_EVERY = 5
_BATCH_ROWS = 10_000  # Spark's size of a batch
"""Heartbeats between two messages with lines."""

_CERTIFICATE = b"-" * 600  # about as long as a real one, since every FeedPlace has one


class Fleet:
    """The nodes, seen from the driver's process.

    Parameters
    ----------
    names : sequence of str
        Names of the nodes.
    address : DoorAddress
        Address that the nodes connect to.
    processes : int
        How many processes share them.
    """

    def __init__(self, names: Sequence[str], address: DoorAddress, processes: int = 2) -> None:
        self._changed = threading.Condition()
        self._said: list[list[dict[str, Any]]] = [[] for _ in range(processes)]
        self._processes = [self._start(list(names[place::processes]), address) for place in range(processes)]
        self._threads = [threading.Thread(target=self._listen, args=(i,), daemon=True) for i in range(processes)]
        for thread in self._threads:
            thread.start()

    def _start(self, names: list[str], address: DoorAddress) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_nodes"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        secrets = base64.b64encode(address.certificate).decode(), address.token
        self._write(process, {"names": names, "door": [address.host, address.port, *secrets]})
        return process

    @staticmethod
    def _write(process: subprocess.Popen[str], order: dict[str, Any]) -> None:
        assert process.stdin is not None, "it was asked for"
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()

    def _listen(self, place: int) -> None:
        stdout = self._processes[place].stdout
        assert stdout is not None, "it was asked for"
        for line in stdout:
            with self._changed:
                self._said[place].append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._said[place].append({"said": "gone"})
            self._changed.notify_all()

    def order(self, do: str, to: int | None = None, **arguments: Any) -> float:
        """Send an order to all processes or to one of them; return the time at which it was sent."""
        at = time.time()
        for process in self._processes if to is None else [self._processes[to]]:
            self._write(process, {"do": do, **arguments})
        return at

    def hear(self, what: str, timeout: float, of: int | None = None) -> list[dict[str, Any]]:
        """Wait for an answer of every process, or of one of them; return the answers, and remove them.

        Raises
        ------
        TimeoutError
            If that takes too long, or one of them has ended.
        """
        asked = self._said if of is None else [self._said[of]]

        def reached() -> bool:
            return any(_find(said, "gone") for said in asked) or all(_find(said, what) for said in asked)

        with self._changed:
            self._changed.wait_for(reached, timeout)
            found = [_find(said, what) for said in asked]
            if not all(found):
                why = "one has ended" if any(_find(said, "gone") for said in asked) else f"after {timeout:g} s"
                raise TimeoutError(f"{found.count(None)} of {len(found)} processes have not {what}: {why}")
            for said, one in zip(asked, found, strict=True):
                said.remove(one or {})
            return [one for one in found if one is not None]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait()
            thread.join()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _find(said: list[dict[str, Any]], what: str) -> dict[str, Any] | None:
    return next((one for one in said if one["said"] == what), None)


# --- in the nodes' process ---


def _say(said: str, **more: Any) -> None:
    print(json.dumps({"said": said, **more}), flush=True)


class _Node:
    """One node."""

    def __init__(self, name: str, number: int, crew: _Crew) -> None:
        self.name, self._number, self._crew = name, number, crew
        self._host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        self._step = 0
        self._started = False
        self._writing = asyncio.Lock()
        self._call: Any = None

    async def live(self) -> None:
        """Connect to the Door, and obey its messages until the stream ends."""
        import grpc.aio

        from tfos_nb.runtime.control.door import ATTEND, dial, metadata_of
        from tfos_nb.runtime.control.lifecycle import Reservation

        address, crew = self._crew.address, self._crew
        # Each node gets its own connection: gRPC would otherwise share one among all nodes of a process.
        channel = dial(address, grpc.aio.secure_channel, ("grpc.use_local_subchannel_pool", 1))
        try:
            async with crew.gate:
                self._call = channel.stream_stream(ATTEND)(metadata=metadata_of(address))
                port, executor = 35000 + self._number % 20000, str(self._number)
                await self.send(Reservation(self.name, self._host, port, executor, 0, 4711))
            while (data := await self._call.read()) is not grpc.aio.EOF:
                await self._obey(data)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if not self._started:
                raise  # no Start has come yet
        finally:
            await channel.close()
            crew.count("left")

    async def send(self, message: Any) -> None:
        """Send a message, after those before it."""
        import grpc.aio

        from tfos_nb.runtime.control import wire

        async with self._writing:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                await self._call.write(wire.encode(message))

    async def _obey(self, data: bytes) -> None:
        from tfos_nb.runtime.control import wire
        from tfos_nb.runtime.control.lifecycle import EndNode, MainReturned, NodeEnded, Stop

        if len(data) > 4096 or b"Start" in data[:24]:  # it has every address: real nodes decode it on their own CPUs
            self._started = True
            self._crew.count("started", len(data))
            return
        message = wire.decode(data)
        if isinstance(message, Stop):
            self._crew.count("stopped")
            if message.grace > 0:
                await self.send(MainReturned(self.name, b""))
                return
        if isinstance(message, (Stop, EndNode)):
            await self.send(NodeEnded(self.name, 0, None, ""))
            await self._call.done_writing()

    async def come_up(self) -> None:
        """Send the messages of a node that has imported TensorFlow and calls main."""
        from tfos_nb.runtime.control.lifecycle import FeedPlace, MainStarted, NodeUp

        place = FeedPlace(f"/tmp/tfos_nb-node-{self._number:08x}/feed", self._host, 40000, _CERTIFICATE)
        await self.send(NodeUp(self.name, 4712, "2.21.0", "3.15.1", place))
        await self.send(MainStarted(self.name))

    async def beat(self) -> None:
        """Send a heartbeat with a step's report, and lines of output now and then."""
        from tfos_nb.runtime.control.reports import FeedStatus, Heartbeat, LogLines, StepReport

        self._step += 1
        metrics = {"loss": 1 / (1 + self._step), "accuracy": 0.9 + 1e-4 * self._step}
        report = StepReport(1, 30, self._step, 10_000, metrics, False, time.time(), "fit")
        feed = FeedStatus(128 * self._step, 128 * self._step, 1 << 20)
        await self.send(Heartbeat(self.name, 71.0 + self._step % 9, (2 << 30) + self._step, (report,), feed))
        if (self._step + self._number) % LINES_EVERY == 0:
            lines = (f"step {self._step}: loss {metrics['loss']:.6f}", "a line that the program has printed by itself")
            await self.send(LogLines(self.name, lines))

    def lose(self) -> None:
        """Break the stream without a last message, as when a host is lost."""
        self._call.cancel()


class _Crew:
    """All nodes of this process."""

    def __init__(self, names: Sequence[str], address: DoorAddress) -> None:
        self.address = address
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.nodes = {name: _Node(name, int(name.partition(":")[2]), self) for name in names}
        self._counts = {"started": [0, 0], "stopped": [0, 0], "left": [0, 0]}
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._beats = 0
        self._late = 0
        self._lost = 0

    def count(self, what: str, size: int = 0) -> None:
        """Count an event of a node; answer when it has happened to all remaining nodes."""
        count = self._counts[what]
        count[0] += 1
        count[1] += size
        if count[0] == len(self.nodes) - (self._lost if what == "stopped" else 0):
            _say(what, at=time.time(), bytes=count[1])

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    def do_come(self) -> None:
        """Have all nodes connect."""
        for node in self.nodes.values():
            self.spawn(node.live())

    def do_up(self) -> None:
        """Have all nodes come up."""
        self.spawn(self._come_up())

    async def _come_up(self) -> None:
        for node in self.nodes.values():
            await node.come_up()

    def do_beat(self, every: float = 1.0) -> None:
        """Have each node send a heartbeat ``every`` so many seconds, evenly spread over that time."""
        self.spawn(self._keep_beating(every))

    async def _keep_beating(self, every: float) -> None:
        """Send heartbeats by the clock; leave one out if the node's last one is still being sent."""
        began, share, under_way = time.monotonic(), every / len(self.nodes), set()
        for number in itertools.count():
            for place, node in enumerate(self.nodes.values()):
                pause = began + every * number + place * share - time.monotonic()
                if pause > 0:
                    await asyncio.sleep(pause)
                if node in under_way:
                    self._late += 1
                    continue
                self._beats += 1
                under_way.add(node)
                self.spawn(self._beat(node, under_way))

    async def _beat(self, node: _Node, under_way: set[_Node]) -> None:
        try:
            await node.beat()
        finally:
            under_way.discard(node)

    def do_tell(self) -> None:
        """Answer how many heartbeats were sent and how many were left out."""
        _say("told", beats=self._beats, late=self._late, cpu=time.process_time())

    def do_lose(self, name: str) -> None:
        """Lose a node."""
        self._lost += 1
        at = time.time()
        self.nodes[name].lose()
        _say("lost", at=at)

    def do_feed(self, feed: int, first: int, count: int, rows: int) -> None:
        """Send the requests of tasks that feed ``count`` partitions of ``rows`` rows."""
        self.spawn(self._feed(feed, range(first, first + count), rows))

    async def _feed(self, feed: int, partitions: range, rows: int) -> None:
        import grpc.aio
        import pyarrow as pa

        from tfos_nb.runtime.control import wire
        from tfos_nb.runtime.control.door import ASK, dial, metadata_of
        from tfos_nb.runtime.feed import messages

        channel = dial(self.address, grpc.aio.secure_channel)
        method, metadata = channel.unary_unary(ASK), metadata_of(self.address)
        size = 0

        async def ask(question: Any) -> Any:
            nonlocal size
            data = await method(wire.encode(question), metadata=metadata, timeout=120.0)
            size += len(data)
            return wire.decode(data)

        schema = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.int64())]).serialize().to_pybytes()
        for partition in partitions:
            told = await ask(messages.OpenPartition(feed, partition, schema, {"x": (784,)}, "10.0.0.1"))
            known = set(told.places)
            for row in range(0, rows, _BATCH_ROWS):
                claimed = await ask(messages.ClaimRows(feed, partition, row, min(_BATCH_ROWS, rows - row)))
                if unknown := tuple(set(claimed.nodes) - known):
                    known |= (await ask(messages.WherePlaces(feed, unknown))).places.keys()
            await ask(messages.PartitionDone(feed, partition, rows, True))
        await channel.close()
        _say("fed", at=time.time(), bytes=size)


async def _main() -> None:
    from tfos_nb.runtime.control.door import DoorAddress
    from tfos_nb.runtime.node import supervisor  # noqa: F401 - the wire must know a supervisor's messages

    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_quiet)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    job = json.loads(await reader.readline())
    host, port, certificate, token = job["door"]
    crew = _Crew(job["names"], DoorAddress(host, port, base64.b64decode(certificate), token))
    _say("ready")
    obeying = asyncio.ensure_future(_obey_all(reader, crew))
    await asyncio.wait({obeying, crew.failed}, return_when=asyncio.FIRST_COMPLETED)
    if crew.failed.done():
        crew.failed.result()


async def _obey_all(reader: asyncio.StreamReader, crew: _Crew) -> None:
    while line := await reader.readline():
        order = json.loads(line)
        getattr(crew, f"do_{order.pop('do')}")(**order)


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), BlockingIOError):  # gRPC's poller: see tfos_nb.runtime.control.door
        loop.default_exception_handler(context)


if __name__ == "__main__":
    asyncio.run(_main())
