"""Helpers for the tests of addresses: requests byte by byte, and a fake TensorBoard that records its requests."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine

__all__ = ["Board", "Raw", "RunningCluster", "ask_raw"]

SECONDS = 30.0


@dataclass(frozen=True)
class Raw:
    """An answer as it was received."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    all: bytes = field(repr=False)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


def ask_raw(port: int, request: bytes) -> Raw:
    """Send these bytes, and read until the server closes the connection; status 0 if it sends nothing."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(request)
        said = b""
        try:
            while piece := connection.recv(1 << 16):
                said += piece
        except ConnectionResetError:
            pass
    head, _, body = said.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    headers = [(name, value.strip()) for name, _, value in (one.partition(":") for one in lines)]
    return Raw(int(words[1]) if len(words) > 1 else 0, headers, body, said)


class Board:
    """A fake TensorBoard on a unix socket: it records its requests, and tries to set a cookie."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        board = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def parse_request(self) -> bool:
                if not super().parse_request():
                    return False
                target = self.raw_requestline.split(b" ")[1].decode("latin-1")  # the parser merges slashes
                board.asked.append((self.command, target, dict(self.headers), self._body()))
                body = json.dumps({"enabled": True}).encode()
                self.send_response(200)
                for name, value in (("Content-Length", str(len(body))), ("Set-Cookie", "a=1"), ("X-Secret", "hidden")):
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                return False

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                return body

            def log_message(self, *args: Any) -> None: ...

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(path, Handler)

    @classmethod
    @contextmanager
    def at(cls, path: str) -> Iterator[Board]:
        board = cls(path)
        threading.Thread(target=board._server.serve_forever, daemon=True).start()
        try:
            yield board
        finally:
            board._server.shutdown()
            board._server.server_close()


class RunningCluster:
    """A fake cluster whose TensorBoard is that board."""

    def __init__(self, cluster_id: str, board: str) -> None:
        self.id, self.tensorboard_socket = cluster_id, board
        self.stops = 0
        self.asked_for: list[str] = []

    def snapshot(self) -> ClusterState:
        return ClusterState("mnist", self.id, status=ClusterStatus.RUNNING, log_dir="/tmp")

    def request_stop(self) -> str:
        self.stops += 1
        return "stopping"

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        self.asked_for.append(node)
        if node != "worker:0":
            raise ValueError(f"no node {node!r}")
        return [LogLine(1.5, node, "a line")]

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        return {"metrics": [metric], "by": by, "node": node}

    def stacks(self) -> dict[str, str]:
        return {"worker:0": "Thread (main)"}
