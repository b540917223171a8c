"""Implement ``ctx.checkpoint`` and ``ctx.resume``: write a state together with the program's position.

::

    checkpoint_dir/
        00000003/    state.index, state.data-…   TensorFlow's own checkpoint
                     place.json                  {"epoch": 3, "generation": 1}
        00000003-0001-000002/    the same, in the middle of a pass: the second such one of the first generation
        .part-…      one that is being written: renamed when it is whole

A checkpoint is there whole or not at all: it is written beside its place and renamed. Where the place is far, a local
copy is uploaded while the training goes on, and ``place.json`` is put into its place when all else is there: object
stores rename by copying one file after another. A directory without it is no checkpoint.

All nodes of a generation go on from the same state: the newest of an earlier one, however far another node has come by
the time at which this one looks. It is kept until the generation is over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.storage.paths import is_local
from tfos_nb.runtime.storage.remote import file_system, put_whole, rename_over, writing
from tfos_nb.runtime.storage.shared_directory import mark_in
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads
from tfos_nb.truncate import without_password

__all__ = ["CheckpointCalls", "Checkpoints", "Resumed"]

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d{8}(-\d{4}-\d{6})?")
_STATE, _PLACE, _PART = "state", "place.json", ".part-"


@dataclass(frozen=True)
class Resumed:
    """Where a program goes on: so many epochs are in the state that was put back.

    Examples
    --------
    >>> for epoch in range(Resumed(2).epoch, 5):
    ...     print(epoch)
    2
    3
    4
    """

    epoch: int = 0


@dataclass(frozen=True)
class CheckpointCalls:
    """What a node's process tells the driver of states.

    Attributes
    ----------
    held : callable
        Called when a state of whole epochs is where it belongs: a node that joins may begin from it.
    seen : callable
        Called with the directory of the states on this host, and the mark that was found in it.
    request : SaveRequest
        Says whether the driver wants a state.
    """

    held: Callable[[], object]
    seen: Callable[[str, str], object]
    request: SaveRequest


class Checkpoints:
    """The states that a program saves and puts back.

    Parameters
    ----------
    directory : callable
        Returns where they are written: a directory of this cluster alone.
    rows : RowQueue
        The rows of this node: they go on behind those that a state holds.
    is_chief : bool
        Whether this node writes.
    generation, restarts : int
        As ``ctx`` has them.
    held_states : collection of str
        The states amid a pass that all nodes have saved.
    saving : SavingFlag
        Up while something is saved.
    uploads : Uploads
        What writes to places that are far.
    calls : CheckpointCalls
        What the driver is told.
    """

    def __init__(
        self,
        directory: Callable[[], str],
        rows: RowQueue,
        *,
        is_chief: bool,
        generation: int,
        restarts: int,
        held_states: Collection[str],
        saving: SavingFlag,
        uploads: Uploads,
        calls: CheckpointCalls,
    ) -> None:
        self._directory = directory
        self._rows = rows
        self._is_chief = is_chief
        self._generation = generation
        self._restarts = restarts
        self._held_states = frozenset(held_states)
        self._saving = saving
        self._uploads = uploads
        self._calls = calls
        self._looked = False  # at the directory
        self._amid = 0  # states that were saved in the middle of a pass
        self._from = ""  # the state that was put back

    def save(self, model: Any, objects: dict[str, Any], *, epoch: int, rows: int | None, max_to_keep: int) -> str:
        """Save a state; return its directory."""
        import tensorflow as tf

        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be the number of epochs that the state includes, 0 or more, got {epoch!r}")
        if rows is not None and (type(rows) is not int or rows < 0):
            raise ValueError(f"rows must be the number of rows since the last whole epoch, 0 or more, got {rows!r}")
        state = tf.train.Checkpoint(**_named(model, objects))
        place = self._place()
        name = f"{epoch:08d}" if rows is None else self._hold(epoch, rows)
        held = self._calls.held if rows is None else _nothing
        with self._saving:
            if self._is_chief and not place.local:
                scratch = tempfile.mkdtemp(prefix="tfos_nb-checkpoint-")
                _write(state, scratch, epoch, self._generation)
                upload = _Upload(place, scratch, name, self._from, max_to_keep, held)
                self._uploads.begin(upload, without_password(self.directory))
            elif self._is_chief:
                with writing(place.path):
                    part = place.part()
                    _write(state, part, epoch, self._generation)
                    place.put(part, part, name, self._from, max_to_keep)
                held()
            else:
                with tempfile.TemporaryDirectory(prefix="tfos_nb-checkpoint-") as scratch:
                    state.write(f"{scratch}/{_STATE}")
        if self._calls.request.asked:
            self._hand_over(name, epoch, rows)
        return f"{self.directory}/{name}"

    def _hand_over(self, name: str, epoch: int, rows: int | None) -> None:
        """Wait until the state is where it belongs, and then until the driver has started the nodes again."""
        self._uploads.finish()
        if rows is not None:
            self._rows.hold(name, epoch, rows, waits=True)
        self._calls.request.wait()

    @property
    def directory(self) -> str:
        """Where states are written."""
        return self._directory()

    def look_at_place(self) -> None:
        """Tell the driver now which directory this host has for states: it ends the cluster if they differ."""
        self._place()

    def _place(self) -> _Place:
        """Find the directory; tell the driver once which one it is on this host, if another host's may be wanted."""
        place = _Place.at(self.directory)
        if self._restarts and place.local and not self._looked:
            self._looked, mark = True, ""
            with writing(place.path) if self._is_chief else contextlib.suppress(OSError):  # the others need not write
                mark = mark_in(place.path)
            self._calls.seen(place.path, mark)
        return place

    def _hold(self, epoch: int, rows: int) -> str:
        """Name a state in the middle of a pass, the same on every node; tell the driver which rows it holds."""
        self._amid += 1
        name = f"{epoch:08d}-{self._generation:04d}-{self._amid:06d}"
        self._rows.hold(name, epoch, rows)
        return name

    def resume(self, model: Any, objects: dict[str, Any]) -> Resumed:
        """Put the newest state back that was saved before the last loss, if there is one.

        Raises
        ------
        TfosError
            If the state is not of these objects.
        """
        import tensorflow as tf

        named, place = _named(model, objects), self._place()
        found = [(name, says) for name, says in place.checkpoints() if self._may_go_on(name, says)]
        if not found:
            return Resumed()
        name, epoch = found[-1][0], int(found[-1][1]["epoch"])
        _build(model)
        with tempfile.TemporaryDirectory(prefix="tfos_nb-checkpoint-") as scratch:
            folder = place.get(name, scratch)
            try:
                tf.train.Checkpoint(**named).read(f"{folder}/{_STATE}").assert_existing_objects_matched()
            except (AssertionError, ValueError, tf.errors.OpError) as error:
                here = without_password(self.directory)
                raise TfosError(
                    f"the state in {here} does not match the objects given to ctx.resume: {error}"
                ) from error
        self._from = name
        self._rows.resume(epoch, "" if _is_of_a_whole_epoch(name) else name)
        logger.info("continues after epoch %d, from %s/%s", epoch, without_password(self.directory), name)
        return Resumed(epoch)

    def _may_go_on(self, name: str, says: Mapping[str, int]) -> bool:
        """Whether this generation goes on from a state: not from its own, nor from one that not all have saved."""
        return says["generation"] < self._generation and (_is_of_a_whole_epoch(name) or name in self._held_states)


