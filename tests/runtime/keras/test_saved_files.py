"""Files that all workers of a synchronous strategy save, in separate processes as in a cluster."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tests.runtime.keras.test_fit import run_workers

keras = pytest.importorskip("keras")


class Saved:
    def __init__(self, folder: pathlib.Path, flavour: str) -> None:
        self.folder = folder / "users"
        self.folder.mkdir()
        self.workers = run_workers(2, "file_cases.py", folder / "out", str(self.folder), flavour)

    def of(self, case: str) -> list[Any]:
        return [worker[case] for worker in self.workers]

    def names(self, below: str = "") -> list[str]:
        return sorted(os.listdir(self.folder / below))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("keras"), "keras")


@pytest.fixture(scope="module")
def saved_by_tf_keras(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("tf_keras"), "tf_keras")


CHECKPOINTS = [
    *(f"b{epoch}-{batch}.keras" for epoch in (1, 2) for batch in (4, 8, 12)),
    *("best.keras", "full.h5"),
    *(f"m0{epoch}.keras" for epoch in (1, 2)),
    *(f"w0{epoch}.weights.h5" for epoch in (1, 2)),
]


FOLDERS = {"checkpoints"}
"""ModelCheckpoint itself makes the folder, on whichever worker comes first; what is in it is the chief's."""


def test_checkpoints_are_complete_on_every_worker_for_the_next_callback(saved: Saved) -> None:
    for worker in saved.of("checkpoints"):
        assert worker["same"] == [True] * 8
    assert saved.names("checkpoints") == sorted(CHECKPOINTS)


def test_only_the_chief_writes_to_the_users_directory(saved: Saved) -> None:
    chief, other = saved.of("once")
    assert set(other) <= FOLDERS
    assert chief.count("checkpoints/m01.keras") == 1
    assert chief.count("checkpoints/full.h5") == 2, "one for each epoch"


def test_only_the_chief_writes_logs(saved: Saved) -> None:
    lines = (saved.folder / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]
    assert len(saved.names("board/train")) == 1


def test_moving_averages_are_saved(saved: Saved) -> None:
    assert saved.of("averages") == [True, True]


def test_every_worker_can_read_saved_and_exported_models(saved: Saved) -> None:
    for found in saved.of("direct"):
        assert all(found.values()), found


def test_a_chief_that_saves_alone_does_not_wait(saved: Saved) -> None:
    assert all(worker["waited"] < 5 for worker in saved.of("alone"))
    keras.models.load_model(saved.folder / "chiefs.keras")


def test_a_worker_writes_a_file_that_the_chief_does_not_save(saved: Saved) -> None:
    assert [worker["there"] for worker in saved.of("alone")] == [[True] * 3] * 2


def test_a_save_that_fails_on_the_chief_fails_on_all_workers(saved: Saved) -> None:
    chief, other = saved.of("refused")
    assert "taken.keras" in chief
    assert "the chief could not save" in other


def test_backups_are_removed_when_fit_returns_on_any_worker(saved: Saved) -> None:
    assert saved.of("removed") == [True, True]


def test_every_worker_keeps_its_own_backup(saved: Saved) -> None:
    assert [len(states) for states in saved.of("backups")] == [1, 1]


def test_a_killed_writer_leaves_the_old_file_intact(saved: Saved) -> None:
    assert saved.workers[1]["killed"]["whole"]


def test_no_temporary_files_are_left(saved: Saved) -> None:
    left = [name for name in saved.names() if name.startswith(".part-")]
    assert len(left) == 1, "what the killed writer has left"
    assert not [name for name in saved.names("checkpoints") if name.startswith(".")]


@pytest.mark.slow
def test_tf_keras_saves_checkpoints_once_too(saved_by_tf_keras: Saved) -> None:
    for worker in saved_by_tf_keras.of("checkpoints"):
        assert worker["same"] == [True] * 10
    names = saved_by_tf_keras.names("checkpoints")
    assert {"best.keras", "full.h5", "m02.keras", "w02.weights.h5", "tf.weights-2.index", "checkpoint"} <= set(names)
    assert not [name for name in names if name.startswith((".", "workertemp"))]
    assert set(saved_by_tf_keras.of("once")[1]) <= FOLDERS
