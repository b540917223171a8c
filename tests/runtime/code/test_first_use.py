"""A strategy must be built before TensorFlow is first used; datasets may be created before the strategy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.programs import DEADLINE, start
from tests.runtime.keras.test_fit import PROGRAMS

TWO = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    process = start(PROGRAMS / "order_cases.py", TF_CONFIG=json.dumps(TWO))
    said = process.communicate(DEADLINE)[0]
    assert process.returncode == 0, said[-6000:]
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_dataset_runs_no_operation_before_it_is_used(report: dict[str, Any]) -> None:
    assert report["begun"] is False


def test_a_deferred_dataset_names_an_unknown_column_at_once(report: dict[str, Any]) -> None:
    assert report["unknown"].startswith("no column 'z'")


def test_a_deferred_dataset_works_like_any_other_dataset(report: dict[str, Any]) -> None:
    assert report["is_dataset"]
    assert report["batches"] == [[[1.0, 2.0], [1, 0]], [[3.0], [1]]]
    assert report["mapped"] == [2, 1, 2]
    assert "TensorSpec" in report["spec"]


def test_a_strategy_built_too_late_names_the_first_use_and_its_own_line(report: dict[str, Any]) -> None:
    used, _, built = report["late"].partition("built at")
    assert "one = tf.constant(1)" in used
    assert "order_cases.py, line" in used
    assert "tf.distribute.MultiWorkerMirroredStrategy()" in built
    assert "Build it first in main" in built
