"""Read the Python stacks of a node's process from outside: both ends, and the messages.

::

    driver ──AskStacks──▶ supervisor ──a byte in a pipe──▶ TF process: a thread writes all threads' stacks into a file
    driver ◀──StacksTaken── supervisor ◀──reads the file

A program that hangs can still be asked, as long as it does not hold the interpreter's lock. The thread holds this lock
while it writes: faulthandler can also write without it, from a signal's handler, but then it reads frames that other
threads change, and may end the process. A process that was stopped by a signal, or waits for a disk, does not answer.
Its state says so (``/proc/PID/stat``, proc_pid_stat(5)).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.host.control_group import Throttling

__all__ = [
    "NO_ANSWER",
    "AskStacks",
    "Frame",
    "HostFigures",
    "StacksTaken",
    "frames_of_main",
    "frames_of_others",
    "no_answer",
    "take_stacks",
    "write_stacks_when_asked",
]

_PIPE, _NAME = "ask-for-stacks", "stacks-"
_WITHIN, _LOOK_EVERY, _QUIET = 1.0, 0.02, 0.06  # seconds
_MEASURED = 0.3  # seconds over which the host's figures are means
_MOST = 256 << 10  # bytes of a text
_FRAME = re.compile(r'^ {2}File "(.*)", line (\d+) in (.*)$')
_SPY_THREAD = re.compile(r'^Thread (\d+) \([^)]*\)(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"^ {4}(\S.*) \((.*):(\d+)\)$")
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)")


NO_ANSWER = "no answer: its native code holds Python's lock, or its supervisor does not answer"
"""Text for a node whose stacks have not come."""


@message
@dataclass(frozen=True)
class AskStacks:
    """To a supervisor: take the stacks of the process. The answer has the same number."""

    number: int


@message
@dataclass(frozen=True)
class HostFigures:
    """Load of a host: its CPU in percent of all its ``cpus``, and bytes per second on its network.

    ``throttled`` is the part of the time, in percent, in which the node's container had used up its CPU limit.
    """

    cpu_percent: float
    cpus: int
    received: float
    sent: float
    throttled: float = 0.0


@message
@dataclass(frozen=True)
class StacksTaken:
    """From a supervisor: the stacks of its process.

    ``text`` is as faulthandler writes it, the main thread first; empty if the process did not answer, or why py-spy
    could not read it. ``state`` is the letter of the process's state in ``/proc``: ``T`` if it was stopped by a signal,
    ``D`` if it waits for a disk. ``memory_pressure`` is the part of the last 10 s in which a task of the host waited
    for memory, in percent; -1 if its kernel does not say it. ``host`` is what the host did while the process was asked.
    ``waits`` counts how often the main thread has begun to wait so far, for instance for a packet of a download.
    """

    node: str
    number: int
    text: str = ""
    state: str = ""
    memory_pressure: float = 0.0
    host: HostFigures | None = None
    waits: int = 0


class Frame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def write_stacks_when_asked(directory: str) -> None:
    """Have this process write its stacks into a file of the directory whenever :func:`take_stacks` asks."""
    path = os.path.join(directory, f"{_NAME}{threading.main_thread().ident:016x}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.mkfifo(os.path.join(directory, _PIPE), 0o600)
    pipe = os.open(os.path.join(directory, _PIPE), os.O_RDWR)  # also a writer, so that reading never ends
    threading.Thread(target=_write_when_asked, args=(pipe, file), name="tfos_nb write stacks", daemon=True).start()


def _write_when_asked(pipe: int, file: int) -> None:
    while os.read(pipe, 1):
        faulthandler.dump_traceback(file, all_threads=True)


def take_stacks(node: str, number: int, pid: int, directory: str) -> StacksTaken:
    """Ask a process for its stacks; waits for a second at most, and for :data:`_MEASURED` seconds at least."""
    host, since = _HostCounters.now(), time.monotonic()
    before, waits = _state_of(pid), _waits_of(pid)
    text = _answer(directory) if before not in ("", "T", "Z") else ""
    if not text and (tool := _py_spy()):
        text = _of_py_spy(tool, pid)
    if (left := since + _MEASURED - time.monotonic()) > 0:
        threading.Event().wait(left)
    return StacksTaken(node, number, text[:_MOST], before, _memory_pressure(), _HostCounters.now().since(host), waits)


@dataclass(frozen=True)
class _HostCounters:
    """The host's counters at a moment: seconds of all CPUs, of these the busy ones, and bytes."""

    at: float
    total: float
    busy: float
    received: int
    sent: int
    throttling: Throttling

    @classmethod
    def now(cls) -> _HostCounters:
        import psutil

        times, network = psutil.cpu_times(), psutil.net_io_counters()
        counted_twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # by Linux
        total = sum(times) - counted_twice
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        received, sent = (network.bytes_recv, network.bytes_sent) if network is not None else (0, 0)
        return cls(time.monotonic(), total, busy, received, sent, Throttling.now())

    def since(self, before: _HostCounters) -> HostFigures:
        import psutil

        seconds, total = max(self.at - before.at, 1e-3), self.total - before.total
        percent = 100 * (self.busy - before.busy) / total if total > 0 else 0.0
        received, sent = self.received - before.received, self.sent - before.sent
        throttled = self.throttling.since(before.throttling)
        return HostFigures(percent, psutil.cpu_count() or 1, received / seconds, sent / seconds, throttled)


