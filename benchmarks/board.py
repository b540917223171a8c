"""Compare a TensorBoard page on a browser's path with the same page directly from TensorBoard.

The path is the real one: the kernel's endpoint (a unix socket), the driver's port, gRPC over TLS to the supervisor, and
TensorBoard on loopback. Only the Jupyter server in front is left out, since every page of a notebook goes through it.
"""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings
    from tfos_nb.runtime.control.tunnel import OpenTunnel
    from tfos_nb.state.cluster_state import ClusterState, LogLine

__all__ = ["run"]

PAGES = {"page of 200 kB": "", "list of tags": "data/plugin/timeseries/tags", "event file of 200 MB": "data/big"}
TIMES = 30
BIG = 200 << 20
START_SECONDS = 60.0

Connect = Callable[[], http.client.HTTPConnection]


class _Handler:
    """Handler of a Door that only TensorBoard's tunnel connects to."""

    def arrived(self, link: Any, message: Any) -> None:
        """Ignore a node that arrives."""

    received = arrived

    def left(self, link: Any) -> None:
        """Ignore a node that leaves."""

    def asked(self, message: Any) -> Any:
        """Return no answer."""

    def ticked(self, late: float) -> None:
        """Do nothing: no deadline is watched."""


class _Running:
    """Stand-in for a running cluster, with what the endpoint uses."""

    def __init__(self, path: str, log_dir: str) -> None:
        self.id, self.tensorboard_socket, self._log_dir = uuid.uuid4().hex[:12], path, log_dir

    def snapshot(self) -> ClusterState:
        """Return a state with a log directory."""
        from tfos_nb.state.cluster_state import ClusterState, ClusterStatus

        return ClusterState("bench", self.id, status=ClusterStatus.RUNNING, log_dir=self._log_dir)

    def request_stop(self) -> str:
        """Do nothing: there is no node to stop."""
        return ""

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        """Return no lines."""
        return ()

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        """Return no curves."""
        return {}

    def stacks(self) -> dict[str, str]:
        """Return no stacks."""
        return {}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("kernel")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def run(settings: Settings) -> Result:
    """Measure two pages of TensorBoard, and the throughput of many bytes."""
    figures: dict[str, Any] = {}
    ratios = []
    with _both_ways() as (direct, tunnelled, prefix):
        for what in ("page of 200 kB", "list of tags"):
            path = PAGES[what]
            figures[what] = {"direct": [], "tunnelled": []}
            for _ in range(TIMES * settings.repeat):
                figures[what]["direct"].append(_milliseconds(direct, f"/{path}"))
                figures[what]["tunnelled"].append(_milliseconds(tunnelled, f"{prefix}{path}"))
            settings.say(f"board: {what}: {median(figures[what]['tunnelled']):.1f} ms")
            ours, theirs = median(figures[what]["tunnelled"]), median(figures[what]["direct"])
            ratios.append(Ratio(f"TensorBoard, {what}, tunnelled / direct", ours, theirs, "ms", at_most=True))
    figures["bytes"] = _throughput(settings)
    ours, theirs = median(figures["bytes"]["tunnelled"]), median(figures["bytes"]["direct"])
    ratios.append(Ratio(f"{BIG >> 20} MiB through the tunnel / direct", ours, theirs, "MB/s"))
    return Result("board", tuple(ratios), figures, ("one connection a request, as TensorBoard closes each.",))


@contextmanager
def _both_ways() -> Iterator[tuple[Connect, Connect, str]]:
    """Start TensorBoard and all parts between it and a page; yield both ways to connect, and the second's prefix."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    from tfos_nb.jupyter.endpoint import Endpoint
    from tfos_nb.runtime.node.tensorboard import TensorBoard

    with tempfile.TemporaryDirectory(prefix="tfos-board-") as name:
        os.environ["JUPYTER_RUNTIME_DIR"] = name
        EventFileWriter(f"{name}/logs/run").close()
        board = TensorBoard(f"{name}/logs")
        board.start()
        at = board.wait(START_SECONDS)
        if at is None:
            raise RuntimeError(f"TensorBoard did not start: {board.said}")
        endpoint = Endpoint()
        try:
            with _tunnel(Path(name) / "mouth", at) as path:
                cluster = _Running(path, f"{name}/logs")
                endpoint.serve(cluster)
                through = partial(_UnixConnection, endpoint.socket)
                yield partial(_UnixConnection, at), through, f"/{cluster.id}/tb/"
        finally:
            endpoint.close()
            board.stop()


@contextmanager
def _tunnel(path: Path, board: str) -> Iterator[str]:
    """Open a Door with the driver's end of the tunnel, and a supervisor's end."""
    from tfos_nb.runtime.control.door import Door, DoorClient
    from tfos_nb.runtime.control.tunnel import TunnelEnd

    door = Door(_Handler(), host="127.0.0.1", bind="127.0.0.1")
    address = door.open()
    with DoorClient(address) as client:
        end = TunnelEnd(client, lambda: board)

        def ask(message: OpenTunnel) -> bool:
            end.open(message)
            return True

        door.open_tunnel(str(path), ask)
        try:
            yield str(path)
        finally:
            door.close()


def _milliseconds(connect: Connect, path: str) -> float:
    started = time.perf_counter()
    connection = connect()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} was answered with {answer.status}")
    return 1e3 * (time.perf_counter() - started)


def _throughput(settings: Settings) -> dict[str, list[float]]:
    """Read many bytes from a plain socket server, directly and through the tunnel alone."""
    import threading

    found: dict[str, list[float]] = {"direct": [], "tunnelled": []}
    with tempfile.TemporaryDirectory(prefix="tfos-board-") as name, socket.socket(socket.AF_UNIX) as server:
        at = f"{name}/poured"
        server.bind(at)
        server.listen()
        threading.Thread(target=_pour, args=(server,), daemon=True).start()
        with _tunnel(Path(name) / "mouth", at) as path:
            for _ in range(settings.repeat):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(at)
                    found["direct"].append(_drain(connection))
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(path)
                    found["tunnelled"].append(_drain(connection))
    return found


def _pour(server: socket.socket) -> None:
    piece = os.urandom(1 << 20)
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            for _ in range(BIG // len(piece)):
                connection.sendall(piece)


def _drain(connection: socket.socket) -> float:
    """Read to the end; return megabytes a second."""
    started, taken = time.perf_counter(), 0
    while data := connection.recv(1 << 20):
        taken += len(data)
    if taken != BIG:
        raise RuntimeError(f"{taken} bytes came of {BIG}")
    return taken / 1e6 / (time.perf_counter() - started)
