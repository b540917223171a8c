"""Data of a chart for a page, as JSON has them: the page asks for one metric of one node, by epoch or by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfos_nb.state.metric_order import in_order
from tfos_nb.state.training_curve import AXES, Line, Point, chart, chart_names, common_axis, metric_of, usual_axis

__all__ = ["MOST_NODES", "MOST_POINTS", "chart_data", "comparison_data"]

MOST_POINTS = 1_000
"""Maximum number of points of a line, about as many as a chart has pixels."""

MOST_NODES = 64

_DIGITS = 7


def chart_data(
    points: Sequence[Point], *, metric: str = "", by: str = "", node: str = "", nodes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a page needs to draw a metric.

    Parameters
    ----------
    points : sequence of Point
        The node's training curve.
    metric : str
        The metric, in training or in validation. Default: the first, which is the loss if there is one.
    by : str
        ``epoch`` or ``step``. Default: epochs, if two have ended.
    node, nodes : str, sequence of str
        The node whose points they are, and those that can be asked for; at most 64 of them are listed.

    Returns
    -------
    dict
        The ``metrics`` that have a chart; the chosen ``metric``, ``by`` and ``node``; the ``lines``, whose ``y`` is
        None in a gap; the ``recovered`` places; and how many points are ``shown`` of a ``total``.
    """
    names = chart_names(points)
    chosen = next((name for name in names if _is_meant(name, metric)), names[0] if names else "")
    axis = by if by in AXES else usual_axis(points)
    drawn = chart(points, chosen, axis, MOST_POINTS)
    return {
        "metrics": names,
        "nodes": list(nodes[:MOST_NODES]),
        "metric": chosen,
        "node": node,
        "by": axis,
        "lines": [_line(line) for line in drawn.lines],
        "recovered": list(drawn.recovered),
        "shown": drawn.shown,
        "total": drawn.total,
    }


def comparison_data(curves: Mapping[str, Sequence[Point]], *, metric: str = "", by: str = "") -> dict[str, Any]:
    """Return what a page needs to draw a metric of several runs in one chart.

    Parameters
    ----------
    curves : mapping of str to sequence of Point
        The points of each run, by its id.
    metric, by : str
        As in :func:`chart_data`.

    Returns
    -------
    dict
        As that of :func:`chart_data`. Each line has, besides, the ``run`` that it is of, and there is no ``node``.

    Raises
    ------
    PlanError
        If no run has the metric.
    """
    chosen = metric_of(curves.values(), metric)
    axis = by if by in AXES else common_axis(curves.values())
    drawn = {run: chart(points, chosen, axis, MOST_POINTS) for run, points in curves.items()}
    return {
        "metrics": in_order(name for points in curves.values() for name in chart_names(points)),
        "metric": chosen,
        "by": axis,
        "lines": [{**_line(line), "run": run} for run, one in drawn.items() for line in one.lines],
        "recovered": [],
        "shown": sum(one.shown for one in drawn.values()),
        "total": sum(one.total for one in drawn.values()),
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "name": line.name,
        "metric": line.metric,
        "x": [_brief(x) for x in line.xs],
        "y": [_brief(y) if math.isfinite(y) else None for y in line.ys],
    }


def _is_meant(name: str, metric: str) -> bool:
    """Return whether a page means this metric: by its name, that of its validation, or a long name that was cut."""
    wanted = metric.removeprefix("val_")
    return name in (metric, wanted) or (wanted.endswith("…") and name.startswith(wanted[:-1]))


def _brief(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if not value.is_integer() else value
