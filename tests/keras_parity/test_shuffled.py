"""Rows that the program shuffles are used once in each pass, by any worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras_parity.shuffled import BATCH, EPOCHS, ROWS, WEIGHTS, Y
from tests.keras_parity.workers import read_results, run

OF_WHOLE_BATCHES = ("batches shuffled", "batches by number", "batches by threads")
IN_THE_SAME_ORDER = ("not shuffled", "seeded arrays")


def expected(case: str) -> np.ndarray[Any, Any]:
    once = np.ones(ROWS)
    if case == "two fits":
        return once
    if case == "sample weights":
        once = WEIGHTS
    if case == "class weights":
        once = np.where(Y == 0, 1, 3)
    if case == "validation split":
        once = np.where(np.arange(ROWS) < int(ROWS * 0.75), 1, 0)
    return EPOCHS * once


def check(case: str, mine: dict[str, Any], alone: dict[str, Any]) -> None:
    assert "error" not in mine, mine["error"]
    np.testing.assert_array_equal(mine["used"], expected(case), err_msg=case)
    np.testing.assert_array_equal(alone["used"], expected(case), err_msg=case)
    if case in IN_THE_SAME_ORDER:
        assert mine["steps"] == alone["steps"], case
        return
    sizes = [len(step) for step in mine["steps"]]
    assert sorted(sizes) == sorted(len(step) for step in alone["steps"]), case
    per_pass = -(-int(np.count_nonzero(expected(case))) // BATCH)
    passes = [mine["steps"][first : first + per_pass] for first in range(0, len(sizes), per_pass)]
    if case in OF_WHOLE_BATCHES:
        assert all(step == list(range(step[0], step[0] + len(step))) for step in mine["steps"]), case
    if case == "seeded dataset":
        assert passes[0] == alone["steps"][:per_pass], case  # in one process Keras skips every second order
    if case == "within batches":
        assert passes[0] == passes[1], case
        return
    # Five batches have 120 orders. Two passes have the same order in one of 120 runs, three in one of 14,400.
    assert any(one != passes[0] for one in passes[1:]), f"{case}: each pass has the same order"


def compare(folder: Path) -> None:
    outs, alone = run(2, "shuffled", folder)
    first, second, one = (read_results(path) for path in (*outs, alone))
    assert first == second
    assert first.keys() == one.keys()
    for case, right in one.items():
        check(case, first[case], right)


def test_shuffled_rows_are_used_once_in_each_pass(tmp_path: Path) -> None:
    compare(tmp_path)


@pytest.mark.slow
def test_tf_keras_uses_shuffled_rows_once_in_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    compare(tmp_path)