@dataclass(frozen=True)
class _Place:
    """A directory of checkpoints, wherever fsspec can reach it."""

    filesystem: Any
    path: str

    @classmethod
    def at(cls, url: str) -> _Place:
        """Find it."""
        return cls(*file_system(url))

    @property
    def local(self) -> bool:
        """Whether TensorFlow can write there by itself."""
        return is_local(self.filesystem)

    def checkpoints(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Give the names of the checkpoints that are whole, the oldest first, and what each says of its place."""
        for name in self._named():
            with contextlib.suppress(FileNotFoundError):  # half of one, or the chief removes it just now
                yield name, json.loads(self.filesystem.cat_file(f"{self.path}/{name}/{_PLACE}"))

    def _is_whole(self, name: str) -> bool:
        return bool(self.filesystem.exists(f"{self.path}/{name}/{_PLACE}"))

    def _named(self) -> list[str]:
        """Return the names of the checkpoints, whole or not, the oldest first."""
        self.filesystem.invalidate_cache()
        if not self.filesystem.exists(self.path):
            return []
        names = (name.rstrip("/").rpartition("/")[2] for name in self.filesystem.ls(self.path, detail=False))
        return sorted(name for name in names if _NUMBER.fullmatch(name))

    def part(self) -> str:
        """Return the place of one that is to be written, and make it; what an earlier writer left is removed."""
        self.filesystem.makedirs(self.path, exist_ok=True)
        for name in self.filesystem.ls(self.path, detail=False):
            if name.rstrip("/").rpartition("/")[2].startswith(_PART):
                self.filesystem.rm(name, recursive=True)
        part = f"{self.path}/{_PART}{uuid.uuid4().hex}"
        if self.local:
            self.filesystem.makedirs(part)
        return part

    def put(self, folder: str, part: str, number: str, begun_from: str, keep: int) -> None:
        """Make a written state a checkpoint, and remove the oldest ones, but that which others may still put back."""
        place = f"{self.path}/{number}"  # one that is there was passed before a loss
        if folder == part:
            rename_over(self.filesystem, part, place)
        else:
            put_whole(self.filesystem, folder, part, place, _PLACE)
        named = self._named()
        names = list(filter(self._is_whole, named))
        kept = {begun_from, *names[-max(keep, 1) :], *[name for name in names if _is_of_a_whole_epoch(name)][-1:]}
        for old in named:
            if old not in kept:
                self._remove(f"{self.path}/{old}")

    def _remove(self, place: str) -> None:
        """Remove a checkpoint, which is none any more as soon as its first file is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{place}/{_PLACE}")
        self.filesystem.rm(place, recursive=True)

    def get(self, number: str, scratch: str) -> str:
        """Return a local directory that has a checkpoint's files."""
        if self.local:
            return f"{self.path}/{number}"
        self.filesystem.get(f"{self.path}/{number}", f"{scratch}/{number}", recursive=True)
        return f"{scratch}/{number}"


@dataclass(frozen=True)
class _Upload:
    """Puts a state that lies in a directory where it belongs, and removes the directory."""

    place: _Place
    scratch: str
    number: str
    begun_from: str
    keep: int
    held: Callable[[], object]

    def __call__(self) -> None:
        """Do it."""
        try:
            with writing(self.place.path):
                self.place.put(self.scratch, self.place.part(), self.number, self.begun_from, self.keep)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.held()


def _is_of_a_whole_epoch(name: str) -> bool:
    """Whether a state can be gone on from whatever the nodes have said of it."""
    return "-" not in name


def _nothing() -> None:
    """Send nothing: a node that joins must wait for the end of a pass."""


def _write(state: Any, folder: str, epoch: int, generation: int) -> None:
    state.write(f"{folder}/{_STATE}")
    with open(f"{folder}/{_PLACE}", "w", encoding="utf-8") as file:
        json.dump({"epoch": epoch, "generation": generation}, file)


def _named(model: Any, objects: dict[str, Any]) -> dict[str, Any]:
    named = {**objects, **({} if model is None else {"model": model})}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        named["model_optimizer"] = optimizer
    if not named:
        raise ValueError("ctx.checkpoint needs objects to save: ctx.checkpoint(model, epoch=1), or variables by name")
    return named


def _build(model: Any) -> None:
    """Make the optimizer's variables, which otherwise come with its first step: too late to be put back."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built and not getattr(optimizer, "built", True):
        optimizer.build(model.trainable_variables)
