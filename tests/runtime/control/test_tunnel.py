"""The tunnel to TensorBoard: pages arrive unchanged, and a disconnect on either side is noticed."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import http.server
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.runtime.control.test_door import RecordingHandler
from tests.waiting import until
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorClient
from tfos_nb.runtime.control.tunnel import OpenTunnel, TunnelEnd, TunnelEntry

SECONDS = 20.0
BIG = 64 << 20
PIECE = os.urandom(1 << 20)


class Board(http.server.BaseHTTPRequestHandler):
    """Stands in for TensorBoard: serves a page, an echo, and an answer of 64 MiB that records its progress."""

    sent = 0
    gave_up = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/big":
            self._big()
        else:
            self._answer(f"{self.path} {self.headers.get('Accept')}".encode())

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _big(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(BIG))
        self.end_headers()
        type(self).sent = 0
        try:
            for _ in range(BIG // len(PIECE)):
                self.wfile.write(PIECE)
                type(self).sent += len(PIECE)
        except OSError:
            self.gave_up.set()

    def log_message(self, *args: Any) -> None:
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    Board.gave_up.clear()
    server = UnixServer(str(tmp_path / "board"), Board)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield str(tmp_path / "board")
    server.shutdown()
    server.server_close()


class Tunnel:
    """A door with an open tunnel, and the supervisor's end, which gets the door's requests directly.

    ``forwarded``: connections come from a kernel by another door.
    """

    def __init__(self, path: Path, board: str | None, forwarded: bool = False) -> None:
        self.door = Door(RecordingHandler(), host="127.0.0.1", bind="127.0.0.1")
        self.address = self.door.open()
        self.client = DoorClient(self.address)
        self.end = TunnelEnd(self.client, lambda: board)
        self.present = True
        self.path = str(path / "listener")
        self.door.open_tunnel(self.path, self._ask)
        self.near = self.far = None
        if forwarded:
            listener, self.path = self.path, str(path / "entry")
            self.near = Door(RecordingHandler(), host="127.0.0.1", bind="127.0.0.1")
            self.far = DoorClient(self.near.open())
            self.near.forward(lambda: listener)
            self.entry = TunnelEntry(self.far, self.path)

    def _ask(self, message: OpenTunnel) -> bool:
        if self.present:
            self.end.open(message)
        return self.present

    def close(self) -> None:
        if self.near is not None and self.far is not None:
            self.entry.close()
            self.near.close()
            self.far.close()
        self.client.close()
        self.door.close()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        connection.connect(self.path)
        return connection

    def http(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("board")
        connection.sock = self.connect()
        return connection


@pytest.fixture(params=["", "forwarded"])
def tunnel(request: pytest.FixtureRequest, tmp_path: Path, board: str) -> Iterator[Tunnel]:
    made = Tunnel(tmp_path, board, bool(request.param))
    yield made
    made.close()


def get(tunnel: Tunnel, path: str) -> bytes:
    connection = tunnel.http()
    connection.request("GET", path, headers={"Accept": "text/html"})
    body = connection.getresponse().read()
    connection.close()
    return body


def test_a_page_passes_through_the_tunnel(tunnel: Tunnel) -> None:
    assert get(tunnel, "/data/runs?x=1") == b"/data/runs?x=1 text/html"


def test_posted_data_arrives(tunnel: Tunnel) -> None:
    connection = tunnel.http()
    body = os.urandom(3 << 20)
    connection.request("POST", "/", body=body)
    assert connection.getresponse().read() == body
    connection.close()


def test_many_pages_at_once_are_not_mixed_up(tunnel: Tunnel) -> None:
    found: dict[int, bytes] = {}

    def ask(number: int) -> None:
        found[number] = get(tunnel, f"/{number}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == {number: f"/{number} text/html".encode() for number in range(40)}


def test_a_large_answer_arrives_whole(tunnel: Tunnel) -> None:
    assert hashlib.sha256(get(tunnel, "/big")).digest() == hashlib.sha256(PIECE * (BIG // len(PIECE))).digest()


def test_a_page_that_does_not_read_makes_tensorboard_wait(tunnel: Tunnel) -> None:
    connection = tunnel.connect()
    connection.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    assert connection.recv(100)
    still, before = 0, -1
    while still < 5:  # five checks in a row without another byte: it has stopped
        threading.Event().wait(0.1)
        still = still + 1 if before == Board.sent else 0
        before = Board.sent
    assert before < BIG / 2
    connection.close()
    assert Board.gave_up.wait(SECONDS), "TensorBoard is told that the page is gone"


def test_a_connection_is_closed_if_the_node_is_missing(tunnel: Tunnel) -> None:
    tunnel.present = False
    assert tunnel.connect().recv(1) == b""


def test_a_connection_is_closed_if_tensorboard_does_not_run(tmp_path: Path) -> None:
    tunnel = Tunnel(tmp_path, None)
    assert tunnel.connect().recv(1) == b""
    tunnel.close()


def test_only_the_owner_may_open_the_socket(tunnel: Tunnel) -> None:
    assert os.stat(tunnel.path).st_mode & 0o077 == 0


def test_the_door_closes_while_a_page_is_open(tunnel: Tunnel) -> None:
    connection = tunnel.connect()
    connection.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    assert connection.recv(100)
    tunnel.close()
    while connection.recv(1 << 20):
        pass
    assert not os.path.exists(tunnel.path)


def test_the_door_closes_right_after_a_pages_stream_has_ended(tunnel: Tunnel) -> None:
    connection = tunnel.connect()
    connection.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    assert connection.recv(100)
    (passage,) = tunnel.door._tunnel._open
    assert until(passage.writer.transport.get_write_buffer_size, SECONDS), "the page is sent more than it reads"
    tunnel.client.close()  # as when a supervisor ends
    assert until(passage.over.is_set, SECONDS)
    for _ in range(3):  # let the door's loop run everything that is scheduled
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), tunnel.door._loop).result(SECONDS)
    tunnel.door.close()
    while connection.recv(1 << 20):
        pass


def test_a_stream_needs_the_token(tunnel: Tunnel) -> None:
    address = tunnel.address
    stranger = DoorClient(DoorAddress(address.host, address.port, address.certificate, "another"))
    with pytest.raises(grpc.RpcError) as caught:
        list(stranger.carry(1, iter(())))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    stranger.close()


def test_a_stream_that_was_not_requested_gets_nothing(tunnel: Tunnel) -> None:
    assert list(tunnel.client.carry(999, iter((b"GET / HTTP/1.0\r\n\r\n",)))) == []
