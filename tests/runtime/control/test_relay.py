"""A relay delivers messages unchanged, once and in order, even if exchanges are lost or repeated."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.control.test_door import RecordingHandler, still_open
from tests.waiting import until
from tfos_nb.driver import relaying
from tfos_nb.driver.relaying import Carrier, check_relay
from tfos_nb.errors import PlanError, TfosError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorClient
from tfos_nb.runtime.control.lifecycle import EndNode
from tfos_nb.runtime.control.processes import read_frame
from tfos_nb.runtime.control.relay import Exchange, ExchangeTask, Frames, RelayPlace, Taken

BIG = os.urandom(3 << 20)


@contextmanager
def relay(alone: float = 60.0) -> Iterator[tuple[RelayPlace, subprocess.Popen[bytes]]]:
    """Start a relay as a task does."""
    command = [sys.executable, "-m", "tfos_nb.runtime.control.relay", "127.0.0.1", str(alone)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield read_frame(process.stdout), process
        finally:
            process.kill()


def exchange_with(place: RelayPlace) -> Callable[[bytes], bytes]:
    """Return a function that does the exchange of a Spark job with one task."""

    def exchange(question: bytes) -> bytes:
        (batch,) = ExchangeTask(place.exchanges, question)(())
        return bytes(batch.column("answer")[0].as_py())

    return exchange


def badly(exchange: Callable[[bytes], bytes], pick: random.Random) -> Callable[[bytes], bytes]:
    """Return an unreliable exchange: the question or its answer may be lost, or the exchange may be made twice."""

    def attempt(question: bytes) -> bytes:
        outcome = pick.choice(["well", "well", "twice", "not there", "not back"])
        if outcome == "not there":
            raise TfosError("lost on its way there")
        answer = exchange(question)
        if outcome == "not back":
            raise TfosError("lost on its way back")
        return exchange(question) if outcome == "twice" else answer

    return attempt


@contextmanager
def relayed(
    handler: RecordingHandler, how: Callable[[Callable[[bytes], bytes]], Callable[[bytes], bytes]] = lambda same: same
) -> Iterator[DoorAddress]:
    """Open a door, and a relay that leads to it."""
    door = Door(handler, host="127.0.0.1", bind="127.0.0.1")
    own = door.open()
    with relay() as (place, _):
        carrier = Carrier(how(exchange_with(place)), own.port)
        carrier.start()
        yield replace(own, host=place.host, port=place.port, relayed=True)
        door.close()
        carrier.close(10.0)


def test_strangers_at_a_relay_cannot_use_up_the_drivers_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "descriptors_left", lambda: 20)
    with relayed(RecordingHandler()) as address, ExitStack() as stack:
        where = address.host, address.port
        strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(60)]
        assert until(lambda: len(still_open(strangers)) <= 10), len(still_open(strangers))
        assert len(still_open(strangers)) == 10, "they have their time"
        for stranger in strangers:
            stranger.close()
        with DoorClient(address) as client:
            assert until(lambda: answers(client))


def answers(client: DoorClient) -> bool:
    try:
        return bool(client.ask(EndNode()) == EndNode())
    except grpc.RpcError:
        return False


def test_a_relay_carries_a_question_and_answer_of_several_megabytes() -> None:
    with relayed(RecordingHandler()) as address, DoorClient(address) as client:
        assert client.ask(BIG) == BIG


@pytest.mark.parametrize("seed", [1, 2])
def test_no_message_is_lost_or_repeated_when_exchanges_are(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("tfos_nb.driver.relaying._AGAIN_AFTER", 0.01)
    pick = random.Random(seed)
    with relayed(RecordingHandler(), lambda well: badly(well, pick)) as address, DoorClient(address) as client:
        for number in range(5):
            said = {"number": number, "data": BIG[: number << 17]}
            assert client.ask(said) == said


def test_a_relay_ends_when_its_driver_ends_or_never_appears(tmp_path: object) -> None:
    with relay() as (place, process):
        exchange_with(place)(wire.encode(Exchange(0, 0, (), over=True)))
        assert process.wait(10) == 0
    with relay(alone=1.0) as (_, process):
        assert process.wait(10) == 0


def test_a_relay_makes_no_exchange_with_a_stranger() -> None:
    with relay() as (place, _):
        import grpc

        with pytest.raises(grpc.RpcError, match="no valid token"):
            exchange_with(replace(place, token="0" * 64))(wire.encode(Exchange(0, 0)))


def test_a_carrier_is_not_prompt_while_its_exchanges_fail() -> None:
    broken = threading.Event()

    with relay() as (place, _):
        well = exchange_with(place)

        def exchange(question: bytes) -> bytes:
            if broken.is_set():
                raise TfosError("no slot is free")
            return well(question)

        carrier = Carrier(exchange, 1)
        assert not carrier.prompt
        carrier.start()
        assert until(lambda: carrier.prompt)
        broken.set()
        assert until(lambda: not carrier.prompt)
        broken.clear()
        assert until(lambda: carrier.prompt)
        carrier.close(10.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=40))
def test_frames_arrive_once_and_in_order(exchanges: list[tuple[int, bool, bool]]) -> None:
    """Put some frames; then the exchange's question and its answer may each be lost."""
    sent, taken, got, put = Frames(), Taken(), [], 0
    for count, goes, comes in [*exchanges, (0, True, True)]:
        for _ in range(count):
            sent.put(put, b"x")
            put += 1
        if goes:
            got += taken.new_of(*sent.next_ones())
            if comes:
                sent.taken(taken.count)
    assert [number for number, _ in got] == list(range(put))
    assert len(sent) == 0


def test_a_gap_in_the_frames_is_an_error() -> None:
    with pytest.raises(ValueError, match="frame 3 came, but frame 0 was expected"):
        Taken().new_of(3, ((1, b"x"),))


def test_a_relay_is_refused_where_spark_runs_no_barrier_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    spark: Any = None
    context = SimpleNamespace(has_dynamic_allocation=False)
    monkeypatch.setattr(relaying, "context_of", lambda _: context)
    check_relay(spark)
    context.has_dynamic_allocation = True
    with pytest.raises(PlanError, match="a relay among them does not start with spark.dynamicAllocation.enabled"):
        check_relay(spark)
