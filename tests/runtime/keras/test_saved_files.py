"""Files that all workers of a synchronous strategy save, in processes of their own as in a cluster."""

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


def test_checkpoints_are_whole_on_every_worker_when_the_next_callback_reads_them(saved: Saved) -> None:
    for worker in saved.of("checkpoints"):
        assert worker["same"] == [True] * 8
    assert saved.names("checkpoints") == sorted(CHECKPOINTS)


def test_only_the_chief_writes_to_the_users_folder(saved: Saved) -> None:
    chief, other = saved.of("once")
    assert set(other) <= FOLDERS
    assert chief.count("checkpoints/m01.keras") == 1
    assert chief.count("checkpoints/full.h5") == 2, "one for each epoch"


def test_logs_are_the_chiefs(saved: Saved) -> None:
    lines = (saved.folder / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]
    assert len(saved.names("board/train")) == 1


def test_moving_averages_are_saved(saved: Saved) -> None:
    assert saved.of("averages") == [True, True]


def test_models_that_are_saved_and_exported_are_read_by_every_worker(saved: Saved) -> None:
    for found in saved.of("direct"):
        assert all(found.values()), found


def test_chief_that_saves_alone_waits_for_nobody(saved: Saved) -> None:
    assert all(worker["waited"] < 5 for worker in saved.of("alone"))
    keras.models.load_model(saved.folder / "chiefs.keras")


def test_worker_whose_file_the_chief_does_not_save_writes_it(saved: Saved) -> None:
    assert [worker["there"] for worker in saved.of("alone")] == [[True] * 3] * 2


def test_what_the_chief_cannot_save_fails_on_all_workers(saved: Saved) -> None:
    chief, other = saved.of("refused")
    assert "taken.keras" in chief
    assert "the chief could not save" in other


def test_backups_are_gone_when_fit_returns_on_any_worker(saved: Saved) -> None:
    assert saved.of("removed") == [True, True]


def test_every_worker_keeps_its_own_backup(saved: Saved) -> None:
    assert [len(states) for states in saved.of("backups")] == [1, 1]


def test_killed_writer_leaves_the_old_file_whole(saved: Saved) -> None:
    assert saved.workers[1]["killed"]["whole"]


def test_nothing_is_left_beside_the_files(saved: Saved) -> None:
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
