"""Send the TF process's output to the driver: whole lines, without delay, in bounded memory.

The pipe is read without delay, so a program that writes very much is not blocked. Lines wait in a buffer until the
supervisor sends a message. If the buffer is full, the oldest lines are dropped, and a line says how many.
"""

from __future__ import annotations

import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

__all__ = ["Output", "without_chatter"]

_CHUNK = 1 << 16
_LINE_LENGTH = 4000
_LINES_KEPT, _CHARACTERS_KEPT = 5_000, 1 << 19
_LINES_TAKEN, _CHARACTERS_TAKEN = 1_000, 1 << 17
_TAIL = 40
_FATAL, _BEFORE_FATAL, _AFTER_FATAL = "Fatal Python error: ", 10, 1_000  # lines of a crash that are looked through
_UNFINISHED_EVERY = 5.0  # seconds between two versions of a line that is overwritten repeatedly, such as a progress bar
_UNFINISHED_AFTER = 1.0  # seconds after which the beginning of an unfinished line is shown
# Lines that TensorFlow writes at every start on every node. No setting of TensorFlow's suppresses them.
_CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|I\d{4} [\d:.]+ +\d+ (port|cudart_stub|cpu_feature_guard|cuda_executor)\.cc:\d+\] "
    r"|W\d{4} [\d:.]+ +\d+ dataset\.cc:\d+\] Input of GeneratorDatasetOp::Dataset will not be optimized "
    r"|To enable the following instructions: .*, rebuild TensorFlow with the appropriate compiler flags\.$"
)
_WITHOUT_GPU = re.compile(r"E\d{4} [\d:.]+ +\d+ cuda_\w+\.cc:\d+\] failed call to cuInit: ")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\x08+")


def without_chatter(text: str) -> str:
    """Return a text without the lines that TensorFlow writes at every start."""
    return "\n".join(line for line in text.splitlines() if not _CHATTER.match(line))


