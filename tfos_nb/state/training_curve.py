"""Training curves: the points to draw, by epoch or by step, with gaps where the cluster recovered.

The page, static HTML, matplotlib and pandas show the same points. Nothing in this module depends on any of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.state.metric_order import in_order

__all__ = [
    "AXES",
    "TRAINING",
    "VALIDATION",
    "Chart",
    "Line",
    "Point",
    "chart",
    "chart_names",
    "check_axis",
    "common_axis",
    "metric_names",
    "metric_of",
    "points_of",
    "thin_points",
    "to_pandas",
    "usual_axis",
]

AXES = ("epoch", "step")
"""Units of a chart's x axis."""

TRAINING, VALIDATION = "training", "validation"
"""Names of a chart's lines."""

_VALIDATION_PREFIX = "val_"
_HIGHEST = 1e300  # a chart of larger numbers has a range that no float has


@dataclass(frozen=True)
class Point:
    """Metrics that a node reported, and when.

    ``epoch`` and ``step`` count from 1 over the whole training, also over several calls of ``fit``. ``ends_epoch`` says
    whether the metrics are those of a whole epoch. ``generation`` is higher after each recovery.
    """

    epoch: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    ends_epoch: bool = False
    generation: int = 1


@dataclass(frozen=True)
class Line:
    """A line of a chart. A ``y`` of NaN is a gap."""

    name: str
    metric: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """A metric in training and in validation. ``recovered`` has the x after which the cluster recovered.

    ``total`` is the number of points before the lines were thinned.
    """

    metric: str
    by: str
    lines: tuple[Line, ...] = ()
    recovered: tuple[float, ...] = ()
    total: int = 0

    @property
    def shown(self) -> int:
        """The number of points in the lines; a gap is none."""
        return sum(math.isfinite(y) for line in self.lines for y in line.ys)


class _Counter:
    """Count epochs and steps over a whole training from reports that count within a fit and within an epoch."""

    def __init__(self) -> None:
        self._generation = 0
        self._epoch: int | None = None  # as reported last
        self._before = 0  # epochs of earlier fits
        self._ended = 0  # epochs without a number
        self._start = 0  # steps before the current epoch
        self._starts: dict[int, int] = {}  # by epoch, counted over all fits
        self.step = 0

    def place(self, generation: int, report: StepReport) -> tuple[int, int]:
        """Return the epoch and the step of the next report."""
        recovered = generation > self._generation and self._generation > 0
        self._generation = max(generation, self._generation)
        if report.epoch is None:
            self._begin_anew_if_back(report, recovered)
        elif report.epoch != self._epoch:
            self._enter(report.epoch, recovered)
        epoch = self._before + (self._ended + 1 if report.epoch is None else report.epoch)
        self._ended += report.epoch is None and report.epoch_end
        if report.step is not None:
            self.step = self._start + report.step
        elif not report.epoch_end or report.epoch is None or self.step == self._start:
            self.step += 1
        return epoch, self.step

    def _begin_anew_if_back(self, report: StepReport, recovered: bool) -> None:
        """A loop without epochs that counts from the start again is another loop, unless the cluster has recovered."""
        if not recovered and report.step is not None and self._start + report.step < self.step:
            self._start = self.step

    def _enter(self, epoch: int, recovered: bool) -> None:
        if self._epoch is not None and epoch < self._epoch and not recovered:
            self._before += self._epoch  # another fit
        self._epoch = epoch
        known = self._starts.get(self._before + epoch)
        if recovered and known is not None:
            self.step = known
        self._start = self.step
        self._starts[self._before + epoch] = self._start


def points_of(reports: Iterable[tuple[int, StepReport]]) -> list[Point]:
    """Return the points of a node's reports, each given with its generation.

    A recovered cluster continues from a saved state, and trains again what came after it. Points that are trained again
    are replaced, so that each step counts once.

    Examples
    --------
    >>> reports = [StepReport(1, 2, 4, 4, {"loss": 0.5}, True), StepReport(2, 2, 3, 4, {"loss": 0.4})]
    >>> [(point.epoch, point.step, point.metrics["loss"]) for point in points_of((1, one) for one in reports)]
    [(1, 4, 0.5), (2, 7, 0.4)]
    """
    counter, points = _Counter(), list[Point]()
    for generation, report in reports:
        epoch, step = counter.place(generation, report)
        point = Point(epoch, step, report.metrics, report.epoch_end, generation)
        while points and points[-1].generation < generation and _is_before(point, points[-1]):
            points.pop()
        if points and point.ends_epoch and not points[-1].ends_epoch and _is_at(point, points[-1]):
            points.pop()  # the last step's report, whose metrics the epoch's report has too
        points.append(point)
    return points


def _is_before(point: Point, other: Point) -> bool:
    return point.step < other.step or (point.step == other.step and point.epoch <= other.epoch)


def _is_at(point: Point, other: Point) -> bool:
    return (point.epoch, point.step, point.generation) == (other.epoch, other.step, other.generation)


def metric_names(points: Iterable[Point]) -> list[str]:
    """Return the names of all metrics, training first."""
    return in_order(name for point in points for name in point.metrics)


