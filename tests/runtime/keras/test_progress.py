"""Progress reports of fit, its validation and evaluate; with either Keras, on one worker and on two."""

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


def test_a_validation_within_fit_reports_its_own_steps_and_then_fit_continues(alone: dict[str, Any]) -> None:
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


def test_a_validation_reports_the_same_metrics_as_the_end_of_the_epoch(alone: dict[str, Any]) -> None:
    reports, history = alone["validation"]["reports"], alone["validation"]["history"]
    for epoch in (1, 2):
        last = [report for report in reports if report["phase"] == "evaluate" and report["epoch"] == epoch][-1]
        [end] = [report for report in reports if report["epoch_end"] and report["epoch"] == epoch]
        for name in ("val_loss", "val_mae"):
            assert_alike(last[name], end[name])
            assert_alike(end[name], history[name][epoch - 1])
        assert "loss" not in last


def test_a_validation_of_known_length_reports_it_from_the_beginning(alone: dict[str, Any]) -> None:
    assert alone["validation"]["known_steps"] == [2] * 3 + [3] * 4  # 8 rows by 4, then 70 by Keras' own 32


def test_a_separate_evaluation_reports_its_steps_and_its_outcome(alone: dict[str, Any]) -> None:
    *reports, last = alone["evaluation"]["reports"]
    assert told(reports, "phase", "epoch", "step") == [("evaluate", None, step) for step in range(1, 6)]
    assert (last["phase"], last["step"], last["steps"]) == ("over", 5, 5)
    for name, value in alone["evaluation"]["values"].items():
        assert_alike(last[f"test_{name}"], value)
    assert "loss" not in last


def test_a_progress_callback_given_by_the_user_is_not_duplicated(alone: dict[str, Any]) -> None:
    found = alone["callbacks"]
    assert found["doubled"] == []
    fit = ["fit"] * 3 + ["evaluate"] * 3 + ["fit"] * 2 + ["over"]
    assert found["own"] == [*fit, "evaluate", "evaluate", "over"]


def test_callbacks_in_keras_container_are_kept_and_ours_is_added(alone: dict[str, Any]) -> None:
    found = alone["callbacks"]
    assert found["hooks"] == {"train": 3, "test": 2}
    assert found["history"] == ["loss", "mae", "val_loss", "val_mae"]
    assert [report["phase"] for report in found["contained"]] == (
        ["fit"] * 3 + ["evaluate"] * 3 + ["fit"] * 2 + ["over"]
    )
    [end] = [report for report in found["contained"] if report["epoch_end"]]
    assert (end["epoch"], end["epochs"], end["step"]) == (1, 1, 3)


def test_a_users_own_kind_of_container_is_not_changed(alone: dict[str, Any]) -> None:
    assert alone["callbacks"]["strange"] == [{"train": 3, "test": 2}, []]


def test_a_stop_ends_an_evaluation_if_keras_supports_it(alone: dict[str, Any]) -> None:
    if alone["flavour"] == "tf_keras":
        assert alone["stop"] == {"alone": {"train": 0, "test": 3000}, "amid": {"train": 5, "test": 3000}}
    else:
        assert alone["stop"] == {"alone": {"train": 0, "test": 7}, "amid": {"train": 5, "test": 7}}


@pytest.mark.slow
def test_a_stop_on_one_worker_ends_all_evaluations_after_the_same_step(two: list[dict[str, Any]]) -> None:
    if "stop" not in two[0]:
        pytest.skip("tf_keras ends no evaluation")
    first, second = (worker["stop"] for worker in two)
    assert first == second
    assert 7 <= first["alone"]["test"] < 3000
    assert 7 <= first["amid"]["test"] < 3000
    assert first["amid"]["train"] == 10  # one epoch: five batches for both workers are ten half batches for each


def test_metrics_within_an_evaluation_are_not_summed_over_workers(two: list[dict[str, Any]]) -> None:
    for worker in two:
        *reports, last = worker["evaluation"]["reports"]
        assert_alike(reports[-1]["test_loss"], last["test_loss"])
        assert_alike(last["test_loss"], worker["evaluation"]["values"]["loss"])
        ends = [report for report in worker["validation"]["reports"] if report["epoch_end"]]
        assert_alike([end["val_mae"] for end in ends], worker["validation"]["history"]["val_mae"])


def test_keras_metrics_are_not_read_between_two_reports() -> None:
    """On a GPU each read would wait for the step to end."""

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


def test_an_epoch_that_ends_early_is_not_reported_as_complete(alone: dict[str, Any]) -> None:
    """The dataset's length is unknown: the first epoch reveals it, unless that epoch itself ends early."""
    later, first = alone["left"]["later"], alone["left"]["first"]
    assert told([later], "phase", "epoch", "epochs", "step", "steps") == [("over", 3, 400, 2, 24)]
    assert told([first], "phase", "epoch", "epochs", "step", "steps") == [("over", 1, 400, 2, None)]
