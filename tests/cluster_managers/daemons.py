"""Daemons of a cluster for a test: started with a deadline, each with a log, and always ended afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import until

PATIENCE = 180.0
# Becomes another program, which is killed when the thread that started it ends. It is not done between fork and exec
# of this process, because locks that other threads hold at a fork are held forever in the child.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
_PORTS = range(12_000, 32_000)  # below the ephemeral ports of the kernel


@dataclass(frozen=True)
class Daemon:
    """A running daemon, which is the leader of its process group."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def told(self, pattern: str) -> str:
        """Wait until the log matches ``pattern``; return the group in parentheses."""
        until(lambda: self.ended or re.search(pattern, self.log.read_text(errors="replace")), PATIENCE)
        found = re.search(pattern, self.log.read_text(errors="replace"))
        assert found, f"{self.name} did not say {pattern!r}:\n{self.tail}"
        return found[1]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon and its process group."""
        _signal(self.process.pid, number)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            _signal(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def start(name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Daemon:
    """Start a daemon. It is killed when the thread that started it ends."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _TIED, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    return Daemon(name, process, log)


def free_ports(count: int) -> list[int]:
    """Find free ports. They are held until all have been found, so that no two are the same."""
    found: list[int] = []
    first = os.getpid() * 97 % len(_PORTS)
    with contextlib.ExitStack() as held:
        for port in [*_PORTS[first:], *_PORTS[:first]]:
            holder = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                break
    return found


def processes_in(folder: Path) -> Iterator[psutil.Process]:
    """Find the processes that run in a folder: each of YARN's containers starts in its own folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder):
                yield process


def end_all_in(folder: Path) -> None:
    """Kill the processes that run in a folder, and wait until they are gone."""

    def gone() -> bool:
        left = [process for process in processes_in(folder) if process.pid != os.getpid()]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not left

    assert until(gone, PATIENCE), f"still at work in {folder}: {list(processes_in(folder))}"
