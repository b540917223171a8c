"""A custom training loop gets the numbers of one process, and never sees a batch without rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.keras_parity.workers import run

FEW_ROWS = "3/2"
"""Two rows a step: in the second step one of two workers has no row."""


def test_a_custom_loop_gets_the_numbers_of_one_process_if_a_worker_lacks_rows(tmp_path: Path) -> None:
    outs, alone = run(2, "loops", tmp_path, FEW_ROWS)
    first, second, one = ([json.loads(line) for line in out.read_text().splitlines()] for out in (*outs, alone))
    assert [way["name"] for way in one] == [f"{FEW_ROWS} rows, {way}" for way in ("in_a_function", "eagerly")]
    for mine, others, right in zip(first, second, one, strict=True):
        assert "error" not in {**mine, **others, **right}, (mine, others, right)
        assert mine == others, mine["name"]
        assert_alike(mine, right)


def assert_alike(mine: dict[str, Any], right: dict[str, Any]) -> None:
    for name in ("rows", "sizes", "steps", "seen"):
        assert mine[name] == right[name], (mine["name"], name)
    assert mine["rows"] == 6
    for name in ("losses", "mae"):
        np.testing.assert_allclose(mine[name], right[name], rtol=1e-5, atol=1e-6, err_msg=f"{mine['name']}: {name}")
    for place, (weights, others) in enumerate(zip(mine["weights"], right["weights"], strict=True)):
        np.testing.assert_allclose(weights, others, rtol=1e-4, atol=1e-5, err_msg=f"{mine['name']}: weight {place}")
