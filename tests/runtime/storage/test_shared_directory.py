"""Detect whether all hosts see the same model directory, before a state has to be restored from it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.recovery.test_checkpointing import Node
from tests.waiting import until
from tfos_nb.errors import TfosError
from tfos_nb.runtime.storage.shared_directory import PlaceSeen, PlacesSeen, mark_in


def seen(node: str, directory: Path, mark: str | None = None) -> PlaceSeen:
    return PlaceSeen(node, f"host of {node}", str(directory), mark_in(str(directory)) if mark is None else mark)


def test_all_nodes_find_the_same_mark_in_a_shared_directory(tmp_path: Path) -> None:
    places = PlacesSeen()
    for index in range(3):
        assert not places.unlike(seen(f"worker:{index}", tmp_path / "models"))


def test_the_last_mark_counts_if_several_nodes_create_it_at_once(tmp_path: Path) -> None:
    """As with a mounted object store, which tells each node that it was the first."""
    mark, found = tmp_path / ".tfos_nb-mark", []
    looking = threading.Thread(target=lambda: found.append(mark_in(str(tmp_path))))
    looking.start()
    assert until(mark.exists)
    mark.write_text("b" * 32)
    looking.join()
    assert found == ["b" * 32]


def test_local_disks_under_the_same_path_are_reported(tmp_path: Path) -> None:
    places = PlacesSeen()
    assert not places.unlike(PlaceSeen("worker:0", "a", "/models", mark_in(str(tmp_path / "disk of a"))))
    told = places.unlike(PlaceSeen("worker:1", "b", "/models", mark_in(str(tmp_path / "disk of b"))))
    assert told.startswith("worker:0 on a and worker:1 on b see different directories at /models: after a loss")
    assert "model_dir= as a directory that all hosts share, or as a URL" in told


def test_both_of_two_different_paths_are_reported(tmp_path: Path) -> None:
    places = PlacesSeen()
    assert not places.unlike(seen("worker:0", tmp_path / "0"))
    told = places.unlike(seen("worker:1", tmp_path / "1"))
    assert f"different directories, {tmp_path / '0'} and {tmp_path / '1'}:" in told


@pytest.mark.parametrize("there", ["", "half of a mark"])
def test_a_mark_that_is_being_written_is_ignored(tmp_path: Path, there: str) -> None:
    (tmp_path / ".tfos_nb-mark").write_text(there)
    assert mark_in(str(tmp_path)) == ""
    places = PlacesSeen()
    assert not places.unlike(seen("worker:0", tmp_path, "a" * 32))
    assert not places.unlike(seen("worker:1", tmp_path))


@pytest.mark.parametrize("is_chief", [True, False])
def test_only_a_node_that_will_write_fails_in_an_unwritable_directory(tmp_path: Path, is_chief: bool) -> None:
    (tmp_path / "file").touch()
    node = Node(is_chief, model_dir=str(tmp_path / "file" / "models"))
    says_so = pytest.raises(TfosError, match=r"file/models/.* cannot be written on .*Give a model_dir")
    with says_so if is_chief else contextlib.nullcontext():
        assert node.resume(counter=object()).epoch == 0


@pytest.mark.parametrize(("restarts", "looks"), [(1, 1), (0, 0)])
def test_a_node_reports_the_mark_once_and_only_if_restarts_are_possible(
    tmp_path: Path, restarts: int, looks: int
) -> None:
    import tensorflow as tf

    node, counter = Node(model_dir=str(tmp_path), restarts=restarts), tf.Variable(3)
    assert node.resume(counter=counter).epoch == 0
    node.checkpoint(counter=counter, epoch=1)
    told: list[Any] = [words for words in node.told if words[0] == node.checkpoint_dir]
    assert told == [(node.checkpoint_dir, mark_in(node.checkpoint_dir))] * looks
    assert Node(model_dir=str(tmp_path), restarts=restarts, generation=2).resume(counter=counter).epoch == 1
