"""Small curves: as a short string for the page, as the points of an SVG line for static HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["GAP", "LEVELS", "quantise", "span", "svg_lines", "thin"]

LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""The characters of a quantised curve, from the lowest value to the highest; ``panel.js`` has the same."""

GAP = "~"
"""The character of a value that is not finite: the line has a gap there."""


def span(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the lowest and the highest finite value; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def quantise(values: Sequence[float], points: int) -> str:
    """Write a curve as a string of at most so many characters, its first and last value included.

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
    """Return the points of the lines of a curve, for ``<polyline>``; several where values are not finite."""
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
    # halves first: the distance of two huge numbers is infinite
    return round((value / 2 - low / 2) / (high / 2 - low / 2) * (len(LEVELS) - 1)) if high > low else len(LEVELS) // 2


def thin(values: Sequence[float], points: int) -> Sequence[float]:
    """Return at most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= points:
        return values
    last = len(values) - 1
    return [values[round(i * last / (points - 1))] for i in range(points)]
