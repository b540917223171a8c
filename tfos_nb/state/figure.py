"""Charts of a training's metrics as a matplotlib figure. matplotlib is imported when a figure is made."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from tfos_nb.errors import MissingPackage, PlanError
from tfos_nb.state.training_curve import (
    VALIDATION,
    Chart,
    Point,
    chart,
    chart_names,
    check_axis,
    common_axis,
    metric_of,
    usual_axis,
)

__all__ = ["comparison", "figure"]

_WIDTH, _HEIGHT = 7.2, 3.4  # inches of one chart
_COLOURS = {"training": "#2f6fde", "validation": "#b26a00"}


def figure(points: Sequence[Point], metrics: str | Sequence[str] | None, by: str | None, log: bool) -> Any:
    """Return a figure with a chart for each metric, training and validation in one.

    Raises
    ------
    PlanError
        If nothing was reported, or ``metrics`` or ``by`` name something that does not exist.
    MissingPackage
        If matplotlib is not installed.
    """
    charts = _charts(points, metrics, by)
    made, all_axes = _empty(len(charts))
    for axes, one in zip(all_axes, charts, strict=True):
        _draw(axes, one, log)
    return made


def comparison(curves: Mapping[str, Sequence[Point]], metric: str, by: str | None, log: bool) -> Any:
    """Return a figure with a metric of several runs in one chart. ``curves`` has the points of each, by its name.

    Raises
    ------
    PlanError
        If no run has the metric, or ``by`` names something that does not exist.
    MissingPackage
        If matplotlib is not installed.
    """
    chosen = metric_of(curves.values(), metric)
    axis = common_axis(curves.values()) if by is None else check_axis(by)
    made, (axes,) = _empty(1)
    for number, (name, points) in enumerate(curves.items()):
        for line in chart(points, chosen, axis).lines:
            label, style = (name, "-") if line.name != VALIDATION else (f"{name}, validation", "--")
            axes.plot(line.xs, line.ys, style, color=f"C{number}", label=label)
    _finish(axes, chosen, axis, log)
    return made


def _empty(charts: int) -> tuple[Any, list[Any]]:
    """Return a new figure, and the axes of its charts, one below the other."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingPackage(
            "plot() needs matplotlib, which is not installed here: pip install 'tfos_nb[plot]', or pip install "
            "matplotlib. to_pandas() returns the numbers without it"
        ) from error

    # Notebooks show a Figure by themselves only once pyplot was imported.
    kind: Any = type("Figure", (Figure,), {"_repr_png_": _as_png})
    made = kind(figsize=(_WIDTH, _HEIGHT * charts), layout="constrained")
    all_axes = list(made.subplots(charts, squeeze=False)[:, 0])
    for axes in all_axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return made, all_axes


def _charts(points: Sequence[Point], metrics: str | Sequence[str] | None, by: str | None) -> list[Chart]:
    known = chart_names(points)
    if not known:
        raise PlanError("there is nothing to plot: no metric was reported yet (Keras' fit and ctx.report() report)")
    wanted = known if metrics is None else _named(metrics)
    wanted = list(dict.fromkeys(name if name in known else name.removeprefix("val_") for name in wanted))
    for name in wanted:
        if name not in known:
            raise PlanError(f"metrics: no metric {name!r} was reported; there are {', '.join(known)}")
    if not wanted:
        raise PlanError(f"metrics=[] names nothing to plot; there are {', '.join(known)}")
    axis = usual_axis(points) if by is None else check_axis(by)
    return [chart(points, name, axis) for name in wanted]


def _named(metrics: Any) -> list[str]:
    if isinstance(metrics, str):
        return [metrics]
    if not isinstance(metrics, Sequence | Set) or not all(isinstance(name, str) for name in metrics):
        raise PlanError(f"metrics must be the name of a metric or a list of names, such as 'loss', got {metrics!r:.80}")
    return list(metrics)


def _as_png(figure: Any) -> bytes:
    """Return a figure as a notebook shows it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=figure.dpi, bbox_inches="tight")
    return buffer.getvalue()


def _draw(axes: Any, one: Chart, log: bool) -> None:
    for line in one.lines:
        style = "--" if line.name == VALIDATION else "-"
        marker = "o" if len(line.xs) <= 30 else None
        axes.plot(line.xs, line.ys, style, color=_COLOURS[line.name], label=line.name, marker=marker, markersize=3.5)
    for number, x in enumerate(one.recovered):
        axes.axvline(x, color="0.5", linewidth=1, linestyle=":", label="recovered" if number == 0 else None)
    _finish(axes, one.metric, one.by, log)


def _finish(axes: Any, metric: str, by: str, log: bool) -> None:
    axes.set_title(metric.replace("_", " "), loc="left", fontsize=11)
    axes.set_xlabel(by)
    has_log = log and any(0 < y < math.inf for line in axes.lines for y in line.get_ydata())
    axes.set_yscale("log" if has_log else "linear")
    if log and not has_log:
        axes.text(
            0.99, 0.97, "no value above 0: not logarithmic", transform=axes.transAxes, ha="right", va="top", alpha=0.6
        )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)
