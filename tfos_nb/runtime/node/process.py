"""The supervisor's view of a node's TensorFlow process; each generation of the cluster has a new one."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.control.lifecycle import MainStarted, NodeEnded, NodeJob, Saving
from tfos_nb.runtime.control.processes import Channel, kill_group, path_variable, signal_name, start_module
from tfos_nb.runtime.control.reports import Heartbeat, LogLines, ReportBox
from tfos_nb.runtime.host.gpu import GpuWatch, gpu_variables
from tfos_nb.runtime.host.memory import ControlGroup
from tfos_nb.runtime.host.output import Output
from tfos_nb.runtime.host.usage import ProcessUse
from tfos_nb.runtime.node.stacks import StacksTaken, take_stacks
from tfos_nb.runtime.node.warm_process import PROGRAMS, Fork, ForkedProcess, WarmProcess

__all__ = ["Exited", "NodeProcess", "ProcessMessage", "ProcessOutput", "environment_of", "environment_to_warm"]

# Blocks of rows are megabytes in size. With its defaults, glibc returns each one to the system and fetches it again,
# page by page. That took half of a node's system time while it was fed.
_ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_LAST_WORDS = 1.0  # seconds to read the last messages of a process that has ended
_CONTINUED_AFTER = 1 / 6  # of the heartbeat_timeout: a process that a signal has stopped


@dataclass(frozen=True)
class Exited:
    """A process has ended."""

    process: NodeProcess
    returncode: int


@dataclass(frozen=True)
class ProcessMessage:
    """A process has sent a message that its supervisor acts on."""

    process: NodeProcess
    message: MainStarted | Saving


@dataclass(frozen=True)
class ProcessOutput:
    """A process has written lines to its output."""


class NodeProcess:
    """A running process, with its messages, output and resource usage.

    Create it in a thread that outlives the process, because the process ends with that thread.

    Parameters
    ----------
    job : NodeJob
        The job of the process.
    directory : str
        Directory of its sockets. It is created if it does not exist.
    temporary : str
        Directory of its temporary files.
    host : str
        The address by which the other nodes reach it.
    events : queue.SimpleQueue
        Receives :class:`Exited`, :class:`ProcessMessage` and :class:`ProcessOutput`.
    pass_on : callable
        Called with each of its messages.
    warm : WarmProcess, optional
        Forks the process. By default a new interpreter is started.
    """

    def __init__(
        self,
        job: NodeJob,
        *,
        directory: str,
        temporary: str,
        host: str,
        events: queue.SimpleQueue[Any],
        pass_on: Callable[[Any], object],
        warm: WarmProcess | None = None,
    ) -> None:
        self._node = job.node
        self._directory = directory
        self._patience = float(str(job.settings.get("heartbeat_timeout", 15.0)))
        self._note = ""
        self._continued_at = -math.inf
        self._events = events
        self._pass_on = pass_on
        os.makedirs(directory, 0o700, exist_ok=True)
        self._channel, theirs = Channel.pair()
        reports, reports_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        fds = (theirs.fileno(), reports_theirs.fileno())
        self._process: subprocess.Popen[bytes] | ForkedProcess
        place = directory, host, fds
        self._process = _started(job, temporary, *place) if warm is None else _forked(warm, *place)
        theirs.close()
        reports_theirs.close()
        self._channel.send(job)
        assert self._process.stdout is not None
        self.output = Output(self._process.stdout, lambda: events.put(ProcessOutput()), gpu=bool(job.gpus))
        self._use = ProcessUse(self._process.pid)
        self._killed_before = _killed_for_memory()
        self._gpus = GpuWatch(job.gpus)
        self._asking = threading.Lock()  # one answer at a time in the process's file
        self._reports = ReportBox(reports)
        self._reporting = threading.Thread(target=self._reports.run, name="tfos_nb reports", daemon=True)
        self._reporting.start()
        threading.Thread(target=self._await_exit, name="tfos_nb exit", daemon=True).start()
        self._listener = threading.Thread(target=self._listen, name="tfos_nb node", daemon=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def listen(self) -> None:
        """Pass its messages on from now on, including those that are already waiting."""
        self._listener.start()

    def send(self, message: Any) -> None:
        """Send the process a message."""
        self._channel.send(message)

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        kill_group(self._process)

    def end(self) -> None:
        """Kill the process, and return when all its messages have been read."""
        self.kill()
        self._process.wait()
        if self._listener.ident is not None:
            self._listener.join(_LAST_WORDS)  # it ends with the process, unless a child still has the socket

    def measure(self, now: float) -> None:
        """Measure its resource usage."""
        self._use.measure(now)

    def wake_if_stopped(self, now: float) -> str:
        """Continue it if a signal has stopped it: its peers wait for it. Kill it if it is stopped for too long.

        Return a line for its log; empty if it was left alone. A process that is stopped again at once stays so: whoever
        does that insists.
        """
        self._use.look_whether_stopped(now)
        if (stopped_at := self._use.stopped_at) is None:
            return ""
        seconds = now - stopped_at
        if seconds >= self._patience:
            self._note = f"was stopped by a signal for {self._patience:g} s, and then ended by its supervisor"
            self.kill()
        elif seconds >= self._patience * _CONTINUED_AFTER and stopped_at - self._continued_at > self._patience:
            self._continued_at = now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)
            return f"tfos_nb: a signal had stopped this process for {seconds:.1f} s: its supervisor has continued it"
        return ""

    def heartbeat(self, always: bool) -> Heartbeat | None:
        """Return a heartbeat if its figures have changed, or if ``always``; else None."""
        reports, feed = self._reports.empty()
        if not reports and not always:
            return None
        use = self._use
        figures = use.cpu_percent, use.memory_bytes, reports, feed, self._gpus.newest
        return Heartbeat(self._node, *figures, stopped=use.stopped_at is not None)

    def stacks(self, number: int) -> StacksTaken:
        """Take the stacks of its threads; waits for a second at most, once those who asked before have theirs."""
        with self._asking:
            return take_stacks(self._node, number, self._process.pid, self._directory)

    def left_over(self) -> list[Any]:
        """Return its output and reports that were not sent on yet, after it has ended."""
        self._reports.close()
        for thread in (self.output.thread, self._reporting):
            thread.join(_LAST_WORDS)
        words: list[Any] = []
        while lines := self.output.take():
            words.append(LogLines(self._node, lines))
        reports, feed = self._reports.empty()
        if reports or feed is not None:  # its last rows may have been counted after the last heartbeat
            words.append(Heartbeat(self._node, None, None, reports, feed))
        while reports:
            reports, feed = self._reports.empty()
            words += [Heartbeat(self._node, None, None, reports, feed)] if reports else []
        return words

    def last_messages(self, returncode: int) -> list[Any]:
        """Return the remaining messages about the process after it has ended, the last one ``NodeEnded``."""
        words = self.left_over()
        code = returncode if returncode >= 0 else None
        killer = signal_name(returncode)
        self._note = self._note or (self._why_killed() if killer == "SIGKILL" else "")
        tail = self.output.crash if killer else self.output.tail
        return [*words, NodeEnded(self._node, code, killer, tail, self._use.memory_bytes, self._note)]

    def _why_killed(self) -> str:
        group = ControlGroup.own()
        if group is None or group.kills <= self._killed_before:
            return ""
        limit = f"{group.limit / 2**30:.1f} GiB"
        return f"killed by SIGKILL (OOMKilled): its container has reached its memory limit of {limit}"

    def _await_exit(self) -> None:
        self._events.put(Exited(self, self._process.wait()))

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self._pass_on(message)
                if isinstance(message, (MainStarted, Saving)):
                    self._events.put(ProcessMessage(self, message))
        except ValueError as error:  # no later message can be read any more, not even its result
            self._note = f"sent bytes that are not a message ({error}), and was then ended by its supervisor"
            self.kill()


def _killed_for_memory() -> int:
    group = ControlGroup.own()
    return group.kills if group else 0


def _forked(warm: WarmProcess, directory: str, host: str, fds: tuple[int, int]) -> ForkedProcess:
    return warm.fork(Fork(PROGRAMS[0], (directory, host)), fds)


def _started(job: NodeJob, temporary: str, directory: str, host: str, fds: tuple[int, int]) -> subprocess.Popen[bytes]:
    return start_module(
        "tfos_nb.runtime.node.tensorflow_process",
        env=environment_of(temporary, job.env, job.gpus),
        fds=fds,
        arguments=(str(fds[0]), str(fds[1]), directory, host),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def environment_of(temporary: str, env: Mapping[str, str], gpus: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment variables of a node's process: this process's, changed by the user's ``env``.

    The ``temporary`` directory is removed with the node. AutoGraph writes source files there, and a killed process does
    not remove them.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env = {
        "KERAS_BACKEND": "tensorflow",  # as in a Spark worker that has applied a model
        **inherited,
        "TMPDIR": temporary,
        "TF_GRPC_REUSE_PORT": "1",
        "PYTHONUNBUFFERED": "1",
        **_ALLOCATION,
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        **gpu_variables(gpus),
        **env,
    }
    if not gpus:
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    return env


def environment_to_warm(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the warm process of nodes without GPUs, changed by the user's ``env``."""
    return {**environment_of(tempfile.gettempdir(), env), "PYTHONPATH": path_variable()}
