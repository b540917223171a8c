"""A run of any length in a few evenly spread points, which keep its mean."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfos_nb.state.curve import POINTS, Curve

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.lists(st.floats(), max_size=600)


def drawn(values: list[float]) -> tuple[float, ...]:
    curve = Curve()
    for value in values:
        curve.add(value)
    return curve.points


def spans(count: int) -> int:
    """Return how many values each point represents after ``count`` values."""
    each = 1
    while each * POINTS < count:
        each *= 2
    return each


@given(ANY)
@settings(max_examples=200, deadline=None)
def test_each_point_is_the_mean_of_equally_many_consecutive_values(values: list[float]) -> None:
    points = drawn(values)
    each = spans(len(values))
    parts = [values[at : at + each] for at in range(0, len(values), each)]
    assert len(points) == len(parts) <= POINTS
    for point, part in zip(points, parts, strict=True):
        finite = [value for value in part if math.isfinite(value)]
        if not finite:
            assert math.isnan(point)
        else:
            mean = math.fsum(value / len(finite) for value in finite)
            scale = max(map(abs, finite))
            assert min(finite) <= point <= max(finite)
            assert point == pytest.approx(mean, rel=1e-9, abs=scale * 1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=POINTS * 8))
@settings(max_examples=100, deadline=None)
def test_the_mean_of_the_whole_run_is_preserved(values: list[float]) -> None:
    points = drawn(values)
    each = spans(len(values))
    counts = [each] * (len(points) - 1) + [len(values) - each * (len(points) - 1)]
    weighted = math.fsum(point * count for point, count in zip(points, counts, strict=True)) / len(values)
    assert weighted == pytest.approx(statistics.fmean(values), abs=1e-6)


@given(st.lists(FINITE, max_size=POINTS))
def test_a_short_run_keeps_its_values(values: list[float]) -> None:
    assert drawn(values) == tuple(values)


def test_a_falling_curve_has_falling_points() -> None:
    values = [1 / (1 + step) for step in range(10_000)]
    points = drawn(values)
    assert POINTS / 2 <= len(points) <= POINTS
    assert list(points) == sorted(points, reverse=True)
    each = spans(len(values))
    assert points[0] == pytest.approx(statistics.fmean(values[:each]))
    assert points[-1] == pytest.approx(statistics.fmean(values[each * (len(points) - 1) :]))


def test_nan_values_leave_a_gap_of_proportional_length() -> None:
    points = drawn([1.0] * 500 + [math.nan] * 500)
    gaps = [math.isnan(point) for point in points]
    assert gaps == sorted(gaps)
    assert abs(sum(gaps) / len(gaps) - 0.5) < 0.05
    assert {point for point in points if not math.isnan(point)} == {1.0}
