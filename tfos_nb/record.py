"""What the driver knows of one node, and how it looks from outside."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tfos_nb.runtime.door import Link
from tfos_nb.runtime.lifecycle import MainRaised, NodeEnded, NodeUp, Reservation
from tfos_nb.runtime.plan import Node
from tfos_nb.runtime.reports import Heartbeat, StepReport
from tfos_nb.state import NodeState, NodeStatus

__all__ = ["Record"]

_LINES_KEPT = 10_000
_RATE_OVER = 3.0  # seconds over which rows per second are averaged


@dataclass
class Record:
    """What is known of one node."""

    node: Node
    status: NodeStatus = NodeStatus.PLANNED
    link: Link | None = None
    reservation: Reservation | None = None
    up: NodeUp | None = None
    heartbeat: Heartbeat | None = None
    heard_at: float | None = None
    report: StepReport = field(default_factory=StepReport)
    rows: int = 0
    rate: float | None = None
    rated: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))
    result: bytes | None = None
    returned: bool = False
    serving: bool = False
    raised: MainRaised | None = None
    ended: NodeEnded | None = None
    parting: bool = False  # it has been told to go, so its end is no failure
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))

    @property
    def sated(self) -> bool:
        """Whether rows wait for it."""
        feed = self.heartbeat.feed if self.heartbeat is not None and not self.status.ended else None
        return feed is not None and not feed.hungry

    def forget_rate(self) -> None:
        """Have no rate: the node takes no more rows."""
        self.rate = None
        self.rated.clear()

    def count_rows(self, rows: int, now: float) -> None:
        """Take the number of rows handed out so far, at a moment of the monotonic clock; work out the rate of late."""
        self.rows = rows
        self.rated.append((now, rows))
        while len(self.rated) > 2 and now - self.rated[0][0] > _RATE_OVER:
            self.rated.popleft()
        then, before = self.rated[0]
        if now > then and not self.status.ended:
            self.rate = (rows - before) / max(now - then, 0.1)

    def state(self, now: float) -> NodeState:
        """Return how the node looks at a moment of the monotonic clock."""
        place, beat, report = self.reservation, self.heartbeat, self.report
        alive = not self.status.ended
        return NodeState(
            node=str(self.node),
            status=self.status,
            host=place.host if place else "",
            executor=place.executor if place else "",
            pid=self.up.pid if self.up else None,
            gpus=place.gpus if place else (),
            epoch=report.epoch,
            epochs=report.epochs,
            step=report.step,
            steps=report.steps,
            metrics=dict(sorted(report.metrics.items(), key=lambda pair: pair[0] != "loss")),
            rows=self.rows,
            rows_per_second=self.rate if alive else None,
            cpu_percent=beat.cpu_percent if beat and alive else None,
            memory_bytes=beat.memory_bytes if beat and alive else None,
            heartbeat_age=now - self.heard_at if self.heard_at is not None and alive else None,
        )
