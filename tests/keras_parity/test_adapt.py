"""Preprocessing layers adapt to the rows of all workers, and get the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.keras_parity.workers import read_results, run


def flat(value: Any) -> list[Any]:
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


def test_layers_adapt_to_the_rows_of_all_workers(tmp_path: Path) -> None:
    outs, alone = run(2, "adapt", tmp_path)
    first, second, one = (read_results(path) for path in (*outs, alone))
    assert len(one) == 12
    assert first == second
    for case, right in one.items():
        assert "error" not in right, (case, right)
        assert "error" not in first[case], (case, first[case])
        for name, value in right.items():
            for mine, theirs in zip(flat(first[case][name]), flat(value), strict=True):
                expected = pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else theirs
                assert mine == expected, (case, name)
