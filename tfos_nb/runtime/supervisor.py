"""One node's supervisor: a small process between Spark's task and the TensorFlow process.

::

    driver's door ◀──stream── supervisor ──socket pair──▶ TF process (main)
                                  ▲ datagrams: reports      │
                                  ▲ pipe: output ◀──────────┘
    NodeTask (Spark) ──stdin: the job──▶ supervisor

It starts the TF process at once, so that TensorFlow is imported while the cluster gathers; holds the port open until
TensorFlow has it (SO_REUSEPORT, and ``TF_GRPC_REUSE_PORT=1``); passes messages on; sends heartbeats; and sees to it
that the process ends: with SIGKILL after a grace, since TensorFlow swallows SIGTERM. When the driver's stream is gone,
it ends the process and itself. Spark's task may go before it (see :mod:`tfos_nb.runtime.node`).

It never imports TensorFlow, and is the same whether Spark's task waits for it or leaves it behind.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from tfos_nb.runtime import ledger
from tfos_nb.runtime.gpu import GpuWatch
from tfos_nb.runtime.gpu_claims import GpuClaims, GpusTaken
from tfos_nb.runtime.lifecycle import (
    Farewell,
    MainStarted,
    NodeEnded,
    NodeJob,
    Refused,
    Reservation,
    Saving,
    Stop,
)
from tfos_nb.runtime.output import Output
from tfos_nb.runtime.process import (
    Channel,
    kill_group,
    private_directory,
    read_frame,
    signal_name,
    start_module,
)
from tfos_nb.runtime.reports import Heartbeat, LogLines, ReportBox
from tfos_nb.runtime.tensorboard import TensorBoard
from tfos_nb.runtime.tunnel import OpenTunnel, TunnelEnd
from tfos_nb.runtime.usage import ProcessUse

_TICK = 0.5  # at most two messages a second with lines, and two with figures
_HEARTBEAT_EVERY = 1.0
_AFTER_FAREWELL = 3.0
_AFTER_SAVING = 3.0
# These pass through here, so the wire must know them: naming them imports them.
PASSED_ON = (ledger.FeedBegins, ledger.FeedSchema, ledger.FeedEnds, ledger.NoMoreFeeds, ledger.PassDone)
# Blocks of rows come and go by megabytes. As glibc is, each is given back to the system and fetched anew, page by page:
# half of the time that a node spends in the system while it is fed.
_ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_NEEDED = ("tensorflow", "keras", "pyarrow", "grpc")


@dataclass(frozen=True)
class _Exited:
    returncode: int


@dataclass(frozen=True)
class _DriverGone:
    pass


@dataclass(frozen=True)
class _Said:
    message: Any


@dataclass(frozen=True)
class _Heard:
    message: MainStarted | Saving


@dataclass(frozen=True)
class _Wrote:
    pass


class Supervisor:
    """The life of one node.

    Parameters
    ----------
    job : NodeJob
        From Spark's task.
    """

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._directory = private_directory("node")
        self._host = job.host or _address_towards(job.door_host, job.door_port)
        self._port_holder = _hold_port()
        self._claims = GpuClaims()
        self._kill_at: float | None = None
        self._at_once = False
        self._saving = False
        self._board: TensorBoard | None = None
        self._beat_at = self._measured_at = -math.inf
        self._look_due = self._lines_due = 0.0

    def run(self) -> None:
        """Run the node to its end."""
        reason = _why_not() or self._take_gpus()
        if reason is None:
            self._start_process()
        try:
            self._meet_driver(reason)
            if reason is None:
                self._supervise()
        finally:
            if reason is None:
                kill_group(self._process)
            if self._board is not None:
                self._board.stop()
            self._claims.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _take_gpus(self) -> str | None:
        """Take GPUs of the host where Spark gave none; return why that is not possible."""
        try:
            taken = self._claims.take(self._job.claim)
        except GpusTaken as error:
            return str(error)
        self._job = replace(self._job, gpus=self._job.gpus or taken)
        return None

    def _start_process(self) -> None:
        self._channel, theirs = Channel.pair()
        reports, reports_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        fds = (theirs.fileno(), reports_theirs.fileno())
        self._process = start_module(
            "tfos_nb.runtime.tfprocess",
            env={**os.environ, **_tensorflow_env(self._job)},
            fds=fds,
            arguments=(str(fds[0]), str(fds[1]), self._directory, self._host),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        reports_theirs.close()
        self._channel.send(self._job)
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout, lambda: self._events.put(_Wrote()), gpu=bool(self._job.gpus))
        self._use = ProcessUse(self._process.pid)
        self._gpus = GpuWatch(self._job.gpus)
        self._reports = ReportBox(reports)
        threading.Thread(target=self._reports.run, name="tfos_nb reports", daemon=True).start()
        threading.Thread(target=self._await_exit, name="tfos_nb exit", daemon=True).start()

    def _meet_driver(self, reason: str | None) -> None:
        from tfos_nb.runtime.door import DoorAddress, DoorClient

        job = self._job
        self._client = DoorClient(DoorAddress(job.door_host, job.door_port, job.certificate, job.token))
        self._stream = self._client.attend()
        self._tunnel = TunnelEnd(self._client, lambda: self._board.port if self._board is not None else None)
        if reason is not None:
            self._stream.send(Refused(job.node, self._host, reason))
            self._stream.end()
            deque(self._stream, maxlen=0)
            return
        port = self._port_holder.getsockname()[1]
        self._stream.send(Reservation(job.node, self._host, port, job.executor, job.attempt, os.getpid(), job.gpus))
        threading.Thread(target=self._listen_to_driver, name="tfos_nb driver", daemon=True).start()
        threading.Thread(target=self._listen_to_node, name="tfos_nb node", daemon=True).start()

    def _supervise(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._until_due())
            except queue.Empty:
                event = None
            if isinstance(event, _DriverGone):
                return
            if isinstance(event, _Exited):
                self._report_end(event.returncode)
                return
            if isinstance(event, _Said):
                self._obey(event.message)
            elif isinstance(event, _Heard):
                self._heed(event.message)
            self._tick()

    def _heed(self, message: MainStarted | Saving) -> None:
        """Act on what the node says, beside passing it on."""
        if isinstance(message, MainStarted):
            self._start_board()
        elif self._kill_at is None or not self._at_once:
            self._saving = message.going_on
            if self._kill_at is not None:
                self._kill_at = max(self._kill_at, time.monotonic() + _AFTER_SAVING)  # main has to return yet

    def _start_board(self) -> None:
        """Start TensorBoard, if it is this node that has one: not before ``main``, whose start it would slow down."""
        log_dir = str(self._job.settings.get("log_dir", ""))
        if log_dir and self._job.settings.get("board") == self._job.node:
            self._board = TensorBoard(log_dir)
            self._board.start()  # here, in the main thread: it ends with the thread that started it

    def _obey(self, message: Any) -> None:
        if isinstance(message, OpenTunnel):
            self._tunnel.open(message)
            return
        self._channel.send(message)
        if isinstance(message, Stop):
            self._kill_at = time.monotonic() + message.grace
            self._at_once = message.grace <= 0
            self._saving &= not self._at_once
        elif isinstance(message, Farewell):
            self._kill_at = time.monotonic() + _AFTER_FAREWELL

    def _until_due(self) -> float:
        due = min(self._look_due, self._lines_due) if self._output.waiting else self._look_due
        return max(0.0, due - time.monotonic())

    def _tick(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at and not self._saving:
            kill_group(self._process)
        if now >= self._lines_due and (lines := self._output.take()):
            self._lines_due = now + _TICK
            self._stream.send(LogLines(self._job.node, lines))
        if now >= self._look_due:
            self._look_due = now + _TICK
            self._beat(now)

    def _beat(self, now: float) -> None:
        reports, feed = self._reports.empty()
        if not reports and now - self._beat_at < _HEARTBEAT_EVERY:
            return
        self._beat_at = now
        if now - self._measured_at >= _HEARTBEAT_EVERY:
            self._measured_at = now
            self._use.measure(now)
        use = self._use
        self._stream.send(
            Heartbeat(self._job.node, use.cpu_percent, use.memory_bytes, reports, feed, self._gpus.newest)
        )

    def _report_end(self, returncode: int) -> None:
        self._output.thread.join(1.0)
        while lines := self._output.take():
            self._stream.send(LogLines(self._job.node, lines))
        reports, feed = self._reports.empty()
        if reports:
            self._stream.send(Heartbeat(self._job.node, None, None, reports, feed))
        code = returncode if returncode >= 0 else None
        self._stream.send(
            NodeEnded(self._job.node, code, signal_name(returncode), self._output.tail, self._use.memory_bytes)
        )
        self._stream.end()
        self._await_driver_gone(2.0)

    def _await_driver_gone(self, timeout: float) -> None:
        """Let the last messages arrive: the driver ends its side once it has them."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if isinstance(self._events.get(timeout=left), _DriverGone):
                    return
            except queue.Empty:
                return

    # Each of these runs in a thread of its own and turns what it waits for into an event.

    def _await_exit(self) -> None:
        self._events.put(_Exited(self._process.wait()))

    def _listen_to_driver(self) -> None:
        try:
            for message in self._stream:
                self._events.put(_Said(message))
        finally:
            self._events.put(_DriverGone())

    def _listen_to_node(self) -> None:
        for message in self._channel:
            self._stream.send(message)
            if isinstance(message, (MainStarted, Saving)):
                self._events.put(_Heard(message))


def _why_not() -> str | None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{', '.join(missing)} cannot be imported by the executor's Python ({sys.executable}): install it there, set "
        "PYSPARK_PYTHON to an interpreter that has it, or ship an environment with spark.archives"
    )


def _tensorflow_env(job: NodeJob) -> dict[str, str]:
    env = {
        "TF_GRPC_REUSE_PORT": "1",
        "PYTHONUNBUFFERED": "1",
        **_ALLOCATION,
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        "CUDA_VISIBLE_DEVICES": ",".join(job.gpus),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # as TensorFlow is, it takes all of a GPU's memory at once
        "TF_CONFIG": "",
        **job.env,
    }
    if not job.gpus:
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    return env


def _hold_port() -> socket.socket:
    """Bind a port for TensorFlow and keep it bound, not listening: TensorFlow may listen on it, others may not."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    return holder


def _address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to the driver. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def main() -> None:
    """Run as the supervisor's process: the job comes by standard input."""
    job = read_frame(sys.stdin.buffer)
    if job is None:
        return
    Supervisor(job).run()


if __name__ == "__main__":
    main()
