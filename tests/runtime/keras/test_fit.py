"""Keras under TensorFlow's synchronous strategies, in separate processes as in a cluster."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from tests import programs

PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"

TWO_WORKERS = (
    "uneven",
    "no_row_on_the_chief",
    "synchronized_batch_norm",
    "class_weight",
    "sample_weight",
    "sum_loss",
    "steps_per_execution",
    "known_length",
    "own_train_step",
)
THREE_WORKERS = ("no_row_on_one", "epochs_of_different_length")
# Unsynchronized BatchNormalization: if two workers have rows, each normalizes by its own part of a batch.
PARTLY_NORMALIZED = "no_row_on_one"


def run_workers(count: int, program: str, out: pathlib.Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the program as all workers of a cluster; return what each worker wrote."""
    workers = programs.run_workers(count, PROGRAMS / program, str(out), *arguments)
    written = [pathlib.Path(f"{out}.{index}") for index in range(count)]
    for index, file in enumerate(written):
        assert file.exists(), f"worker {index} wrote nothing; it said:\n{workers[index].said[-6000:]}"
    return [json.loads(file.read_text()) for file in written]


class Trained:
    """The results of the workers, and of a single process on the same global batches."""

    def __init__(self, folder: pathlib.Path, workers: int, names: tuple[str, ...]) -> None:
        out = folder / "out"
        process = programs.start(PROGRAMS / "fit_cases.py", str(out), str(workers), *names)
        self.workers = run_workers(workers, "fit_cases.py", out, str(workers), *names)
        said = process.communicate(programs.DEADLINE)[0]
        assert process.returncode == 0, said[-6000:]
        self.single: dict[str, Any] = json.loads(pathlib.Path(f"{out}.single").read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("two"), 2, TWO_WORKERS)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("three"), 3, THREE_WORKERS)


@pytest.fixture(params=[*TWO_WORKERS, *(pytest.param(name, marks=pytest.mark.slow) for name in THREE_WORKERS)])
def case(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    trained: Trained = request.getfixturevalue("two" if request.param in TWO_WORKERS else "three")
    return request.param, [worker[request.param] for worker in trained.workers], trained.single[request.param]


def assert_alike(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), rtol=2e-6, atol=2e-6)


