"""Keras tells of itself: fit, its validation, evaluate; by either Keras, alone and with two workers."""

from __future__ import annotations

import json
import pathlib
import threading
from typing import Any

import pytest

from tests.programs import DEADLINE, start
from tests.runtime.keras.test_fit import PROGRAMS, assert_alike, run_workers
from tfos_nb.runtime.keras.progress import progress_callback

FLAVOURS = ["keras", pytest.param("tf_keras", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FLAVOURS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp(request.param) / "out"
    process = start(PROGRAMS / "evaluate_cases.py", str(out), request.param)
    said = process.communicate(DEADLINE)[0]
    written = pathlib.Path(f"{out}.0")
    assert written.exists(), said[-6000:]
    return {"flavour": request.param, **json.loads(written.read_text())}


@pytest.fixture(scope="module", params=FLAVOURS)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers(2, "evaluate_cases.py", tmp_path_factory.mktemp(request.param) / "out", request.param)


def told(reports: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(report[name] for name in names) for report in reports]


def test_a_validation_within_fit_tells_its_own_steps_and_fit_goes_on_after_it(alone: dict[str, Any]) -> None:
    found = told(alone["validation"]["reports"], "phase", "epoch", "step", "steps", "epoch_end")
    first = [("fit", 1, step, None, False) for step in range(1, 7)]
    assert found[:12] == [
        *first,
        *[("evaluate", 1, step, None, False) for step in range(5)],
        ("fit", 1, 6, None, False),
    ]
    assert found[12] == ("fit", 1, 6, 6, True)
    second = found[13:]
    assert [entry for entry in second if entry[0] == "evaluate"] == [
        ("evaluate", 2, step, 4, False) for step in range(5)
    ]
    assert second[-3:] == [("fit", 2, 6, second[-3][3], False), ("fit", 2, 6, 6, True), ("over", 2, 6, 6, False)]


def test_the_numbers_of_a_validation_are_those_that_the_epoch_ends_with(alone: dict[str, Any]) -> None:
    reports, history = alone["validation"]["reports"], alone["validation"]["history"]
    for epoch in (1, 2):
        last = [report for report in reports if report["phase"] == "evaluate" and report["epoch"] == epoch][-1]
        [end] = [report for report in reports if report["epoch_end"] and report["epoch"] == epoch]
        for name in ("val_loss", "val_mae"):
            assert_alike(last[name], end[name])
            assert_alike(end[name], history[name][epoch - 1])
        assert "loss" not in last


def test_a_validation_whose_length_is_known_tells_it_from_the_beginning(alone: dict[str, Any]) -> None:
    assert alone["validation"]["known_steps"] == [2] * 3 + [3] * 4  # 8 rows by 4, then 70 by Keras' own 32


def test_an_evaluation_by_itself_tells_its_steps_and_its_outcome(alone: dict[str, Any]) -> None:
    *reports, last = alone["evaluation"]["reports"]
    assert told(reports, "phase", "epoch", "step") == [("evaluate", None, step) for step in range(1, 6)]
    assert (last["phase"], last["step"], last["steps"]) == ("over", 5, 5)
    for name, value in alone["evaluation"]["values"].items():
        assert_alike(last[f"test_{name}"], value)
    assert "loss" not in last


def test_a_progress_callback_of_the_users_own_is_not_doubled(alone: dict[str, Any]) -> None:
    found = alone["callbacks"]
    assert found["doubled"] == []
    fit = ["fit"] * 3 + ["evaluate"] * 3 + ["fit"] * 2 + ["over"]
    assert found["own"] == [*fit, "evaluate", "evaluate", "over"]


def test_callbacks_in_keras_own_container_are_kept_and_ours_is_beside_them(alone: dict[str, Any]) -> None:
    found = alone["callbacks"]
    assert found["hooks"] == {"train": 3, "test": 2}
    assert found["history"] == ["loss", "mae", "val_loss", "val_mae"]
    assert [report["phase"] for report in found["contained"]] == (
        ["fit"] * 3 + ["evaluate"] * 3 + ["fit"] * 2 + ["over"]
    )
    [end] = [report for report in found["contained"] if report["epoch_end"]]
    assert (end["epoch"], end["epochs"], end["step"]) == (1, 1, 3)


def test_a_container_of_the_users_own_making_is_left_alone(alone: dict[str, Any]) -> None:
    assert alone["callbacks"]["strange"] == [{"train": 3, "test": 2}, []]


def test_a_stop_ends_an_evaluation_where_keras_can(alone: dict[str, Any]) -> None:
    if alone["flavour"] == "tf_keras":
        assert alone["stop"] == {"alone": {"train": 0, "test": 3000}, "amid": {"train": 5, "test": 3000}}
    else:
        assert alone["stop"] == {"alone": {"train": 0, "test": 7}, "amid": {"train": 5, "test": 7}}


@pytest.mark.slow
def test_a_stop_asked_of_one_worker_ends_the_evaluation_of_all_after_the_same_step(two: list[dict[str, Any]]) -> None:
    if "stop" not in two[0]:
        pytest.skip("tf_keras ends no evaluation")
    first, second = (worker["stop"] for worker in two)
    assert first == second
    assert 7 <= first["alone"]["test"] < 3000
    assert 7 <= first["amid"]["test"] < 3000
    assert first["amid"]["train"] == 10  # one epoch: five batches for both workers are ten halves for each


def test_the_numbers_within_an_evaluation_are_not_summed_over_workers(two: list[dict[str, Any]]) -> None:
    for worker in two:
        *reports, last = worker["evaluation"]["reports"]
        assert_alike(reports[-1]["test_loss"], last["test_loss"])
        assert_alike(last["test_loss"], worker["evaluation"]["values"]["loss"])
        ends = [report for report in worker["validation"]["reports"] if report["epoch_end"]]
        assert_alike([end["val_mae"] for end in ends], worker["validation"]["history"]["val_mae"])


def test_keras_numbers_are_not_looked_at_between_two_reports() -> None:
    """On a GPU each look would wait for the step to end."""

    class Logged:
        def __init__(self) -> None:
            self.looks = 0

        def __float__(self) -> float:
            self.looks += 1
            return 1.0

    logged, reports = Logged(), []
    callback = progress_callback(lambda **report: reports.append(report), threading.Event(), flavour="keras")
    callback.set_params({"epochs": 1, "steps": 10_000})
    callback.on_epoch_begin(0)
    for batch in range(10_000):
        callback.on_train_batch_end(batch, {"loss": logged})
        callback.on_test_batch_end(batch, {"loss": logged})
    assert logged.looks == len(reports) < 1000
    assert reports[0]["loss"] == 1.0


def test_an_epoch_that_is_left_amid_its_steps_is_not_told_to_be_full(alone: dict[str, Any]) -> None:
    """Of a dataset whose length nobody knows: the first epoch tells it, unless it is the one that is left."""
    later, first = alone["left"]["later"], alone["left"]["first"]
    assert told([later], "phase", "epoch", "epochs", "step", "steps") == [("over", 3, 400, 2, 24)]
    assert told([first], "phase", "epoch", "epochs", "step", "steps") == [("over", 1, 400, 2, None)]
