"""Curve of a number since the start of a run, in a limited number of points however long the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["POINTS", "Curve"]

POINTS = 48
"""Maximum number of points of a curve."""


@dataclass
class _Point:
    """Summary of consecutive values: their number, the number of finite ones, and the mean of the finite ones."""

    values: int = 0
    finite: int = 0
    mean: float = math.nan

    def take(self, values: int, finite: int, mean: float) -> None:
        if finite:
            share = finite / (self.finite + finite)
            both = mean if not self.finite else self.mean * (1 - share) + mean * share
            # Rounding must not move the mean out of the range of the values, and never beyond the largest float.
            low, high = sorted((mean, self.mean if self.finite else mean))
            self.mean = min(max(both, low), high)
        self.values += values
        self.finite += finite


class Curve:
    """At most :data:`POINTS` means in order, each of the same number of values. The last may have fewer values.

    When the curve is full, neighbours are merged, and from then on each point stands for twice as many values. A value
    that is not finite counts as a value of its point, but not in the mean. A point without a finite value is NaN, a
    gap.

    Examples
    --------
    >>> curve = Curve()
    >>> for value in (4.0, 2.0, float("nan"), 1.0):
    ...     curve.add(value)
    >>> curve.points
    (4.0, 2.0, nan, 1.0)
    """

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._means: list[float] = []  # means of the points, kept because they are read more often than changed
        self._each = 1

    def add(self, value: float) -> None:
        """Add the next value."""
        if not self._points or self._points[-1].values == self._each:
            if len(self._points) == POINTS:
                self._halve()
            self._points.append(_Point())
            self._means.append(math.nan)
        finite = math.isfinite(value)
        self._points[-1].take(1, int(finite), value)
        self._means[-1] = self._points[-1].mean

    def _halve(self) -> None:
        for left, right in zip(self._points[::2], self._points[1::2], strict=True):
            left.take(right.values, right.finite, right.mean)
        del self._points[1::2]
        self._means = [point.mean for point in self._points]
        self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """The means, the oldest first."""
        return tuple(self._means)
