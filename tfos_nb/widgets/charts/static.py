"""Charts as static SVG, and the table behind them: for the saved notebook, and for hosts without scripts.

A host may remove the style, or the drawing too. What is left then is readable on any background: a line of values for
each metric, and the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from tfos_nb.state.training_curve import VALIDATION, Chart, Line, Point, chart, chart_names, metric_names, usual_axis
from tfos_nb.widgets.words import facts, wording

__all__ = ["render_charts", "render_epochs", "summary", "ticks"]

MOST_CHARTS = 6
MOST_POINTS = 80
"""Maximum number of points of a line. Up to half as many points have a dot each, which tells its value."""

SHOWN_EPOCHS = 12

_SIDE = 1000  # units of the drawing, which is stretched to the place that it has


def render_charts(points: Sequence[Point]) -> str:
    """Return a chart for each metric as HTML; empty if no line has two points."""
    by = usual_axis(points)
    drawn = [chart(points, name, by, MOST_POINTS) for name in chart_names(points)]
    drawn = [one for one in drawn if any(len(line.xs) > 1 for line in one.lines) and _finite(one)]
    if not drawn:
        return ""
    more = f'<p class="t-dim">and {len(drawn) - MOST_CHARTS} more metrics</p>' if len(drawn) > MOST_CHARTS else ""
    return f'<div class="t-charts">{"".join(map(_figure, drawn[:MOST_CHARTS]))}</div>{more}'


def render_epochs(points: Sequence[Point]) -> str:
    """Return the table of the last epochs; empty if none has ended."""
    ended = [point for point in points if point.ends_epoch]
    names = metric_names(ended)[:8]
    if not names:
        return ""
    heads = "".join(f'<th scope="col" class="t-num">{escape(facts.title(name))}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{point.epoch}</th>'
        + "".join(f'<td class="t-num">{wording.number(point.metrics.get(name))}</td>' for name in names)
        + "</tr>"
        for point in ended[-SHOWN_EPOCHS:]
    )
    shown = min(len(ended), SHOWN_EPOCHS)
    told = f"the last {shown} of {len(ended)} epochs" if shown < len(ended) else "each epoch"
    return (
        f'<div class="t-scroll"><table class="t-epochs"><caption class="t-unseen">{told}</caption>'
        f'<thead><tr><th scope="col">Epoch</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def summary(one: Chart) -> str:
    """Return a chart in words, for a screen reader."""
    told = [f"{facts.title(one.metric)} by {one.by}"]
    for line in one.lines:
        found = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
        if found:
            (least_x, least), (most_x, most) = min(found, key=_y), max(found, key=_y)
            told.append(
                f"{line.name} from {wording.number(found[0][1])} to {wording.number(found[-1][1])}, lowest "
                f"{wording.number(least)} at {one.by} {least_x:.0f}, highest {wording.number(most)} at {most_x:.0f}"
            )
    told += [f"the cluster recovered after {one.by} {math.floor(x)}" for x in one.recovered]
    return "; ".join(told)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most ``most`` round numbers between two values.

    Examples
    --------
    >>> ticks(0.03, 2.31, 6), ticks(1, 12, 6, whole=True)
    ([0.5, 1.0, 1.5, 2.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    """
    rough = (high / most - low / most) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough * 0.999)
    step = max(1.0, step) if whole else step
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _y(point: tuple[float, float]) -> float:
    return point[1]


def _finite(one: Chart) -> list[float]:
    return [y for line in one.lines for y in line.ys if math.isfinite(y)]


def _figure(one: Chart) -> str:
    values = "".join(
        f'<span class="t-key t-{line.name}"><span aria-hidden="true">{"╌" if line.name == VALIDATION else "━"}</span> '
        f"{line.name} <b>{wording.number(line.ys[-1])}</b></span> "
        for line in one.lines
    )
    head = f'<div class="t-caption"><b>{escape(facts.title(one.metric))}</b> {values}</div>'
    graph = f'<div class="t-graph" role="img" aria-label="{escape(summary(one))}">{_graph(one)}</div>'
    return f'<div class="t-figure">{head}{graph}</div>'


class _Scale:
    """Linear map from values to the drawing's units."""

    def __init__(self, values: Sequence[float], room: float) -> None:
        low, high = min(values), max(values)
        more = (high / 2 - low / 2) * 2 * room if low < high else (abs(high) or 1) * 0.05
        self.low, self.high = low - more, high + more

    def __call__(self, value: float) -> float:
        return _SIDE * (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halved: a difference may overflow

    def percent(self, value: float) -> str:
        return f"{self(value) * 100 / _SIDE:.1f}%"


def _graph(one: Chart) -> str:
    """Return lines in SVG, with labels and dots laid over them that have no text of their own.

    The style writes a label's text. Without it, and without the drawing, nothing of them is left to be read.
    """
    across = _Scale([x for line in one.lines for x in line.xs], 0.012)
    up = _Scale([-y for y in _finite(one)], 0.05)
    drawn, laid = [], []
    for y in ticks(-up.high, -up.low, 5):
        drawn.append(_rule("stroke-opacity='.14'", y1=up(-y), y2=up(-y), x1=0, x2=_SIDE))
        laid.append(f'<i class="t-y" style="top:{up.percent(-y)}" data-t="{y:.6g}"></i>')
    found = ticks(across.low, across.high, 8, whole=True)
    laid += [f'<i class="t-x" style="left:{across.percent(x)}" data-t="{x:g}"></i>' for x in found]
    laid.append(f'<i class="t-by" data-t="{one.by}"></i>')
    for x in one.recovered:
        drawn.append(_rule("stroke-opacity='.6' stroke-dasharray='2 3'", x1=across(x), x2=across(x), y1=0, y2=_SIDE))
        laid.append(f'<i class="t-again" style="left:{across.percent(x)}" data-t="recovered"></i>')
    for line in reversed(one.lines):  # the training on top
        drawn += _lines(line, across, up)
        laid += _dots(line, one.by, across, up)
    frame = f'viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" width="480" height="160" aria-hidden="true"'
    return f"<svg {frame}>{''.join(drawn)}</svg>{''.join(laid)}"


def _rule(style: str, **ends: float) -> str:
    told = " ".join(f'{name}="{at:.0f}"' for name, at in ends.items())
    return f'<line {told} stroke="currentColor" vector-effect="non-scaling-stroke" {style}/>'


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    """Return the pieces of a line between its gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.xs, line.ys, strict=True):
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return runs


def _lines(line: Line, across: _Scale, up: _Scale) -> Iterator[str]:
    dashes = ' stroke-dasharray="5 4"' if line.name == VALIDATION else ""
    style = f'class="t-line-{line.name}" fill="none" stroke="currentColor" stroke-width="1.8"{dashes}'
    for run in _runs(line):
        if len(run) > 1:
            points = " ".join(f"{across(x):.0f},{up(-y):.0f}" for x, y in run)
            yield f'<polyline {style} vector-effect="non-scaling-stroke" points="{points}"/>'


def _dots(line: Line, by: str, across: _Scale, up: _Scale) -> Iterator[str]:
    """Return a dot for each point, which tells its value under the pointer; of many points, for those alone."""
    for run in _runs(line):
        for x, y in run if len(line.xs) <= MOST_POINTS // 2 or len(run) == 1 else ():
            place = f"left:{across.percent(x)};top:{up.percent(-y)}"
            told = f"{by} {x:.0f}, {line.name}: {wording.number(y)}"
            yield f'<i class="t-pt t-line-{line.name}" style="{place}" title="{told}"></i>'
