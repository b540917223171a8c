"""Charts as static SVG, and the table behind them: for the saved notebook, and for hosts without scripts.

The lines have the colour of the text unless the style says otherwise, and a validation is dashed. So a chart is
readable on a light and on a dark background also if the host removes the style.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from tfos_nb.state.course import VALIDATION, Chart, Line, Point, chart, chart_names, metric_names, usual_axis
from tfos_nb.widgets.words import facts, wording

__all__ = ["render_charts", "render_epochs", "summary", "ticks"]

MOST_CHARTS = 6
MOST_POINTS = 80
"""Maximum number of points of a line. Up to half as many points have a dot each, which tells its value."""

SHOWN_EPOCHS = 12

_WIDTH, _HEIGHT = 520, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 8, 34


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
    return (
        f'<figure class="t-figure"><figcaption><b>{escape(facts.title(one.metric))}</b> {values}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(summary(one))}">'
        f"{''.join(_drawing(one))}</svg></figure>"
    )


class _Scale:
    """Linear map from values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        if low == high:
            low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
        self.low, self.high, self._begin, self._end = low, high, begin, end

    def __call__(self, value: float) -> float:
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halved: a difference may overflow
        return self._begin + share * (self._end - self._begin)


def _drawing(one: Chart) -> Iterator[str]:
    xs = [x for line in one.lines for x in line.xs]
    ys = _finite(one)
    across = _Scale(min(xs), max(xs), _LEFT + 6, _WIDTH - _RIGHT)
    low, high = min(ys), max(ys)
    up = _Scale(low - (high / 20 - low / 20), high + (high / 20 - low / 20), _HEIGHT - _BOTTOM, _TOP)
    for y in ticks(up.low, up.high, 5):
        at = f"{up(y):.1f}"
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="currentColor" '
            'stroke-opacity=".14"/>'
            f'<text x="{_LEFT - 6}" y="{up(y) + 3.5:.1f}" {_TEXT} text-anchor="end">{y:.6g}</text>'
        )
    for x in ticks(across.low, across.high, 8, whole=True):
        yield f'<text x="{across(x):.1f}" y="{_HEIGHT - 18}" {_TEXT} text-anchor="middle">{x:g}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" {_TEXT} text-anchor="end">{one.by}</text>'
    for x in one.recovered:
        at = f"{across(x):.1f}"
        yield (
            f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="currentColor" stroke-opacity=".5" '
            'stroke-dasharray="2 3"><title>the cluster recovered here</title></line>'
        )
    for line in reversed(one.lines):  # the training on top
        yield from _line(line, one.by, across, up)


_TEXT = 'fill="currentColor" fill-opacity=".72" font-size="11"'


def _line(line: Line, by: str, across: _Scale, up: _Scale) -> Iterator[str]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.xs, line.ys, strict=True):
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    dashes = ' stroke-dasharray="5 4"' if line.name == VALIDATION else ""
    css = f'class="t-line-{line.name}"'
    for run in runs:
        if len(run) > 1:
            drawn = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in run)
            yield f'<polyline {css} fill="none" stroke="currentColor" stroke-width="1.8"{dashes} points="{drawn}"/>'
    dotted = len(line.xs) <= MOST_POINTS // 2
    for x, y in (point for run in runs for point in run if dotted or len(run) == 1):
        yield (
            f'<circle {css} cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.4" fill="currentColor">'
            f"<title>{by} {x:.0f}, {line.name}: {wording.number(y)}</title></circle>"
        )
