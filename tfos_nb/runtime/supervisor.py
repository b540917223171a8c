"""One node's supervisor: a small process between Spark's task and the TensorFlow process.

::

    driver's door ◀──stream── supervisor ──socket pair──▶ TF process (main)
                                  ▲ datagrams: reports      │
                                  ▲ pipe: output ◀──────────┘
    NodeTask (Spark) ──stdin: the job; its end means the task is gone──▶ supervisor

It starts the TF process at once, so that TensorFlow is imported while the cluster gathers; holds the port open until
TensorFlow has it (SO_REUSEPORT, and ``TF_GRPC_REUSE_PORT=1``); passes messages on; sends heartbeats; and sees to it
that
the process ends: with SIGKILL after a grace, since TensorFlow swallows SIGTERM. When the driver's stream or Spark's
task is
gone, it ends the process and itself.

It never imports TensorFlow, and is the same whether Spark's task waits for it or leaves it behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime import ledger
from tfos_nb.runtime.lifecycle import Farewell, NodeEnded, NodeJob, Refused, Reservation, Stop
from tfos_nb.runtime.process import (
    Channel,
    die_with_parent,
    kill_group,
    read_frame,
    signal_name,
    start_module,
)
from tfos_nb.runtime.reports import Heartbeat, LogLines, ReportBox

_TICK = 0.5
_HEARTBEAT_EVERY = 1.0
_AFTER_FAREWELL = 3.0
_LINES_PER_TICK = 500
_LINE_LENGTH = 4000
# These pass through here, so the wire must know them: naming them imports them.
PASSED_ON = (ledger.FeedBegins, ledger.FeedSchema, ledger.FeedEnds, ledger.NoMoreFeeds, ledger.PassDone)
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


class _Output:
    """What the TF process writes, on its way to the driver."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._pending: deque[str] = deque(maxlen=10 * _LINES_PER_TICK)
        self._tail: deque[str] = deque(maxlen=40)
        self.thread = threading.Thread(target=self._read, name="tfos_nb output", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for raw in self._pipe:
            line = raw.decode(errors="replace").rstrip("\n")[:_LINE_LENGTH]
            with self._lock:
                self._pending.append(line)
                self._tail.append(line)

    def take(self) -> tuple[str, ...]:
        """Return some lines that were not taken yet."""
        with self._lock:
            count = min(len(self._pending), _LINES_PER_TICK)
            return tuple(self._pending.popleft() for _ in range(count))

    @property
    def tail(self) -> str:
        """The last lines."""
        with self._lock:
            return "\n".join(self._tail)


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
        self._directory = _private_directory()
        self._host = _address_towards(job.door_host, job.door_port)
        self._port_holder = _hold_port()
        self._kill_at: float | None = None
        self._beat_at = 0.0
        self._memory: int | None = None

    def run(self) -> None:
        """Run the node to its end."""
        reason = _why_not()
        if reason is None:
            self._start_process()
        try:
            self._meet_driver(reason)
            if reason is None:
                self._supervise()
        finally:
            if reason is None:
                kill_group(self._process)
            shutil.rmtree(self._directory, ignore_errors=True)

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
        self._output = _Output(self._process.stdout)
        self._reports = ReportBox(reports)
        threading.Thread(target=self._reports.run, name="tfos_nb reports", daemon=True).start()
        threading.Thread(target=self._await_exit, name="tfos_nb exit", daemon=True).start()

    def _meet_driver(self, reason: str | None) -> None:
        from tfos_nb.runtime.door import DoorAddress, DoorClient

        job = self._job
        self._client = DoorClient(DoorAddress(job.door_host, job.door_port, job.certificate, job.token))
        self._stream = self._client.attend()
        if reason is not None:
            self._stream.send(Refused(job.node, self._host, reason))
            self._stream.end()
            deque(self._stream, maxlen=0)
            return
        port = self._port_holder.getsockname()[1]
        self._stream.send(Reservation(job.node, self._host, port, job.executor, job.attempt, os.getpid(), job.gpus))
        threading.Thread(target=self._listen_to_driver, name="tfos_nb driver", daemon=True).start()
        threading.Thread(target=self._listen_to_node, name="tfos_nb node", daemon=True).start()
        if job.hold:
            threading.Thread(target=self._watch_task, name="tfos_nb task", daemon=True).start()

    def _supervise(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_TICK)
            except queue.Empty:
                event = None
            if isinstance(event, _DriverGone):
                return
            if isinstance(event, _Exited):
                self._report_end(event.returncode)
                return
            if isinstance(event, _Said):
                self._obey(event.message)
            self._tick()

    def _obey(self, message: Any) -> None:
        self._channel.send(message)
        if isinstance(message, Stop):
            self._kill_at = time.monotonic() + message.grace
        elif isinstance(message, Farewell):
            self._kill_at = time.monotonic() + _AFTER_FAREWELL

    def _tick(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            kill_group(self._process)
        if lines := self._output.take():
            self._stream.send(LogLines(self._job.node, lines))
        reports, feed = self._reports.empty()
        if reports or now - self._beat_at >= _HEARTBEAT_EVERY:
            self._beat_at = now
            cpu, self._memory = self._measure()
            self._stream.send(Heartbeat(self._job.node, cpu, self._memory, reports, feed))

    def _measure(self) -> tuple[float | None, int | None]:
        import psutil

        with contextlib.suppress(psutil.Error):
            if not hasattr(self, "_measured"):
                self._measured = psutil.Process(self._process.pid)
            return self._measured.cpu_percent(), self._measured.memory_info().rss
        return None, self._memory

    def _report_end(self, returncode: int) -> None:
        self._output.thread.join(1.0)
        while lines := self._output.take():
            self._stream.send(LogLines(self._job.node, lines))
        reports, feed = self._reports.empty()
        if reports:
            self._stream.send(Heartbeat(self._job.node, None, None, reports, feed))
        code = returncode if returncode >= 0 else None
        self._stream.send(NodeEnded(self._job.node, code, signal_name(returncode), self._output.tail, self._memory))
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

    def _watch_task(self) -> None:
        while os.read(
            sys.stdin.fileno(), 1
        ):  # not sys.stdin: a thread in its buffer's lock breaks the interpreter's end
            pass
        self._events.put(_DriverGone())


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
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        "CUDA_VISIBLE_DEVICES": ",".join(job.gpus),
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


def _private_directory() -> str:
    """Make a directory for the node's socket, and remove those of supervisors that were killed."""
    root, prefix = tempfile.gettempdir(), "tfos_nb-node-"
    for name in os.listdir(root):
        owner = name.removeprefix(prefix).partition("-")[0]
        if (
            name.startswith(prefix)
            and owner.isdigit()
            and not os.path.exists(f"/proc/{owner}")
            and os.path.isdir("/proc")
        ):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root)


def main() -> None:
    """Run as the supervisor's process: the job comes by standard input."""
    job = read_frame(sys.stdin.buffer)
    if job is None:
        return
    if job.hold:
        die_with_parent()
    Supervisor(job).run()


if __name__ == "__main__":
    main()