def test_all_workers_end_with_the_same_weights(case: Any) -> None:
    _, workers, _ = case
    for worker in workers[1:]:
        for mine, theirs in zip(worker["weights"], workers[0]["weights"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_weights_are_those_of_one_process_on_the_same_global_batches(case: Any) -> None:
    name, workers, single = case
    if name != PARTLY_NORMALIZED:
        for mine, theirs in zip(workers[0]["weights"], single["weights"], strict=True):
            assert_alike(mine, theirs)


def test_history_is_that_of_one_process_on_the_same_global_batches(case: Any) -> None:
    name, workers, single = case
    assert workers[0]["history"].keys() == single["history"].keys()
    for metric, values in single["history"].items():
        assert np.isfinite(workers[0]["history"][metric]).all()
        assert all(worker["history"][metric] == workers[0]["history"][metric] for worker in workers)
        if name != PARTLY_NORMALIZED:
            assert_alike(workers[0]["history"][metric], values)


def test_every_row_is_used_once_in_each_epoch(case: Any) -> None:
    _, workers, single = case
    assert [worker["given"] for worker in workers] == single["rows"]
    assert {worker["passes"] for worker in workers} == {len(single["steps"])}


def test_all_workers_do_the_steps_of_the_longest_and_the_optimizer_counts_them(case: Any) -> None:
    name, workers, single = case
    for worker in workers:
        assert worker["iterations"] == sum(single["steps"])
        if name != "steps_per_execution":
            assert worker["batch_ends"] == single["steps"]


def test_validation_evaluate_and_predict_work_with_uneven_data(two: Trained) -> None:
    for worker in two.workers:
        assert "val_loss" in worker["uneven"]["history"]
        assert_alike(worker["uneven"]["evaluate"], two.single["uneven"]["evaluate"])
        assert_alike(worker["uneven"]["predict"], two.single["uneven"]["predict"])


def test_metrics_within_an_epoch_are_means_over_all_rows_so_far(two: Trained) -> None:
    for metric, value in two.single["uneven"]["last_batch"].items():
        assert_alike(two.workers[0]["uneven"]["last_batch"][metric], value)


def test_callbacks_are_called_once_per_execution_of_several_steps(two: Trained) -> None:
    assert two.workers[0]["steps_per_execution"]["batch_ends"] == two.single["steps_per_execution"]["batch_ends"]


@pytest.mark.slow
def test_moving_means_follow_the_global_batches_when_a_worker_has_no_rows(three: Trained) -> None:
    gamma, beta, mean = (three.workers[1][PARTLY_NORMALIZED]["weights"][i] for i in range(3))
    assert np.isfinite([gamma, beta]).all()
    assert_alike(mean, three.single[PARTLY_NORMALIZED]["weights"][2])


@pytest.fixture(scope="module", params=["keras", pytest.param("tf_keras", marks=pytest.mark.slow)])
def progress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    return run_workers(2, "progress_cases.py", folder / "out", str(folder / "backups"), request.param)


def test_fit_reports_each_epoch_with_its_validation(progress: list[dict[str, Any]]) -> None:
    for worker in progress:
        ends = [report for report in worker["reports"] if report["epoch_end"]]
        assert [(end["epoch"], end["epochs"], end["step"], end["steps"]) for end in ends] == [
            (1, 2, 16, 16),
            (2, 2, 16, 16),
        ]
        for metric, values in worker["history"].items():
            assert_alike([end[metric] for end in ends], values)
        assert "val_mae" in ends[0]


def test_fit_counts_steps_from_one_and_does_not_sum_them_over_workers(progress: list[dict[str, Any]]) -> None:
    for worker in progress:
        first = worker["reports"][0]
        assert (first["epoch"], first["step"], first["steps"], first["epoch_end"]) == (1, 1, None, False)
        assert_alike(first["loss"], 2.212687)  # the loss of the first step's 16 rows, with either Keras


def test_a_stop_requested_on_one_worker_ends_all_after_the_same_step(progress: list[dict[str, Any]]) -> None:
    first, second = (worker["stop"] for worker in progress)
    assert first == second
    assert first["epochs"] == [0]
    assert 5 <= first["steps"] < 4000


def test_a_callback_that_ends_training_on_one_worker_ends_it_on_all(
    progress: list[dict[str, Any]],
) -> None:
    assert [worker["ended_by_one"] for worker in progress] == [[0, 1], [0, 1]]


def test_workers_restored_to_different_epochs_continue_from_the_latest(progress: list[dict[str, Any]]) -> None:
    if "backup" not in progress[0]:
        pytest.skip("tf_keras keeps its backups right by itself")
    first, second = (worker["backup"] for worker in progress)
    assert first["directory"] != second["directory"]
    for worker in (first, second):
        assert (worker["first"], worker["again"], worker["iterations"]) == ([0, 1], [2, 3], 16)
        for mine, before in zip(worker["weights_restored"], first["weights_before"], strict=True):
            np.testing.assert_array_equal(mine, before)


def test_the_previous_state_is_used_if_the_newest_cannot_be_read(progress: list[dict[str, Any]]) -> None:
    if progress[0].get("damaged") is None:
        pytest.skip("tf_keras, or a Keras that keeps one state")
    for worker in progress:
        assert worker["damaged"] == [2, 3]  # the state after the third epoch was damaged


def test_an_unknown_keras_is_not_patched_and_a_warning_is_logged() -> None:
    process = programs.start(PROGRAMS / "unlike_keras.py")
    said = process.communicate(programs.DEADLINE)[0]
    assert process.returncode == 0, said
    result = json.loads(said.splitlines()[-1])
    assert result["refused"].startswith("WARNING keras: Keras 3.")
    assert "_maybe_symbolic_build takes self, iterator" in result["refused"]
    assert "tf_keras" in result["refused"]
    assert result["untouched"]
    assert not result["done"].startswith("WARNING")
    assert result["again"].endswith("mended already")


def test_a_backups_directory_may_be_deleted_while_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    from tfos_nb.runtime.keras import fit

    folder = tmp_path / "backups"
    (folder / "state-3").mkdir(parents=True)
    (folder / "state-12").mkdir()
    assert fit._states(str(folder)) == [str(folder / "state-12"), str(folder / "state-3")]
    isdir = tf.io.gfile.isdir

    def gone_afterwards(path: str) -> bool:
        there = isdir(path)
        shutil.rmtree(path)
        return there

    monkeypatch.setattr(tf.io.gfile, "isdir", gone_afterwards)
    assert fit._states(str(folder)) == []


def test_only_first_values_that_may_differ_are_sent_to_all_workers(tmp_path: pathlib.Path) -> None:
    chief, other = run_workers(2, "first_values.py", tmp_path / "out")
    assert chief["weights"] == other["weights"], "with other seeds, and another constant, on each worker"
    kernel, bias, gamma, beta, mean, variance = chief["weights"]
    assert np.any(kernel)
    assert (bias, gamma, beta, mean, variance) == ([0] * 3, [1] * 3, [0] * 3, [0] * 3, [1] * 3)
    assert chief["slots"] == other["slots"]
    of_model, of_optimizer = chief["sent"]
    assert chief["sent"] == other["sent"]
    assert of_model == 2 + 2, "kernel and bias; the optimizer's iterations and learning rate, as values"
    assert of_optimizer == 0, "its moments begin with zeros"
