"""Calls in the strategy's scope, outside of a step, give the same results as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.keras_parity.workers import read_results, run


def flat(value: Any) -> list[float]:
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


def test_calls_outside_of_a_step_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    outs, alone = run(2, "outside", tmp_path)
    first, second, one = (read_results(path) for path in (*outs, alone))
    assert first == second
    assert first.keys() == one.keys()
    for case, right in one.items():
        assert "error" not in first[case], (case, first[case])
        assert "error" not in right, (case, right)
        for name, value in right.items():
            mine = first[case][name]
            for part, other in zip(flat(mine), flat(value), strict=True):
                assert part == pytest.approx(other, rel=1e-6), (case, name)
