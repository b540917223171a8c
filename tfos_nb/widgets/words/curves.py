"""Convert small curves to short strings for the page, and to the points of SVG lines for static HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["GAP", "LEVELS", "quantise", "span", "svg_lines", "thin"]

LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""Characters of a quantised curve, from the lowest value to the highest. ``panel.js`` has the same list."""

GAP = "~"
"""Character for a value that is not finite, where the line has a gap."""


def span(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the lowest and the highest finite value; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def quantise(values: Sequence[float], points: int) -> str:
    """Return a curve as a string of at most ``points`` characters, including its first and last value.

    Examples
    --------
    >>> quantise([4.0, 2.0, 1.0, float("nan"), 0.0], 5), quantise([1.0], 5)
    ('_WG~0', '')
    """
    ends = span(values)
    if ends is None or len(values) < 2:
        return ""
    low, high = ends
    return "".join(LEVELS[_level(value, low, high)] if math.isfinite(value) else GAP for value in thin(values, points))


def svg_lines(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return the points of a curve's lines, for ``<polyline>``. Values that are not finite separate the lines."""
    ends = span(values)
    if ends is None or len(values) < 2:
        return []
    low, high = ends
    lines: list[list[str]] = [[]]
    for i, value in enumerate(values):
        if math.isfinite(value):
            up = _level(value, low, high) / (len(LEVELS) - 1)
            x, y = i * width / (len(values) - 1), 1.5 + (1 - up) * (height - 3)
            lines[-1].append(f"{x:.0f},{y:.1f}".replace(".0", ""))
        elif lines[-1]:
            lines.append([])
    return [" ".join(line) for line in lines if len(line) > 1]


def _level(value: float, low: float, high: float) -> int:
    # halve the values first, because the difference of two huge numbers may overflow
    return round((value / 2 - low / 2) / (high / 2 - low / 2) * (len(LEVELS) - 1)) if high > low else len(LEVELS) // 2


def thin(values: Sequence[float], points: int) -> Sequence[float]:
    """Return at most ``points`` of the values, evenly spread, including the first and the last one."""
    if len(values) <= points:
        return values
    last = len(values) - 1
    return [values[round(i * last / (points - 1))] for i in range(points)]
