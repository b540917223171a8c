"""Progress reports of a node: the program's own numbers, and the supervisor's measurements.

Reports may be lost, but must never delay training. The TF process sends a datagram and never waits. If the supervisor
is behind, the report is dropped and counted; an epoch's end waits in memory and is sent later. When steps come faster
than reports are shown, only the newest is converted to numbers and sent. The supervisor keeps the newest report of each
kind. It sends them with a heartbeat, at most twice a second, and less often with many nodes (:func:`tick_among`). The
driver keeps a bounded :class:`~tfos_nb.state.history.History`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.wire import message

__all__ = [
    "EVALUATE",
    "FIT",
    "OVER",
    "PAST",
    "FeedStatus",
    "GpuFigures",
    "Heartbeat",
    "LogLines",
    "ReportBox",
    "Reporter",
    "StepReport",
    "silent_after",
    "tick_among",
]

logger = logging.getLogger(__name__)

FIT, EVALUATE, OVER, PAST = "fit", "evaluate", "over", "past"
"""Phases of Keras' reports: what it does, that it has returned, or the end of an epoch of an earlier cluster."""

_TICK = 0.5  # seconds: at most two messages a second with lines, and two with figures
_MANY, _TICK_OF_MANY = 500, 1.0  # with so many nodes one a second, since all go to one driver
_DRIVER_TAKES = 1500  # heartbeats a second, which leave the driver a third of its core (docs/scaling.md)
_BEATS_IN_TIMEOUT = 4
_SILENT_AFTER = 5.0

_BETWEEN_STEPS = 0.1  # seconds; an earlier report waits for the next one, or for the flush
_FLUSH_AFTER = 0.2
_ENDS_WAITING = 100_000  # ends of epochs that wait in a process; at about 200 bytes each
_ENDS_AT_ONCE = 1000  # in one heartbeat
_LAST_SECONDS = 2.0  # in which the supervisor takes those that wait when the process ends


@message
@dataclass(frozen=True)
class StepReport:
    """Progress that a program reports.

    ``epoch`` and ``step`` count from 1; ``epoch_end`` marks an epoch's last. ``phase`` is :data:`FIT`, :data:`EVALUATE`
    (then ``step`` and ``steps`` are the evaluation's), :data:`OVER` or :data:`PAST`; empty if it is not Keras that
    reports.
    ``waited`` is the seconds that the process has waited for other workers so far; None if that is not known.
    """

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    epoch_end: bool = False
    time: float = 0.0
    phase: str = ""
    waited: float | None = None


@message
@dataclass(frozen=True)
class FeedStatus:
    """Rows that came in and went out since the node started, and what waits in memory.

    ``waits_for_rows``: TensorFlow does; ``dropped`` counts the dropped reports; ``validated`` counts the validation
    rows that went out, which tell a validation that goes on from one that hangs.
    """

    rows_in: int = 0
    rows_out: int = 0
    queued_bytes: int = 0
    waits_for_rows: bool = False
    dropped: int = 0
    validated: int = 0


@message
@dataclass(frozen=True)
class GpuFigures:
    """NVML's figures of one GPU: its share of busy time in percent, and its memory in bytes."""

    name: str = ""
    percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@message
@dataclass(frozen=True)
class Heartbeat:
    """A node is alive. CPU and memory are those of the TF process and of all that it started.

    ``stopped`` says that a signal has stopped the TF process.
    """

    node: str
    cpu_percent: float | None
    memory_bytes: int | None
    reports: tuple[StepReport, ...]
    feed: FeedStatus | None
    gpus: tuple[GpuFigures, ...] = ()
    stopped: bool = False


@message
@dataclass(frozen=True)
class LogLines:
    """Lines that a node wrote to its standard output and error."""

    node: str
    lines: tuple[str, ...]


