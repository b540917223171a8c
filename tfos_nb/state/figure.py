"""Charts of a training's metrics as a matplotlib figure. matplotlib is imported when a figure is made."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tfos_nb.errors import MissingPackage, PlanError
from tfos_nb.state.course import VALIDATION, Chart, Point, chart, chart_names, check_axis, usual_axis

__all__ = ["figure"]

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
    made = kind(figsize=(_WIDTH, _HEIGHT * len(charts)), layout="constrained")
    for axes, one in zip(made.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        _draw(axes, one, log)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return made


def _charts(points: Sequence[Point], metrics: str | Sequence[str] | None, by: str | None) -> list[Chart]:
    known = chart_names(points)
    if not known:
        raise PlanError("there is nothing to plot: no metric was reported yet (Keras' fit and ctx.report() report)")
    wanted = known if metrics is None else [metrics] if isinstance(metrics, str) else list(metrics)
    wanted = list(dict.fromkeys(name if name in known else name.removeprefix("val_") for name in wanted))
    for name in wanted:
        if name not in known:
            raise PlanError(f"metrics: no metric {name!r} was reported; there are {', '.join(known)}")
    if not wanted:
        raise PlanError(f"metrics=[] names nothing to plot; there are {', '.join(known)}")
    axis = usual_axis(points) if by is None else check_axis(by)
    return [chart(points, name, axis) for name in wanted]


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
    axes.set_title(one.metric.replace("_", " "), loc="left", fontsize=11)
    axes.set_xlabel(one.by)
    axes.set_yscale("log" if log else "linear")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if one.lines:
        axes.legend(frameon=False)
