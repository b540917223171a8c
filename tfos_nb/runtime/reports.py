"""Numbers coming out of a node: what the program says of itself, and what the supervisor measures.

A report may be lost; training may not. The TF process sends a datagram and never waits: if the supervisor is behind,
the report is dropped and counted. The supervisor keeps the newest of each kind and sends a heartbeat with them at most
twice a second. The driver keeps a bounded :class:`History`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime import wire
from tfos_nb.runtime.wire import message

__all__ = ["FeedStatus", "Heartbeat", "History", "LogLines", "ReportBox", "Reporter", "StepReport"]

_STEPS_KEPT = 10_000


@message
@dataclass(frozen=True)
class StepReport:
    """Progress that a program reports. ``epoch`` and ``step`` count from 1; ``epoch_end`` marks an epoch's last."""

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    epoch_end: bool = False
    time: float = 0.0


@message
@dataclass(frozen=True)
class FeedStatus:
    """Rows that came in and went out since the node started, and what waits in memory.

    ``hungry`` tells that TensorFlow waits for rows; ``dropped`` counts the reports that were.
    """

    rows_in: int = 0
    rows_out: int = 0
    queued_bytes: int = 0
    hungry: bool = False
    dropped: int = 0


@message
@dataclass(frozen=True)
class Heartbeat:
    """A node is alive."""

    node: str
    cpu_percent: float | None
    memory_bytes: int | None
    reports: tuple[StepReport, ...]
    feed: FeedStatus | None


@message
@dataclass(frozen=True)
class LogLines:
    """What a node wrote to its standard output and error."""

    node: str
    lines: tuple[str, ...]


class Reporter:
    """The TF process' end: never blocks, never raises.

    Parameters
    ----------
    end : socket.socket
        A datagram socket to the supervisor.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.dropped = 0

    def send(self, report: StepReport | FeedStatus) -> None:
        """Send a report, or drop it."""
        try:
            self._socket.send(wire.encode(report))
        except (OSError, wire.NotData):
            self.dropped += 1

    def step(
        self,
        *,
        epoch: int | None = None,
        epochs: int | None = None,
        step: int | None = None,
        steps: int | None = None,
        epoch_end: bool = False,
        **metrics: Any,
    ) -> None:
        """Report a step; a metric that is no number is left out."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
        self.send(StepReport(epoch, epochs, step, steps, numbers, epoch_end, time.time()))


class ReportBox:
    """The supervisor's end: takes datagrams, keeps the newest step and every end of an epoch."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._ends: deque[StepReport] = deque(maxlen=1000)
        self._step: StepReport | None = None
        self._feed: FeedStatus | None = None

    def run(self) -> None:
        """Take reports until the socket is closed."""
        with contextlib.suppress(OSError, ValueError):
            while data := self._socket.recv(1 << 20):
                self._take(wire.decode(data))

    def _take(self, report: StepReport | FeedStatus) -> None:
        with self._lock:
            if isinstance(report, FeedStatus):
                self._feed = report
            elif report.epoch_end:
                self._ends.append(report)
                self._step = None
            else:
                self._step = report

    def empty(self) -> tuple[tuple[StepReport, ...], FeedStatus | None]:
        """Return what came since the last time, and the newest state of the feed."""
        with self._lock:
            reports = (*self._ends, *([self._step] if self._step else []))
            self._ends.clear()
            self._step = None
            return reports, self._feed


class History(Mapping[str, list[float]]):
    """What a training reported: per metric, the value at the end of each epoch, as in Keras' ``History.history``.

    Examples
    --------
    >>> history = History("worker:0")
    >>> history.record("worker:0", StepReport(epoch=1, metrics={"loss": 0.5}, epoch_end=True))
    >>> history["loss"]
    [0.5]
    """

    def __init__(self, chief: str) -> None:
        self._chief = chief
        self._lock = threading.Lock()
        self._epochs: list[StepReport] = []
        self._steps: dict[str, deque[StepReport]] = {}

    def record(self, node: str, report: StepReport) -> None:
        """Keep a report."""
        with self._lock:
            self._steps.setdefault(node, deque(maxlen=_STEPS_KEPT)).append(report)
            if report.epoch_end and node == self._chief:
                self._epochs.append(report)

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The chief's metrics at the end of each epoch, in order; ``epoch`` counts from 1."""
        with self._lock:
            return [
                {"epoch": report.epoch or number, **report.metrics} for number, report in enumerate(self._epochs, 1)
            ]

    def steps(self, node: str | None = None) -> list[StepReport]:
        """Return what a node (the chief if none is named) reported of late, the oldest first."""
        with self._lock:
            return list(self._steps.get(node or self._chief, ()))

    def __getitem__(self, metric: str) -> list[float]:
        values = [epoch[metric] for epoch in self.epochs if metric in epoch and metric != "epoch"]
        if not values:
            raise KeyError(metric)
        return values

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for epoch in self.epochs for name in epoch if name != "epoch"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"<History {len(self._epochs)} epochs: {', '.join(self._names()) or 'nothing reported'}>"
