import math

import pytest

from tfos_nb.widgets.words.curves import quantise, svg_lines


@pytest.mark.parametrize(
    ("values", "points", "drawn"),
    [
        ((), 8, ""),
        ((1.0,), 8, ""),
        ((2.0, 2.0), 8, "WW"),
        ((0.0, 1.0), 8, "0_"),
        ((math.nan, math.nan), 8, ""),
        ((-1e308, 1e308), 8, "0_"),
        (tuple(float(i) for i in range(100)), 3, "0W_"),
    ],
)
def test_a_curve_is_a_short_string(values, points, drawn):
    assert quantise(values, points) == drawn


def test_a_gap_splits_the_line():
    assert svg_lines((0.0, 1.0, math.nan, 0.5, 0.5), 100, 16) == ["0,14.5 25,1.5", "75,7.9 100,7.9"]
