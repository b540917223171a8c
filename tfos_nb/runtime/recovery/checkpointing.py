"""``ctx.checkpoint`` and ``ctx.resume``: a state, and how far its program has come, written as one.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.storage.paths import is_local
from tfos_nb.runtime.storage.remote import file_system, put_whole, rename_over, writing
from tfos_nb.runtime.storage.shared_directory import mark_in
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads
from tfos_nb.truncate import without_password

__all__ = ["Checkpointing", "Resumed"]

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


class Checkpointing:
    """The part of ``ctx`` that saves states and puts them back."""

    is_chief: bool
    model_dir: str
    generation: int
    _run: str
    _passes: RowQueue
    _saving: SavingFlag
    _uploads: Uploads
    _held: Callable[[], object]
    _held_states: frozenset[str]
    _seen: Callable[[str, str], object]
    restarts: int
    _looked = False  # at the directory
    _amid = 0  # states that were saved in the middle of a pass
    _from = ""  # the state that was put back

    @property
    def checkpoint_dir(self) -> str:
        """Where :meth:`checkpoint` writes, a directory of this cluster alone. It does for ``BackupAndRestore`` too."""
        return f"{self.model_dir.rstrip('/')}/checkpoints/{self._run}"

    def checkpoint(
        self, model: Any = None, *, epoch: int, rows: int | None = None, max_to_keep: int = 3, **objects: Any
    ) -> str:
        """Save a state, and that it holds ``epoch`` epochs of the rows; after a loss, training goes on from there.

        Every node calls it, at the same place of its program, since what a synchronous strategy spreads over the nodes
        is gathered. The chief writes. To a place that TensorFlow cannot write to by itself the state is uploaded in the
        background; the next call waits for it, and raises its error, as the end of ``main`` does.

        Parameters
        ----------
        model : keras.Model, optional
            The model, with its optimizer if it is compiled.
        epoch : int
            How many passes over the rows the state holds, counted from the first call of ``train``.
        rows : int, optional
            How many rows of the pass after these this node has been through, in this iteration over
            :meth:`dataset`, which must not shuffle. After a loss the iteration begins behind them.
        max_to_keep : int, optional
            How many checkpoints to keep. The newest of a whole epoch is kept whatever the number, and after a loss that
            from which the nodes go on.
        **objects
            More of the state, by name: a ``tf.Variable``, an optimizer, or whatever ``tf.train.Checkpoint`` takes.

        Returns
        -------
        str
            The checkpoint's directory.

        Examples
        --------
        >>> for epoch in range(ctx.resume(model).epoch, 5):  # doctest: +SKIP
        ...     for batch in ctx.dataset(64):
        ...         step(batch)
        ...     ctx.checkpoint(model, epoch=epoch + 1)

        Where an epoch takes hours:

        >>> for epoch in range(ctx.resume(model).epoch, 5):  # doctest: +SKIP
        ...     rows = 0
        ...     for number, (x, y) in enumerate(ctx.dataset(64, x="x", y="y"), 1):
        ...         step(x, y)
        ...         rows += len(y)
        ...         if number % 10_000 == 0:
        ...             ctx.checkpoint(model, epoch=epoch, rows=rows)
        ...     ctx.checkpoint(model, epoch=epoch + 1)
        """
        import tensorflow as tf

        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be the number of epochs that the state holds, 0 or more, got {epoch!r}")
        if rows is not None and (type(rows) is not int or rows < 0):
            raise ValueError(f"rows must be the number of rows since the last whole epoch, 0 or more, got {rows!r}")
        state = tf.train.Checkpoint(**_named(model, objects))
        shelf = self._shelf()
        name = f"{epoch:08d}" if rows is None else self._hold(epoch, rows)
        held = self._held if rows is None else _nothing
        with self._saving:
            if self.is_chief and not shelf.local:
                scratch = tempfile.mkdtemp(prefix="tfos_nb-checkpoint-")
                _write(state, scratch, epoch, self.generation)
                upload = _Upload(shelf, scratch, name, self._from, max_to_keep, held)
                self._uploads.begin(upload, without_password(self.checkpoint_dir))
            elif self.is_chief:
                with writing(shelf.place):
                    part = shelf.part()
                    _write(state, part, epoch, self.generation)
                    shelf.put(part, part, name, self._from, max_to_keep)
                held()
            else:
                with tempfile.TemporaryDirectory(prefix="tfos_nb-checkpoint-") as scratch:
                    state.write(f"{scratch}/{_STATE}")
        return f"{self.checkpoint_dir}/{name}"

    def look_at_place(self) -> None:
        """Tell the driver now which directory this host has for states: it ends the cluster if they differ."""
        self._shelf()

    def _shelf(self) -> _Shelf:
        """Find the directory; tell the driver once which one it is on this host, if another host's may be wanted."""
        shelf = _Shelf.at(self.checkpoint_dir)
        if self.restarts and shelf.local and not self._looked:
            self._looked, mark = True, ""
            with writing(shelf.place) if self.is_chief else contextlib.suppress(OSError):  # the others need not write
                mark = mark_in(shelf.place)
            self._seen(shelf.place, mark)
        return shelf

    def _hold(self, epoch: int, rows: int) -> str:
        """Name a state in the middle of a pass, the same on every node; tell the driver which rows it holds."""
        self._amid += 1
        name = f"{epoch:08d}-{self.generation:04d}-{self._amid:06d}"
        self._passes.hold(name, epoch, rows)
        return name

    def resume(self, model: Any = None, **objects: Any) -> Resumed:
        """Put the newest state back that this cluster has saved before its last loss, if there is one.

        To be called before the first row is read, with what :meth:`checkpoint` is given. Rows that the state holds are
        not fed again. Every node finds the same state, whenever it calls: what is saved from now on is for the next
        generation.

        Parameters
        ----------
        model : keras.Model, optional
            The model.
        **objects
            More of the state, by name.

        Returns
        -------
        Resumed
            Where to go on; its ``epoch`` is 0 if there is no state.

        Raises
        ------
        TfosError
            If the state is not of these objects.
        """
        import tensorflow as tf

        named, shelf = _named(model, objects), self._shelf()
        found = [(name, place) for name, place in shelf.places() if self._may_go_on(name, place)]
        if not found:
            return Resumed()
        name, epoch = found[-1][0], int(found[-1][1]["epoch"])
        _build(model)
        with tempfile.TemporaryDirectory(prefix="tfos_nb-checkpoint-") as scratch:
            folder = shelf.get(name, scratch)
            try:
                tf.train.Checkpoint(**named).read(f"{folder}/{_STATE}").assert_existing_objects_matched()
            except (AssertionError, ValueError, tf.errors.OpError) as error:
                here = without_password(self.checkpoint_dir)
                raise TfosError(f"the state in {here} is not of what was given to ctx.resume: {error}") from error
        self._from = name
        self._passes.resume(epoch, "" if _is_of_a_whole_epoch(name) else name)
        logger.info("goes on after epoch %d, from %s/%s", epoch, without_password(self.checkpoint_dir), name)
        return Resumed(epoch)

    def _may_go_on(self, name: str, place: Mapping[str, int]) -> bool:
        """Whether this generation goes on from a state: not from its own, nor from one that not all have saved."""
        return place["generation"] < self.generation and (_is_of_a_whole_epoch(name) or name in self._held_states)


