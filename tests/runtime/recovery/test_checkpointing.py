"""Checkpoints on remote file systems: complete or absent, and the training does not wait for them."""

from __future__ import annotations

import glob
import tempfile
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.waiting import until
from tfos_nb.runtime.recovery.checkpointing import CheckpointCalls, Checkpoints
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads


class Far(MemoryFileSystem):
    """A file system whose uploads wait until they are released, or fail."""

    protocol = "far"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in fsspec
    pseudo_dirs = [""]  # noqa: RUF012
    let_go = threading.Event()
    error: OSError | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("far://", "memory://") if isinstance(path, str) else path)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        assert self.let_go.wait(30)
        if type(self).error is not None:
            raise type(self).error
        return super().put(*args, **kwargs)


class Node:
    """The part of a ``ctx`` that saves states."""

    def __init__(
        self,
        is_chief: bool = True,
        generation: int = 1,
        held_states: tuple[str, ...] = (),
        model_dir: str = "far://bucket",
        restarts: int = 1,
    ) -> None:
        self.checkpoint_dir = f"{model_dir}/checkpoints/a"
        self.saving: list[bool] = []
        self.held = 0
        self.told: list[Any] = []
        saving = SavingFlag(self.saving.append)
        self.uploads = Uploads(saving)
        rows: Any = SimpleNamespace(
            resume=lambda *place, **more: self.told.append(place),
            hold=lambda *place, **more: self.told.append(place),
            rows_after=lambda step: 32 * step,
        )
        self.checkpoints = Checkpoints(
            lambda: self.checkpoint_dir,
            rows,
            is_chief=is_chief,
            workers=1,
            generation=generation,
            restarts=restarts,
            held_states=held_states,
            saving=saving,
            uploads=self.uploads,
            calls=CheckpointCalls(self._count_held, lambda place, mark: self.told.append((place, mark)), SaveRequest()),
            stored_rows=lambda: StoredRows(self.checkpoint_dir),
        )

    def _count_held(self) -> None:
        self.held += 1

    def checkpoint(
        self,
        model: Any = None,
        *,
        epoch: int,
        rows: int | None = None,
        step: Any = None,
        max_to_keep: int = 3,
        **objects: Any,
    ) -> str:
        return self.checkpoints.save(model, objects, epoch=epoch, rows=rows, step=step, max_to_keep=max_to_keep)

    def resume(self, model: Any = None, **objects: Any) -> Any:
        return self.checkpoints.resume(model, objects)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[type[Far]]:
    fsspec.register_implementation("far", Far, clobber=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Far.store.clear()
    Far.let_go.clear()
    Far.error = None
    yield Far
    Far.let_go.set()


@pytest.fixture
def counter() -> Any:
    import tensorflow as tf

    return tf.Variable(0, dtype=tf.int64)


def checkpoints() -> list[str]:
    listed = fsspec.filesystem("far").find("/bucket") if Far.store else []
    return sorted({name.split("/")[-2] for name in listed if "/.part-" not in name})


def test_training_continues_while_a_state_is_uploaded(far: type[Far], counter: Any) -> None:
    node = Node()
    counter.assign(7)
    place = node.checkpoint(counter=counter, epoch=1)
    counter.assign(8)  # a step done meanwhile is not in the state
    assert place == "far://bucket/checkpoints/a/00000001"
    assert (checkpoints(), node.saving, node.held) == ([], [True], 0)
    far.let_go.set()
    node.uploads.finish()
    assert (checkpoints(), node.saving, node.held) == (["00000001"], [True, False], 1)
    assert Node(generation=2).resume(counter=counter).epoch == 1
    assert int(counter.numpy()) == 7
    assert not glob.glob(f"{tempfile.gettempdir()}/tfos_nb-checkpoint-*")


def test_the_next_state_waits_for_the_one_before(far: type[Far], counter: Any) -> None:
    node = Node()
    node.checkpoint(counter=counter, epoch=1)
    second = threading.Thread(target=node.checkpoint, kwargs={"counter": counter, "epoch": 2}, daemon=True)
    second.start()
    assert until(lambda: len(glob.glob(f"{tempfile.gettempdir()}/tfos_nb-checkpoint-*")) == 2)
    assert second.is_alive()
    far.let_go.set()
    second.join(30)
    node.uploads.finish()
    assert checkpoints() == ["00000001", "00000002"]
    assert node.saving in ([True, False], [True, False, True, False])


def test_a_state_with_an_interrupted_upload_is_ignored(
    far: type[Far], counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores rename by copying one file after another: the writer may die in the middle."""
    far.let_go.set()
    node = Node()
    for epoch in (1, 2):
        saved(node, counter, epoch=epoch)

    put_file = Far.put_file

    def broken_off(self: Far, source: str, place: str, **more: Any) -> None:
        if place.endswith("/place.json"):
            raise OSError("the host is gone")
        put_file(self, source, place, **more)

    monkeypatch.setattr(Far, "put_file", broken_off)
    for epoch in (2, 3):  # once over an existing state, once not
        counter.assign_add(1)
        node.checkpoint(counter=counter, epoch=epoch)
        with pytest.raises(OSError, match="the host is gone"):
            node.uploads.finish()
    assert checkpoints() == ["00000001", "00000002", "00000003"]
    assert Node(generation=2).resume(counter=counter).epoch == 1
    assert int(counter.numpy()) == 1
    monkeypatch.undo()
    saved(node, counter, epoch=4)
    assert checkpoints() == ["00000001", "00000004"], "halves are removed"


@pytest.mark.parametrize("where", ["the next state", "the end"])
def test_a_failed_upload_is_raised_and_earlier_states_are_kept(far: type[Far], counter: Any, where: str) -> None:
    node = Node()
    far.let_go.set()
    node.checkpoint(counter=counter, epoch=1)
    node.uploads.finish()
    far.error = OSError("no space in the bucket")
    node.checkpoint(counter=counter, epoch=2)
    with pytest.raises(OSError, match="no space in the bucket"):
        node.checkpoint(counter=counter, epoch=3) if where == "the next state" else node.uploads.finish()
    assert checkpoints() == ["00000001"]
    assert node.held == 1
    assert node.saving[-1] is False


def test_only_the_chief_writes(far: type[Far], counter: Any) -> None:
    node = Node(is_chief=False)
    assert node.checkpoint(counter=counter, epoch=1) == "far://bucket/checkpoints/a/00000001"
    assert (checkpoints(), node.saving, node.held) == ([], [True, False], 0)


# --- in the middle of a pass ----------------------------------------------------------------------

FIRST, SECOND = "00000002-0001-00000001", "00000002-0001-00000002"


def saved(node: Node, counter: Any, **place: Any) -> None:
    counter.assign_add(1)
    node.checkpoint(counter=counter, **place)
    node.uploads.finish()


def test_a_state_within_a_pass_has_its_own_name_and_its_rows_are_reported(far: type[Far], counter: Any) -> None:
    far.let_go.set()
    node = Node()
    saved(node, counter, epoch=2)
    saved(node, counter, epoch=2, rows=640)
    saved(node, counter, epoch=2, rows=0)  # another node may have received some of the rows
    assert checkpoints() == ["00000002", FIRST, SECOND]
    assert node.told == [(FIRST, 2, 640), (SECOND, 2, 0)]
    assert node.held == 1


@pytest.mark.parametrize(
    ("held", "place", "value"),
    [((), (2, ""), 1), ((FIRST,), (2, FIRST), 2), ((FIRST, SECOND), (2, SECOND), 3), (("other",), (2, ""), 1)],
)
def test_a_state_within_a_pass_is_restored_if_its_rows_are_known_for_all_nodes(
    far: type[Far], counter: Any, held: tuple[str, ...], place: tuple[int, str], value: int
) -> None:
    far.let_go.set()
    node = Node()
    saved(node, counter, epoch=2)
    saved(node, counter, epoch=2, rows=640)
    saved(node, counter, epoch=2, rows=1280)
    again = Node(generation=2, held_states=held)
    assert again.resume(counter=counter).epoch == 2
    assert again.told == [place]
    assert int(counter.numpy()) == value


def test_the_state_of_the_last_whole_epoch_is_kept_whatever_is_saved_later(far: type[Far], counter: Any) -> None:
    far.let_go.set()
    node = Node()
    for epoch in (1, 2):
        saved(node, counter, epoch=epoch, max_to_keep=2)
    for rows in (64, 128, 192):
        saved(node, counter, epoch=2, rows=rows, max_to_keep=2)
    assert checkpoints() == ["00000002", SECOND, "00000002-0001-00000003"]
    saved(node, counter, epoch=3, max_to_keep=2)
    assert checkpoints() == ["00000002-0001-00000003", "00000003"]


def test_a_late_node_resumes_from_the_same_state_as_the_others(far: type[Far], counter: Any) -> None:
    far.let_go.set()
    before = Node()
    for epoch in (1, 2):
        counter.assign(epoch - 1)
        saved(before, counter, epoch=epoch)
    assert Node().resume(counter=counter).epoch == 0, "what a generation has saved is for the next one"
    chief, late = Node(generation=2), Node(is_chief=False, generation=2)
    assert chief.resume(counter=counter).epoch == 2
    for epoch in range(3, 9):
        saved(chief, counter, epoch=epoch, max_to_keep=2)
    assert checkpoints() == ["00000002", "00000007", "00000008"]
    assert late.resume(counter=counter).epoch == 2
    assert int(counter.numpy()) == 2
    after = Node(generation=3)
    assert after.resume(counter=counter).epoch == 8
    saved(after, counter, epoch=9, max_to_keep=1)
    assert checkpoints() == ["00000008", "00000009"]


@pytest.mark.parametrize("rows", [-1, 6.0, True, "6"])
def test_rows_must_be_a_non_negative_number(far: type[Far], counter: Any, rows: Any) -> None:
    with pytest.raises(ValueError, match="rows must be the number of rows since the last whole epoch, 0 or more"):
        Node().checkpoint(counter=counter, epoch=1, rows=rows)


@pytest.mark.parametrize(("step", "rows"), [(-1, None), (1.0, None), (True, None), (3, 96)])
def test_a_step_must_be_a_number_of_steps_and_without_rows(counter: Any, step: Any, rows: Any) -> None:
    with pytest.raises(ValueError, match="step must be the number of steps since the last whole epoch, 0 or more, got"):
        Node().checkpoint(counter=counter, epoch=1, step=step, rows=rows)


def test_a_state_in_memory_is_one_within_an_epoch(counter: Any) -> None:
    with pytest.raises(ValueError, match=r"in_memory=True keeps states within an epoch: give step="):
        Node().checkpoints.keep(None, {"counter": counter}, epoch=1, rows=None)
    with pytest.raises(ValueError, match="step must be the number of steps since the last whole epoch"):
        Node().checkpoints.keep(None, {"counter": counter}, epoch=1, rows=3, step=3)
    Node().checkpoints.keep(None, {"counter": counter}, epoch=1, rows=None, step=3)  # nowhere, without restarts