def chart_names(points: Iterable[Point]) -> list[str]:
    """Return the metrics that have a chart: a metric and its validation share one.

    Examples
    --------
    >>> chart_names([Point(1, 8, {"val_loss": 0.4, "loss": 0.3, "val_auc": 0.9})])
    ['loss', 'auc']
    """
    return in_order(name.removeprefix(_VALIDATION_PREFIX) for name in metric_names(points))


def check_axis(by: object) -> str:
    """Return ``by`` if it names an axis.

    Raises
    ------
    PlanError
        If it does not.
    """
    if by not in AXES:
        raise PlanError(f"by must be 'epoch' or 'step', got {by!r}")
    return str(by)


def usual_axis(points: Sequence[Point]) -> str:
    """Return the axis to begin with: epochs if two have ended, else steps."""
    return "epoch" if sum(point.ends_epoch for point in points) > 1 else "step"


def common_axis(curves: Iterable[Sequence[Point]]) -> str:
    """Return the axis to begin with for several trainings in one chart: epochs if each has ended two."""
    return "epoch" if all(usual_axis(points) == "epoch" for points in curves) else "step"


def metric_of(curves: Iterable[Sequence[Point]], wanted: str) -> str:
    """Return the metric of several trainings that is meant: ``wanted``, also with ``val_`` before it, or the first.

    Raises
    ------
    PlanError
        If none of them has it.
    """
    if not isinstance(wanted, str):
        raise PlanError(f"metric must be the name of one metric, got {wanted!r}")
    known = in_order(name for points in curves for name in chart_names(points))
    if not known:
        raise PlanError("there is nothing to draw: none of these runs has reported a metric")
    meant = wanted if wanted in known else wanted.removeprefix(_VALIDATION_PREFIX)
    if wanted and meant not in known:
        raise PlanError(f"metric: no run has {wanted!r}; there are {', '.join(known)}")
    return meant or known[0]


def chart(points: Sequence[Point], metric: str, by: str = "epoch", most: int | None = None) -> Chart:
    """Return the chart of a metric, with at most about ``most`` points a line."""
    whole = [point for point in points if point.ends_epoch] if by == "epoch" else points
    lines, total = [], 0
    for name, reported in ((TRAINING, metric), (VALIDATION, _VALIDATION_PREFIX + metric)):
        found = [point for point in whole if reported in point.metrics]
        total += len(found)
        if found:
            xs, ys = _drawn(found, reported, by, most)
            lines.append(Line(name, reported, xs, ys))
    recovered = [
        (_x(before, by) + _x(after, by)) / 2
        for before, after in itertools.pairwise(whole)
        if after.generation > before.generation
    ]
    return Chart(metric, by, tuple(lines), tuple(recovered), total)


def _x(point: Point, by: str) -> float:
    return float(point.epoch if by == "epoch" else point.step)


def _drawn(
    points: Sequence[Point], metric: str, by: str, most: int | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the coordinates of a line, with a gap before each point after a recovery."""
    xs, ys, last = list[float](), list[float](), points[0]
    for point in points if most is None else _thinned(points, metric, most):
        if point.generation > last.generation:
            xs.append((_x(last, by) + _x(point, by)) / 2)
            ys.append(math.nan)
        xs.append(_x(point, by))
        ys.append(_drawable(point.metrics[metric]))
        last = point
    return tuple(xs), tuple(ys)


def _drawable(number: float) -> float:
    """Return a number as it is drawn; one that is too large becomes infinite."""
    return math.copysign(math.inf, number) if abs(number) > _HIGHEST else number


def _thinned(points: Sequence[Point], metric: str, most: int) -> Sequence[Point]:
    """Return the lowest and the highest point of each stretch, so that no peak is lost, and the first and the last."""
    if len(points) <= most:
        return points
    count = max(1, most // 2 - 1)
    kept = {0, len(points) - 1}
    for number in range(count):
        stretch = range(number * len(points) // count, (number + 1) * len(points) // count)
        finite = [place for place in stretch if math.isfinite(points[place].metrics[metric])]
        for choose in (min, max):
            kept.add(choose(finite, key=lambda place: points[place].metrics[metric]) if finite else stretch[0])
    return [points[place] for place in sorted(kept)]


def thin_points(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about ``most`` of the points, evenly spread; ends of epochs are preferred."""
    ends = [place for place, point in enumerate(points) if point.ends_epoch]
    others = [place for place, point in enumerate(points) if not point.ends_epoch]
    kept = _spread(ends, most)
    return [points[place] for place in sorted([*kept, *_spread(others, most - len(kept))])]


def _spread(places: list[int], most: int) -> list[int]:
    if len(places) <= most:
        return places
    return [places[round(number * (len(places) - 1) / (most - 1))] for number in range(most)] if most > 1 else []


def to_pandas(points: Sequence[Point], by: str = "epoch") -> Any:
    """Return the points as a pandas DataFrame: a row for each epoch or each reported step, a column for each metric."""
    import pandas as pd

    whole = [point for point in points if point.ends_epoch] if by == "epoch" else points
    index = pd.Index([getattr(point, by) for point in whole], name=by, dtype="int64")
    columns = {"epoch": [point.epoch for point in whole]} if by == "step" else {}
    for name in metric_names(whole):
        columns[name] = [point.metrics.get(name, math.nan) for point in whole]  # type: ignore[misc]
    return pd.DataFrame(columns, index=index)