class Reporter:
    """The TF process' end: never blocks, never raises.

    Parameters
    ----------
    end : socket.socket
        A datagram socket to the supervisor.

    Attributes
    ----------
    waited : callable
        Returns the seconds that the process has waited for other workers so far, or None.
    dropped : int
        Number of dropped reports.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.waited: Callable[[], float | None] = _unknown
        self.dropped = 0
        self._due = -math.inf
        self._waiting: deque[bytes] = deque()  # ends of epochs for which the supervisor had no room
        self._held: tuple[Any, ...] | None = None
        self._sending = threading.Lock()
        self._holding = threading.Event()
        self._flusher: threading.Thread | None = None
        self._closing = threading.Event()

    def send(self, report: StepReport | FeedStatus) -> None:
        """Send a report, or drop it."""
        try:
            self._socket.send(wire.encode(report))
        except (OSError, wire.NotData):
            self.dropped += 1

    def _send_end(self, report: StepReport) -> None:
        """Send the end of an epoch, after those that wait; let it wait, too, while the supervisor has no room."""
        try:
            self._waiting.append(wire.encode(report))
        except wire.NotData:
            self.dropped += 1
        while len(self._waiting) > _ENDS_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        if not self._send_waiting():
            self._flush_soon()

    def _send_waiting(self) -> bool:
        """Send what waits as far as there is room; return whether nothing waits any more."""
        try:
            while self._waiting:
                self._socket.send(self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            return False
        except OSError:  # there is no supervisor any more
            self.dropped += len(self._waiting)
            self._waiting.clear()
        return True

    def step(
        self,
        *,
        epoch: int | None = None,
        epochs: int | None = None,
        step: int | None = None,
        steps: int | None = None,
        epoch_end: bool = False,
        phase: Any = "",
        **metrics: Any,
    ) -> None:
        """Report a step; a metric that is not a number is left out.

        A report within a tenth of a second after the last one, which does not end an epoch, is held back and replaces
        an earlier held one. Converting a metric to a number may have to wait for the GPU. The newest held report is
        sent soon after.
        """
        now = time.monotonic()
        report = (epoch, epochs, step, steps, metrics, epoch_end, time.time(), phase)
        if now < self._due and not epoch_end:
            self._held = report
            if not self._holding.is_set():
                self._flush_soon()
            return
        with self._sending:
            self._due = now + _BETWEEN_STEPS
            self._held = None
            self._send_step(report)

    def flush_all(self) -> None:
        """Send all that waits, also if the supervisor has room only later: within :data:`_LAST_SECONDS`."""
        self.flush()
        until = time.monotonic() + _LAST_SECONDS
        while self._waiting and (left := until - time.monotonic()) > 0:
            select.select((), (self._socket,), (), left)
            self.flush()

    def flush(self) -> None:
        """Send now what waits, and the newest step if it was held back."""
        with self._sending:
            if not self._send_waiting():
                self._holding.set()  # send the others later
            held, self._held = self._held, None
            if held is not None:
                self._send_step(held)

    def _send_step(self, report: tuple[Any, ...]) -> None:
        epoch, epochs, step, steps, metrics, epoch_end, at, phase = report
        if phase not in ("", FIT, EVALUATE, OVER, PAST):
            metrics, phase = {**metrics, "phase": phase}, ""  # the user has a metric of this name
        numbers = {name: number for name, value in metrics.items() if (number := _number(value)) is not None}
        counts = (_whole(epoch), _whole(epochs), _whole(step), _whole(steps))
        made = StepReport(*counts, numbers, bool(epoch_end), at, phase, self.waited())
        if made.epoch_end:
            self._send_end(made)
        else:
            self.send(made)

    def _flush_soon(self) -> None:
        self._holding.set()
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._keep_flushing, name="tfos_nb flush", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                self._flusher.start()

    def close(self) -> None:
        """Send the held report and what waits, and end the thread that sends held reports."""
        self.flush_all()
        self._closing.set()
        self._holding.set()

    def _keep_flushing(self) -> None:
        while self._holding.wait() and not self._closing.wait(_FLUSH_AFTER):
            self._holding.clear()  # before the flush: a report held later sets it again
            self.flush()


def _unknown() -> None:
    return None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - a tensor or a user's object may raise any error: it is not a number then
        return None


def _whole(value: Any) -> int | None:
    """Return a count as a plain integer; it may be a variable such as an optimizer's ``iterations``."""
    try:
        return None if value is None else int(value)
    except Exception:  # noqa: BLE001 - as above
        return None


class ReportBox:
    """The supervisor's end: take datagrams, keep the newest step and every end of an epoch."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._ends: deque[StepReport] = deque(maxlen=_ENDS_WAITING)
        self._step: StepReport | None = None
        self._feed: FeedStatus | None = None

    def run(self) -> None:
        """Take reports until the socket is closed; skip datagrams that are not reports."""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 20):
                with contextlib.suppress(ValueError):
                    self._take(wire.decode(data))

    def close(self) -> None:
        """Take the datagrams that have arrived, then stop: the reporting process has ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def _take(self, report: Any) -> None:
        with self._lock:
            if isinstance(report, FeedStatus):
                self._feed = report
            elif not isinstance(report, StepReport):
                logger.debug("a %s is not a report", type(report).__name__)
            elif report.epoch_end:
                self._ends.append(report)
                self._step = None
            else:
                self._step = report

    def empty(self) -> tuple[tuple[StepReport, ...], FeedStatus | None]:
        """Return the reports since the last call, and the newest state of the feed.

        Of more than a thousand ends of epochs the first thousand come now, and the others with the next calls.
        """
        with self._lock:
            ends = [self._ends.popleft() for _ in range(min(_ENDS_AT_ONCE, len(self._ends)))]
            if self._ends or self._step is None:
                return tuple(ends), self._feed
            step, self._step = self._step, None
            return (*ends, step), self._feed


def tick_among(nodes: int, heartbeat_timeout: float = 15.0) -> float:
    """Return the seconds between two messages of one kind from each of ``nodes`` nodes.

    The driver must also feed and stop the nodes. If their messages would take all its time, each node sends fewer, but
    enough not to count as lost.

    Examples
    --------
    >>> tick_among(2), tick_among(1000), tick_among(3000)
    (0.5, 1.0, 2.0)
    >>> tick_among(60_000)
    3.75
    """
    if nodes < _MANY:
        return _TICK
    return max(_TICK_OF_MANY, min(nodes / _DRIVER_TAKES, heartbeat_timeout / _BEATS_IN_TIMEOUT))


def silent_after(nodes: int) -> float:
    """Return the seconds without a message from one of ``nodes`` nodes after which its silence is shown.

    Examples
    --------
    >>> silent_after(2), silent_after(6000)
    (5.0, 8.0)
    """
    return max(_SILENT_AFTER, 2 * nodes / _DRIVER_TAKES)
