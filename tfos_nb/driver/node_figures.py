"""Progress figures of one node, and the state of it that users see."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from tfos_nb.driver.hangs.explanation import Situation
from tfos_nb.driver.hangs.stragglers import Mark
from tfos_nb.driver.membership.members import Member
from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, GpuFigures, Heartbeat, StepReport
from tfos_nb.runtime.node.stacks import StacksTaken
from tfos_nb.state.cluster_state import GpuUse, NodeState, NodeStatus
from tfos_nb.state.curve import Curve
from tfos_nb.state.metric_order import in_order, rank
from tfos_nb.state.progress_estimate import ProgressEstimate

__all__ = ["NodeFigures"]

_RATE_OVER = 3.0  # seconds over which rows per second are averaged
_CURVES = 3  # beside that of the loss
_BEAT = 5.0  # seconds for which a heartbeat's figures stay valid, at most
_METRICS = 100  # limit for a program that gives each step's metric another name


@dataclass
class NodeFigures:
    """Rows, steps, metrics and host usage of one node."""

    heartbeat: Heartbeat | None = None
    beat_at: float | None = None
    worked: float = 0.0  # CPU time in seconds, from its heartbeats
    heard_at: float | None = None
    report: StepReport = field(default_factory=StepReport)
    trained: StepReport = field(default_factory=StepReport)  # the newest report that is not of an evaluation
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    estimate: ProgressEstimate = field(default_factory=ProgressEstimate)
    rows: int = 0
    validated: int = 0  # rows of validations
    rate: float | None = None
    rated: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))
    taken: int = 0  # reports of the program
    finding: str = ""  # what it does while nothing moves, if the others wait for it
    slow: str = ""  # why the others wait for it in each step
    mark: Mark | None = None  # how far it has come, if it waits for others in its steps
    told_of_nan: bool = False  # its log says already that its loss became NaN

    @property
    def has_rows(self) -> bool:
        """Whether rows wait for it."""
        feed = self.heartbeat.feed if self.heartbeat is not None else None
        return feed is not None and not feed.waits_for_rows

    @property
    def waits_for_rows(self) -> bool:
        """Whether it waits for rows."""
        feed = self.heartbeat.feed if self.heartbeat is not None else None
        return feed is not None and feed.waits_for_rows

    def situation(self, member: Member, stacks: StacksTaken | None) -> Situation:
        """Return what is known of it, for an explanation why nothing moves."""
        beat = self.heartbeat
        place = self.report.epoch or 0, self.report.step or 0
        cpu = beat.cpu_percent if beat is not None else None
        gpu = max((one.percent or 0.0 for one in beat.gpus), default=None) if beat is not None else None
        return Situation(str(member.node), place, self.waits_for_rows, member.saving, cpu, gpu, stacks)

    def begin_anew(self) -> None:
        """Forget the previous process. Its figures stay until newer ones come."""
        self.heartbeat, self.told_of_nan, self.finding = None, False, ""
        self.mark, self.slow = None, ""
        self.forget_rate()

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take a heartbeat; ``now`` is a time of the monotonic clock."""
        if self.beat_at is not None and heartbeat.cpu_percent is not None:
            self.worked += heartbeat.cpu_percent / 100 * min(now - self.beat_at, _BEAT)
        self.heartbeat, self.beat_at = heartbeat, now

    def hear(self, now: float) -> None:
        """Note that the node was heard, at the monotonic time ``now``."""
        self.heard_at = now

    def silent_for(self, now: float, late: float) -> float:
        """Return for how many seconds it was not heard, without ``late`` seconds in which this process stood still."""
        if self.heard_at is None:
            return 0.0
        self.heard_at = min(now, self.heard_at + late)
        return now - self.heard_at

    def loss_became_nan(self) -> bool:
        """Return whether its loss is NaN; true once only."""
        if self.told_of_nan or not math.isnan(self.metrics.get("loss", 0.0)):
            return False
        self.told_of_nan = True
        return True

    def show_finding(self, finding: str) -> None:
        """Show what it does while nothing moves; with an empty text, nothing."""
        self.finding = finding

    def show_slow(self, why: str) -> bool:
        """Show why the others wait for it in each step, empty if they do not; return whether this is new."""
        before, self.slow = self.slow, why
        return bool(why) and not before

    def forget_rate(self) -> None:
        """Drop the rate of rows: the node takes no more rows."""
        self.rate = None
        self.rated.clear()

    def count_rows(self, rows: int, now: float) -> None:
        """Take the number of rows handed out so far, at the monotonic time ``now``, and update the recent rate."""
        self.rows = rows
        self.rated.append((now, rows))
        while len(self.rated) > 2 and now - self.rated[0][0] > _RATE_OVER:
            self.rated.popleft()
        then, before = self.rated[0]
        if now > then:
            self.rate = (rows - before) / max(now - then, 0.1)

    def take(self, report: StepReport) -> None:
        """Take a progress report of the program.

        An evaluation counts its own steps, and reports the training epoch that it belongs to. A metric stays until a
        newer value comes, or training starts again.
        """
        self.taken += 1
        self.estimate.take(report)
        self._note_steps(report)
        if report.phase == EVALUATE:
            before = self.trained
            self.report = replace(report, epoch=report.epoch or before.epoch, epochs=report.epochs or before.epochs)
        elif report.phase == OVER and report.epoch is None:
            self.report = replace(self.trained, phase="")
        else:
            if (report.epoch or 0) < (self.trained.epoch or 0):
                self.metrics.clear()
            self.report = self.trained = report
        if len(self.metrics) >= _METRICS:
            self.metrics.clear()
        self.metrics.update(report.metrics)
        if report.phase not in (EVALUATE, OVER):
            self._draw(report.metrics)

    def _note_steps(self, report: StepReport) -> None:
        """Count the steps of the training, of which a report need not say all."""
        if report.waited is None or report.step is None or report.phase not in ("", FIT):
            return
        before, steps = self.trained, self.mark.steps if self.mark is not None else 0
        is_same = (report.epoch or 0) == (before.epoch or 0) and (before.step or 0) <= report.step
        steps += report.step - (before.step or 0) if is_same else report.step
        self.mark = Mark(report.time, steps, report.waited)

    def _draw(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name in self.curves or self._make_room(name):
                self.curves.setdefault(name, Curve()).add(value)

    def _make_room(self, name: str) -> bool:
        """Return whether a metric gets a curve: those that the panel shows do, in whatever order they came."""
        others = self.curves.keys() - {"loss"}
        if name == "loss" or len(others) < _CURVES:
            return True
        last = max(others, key=rank)
        if rank(name) > rank(last):
            return False
        del self.curves[last]
        return True

    def state(self, member: Member, now: float) -> NodeState:
        """Return the node's state at the monotonic time ``now``."""
        place, beat, report = member.reservation, self.heartbeat, self.report
        alive = not member.status.ended
        gpus = beat.gpus if beat else ()
        if not alive:  # its last training figures are still useful
            gpus = tuple(GpuFigures(one.name) for one in gpus if one.name)
        return NodeState(
            node=str(member.node),
            status=member.status,
            host=place.host if place else "",
            executor=place.executor if place else "",
            pid=member.up.pid if member.up else None,
            gpus=place.gpus if place else (),
            gpu_use=tuple(GpuUse(one.name, one.percent, one.memory_used, one.memory_total) for one in gpus),
            phase=report.phase if alive and report.phase != OVER else "",
            epoch=report.epoch,
            epochs=report.epochs,
            step=report.step,
            steps=report.steps,
            metrics={name: self.metrics[name] for name in in_order(self.metrics)},
            curves={name: self.curves[name].points for name in in_order(self.curves)},
            seconds_left=self.estimate.seconds_left if alive else None,
            rows=self.rows,
            rows_per_second=self.rate if alive else None,
            cpu_percent=beat.cpu_percent if beat and alive else None,
            memory_bytes=beat.memory_bytes if beat and alive else None,
            heartbeat_age=now - self.heard_at if self.heard_at is not None and alive else None,
            detail=self.finding or self.slow or _how_it_starts(member),
            stuck=bool(self.finding) and alive,
            slow=bool(self.slow) and alive,
        )


def _how_it_starts(member: Member) -> str:
    """Return how a starting node's process is made, which explains the time that it takes."""
    if member.reservation is None or member.status not in (NodeStatus.RESERVED, NodeStatus.STARTING):
        return ""
    return "from a warm process" if member.reservation.warm else "imports TensorFlow"
