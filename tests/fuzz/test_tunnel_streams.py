"""Tunnel streams that nobody asked for, that come twice or that break off: no page gets another page's bytes."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.inputs import examples
from tests.runtime.control.test_door import RecordingHandler
from tests.runtime.control.test_tunnel import Tunnel, board, get
from tests.waiting import until
from tfos_nb.runtime.control.door import _CARRY, _NUMBER, Door, DoorClient, dial, metadata_of
from tfos_nb.runtime.control.tunnel import OpenTunnel

__all__ = ["board"]

SECONDS = 20.0


class Listener:
    """A door with the listener of a tunnel; the test takes the supervisor's part."""

    def __init__(self, path: str) -> None:
        self.door = Door(RecordingHandler(), host="127.0.0.1", bind="127.0.0.1")
        self.address = self.door.open()
        self.client = DoorClient(self.address)
        self.channel = dial(self.address)
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.path = path
        self.door.open_tunnel(path, self._ask)

    def _ask(self, message: OpenTunnel) -> bool:
        self.asked.put(message.number)
        return True

    def page(self) -> tuple[socket.socket, int]:
        """Open a page; return its connection, and the number of the stream that it waits for."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        connection.connect(self.path)
        return connection, self.asked.get(timeout=SECONDS)

    def carry(self, number: str, says: list[bytes]) -> list[bytes]:
        """Open a stream with any number, send all, and return what arrives until it ends."""
        metadata = (*metadata_of(self.address), (_NUMBER, number))
        return list(self.channel.stream_stream(_CARRY)(iter(says), timeout=SECONDS, metadata=metadata))

    def close(self) -> None:
        self.channel.close()
        self.client.close()
        self.door.close()


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    listener = Listener(str(tmp_path_factory.mktemp("listener") / "m"))
    yield listener
    listener.close()


def received(connection: socket.socket) -> bytes:
    """Read until the other end closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            said += piece
    return said


pieces = st.lists(st.binary(max_size=40), max_size=5)
printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
numbers = printable | st.integers(-5, 10**30).map(str) | st.sampled_from(["9" * 5000, "1e9", "0x1", "+1", "01", "1_0"])


@examples(60)
@given(number=numbers, says=pieces)
def test_a_stream_with_any_number_reaches_no_page_that_did_not_ask_for_it(
    listener: Listener, number: str, says: list[bytes]
) -> None:
    """The page that waits then gets its own stream in full, and nothing of the other one."""
    page, right = listener.page()
    with page:
        if number.isdigit() and len(number) < 18 and int(number) == right:
            number += "0"
        assert listener.carry(number, says) == []
        page.sendall(b"question")
        page.shutdown(socket.SHUT_WR)
        assert b"".join(listener.carry(str(right), [b"ans", b"wer"])) == b"question"
        assert received(page) == b"answer"


@examples(40)
@given(asks=st.binary(max_size=60), says=pieces, again=pieces)
def test_a_stream_arrives_unchanged_and_a_second_one_with_its_number_gets_nothing(
    listener: Listener, asks: bytes, says: list[bytes], again: list[bytes]
) -> None:
    page, number = listener.page()
    with page:
        page.sendall(asks)
        page.shutdown(socket.SHUT_WR)
        assert b"".join(listener.carry(str(number), says)) == asks
        assert listener.carry(str(number), again) == []
        assert received(page) == b"".join(says)


@examples(40)
@given(asks=st.binary(max_size=60), says=pieces, reset=st.booleans())
def test_a_page_that_was_closed_before_its_stream_opened_leaves_nothing_behind(
    listener: Listener, asks: bytes, says: list[bytes], reset: bool
) -> None:
    """Its stream ends and the next page is served, whether the page was closed or reset."""
    page, number = listener.page()
    if reset:
        page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with contextlib.suppress(BrokenPipeError):
        page.sendall(asks)
    page.close()
    assert b"".join(listener.carry(str(number), says)) in (asks, b"")
    other, number = listener.page()
    with other:
        other.shutdown(socket.SHUT_WR)
        assert listener.carry(str(number), [b"well"]) == []
        assert received(other) == b"well"
    inside = listener.door._tunnel
    assert inside is not None
    assert until(lambda: not inside._open and not inside._waiting, SECONDS)


def test_streams_that_end_by_an_error_do_not_end_the_others(listener: Listener) -> None:
    """If a supervisor breaks off, its page gets the end of the stream, and another page gets everything."""
    first, number = listener.page()
    second, other = listener.page()
    with first, second:
        broken = threading.Event()

        def breaks() -> Iterator[bytes]:
            yield b"half"
            broken.wait(SECONDS)
            raise RuntimeError("the supervisor has gone wrong")

        call = listener.channel.stream_stream(_CARRY)(
            breaks(), timeout=SECONDS, metadata=(*metadata_of(listener.address), (_NUMBER, str(number)))
        )
        assert first.recv(10) == b"half"
        broken.set()
        with contextlib.suppress(grpc.RpcError):
            list(call)
        assert received(first) == b""
        second.shutdown(socket.SHUT_WR)
        listener.carry(str(other), [b"all"])
        assert received(second) == b"all"


def test_a_supervisor_asked_for_streams_that_nobody_waits_for_still_serves_the_next(tmp_path: Path, board: Any) -> None:
    """There are more of them than it carries at once. Each is closed, and blocks none of the later ones."""
    tunnel = Tunnel(tmp_path, board)
    try:
        for number in [-1, 0, 10**9, 2**63 - 1] * 20:
            tunnel.end.open(OpenTunnel(number))
        assert get(tunnel, "/data").startswith(b"/data")
    finally:
        tunnel.close()
