"""Send the TF process's output to the driver: whole lines, without delay, in bounded memory.

The pipe is always read at once, so a program that writes very much is not blocked. One message is sent at most every
half second. Lines that do not fit into it are dropped, the oldest first, and a line says how many.
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
_UNFINISHED_EVERY = 5.0  # seconds between two looks at a line that is written over and over, such as a progress bar
_UNFINISHED_AFTER = 1.0  # seconds after which the beginning of a line is shown though its end has not come
# What TensorFlow says at every start, before any of its settings can keep it quiet: true of every node, and no news.
_CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|I\d{4} [\d:.]+ +\d+ (port|cudart_stub|cpu_feature_guard|cuda_executor)\.cc:\d+\] "
    r"|W\d{4} [\d:.]+ +\d+ dataset\.cc:\d+\] Input of GeneratorDatasetOp::Dataset will not be optimized "
    r"|To enable the following instructions: .*, rebuild TensorFlow with the appropriate compiler flags\.$"
)
_WITHOUT_GPU = re.compile(r"E\d{4} [\d:.]+ +\d+ cuda_\w+\.cc:\d+\] failed call to cuInit: ")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\x08+")


def without_chatter(text: str) -> str:
    """Leave out what TensorFlow says at every start."""
    return "\n".join(line for line in text.splitlines() if not _CHATTER.match(line))


class Output:
    """Reads a pipe in a thread of its own, until its end.

    Parameters
    ----------
    pipe : binary file
        Unbuffered or not; the standard output and error of the TF process.
    wrote : callable
        Called without arguments, in that thread, when there are lines again after there were none.
    gpu : bool, optional
        Whether the process was given a GPU: then it is news that none can be used.
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
        self._unfinished = b""
        self._unseen_since: float | None = None  # of the unfinished line
        self._shown, self._shown_at = "", 0.0
        self.thread = threading.Thread(target=self._read, name="tfos_nb output", daemon=True)
        self.thread.start()

    def take(self) -> tuple[str, ...]:
        """Return lines that were not taken yet, as many as a message should hold; none if there are none."""
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
        """Whether there are lines to take."""
        return bool(self._pending)

    @property
    def tail(self) -> str:
        """The last lines."""
        with self._lock:
            return "\n".join(self._tail)

    def _read(self) -> None:
        coming = select.poll()
        try:
            coming.register(self._pipe, select.POLLIN)
        except ValueError:  # closed already
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
        """Wait for what is written next; show what there is of a line if its end takes long. Empty at the end."""
        while not coming.poll(self._patience()):
            self._show_unfinished()
        try:
            return bytes(getattr(self._pipe, "read1", self._pipe.read)(_CHUNK))
        except ValueError:  # closed, and its content is not wanted
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
            self._tail.extend(lines[-_TAIL:])
        if were_none and lines:
            self._wrote()

    def _hold(self, rest: bytes) -> None:
        """Keep the beginning of a line whose end has not come; show it at once if it is written over and over."""
        held = self._unfinished + rest
        over = held.rstrip(b"\r").rfind(b"\r")  # a last one may be half of a line's end
        if over >= 0:
            held = held[over + 1 :]
        held = held[: 4 * _LINE_LENGTH]  # of an endless line the rest is not even held
        if self._unseen_since is None and held != self._unfinished:
            self._unseen_since = time.monotonic()
        self._unfinished = held
        if over >= 0 and time.monotonic() - self._shown_at > _UNFINISHED_EVERY:
            self._show_unfinished()

    def _patience(self) -> float | None:
        """Return in how many milliseconds an unfinished line is to be shown; None if there is nothing to show."""
        if self._unseen_since is None:
            return None
        due = self._unseen_since + _UNFINISHED_AFTER
        if self._shown:  # its beginning; what comes bit by bit is not told bit by bit
            due = max(due, self._shown_at + _UNFINISHED_EVERY)
        return max(0.0, 1000 * (due - time.monotonic()))

    def _show_unfinished(self) -> None:
        """Add the beginning of a line; its end will add the whole line again, unless nothing more comes."""
        self._unseen_since = None
        line = _readable(self._unfinished)
        if line and line != self._shown:
            self._shown, self._shown_at = line, time.monotonic()
            self._add([line])


def _readable(line: bytes) -> str:
    """Decode a line as it looks when it is written: what a carriage return wrote over, and colours, are gone."""
    *_, seen = line.rstrip(b"\r").rsplit(b"\r", 1)
    text = seen[: 4 * _LINE_LENGTH].decode(errors="replace")
    if "\x1b" in text or "\x08" in text:
        text = _ESCAPES.sub("", text)
    return text if len(text) <= _LINE_LENGTH else text[:_LINE_LENGTH] + "…"