def _answer(directory: str) -> str:
    path = next(iter(sorted(Path(directory).glob(f"{_NAME}*"))), None)
    try:
        if path is None:  # it has not come so far
            return ""
        os.truncate(path, 0)
        pipe = os.open(os.path.join(directory, _PIPE), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads: it has ended
        return ""
    with open(pipe, "wb", buffering=0) as opened:
        opened.write(b"?")
    deadline, nothing = time.monotonic() + _WITHIN, threading.Event()
    size, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline and not (size and now - since >= _QUIET):
        nothing.wait(_LOOK_EVERY)
        if (grown := path.stat().st_size) != size:
            size, since = grown, time.monotonic()
    return _main_first(path.read_text(errors="replace"), path.name.removeprefix(_NAME))


def _main_first(text: str, main: str) -> str:
    """Put the main thread's stack first, and name it; leave out that of the thread that has written."""
    parts = [part for part in re.split(r"\n(?=(?:Current t|T)hread 0x)", text.strip()) if part]
    own = [part for part in parts if (found := _THREAD.match(part)) and int(found[1], 16) == int(main, 16)]
    others = [part for part in parts if part not in own and not part.startswith("Current")]
    return "\n\n".join([*(part.replace("hread", "hread (main)", 1) for part in own), *others])


def _py_spy() -> str | None:
    """Return the path of py-spy: of this Python's environment, which need not be in the PATH of an executor, or any."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def _of_py_spy(tool: str, pid: int) -> str:
    """Return what py-spy sees, which also reads the memory of a stopped process; or why it does not."""
    command = [tool, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN * 3, check=True)
        return _as_faulthandler(done.stdout)
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.strip()]
        return f"py-spy could not read the stacks: {said[-1] if said else f'exit {error.returncode}'}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy could not read the stacks: {error}"


def _as_faulthandler(text: str) -> str:
    """Return what py-spy has written as faulthandler writes it, the main thread first.

    Examples
    --------
    >>> pool = ['Thread 8 (idle): "a pool"', "    Pool.take (/b.py:4)"]
    >>> print(_as_faulthandler(os.linesep.join([*pool, 'Thread 7 (idle): "MainThread"', "    load (/a.py:3)"])))
    Thread (main) 0x00000007 (most recent call first):
      File "/a.py", line 3 in load
    <BLANKLINE>
    Thread 0x00000008 (most recent call first):
      File "/b.py", line 4 in take
    """
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        if thread := _SPY_THREAD.match(line):
            is_main = thread[2] == "MainThread"
            name = f"Thread {'(main) ' if is_main else ''}0x{int(thread[1]):08x}"
            threads.append((is_main, [f"{name} (most recent call first):"]))
        elif threads and (frame := _SPY_FRAME.match(line)):
            threads[-1][1].append(f'  File "{frame[2]}", line {frame[3]} in {frame[1].rpartition(".")[2]}')
    return "\n\n".join("\n".join(lines) for _, lines in sorted(threads, key=lambda thread: not thread[0]))


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _waits_of(pid: int) -> int:
    """Return the main thread's voluntary context switches; 0 if they are not known."""
    import psutil

    with contextlib.suppress(psutil.Error, NotImplementedError):
        return int(psutil.Process(pid).num_ctx_switches().voluntary)
    return 0


def _memory_pressure() -> float:
    """Return the kernel's pressure figure; -1 if it has none (PSI, Documentation/accounting/psi.rst)."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/pressure/memory").read_text().splitlines()
        some = next(line for line in lines if line.startswith("some"))
        return float(dict(pair.split("=") for pair in some.split()[1:])["avg10"])
    return -1.0


def no_answer(taken: StacksTaken) -> str:
    """Say why a process has not given its stacks."""
    if taken.state == "T":
        return "no answer: the process was stopped by a signal (SIGSTOP)"
    return NO_ANSWER if taken.state else "no answer: the process has ended"


def frames_of_main(text: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first.

    Examples
    --------
    >>> first = ["Thread (main) 0x01 (most recent call first):", '  File "/a.py", line 3 in load']
    >>> frames_of_main(os.linesep.join([*first, "", "Thread 0x02 (most recent call first):"]))
    [Frame(file='/a.py', line=3, function='load')]
    """
    first = text.split("\n\n", 1)[0] if "(main)" in text.split("\n", 1)[0] else ""
    return _frames(first)


def frames_of_others(text: str) -> list[list[Frame]]:
    """Return the frames of each other thread, the innermost first.

    Examples
    --------
    >>> first = ["Thread (main) 0x01 (most recent call first):", '  File "/a.py", line 3 in load']
    >>> other = ["Thread 0x02 (most recent call first):", '  File "/b.py", line 4 in read']
    >>> frames_of_others(os.linesep.join([*first, "", *other]))
    [[Frame(file='/b.py', line=4, function='read')]]
    """
    stacks = text.split("\n\n")
    return [_frames(one) for one in stacks if "(main)" not in one.split("\n", 1)[0]]


def _frames(stack: str) -> list[Frame]:
    found = (_FRAME.match(line) for line in stack.splitlines())
    return [Frame(one[1], int(one[2]), one[3]) for one in found if one]