class Output:
    """Buffer of a process's output, filled by a daemon thread that reads a pipe to its end.

    The buffer holds at most 5,000 lines and 512 Ki characters, and a line at most 4,000 characters.

    Parameters
    ----------
    pipe : binary file
        Standard output and error of the TF process, buffered or not.
    wrote : callable
        Called without arguments, in the thread, when a line is added to the empty buffer.
    gpu : bool, optional
        Whether the process has a GPU. If not, TensorFlow's error that it finds none is left out.
    """

    def __init__(self, pipe: IO[bytes], wrote: Callable[[], object], *, gpu: bool = True) -> None:
        self._pipe = pipe
        self._wrote = wrote
        self._gpu = gpu
        self._lock = threading.Lock()
        self._pending: deque[str] = deque()
        self._characters = 0
        self._left_out = 0
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._crash: list[str] = []  # from some lines before faulthandler's first one on
        self._unfinished = b""
        self._unseen_since: float | None = None  # of the unfinished line
        self._shown, self._shown_at = "", 0.0
        self.thread = threading.Thread(target=self._read, name="tfos_nb output", daemon=True)
        self.thread.start()

    def take(self) -> tuple[str, ...]:
        """Remove and return the next lines for one message: up to 1,000 lines and about 128 Ki characters."""
        with self._lock:
            lines = []
            if self._left_out:
                lines.append(f"… {self._left_out:,} {'line' if self._left_out == 1 else 'lines'} left out")
                self._left_out = 0
            taken = 0
            while self._pending and len(lines) < _LINES_TAKEN and taken < _CHARACTERS_TAKEN:
                lines.append(self._pending.popleft())
                taken += len(lines[-1])
            self._characters -= taken
            return tuple(lines)

    @property
    def waiting(self) -> bool:
        """Whether the buffer has lines."""
        return bool(self._pending)

    @property
    def tail(self) -> str:
        """The last 40 lines, whether they were taken or not."""
        with self._lock:
            return "\n".join(self._tail)

    @property
    def crash(self) -> str:
        """The lines that say where a process that a signal has ended crashed; the last ones if it has not said it."""
        with self._lock:
            return "\n".join(_where_it_crashed(self._crash) if self._crash else self._tail)

    def _read(self) -> None:
        coming = select.poll()
        try:
            coming.register(self._pipe, select.POLLIN)
        except ValueError:  # the pipe is closed already
            return
        while chunk := self._next(coming):
            *whole, rest = chunk.split(b"\n")
            if whole:
                whole[0] = self._unfinished + whole[0]
                self._unfinished, self._unseen_since = b"", None
                self._add_finished([_readable(line) for line in whole])
            self._hold(rest)
            if self._patience() == 0:
                self._show_unfinished()
        if self._unfinished:
            self._add_finished([_readable(self._unfinished)])

    def _next(self, coming: select.poll) -> bytes:
        """Wait for the next bytes, and show an unfinished line meanwhile. Return no bytes at the end of the pipe."""
        while not coming.poll(self._patience()):
            self._show_unfinished()
        try:
            return bytes(getattr(self._pipe, "read1", self._pipe.read)(_CHUNK))
        except ValueError:  # closed by this process, so its content is not needed
            return b""

    def _add_finished(self, lines: list[str]) -> None:
        lines = [line for line in lines if not _CHATTER.match(line) and (self._gpu or not _WITHOUT_GPU.match(line))]
        shown, self._shown = self._shown, ""
        self._add(lines[1:] if shown and lines[:1] == [shown] else lines)

    def _add(self, lines: list[str]) -> None:
        with self._lock:
            were_none = not self._pending
            self._pending.extend(lines)
            self._characters += sum(map(len, lines))
            while len(self._pending) > _LINES_KEPT or self._characters > _CHARACTERS_KEPT:
                self._characters -= len(self._pending.popleft())
                self._left_out += 1
            self._look_for_crash(lines)
            self._tail.extend(lines[-_TAIL:])
        if were_none and lines:
            self._wrote()

    def _look_for_crash(self, lines: list[str]) -> None:
        if self._crash:
            self._crash += lines[: max(0, _AFTER_FATAL - len(self._crash))]
        elif any(line.startswith(_FATAL) for line in lines):
            seen = [*self._tail, *lines]
            first = next(number for number, line in enumerate(seen) if line.startswith(_FATAL))
            self._crash = seen[max(0, first - _BEFORE_FATAL) :][:_AFTER_FATAL]

    def _hold(self, rest: bytes) -> None:
        """Store the beginning of an unfinished line. If it overwrites itself, show it every 5 s."""
        held = self._unfinished + rest
        over = held.rstrip(b"\r").rfind(b"\r")  # a carriage return at the end may be the first half of "\r\n"
        if over >= 0:
            held = held[over + 1 :]
        held = held[: 4 * _LINE_LENGTH]  # limit the memory for a line without end
        if self._unseen_since is None and held != self._unfinished:
            self._unseen_since = time.monotonic()
        self._unfinished = held
        if over >= 0 and time.monotonic() - self._shown_at > _UNFINISHED_EVERY:
            self._show_unfinished()

    def _patience(self) -> float | None:
        """Return the milliseconds until an unfinished line must be shown; None if there is nothing to show."""
        if self._unseen_since is None:
            return None
        due = self._unseen_since + _UNFINISHED_AFTER
        if self._shown:  # its beginning was shown; do not show each small addition
            due = max(due, self._shown_at + _UNFINISHED_EVERY)
        return max(0.0, 1000 * (due - time.monotonic()))

    def _show_unfinished(self) -> None:
        """Add the beginning of an unfinished line. If the line grows, it is added again as a whole at its end."""
        self._unseen_since = None
        line = _readable(self._unfinished)
        if line and line != self._shown:
            self._shown, self._shown_at = line, time.monotonic()
            self._add([line])


def _where_it_crashed(lines: list[str]) -> list[str]:
    """Return those lines of a crash's report by faulthandler that matter: it lists all threads, and that one anywhere.

    A thread of native code, such as TensorFlow's own, has no Python stack: then nothing follows the first lines.

    Examples
    --------
    >>> crash = ["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):", "  File a", ""]
    >>> _where_it_crashed([*crash, "Current thread 0x2 (most recent call first):", "  File b", "", "Extension modules"])
    ['Fatal Python error: Aborted', 'Current thread 0x2 (most recent call first):', '  File b']
    >>> _where_it_crashed(crash)
    ['Fatal Python error: Aborted', 'in a thread of native code']
    """
    fatal = next(number for number, line in enumerate(lines) if line.startswith(_FATAL))
    head, rest = lines[: fatal + 1], lines[fatal + 1 :]
    current = [number for number, line in enumerate(rest) if line.startswith("Current thread ")]
    if not current:
        return [*head, "in a thread of native code"]
    stack = rest[current[0] :]
    return [*head, *stack[: stack.index("") if "" in stack else len(stack)][:_TAIL]]


def _readable(line: bytes) -> str:
    """Decode a line as a terminal shows it: without text overwritten after a carriage return, and without escapes."""
    *_, seen = line.rstrip(b"\r").rsplit(b"\r", 1)
    text = seen[: 4 * _LINE_LENGTH].decode(errors="replace")
    if "\x1b" in text or "\x08" in text:
        text = _ESCAPES.sub("", text)
    return text if len(text) <= _LINE_LENGTH else text[:_LINE_LENGTH] + "…"
