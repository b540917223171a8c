"""One node's supervisor: a small process between Spark's task and the TensorFlow process.

::

    driver's door ◀──stream── supervisor ──socket pair──▶ TF process (main)
                                  ▲ datagrams: reports      │
                                  ▲ pipe: output ◀──────────┘
    NodeTask (Spark) ──stdin: the job──▶ supervisor

It starts the TF process at once, so that TensorFlow is imported while the other nodes reserve. It keeps the port
reserved until TensorFlow has it (SO_REUSEPORT, and ``TF_GRPC_REUSE_PORT=1``). It passes messages on and sends
heartbeats. It ends the process with SIGKILL after a grace period, since TensorFlow ignores SIGTERM. When the driver's
stream ends, it ends the process and itself. Spark's task may end earlier (see
:mod:`tfos_nb.runtime.node.spark_task`).

In a cluster that may start its nodes again, a supervisor outlives its process. On request it starts the next one, on
another port, and reserves again. It also owns the shared memory that keeps a training state between two processes.

It never imports TensorFlow, and works the same whether Spark's task waits for it or leaves it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from tfos_nb.runtime.control.lifecycle import (
    EndNode,
    MainStarted,
    NodeJob,
    Refused,
    Reservation,
    Saving,
    Start,
    StartAgain,
    Stop,
)
from tfos_nb.runtime.control.processes import address_towards, private_directory, read_frame, remove_directory
from tfos_nb.runtime.control.reports import Heartbeat, LogLines, tick_among
from tfos_nb.runtime.control.tunnel import OpenTunnel, TunnelEnd
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.positions import PositionHeld, RowsOfState
from tfos_nb.runtime.host.gpu_claims import GpuClaims, GpusTaken
from tfos_nb.runtime.node.links import AskLinks, see_links
from tfos_nb.runtime.node.node_files import NodeFiles
from tfos_nb.runtime.node.process import Exited, NodeProcess, ProcessMessage, environment_of
from tfos_nb.runtime.node.stacks import AskStacks
from tfos_nb.runtime.node.tensorboard import TensorBoard
from tfos_nb.runtime.node.warm_process import ServerTerms, WarmProcess, can_fork
from tfos_nb.runtime.storage.shared_directory import PlaceSeen

_HEARTBEAT_EVERY = 1.0
_AFTER_LAST_MESSAGE = 3.0
_AFTER_SAVING = 3.0
# These messages pass through here, so their classes must be registered: naming them imports them.
PASSED_ON = (
    messages.FeedBegins,
    messages.FeedSchema,
    messages.FeedEnds,
    messages.FeedFrom,
    messages.MakeRoom,
    messages.NoMoreFeeds,
    messages.PassDone,
    messages.WorkerThrough,
    PositionHeld,
    RowsOfState,
    PlaceSeen,
)
_NEEDED = ("tensorflow", "keras", "pyarrow", "grpc")


@dataclass(frozen=True)
class _DriverGone:
    pass


@dataclass(frozen=True)
class _DriverMessage:
    message: Any


class Supervisor:
    """Supervise one node.

    Parameters
    ----------
    job : NodeJob
        The job, from Spark's task.
    """

    def __init__(self, job: NodeJob) -> None:
        self._lasting = bool(job.settings.get("restarts"))
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._directory = private_directory("node")
        self._temporary = private_directory("scratch", sockets=False)
        self._files = NodeFiles(inherited=job.files) if self._lasting else None
        more: dict[str, object] = {}
        if self._files is not None:
            rows = {"kept_rows": self._files.rows, "kept_validation": self._files.validation_rows}
            states = {"kept": self._files.states, "kept_loop": self._files.loop_states}
            more = {**states, "finished": self._files.finished_fits, **rows}
        self._job = replace(job, settings={**job.settings, **more})
        self._timeout = float(str(job.settings.get("heartbeat_timeout", 15.0)))
        self._host = job.host or address_towards(job.door_host, job.door_port)
        self._port_holder = _hold_port(self._host)
        self._claims = GpuClaims()
        self._process: NodeProcess | None = None
        self._warm: WarmProcess | None = None
        self._processes = 0
        self._notes: list[str] = []
        self._ended = False  # the process has ended, and another may follow
        self._kill_at: float | None = None
        self._at_once = False
        self._saving = False
        self._board: TensorBoard | None = None
        self._beat_at = self._measured_at = -math.inf
        self._look_due = self._lines_due = 0.0
        self._tick_every = tick_among(1)

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
            if self._process is not None:
                self._process.kill()
            if self._warm is not None:
                self._warm.close()
            if self._board is not None:
                self._board.stop()
            if self._files is not None:
                self._files.close()
            self._claims.close()
            for directory in (self._directory, self._temporary):
                remove_directory(directory)

    def _take_gpus(self) -> str | None:
        """Claim GPUs of the host if Spark gave none; return the reason if that is not possible, else None."""
        try:
            taken = self._claims.take(self._job.claim)
        except GpusTaken as error:
            return str(error)
        self._job = replace(self._job, gpus=self._job.gpus or taken)
        return None

    def _start_process(self) -> None:
        """Fork the node's process from a warm process. Start a new interpreter without one, or after two failures."""
        for _ in range(2):
            self._warm = self._warm or self._find_warm()
            if self._warm is None:
                break
            try:
                self._process = self._new_process()
                return
            except OSError as error:  # the warm process was killed, and with it the processes that it had forked
                self._say(f"{error}")
                self._warm.close()
                self._warm = None
                if isinstance(error, TimeoutError):  # it was stopped by a signal, and would be found again
                    break
        self._process = self._new_process()

    def _find_warm(self) -> WarmProcess | None:
        """Connect to the application's warm server, or start a forker for this node; None to start without one."""
        job = self._job
        env = environment_of(self._temporary, job.env, job.gpus)
        if not can_fork():
            return None
        if job.warm_token and not job.gpus:
            terms = ServerTerms(job.warm_token, job.anchor, float(str(job.settings.get("warm_idle"))))
            try:
                return WarmProcess.of_the_application(env, terms)
            except OSError as error:
                self._say(f"the application's warm process cannot be reached ({error})")
        return WarmProcess.of_ones_own(env) if self._lasting else None

    def _say(self, why: str) -> None:
        """Keep a line for the node's log that explains a slow start; it is sent with the reservation."""
        self._notes.append(f"tfos_nb: {why}: this node imports TensorFlow itself")

    def _new_process(self) -> NodeProcess:
        self._processes += 1
        process = NodeProcess(
            self._job,
            directory=os.path.join(self._directory, str(self._processes)),
            temporary=self._temporary,
            host=self._host,
            events=self._events,
            pass_on=lambda message: self._stream.send(message),  # no stream exists when the first process starts
            warm=self._warm,
        )
        self._ended = False
        if self._files is not None:
            self._files.used_by(process.pid)
        return process

    def _meet_driver(self, reason: str | None) -> None:
        from tfos_nb.runtime.control.door import DoorAddress, DoorClient

        job = self._job
        door = DoorAddress(job.door_host, job.door_port, job.certificate, job.token, job.relayed, self._timeout)
        self._client = DoorClient(door)
        self._stream = self._client.attend()
        self._tunnel = TunnelEnd(self._client, lambda: self._board.socket if self._board is not None else None)
        if reason is not None:
            self._stream.send(Refused(job.node, self._host, reason))
            self._stream.end()
            deque(self._stream, maxlen=0)
            return
        self._reserve(0)
        threading.Thread(target=self._listen_to_driver, name="tfos_nb driver", daemon=True).start()

    def _reserve(self, generation: int) -> None:
        assert self._process is not None, "it was started"
        job, port = self._job, self._port_holder.getsockname()[1]
        which = (job.executor, job.attempt, os.getpid(), job.gpus, generation, socket.gethostname())
        self._stream.send(Reservation(job.node, self._host, port, *which, warm=self._warm is not None))
        if self._notes:
            self._stream.send(LogLines(job.node, tuple(self._notes)))
            self._notes = []
        self._process.listen()

    def _start_again(self, message: StartAgain) -> None:
        """End the process and start the next one, after all messages of the old one were passed on."""
        assert self._process is not None, "it was started"
        self._process.end()
        for word in self._process.left_over():
            self._stream.send(word)
        self._port_holder.close()
        self._port_holder = _hold_port(self._host)
        self._saving = False
        self._start_process()
        self._reserve(message.generation)

    def _supervise(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._until_due())
            except queue.Empty:
                event = None
            if isinstance(event, _DriverGone) or not self._goes_on(event):
                return
            self._tick()

    def _goes_on(self, event: Any) -> bool:
        """Handle an event; return whether a process is left to supervise."""
        if isinstance(event, Exited) and event.process is self._process:
            return self._report_end(event)
        if isinstance(event, _DriverMessage):
            return self._obey(event.message)
        if isinstance(event, ProcessMessage) and event.process is self._process:
            self._heed(event.message)
        return True

    def _heed(self, message: MainStarted | Saving) -> None:
        """Act on a message of the node, which is also passed on to the driver."""
        if isinstance(message, MainStarted):
            self._start_board()
        elif self._kill_at is None or not self._at_once:
            self._saving = message.going_on
            if self._kill_at is not None:
                self._kill_at = max(self._kill_at, time.monotonic() + _AFTER_SAVING)  # main still has to return

    def _start_board(self) -> None:
        """Start TensorBoard if this node has one; not before ``main``, whose start it would slow down."""
        log_dir = str(self._job.settings.get("log_dir", ""))
        if log_dir and self._job.settings.get("board") == self._job.node and self._board is None:
            self._board = TensorBoard(log_dir)
            self._board.start()  # in the main thread, because it ends with the thread that started it

    def _obey(self, message: Any) -> bool:
        """Execute a message of the driver; return whether a process is left to supervise."""
        assert self._process is not None, "it was started"
        if isinstance(message, OpenTunnel):
            self._tunnel.open(message)
            return True
        if isinstance(message, StartAgain):
            self._start_again(message)
            return True
        if isinstance(message, AskStacks):
            given = self._process, message.number
            threading.Thread(target=self._send_stacks, args=given, name="tfos_nb stacks", daemon=True).start()
            return True
        if isinstance(message, AskLinks):
            threading.Thread(target=self._send_links, args=(message,), name="tfos_nb links", daemon=True).start()
            return True
        if isinstance(message, Start):
            self._tick_every = tick_among(sum(map(len, message.cluster_spec.values())), self._timeout)
        if isinstance(message, (Stop, EndNode)):
            if self._ended:
                self._take_leave()
                return False
            self._limit_life(message)
        self._process.send(message)
        return True

    def _send_stacks(self, process: NodeProcess, number: int) -> None:
        self._stream.send(process.stacks(number))

    def _send_links(self, asked: AskLinks) -> None:
        self._stream.send(see_links(self._job.node, asked))

    def _limit_life(self, message: Stop | EndNode) -> None:
        if isinstance(message, EndNode):
            self._kill_at = time.monotonic() + _AFTER_LAST_MESSAGE
            return
        self._kill_at = time.monotonic() + message.grace
        self._at_once = message.grace <= 0
        self._saving &= not self._at_once

    def _until_due(self) -> float:
        waiting = self._process is not None and self._process.output.waiting
        due, now = min(self._look_due, self._lines_due) if waiting else self._look_due, time.monotonic()
        if self._kill_at is not None and now < self._kill_at:
            due = min(due, self._kill_at)
        return max(0.0, due - now)

    def _tick(self) -> None:
        process, now = self._process, time.monotonic()
        assert process is not None, "it was started"
        if self._kill_at is not None and now >= self._kill_at and not self._saving:
            process.kill()
        if now >= self._lines_due and (lines := process.output.take()):
            self._lines_due = now + self._tick_every
            self._stream.send(LogLines(self._job.node, lines))
        if now >= self._look_due:
            self._look_due = now + self._tick_every
            self._beat(process, now)

    def _beat(self, process: NodeProcess, now: float) -> None:
        if now - self._measured_at >= _HEARTBEAT_EVERY:
            self._measured_at = now
            process.measure(now)
        if told := process.wake_if_stopped(now):
            self._stream.send(LogLines(self._job.node, (told,)))
        beat = process.heartbeat(always=now - self._beat_at >= _HEARTBEAT_EVERY)
        if beat is not None:
            self._beat_at = now
            self._stream.send(Heartbeat(self._job.node, None, None, (), None) if self._ended else beat)

    def _report_end(self, event: Exited) -> bool:
        """Report how the process ended; return whether another process may follow."""
        for word in event.process.last_messages(event.returncode):
            self._stream.send(word)
        self._ended = True
        if self._lasting and self._kill_at is None:
            return True
        self._take_leave()
        return False

    def _take_leave(self) -> None:
        """End the stream after the last messages have arrived: the driver ends its side once it has them."""
        self._stream.end()
        deadline = time.monotonic() + 2.0
        while (left := deadline - time.monotonic()) > 0:
            try:
                if isinstance(self._events.get(timeout=left), _DriverGone):
                    return
            except queue.Empty:
                return

    def _listen_to_driver(self) -> None:
        """Turn the driver's messages into events, in a thread of its own."""
        try:
            for message in self._stream:
                self._events.put(_DriverMessage(message))
        finally:
            self._events.put(_DriverGone())


def _why_not() -> str | None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{', '.join(missing)} cannot be imported by the executor's Python ({sys.executable}): install it there, set "
        "PYSPARK_PYTHON to an interpreter that has it, or ship an environment with spark.archives"
    )


def _hold_port(host: str) -> socket.socket:
    """Bind a port for TensorFlow and keep it bound, not listening: TensorFlow may listen on it, others may not."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    return holder


def main() -> None:
    """Run as the supervisor's process, which reads its job from standard input."""
    job = read_frame(sys.stdin.buffer)
    if job is None:
        return
    Supervisor(job).run()
    # All is done. gRPC's threads still run, and may prevent the interpreter's exit (grpc/grpc, issue 20026). The task
    # waits for this process, and would keep its slot.
    os._exit(0)


if __name__ == "__main__":
    main()