@dataclass(frozen=True)
class _Shelf:
    """A directory of checkpoints, wherever fsspec can reach it."""

    filesystem: Any
    place: str

    @classmethod
    def at(cls, url: str) -> _Shelf:
        """Find it."""
        return cls(*file_system(url))

    @property
    def local(self) -> bool:
        """Whether TensorFlow can write there by itself."""
        return is_local(self.filesystem)

    def places(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Give the names of the checkpoints that are whole, the oldest first, and what each says of its place."""
        for name in self._named():
            with contextlib.suppress(FileNotFoundError):  # half of one, or the chief removes it just now
                yield name, json.loads(self.filesystem.cat_file(f"{self.place}/{name}/{_PLACE}"))

    def _is_whole(self, name: str) -> bool:
        return bool(self.filesystem.exists(f"{self.place}/{name}/{_PLACE}"))

    def _named(self) -> list[str]:
        """Return the names of the checkpoints, whole or not, the oldest first."""
        self.filesystem.invalidate_cache()
        if not self.filesystem.exists(self.place):
            return []
        names = (name.rstrip("/").rpartition("/")[2] for name in self.filesystem.ls(self.place, detail=False))
        return sorted(name for name in names if _NUMBER.fullmatch(name))

    def part(self) -> str:
        """Return the place of one that is to be written, and make it; what an earlier writer left is removed."""
        self.filesystem.makedirs(self.place, exist_ok=True)
        for name in self.filesystem.ls(self.place, detail=False):
            if name.rstrip("/").rpartition("/")[2].startswith(_PART):
                self.filesystem.rm(name, recursive=True)
        part = f"{self.place}/{_PART}{uuid.uuid4().hex}"
        if self.local:
            self.filesystem.makedirs(part)
        return part

    def put(self, folder: str, part: str, number: str, begun_from: str, keep: int) -> None:
        """Make a written state a checkpoint, and remove the oldest ones, but that which others may still put back."""
        place = f"{self.place}/{number}"  # one that is there was passed before a loss
        if folder == part:
            rename_over(self.filesystem, part, place)
        else:
            put_whole(self.filesystem, folder, part, place, _PLACE)
        named = self._named()
        names = list(filter(self._is_whole, named))
        kept = {begun_from, *names[-max(keep, 1) :], *[name for name in names if _is_of_a_whole_epoch(name)][-1:]}
        for old in named:
            if old not in kept:
                self._remove(f"{self.place}/{old}")

    def _remove(self, place: str) -> None:
        """Remove a checkpoint, which is none any more as soon as its first file is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{place}/{_PLACE}")
        self.filesystem.rm(place, recursive=True)

    def get(self, number: str, scratch: str) -> str:
        """Return a local directory that has a checkpoint's files."""
        if self.local:
            return f"{self.place}/{number}"
        self.filesystem.get(f"{self.place}/{number}", f"{scratch}/{number}", recursive=True)
        return f"{scratch}/{number}"


@dataclass(frozen=True)
class _Upload:
    """Puts a state that lies in a directory on the shelf, and removes the directory."""

    shelf: _Shelf
    scratch: str
    number: str
    begun_from: str
    keep: int
    held: Callable[[], object]

    def __call__(self) -> None:
        """Do it."""
        try:
            with writing(self.shelf.place):
                self.shelf.put(self.scratch, self.shelf.part(), self.number, self.begun_from, self.keep)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.held()


def _is_of_a_whole_epoch(name: str) -> bool:
    """Whether a state can be gone on from whatever the nodes have said of it."""
    return "-" not in name


def _nothing() -> None:
    """Tell nobody: one who joins has to wait for the end of a pass."""


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
        raise ValueError("give what is to be saved: ctx.checkpoint(model, epoch=1), or variables by name")
    return named


def _build(model: Any) -> None:
    """Make the optimizer's variables, which otherwise come with its first step: too late to be put back."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built and not getattr(optimizer, "built", True):
        optimizer.build(model.trainable_variables)
