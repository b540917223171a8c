"""Display of a training's history: its curves and its last epochs."""

from __future__ import annotations

import math
from typing import Any

from tfos_nb.state.training_curve import Point, metric_names
from tfos_nb.widgets.charts.static import SHOWN_EPOCHS, render_charts, render_epochs
from tfos_nb.widgets.html import render_section
from tfos_nb.widgets.words import wording

__all__ = ["history_bundle"]


def history_bundle(history: Any) -> dict[str, str]:
    """Return a history as charts with a table of its last epochs, and as text."""
    points: list[Point] = history.points()
    ended = [point for point in points if point.ends_epoch]
    count = f"{len(ended)} epoch{'s' * (len(ended) != 1)}"
    told = count if points else "nothing was reported yet"
    head = f'<div class="t-head"><b class="t-name">History</b> <span class="t-dim">{told}</span></div>'
    curves, table = render_charts(points), render_epochs(points)
    more = ".plot() draws them with matplotlib, .to_pandas() returns the numbers, also by step"
    foot = f'<div class="t-foot">{more}</div>' if points else ""
    return {"text/html": render_section("History", head + curves + table + foot), "text/plain": _text(ended, count)}


def _text(ended: list[Point], count: str) -> str:
    names = metric_names(ended)[:6]
    if not names:
        return "History: nothing was reported yet" if not ended else f"History: {count}"
    rows = [["epoch", *names]]
    rows += [
        [str(point.epoch), *(wording.number(point.metrics.get(name, math.nan)) for name in names)]
        for point in ended[-SHOWN_EPOCHS:]
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    cut = f", the last {SHOWN_EPOCHS}" if len(ended) > SHOWN_EPOCHS else ""
    return "\n".join([f"History: {count}{cut}", *lines])
