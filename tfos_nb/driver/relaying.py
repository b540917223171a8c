"""Driver's end of a relay: a door that executors reach through a process on one of them.

Where executors cannot connect to this process (a client of Spark Connect behind NAT), a relay is started on one of
them, and nodes connect to that. Short Spark jobs, one after another, fetch the nodes' messages and pass them to the
door over loopback. See :mod:`tfos_nb.runtime.control.relay` for the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError, TfosError
from tfos_nb.ports import allowed_ports
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.admission import descriptors_left
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorHandler, Link
from tfos_nb.runtime.control.processes import python_path
from tfos_nb.runtime.control.relay import (
    ANSWER_SCHEMA,
    PLACE_SCHEMA,
    Exchange,
    Exchanged,
    ExchangeTask,
    Frames,
    RelayPlace,
    RelayTask,
    Taken,
)
from tfos_nb.spark.contexts import context_of, is_connect
from tfos_nb.spark.reachability import look_from_executor
from tfos_nb.spark.session import SparkJobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Carrier", "RelayedDoor", "check_relay", "needs_relay", "stated_relay"]

logger = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_START_SECONDS = 60.0
_WITHOUT_RELAY = "set TFOS_SERVER_HOST to an address of this host that the executors reach"
_LATE = 3.0  # seconds without an exchange after which a node's silence does not count
_GIVES_UP_AFTER = 30.0  # seconds of exchanges that fail
_AGAIN_AFTER = 1.0
_PIECE = 256 << 10

_reached: dict[Hashable, bool] = {}  # by the Spark application


def needs_relay(spark: SparkSession) -> bool:
    """Whether the executors cannot connect to this process, so that a relay is needed.

    A client of Spark Connect runs a task once, to find out. With ``TFOS_SERVER_HOST`` set, that address is taken to be
    reachable. ``TFOS_SERVER_RELAY`` (1 or 0) decides directly.

    Raises
    ------
    PlanError
        If ``TFOS_SERVER_RELAY`` is anything else.
    """
    stated = stated_relay()
    if stated or not is_connect(spark) or os.environ.get("TFOS_SERVER_HOST"):
        return stated == "1"
    key = context_of(spark).key
    if key not in _reached:
        _reached[key] = _is_reached(spark)
    return not _reached[key]


def stated_relay() -> str:
    """Return what ``TFOS_SERVER_RELAY`` says: ``"1"``, ``"0"``, or nothing.

    Raises
    ------
    PlanError
        If it is anything else.
    """
    stated = os.environ.get("TFOS_SERVER_RELAY", "").strip()
    if stated not in ("", "0", "1"):
        raise PlanError(
            f"TFOS_SERVER_RELAY must be 1 (by a relay on an executor) or 0 (directly), got {stated}; unset it to have "
            "a task find out"
        )
    return stated


def check_relay(spark: SparkSession) -> None:
    """Refuse a relay where it cannot start: its task is a barrier task, which Spark runs at once or not at all.

    Raises
    ------
    PlanError
        With dynamic allocation, under which Spark runs no barrier tasks (SPARK-24942).
    """
    if context_of(spark).has_dynamic_allocation:
        raise PlanError(
            "the executors do not reach this process, and a relay among them does not start with "
            "spark.dynamicAllocation.enabled=true: start Spark without it, with spark.executor.instances=N, or give an "
            "address that they reach by TFOS_SERVER_HOST"
        )


def _is_reached(spark: SparkSession) -> bool:
    host, bind = context_of(spark).address()
    try:
        _, row = look_from_executor(spark, host, bind, allowed_ports("TFOS_SERVER_PORT"))
    except PlanError:
        raise
    except Exception as error:  # noqa: BLE001 - the launch that follows reports what is wrong with this Spark
        logger.info("no executor could be asked whether it reaches this process: %s", error)
        return True
    if row.unreachable:
        logger.warning(
            "the executors do not reach this process at %s (%s): the nodes' messages go through a relay on one of them "
            "and short Spark jobs, which is slower. Set TFOS_SERVER_HOST to an address that the executors reach",
            host,
            row.unreachable,
        )
    return not row.unreachable


class RelayedDoor(Door):
    """Door on loopback, with a relay on an executor in front of it.

    Parameters
    ----------
    handler : DoorHandler
        Answers the messages. Its clock stops while no exchange comes back, since the nodes are then not to blame.
    spark : SparkSession
        The session on whose executors the relay runs.
    """

    def __init__(self, handler: DoorHandler, spark: SparkSession) -> None:
        super().__init__(_PausingHandler(handler, self), host=_HERE, bind=_HERE)
        self._spark = spark
        self._jobs = SparkJobs(spark, f"tfos_nb-relay-{uuid.uuid4().hex[:12]}")
        self._carrier: Carrier | None = None

    @property
    def prompt(self) -> bool:
        """Whether exchanges come back in time."""
        return self._carrier is not None and self._carrier.prompt

    def open(self, timeout: float = 10.0) -> DoorAddress:
        """Listen, start the relay, and return where nodes reach it."""
        own = super().open(timeout)
        try:
            place = self._start_relay()
        except BaseException:
            super().close()
            raise
        self._relay = place.exchanges
        self._carrier = Carrier(self._exchange, own.port)
        self._carrier.start()
        return replace(own, host=place.host, port=place.port, relayed=True)

    def close(self, timeout: float = 10.0) -> None:
        """End every stream, the exchanges and the relay."""
        super().close(timeout)
        if self._carrier is not None:
            self._carrier.close(timeout)

    def _start_relay(self) -> RelayPlace:
        check_relay(self._spark)
        task = RelayTask(python_path())
        frame = self._spark.range(0, 1, 1, 1).mapInArrow(task, PLACE_SCHEMA, barrier=True)
        job = self._jobs.run(frame.collect, "tfos_nb: start a relay")
        if not job.done.wait(_START_SECONDS):
            job.cancel()
            raise TfosError(
                f"a relay did not start on an executor within {_START_SECONDS:g} s: no slot was free. Free one, or "
                f"{_WITHOUT_RELAY}"
            )
        if job.error is not None:
            raise TfosError(
                f"a relay did not start on an executor: {job.error}. Correct the cause, or {_WITHOUT_RELAY}"
            ) from job.error
        assert job.result is not None
        place = wire.expect(RelayPlace, job.result[0].place)
        logger.info("the executors do not reach this process: a relay is at %s:%d", place.host, place.port)
        return place

    def _exchange(self, question: bytes) -> bytes:
        """Make an exchange with a Spark job of one task."""
        frame = self._spark.range(0, 1, 1, 1).mapInArrow(ExchangeTask(self._relay, question), ANSWER_SCHEMA)
        job = self._jobs.run(frame.collect, "tfos_nb: what the nodes say")
        job.done.wait()
        if job.error is not None:
            raise TfosError(
                f"an exchange with the relay on {self._relay.host} failed: {job.error}. If its executor was lost, "
                "launch the cluster again"
            ) from job.error
        assert job.result is not None
        return bytes(job.result[0].answer)


class _PausingHandler:
    """DoorHandler whose time limits are not checked while the exchanges with the relay are late."""

    def __init__(self, handler: DoorHandler, door: RelayedDoor) -> None:
        self._handler, self._door = handler, door

    def arrived(self, link: Link, message: Any) -> None:
        self._handler.arrived(link, message)

    def received(self, link: Link, message: Any) -> None:
        self._handler.received(link, message)

    def left(self, link: Link) -> None:
        self._handler.left(link)

    def asked(self, message: Any) -> Any:
        return self._handler.asked(message)

    def ticked(self, late: float) -> None:
        if self._door.prompt:
            self._handler.ticked(late)


class Carrier:
    """Make the exchanges, and hold one connection to the door for each node's connection to the relay.

    Parameters
    ----------
    exchange : callable
        Takes an encoded :class:`~tfos_nb.runtime.control.relay.Exchange` to the relay, and returns the answer.
    port : int
        The door's, on loopback.
    """

    def __init__(self, exchange: Callable[[bytes], bytes], port: int) -> None:
        self._ask, self._port = exchange, port
        self._outgoing, self._taken = Frames(), Taken()
        self._queues: dict[int, asyncio.Queue[bytes]] = {}
        self._open = 0
        self._most = max(descriptors_left() // 2, 1)  # each needs two descriptors: one here, one in the door
        self._over = threading.Event()
        self._prompt_since: float | None = None
        self._back_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = [
            threading.Thread(target=self._run_loop, name="tfos_nb relay's connections", daemon=True),
            threading.Thread(target=self._run, name="tfos_nb relay", daemon=True),
        ]

    def start(self) -> None:
        """Start a thread that makes the exchanges."""
        for thread in self._threads:
            thread.start()

    @property
    def prompt(self) -> bool:
        """Whether exchanges have come back in time for the last seconds, without a break."""
        now, since = time.monotonic(), self._prompt_since
        return since is not None and now - since > _LATE and now - self._back_at < _LATE

    def close(self, timeout: float) -> None:
        """Make a last exchange, which ends the relay."""
        self._over.set()
        self._threads[1].join(timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join(timeout)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._exchange()
            self._exchange(over=True)
        except Exception as error:  # noqa: BLE001 - after any error the door must learn that no messages come any more
            logger.warning("the nodes' messages do not arrive any more: %s", error)
            self._loop.call_soon_threadsafe(self._hang_up)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _exchange(self, over: bool = False) -> None:
        question = wire.encode(Exchange(self._taken.count, *self._outgoing.next_ones(), over))
        try:
            answer = wire.expect(Exchanged, self._ask(question))
        except Exception as error:
            if over or time.monotonic() - self._back_at > _GIVES_UP_AFTER:
                raise
            logger.info("%s", error)
            self._prompt_since = None
            self._over.wait(_AGAIN_AFTER)
            return
        self._note_time()
        self._outgoing.taken(answer.taken)
        for number, data in self._taken.new_of(answer.first, answer.frames):
            self._loop.call_soon_threadsafe(self._arrived, number, data)

    def _note_time(self) -> None:
        now = time.monotonic()
        if now - self._back_at > _LATE or self._prompt_since is None:
            self._prompt_since = now
        self._back_at = now

    # --- in the loop's thread ---

    def _arrived(self, number: int, data: bytes) -> None:
        if number not in self._queues:
            self._queues[number] = asyncio.Queue()
            task = self._loop.create_task(self._connect(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return  # the first frame only announces the connection
        self._queues[number].put_nowait(data)

    async def _connect(self, number: int) -> None:
        try:
            reader, writer = await self._dial()
        except OSError:  # for example, the door is closed
            self._outgoing.put(number, b"")
            while await self._queues[number].get():
                pass
            del self._queues[number]
            return
        reading = asyncio.create_task(self._read(number, reader))
        while data := await self._queues[number].get():
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()
        writer.close()
        await reading
        self._open -= 1
        del self._queues[number]

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._open >= self._most:
            raise OSError("too many connections")
        self._open += 1
        try:
            return await asyncio.open_connection(_HERE, self._port)
        except OSError:
            self._open -= 1
            raise

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                self._outgoing.put(number, data)
                while self._outgoing.full:
                    await asyncio.sleep(0.05)
        self._outgoing.put(number, b"")

    def _hang_up(self) -> None:
        """Close all connections, so that the door counts the nodes as lost."""
        for waiting in self._queues.values():
            waiting.put_nowait(b"")
