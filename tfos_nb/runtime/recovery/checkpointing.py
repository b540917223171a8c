"""Implement ``ctx.checkpoint`` and ``ctx.resume``: save and restore a state together with its position in the rows.

::

    checkpoint_dir/              storage.checkpoint_directory
        00000003/                state.index, state.data-…: TensorFlow's own checkpoint
        00000003-0001-00000002/  the same, in the middle of a pass: epoch, generation, number in the generation

In a remote store, a local copy is uploaded while the training goes on. With ``in_memory=True`` a state is in the memory
of all nodes (recovery.loop_states); the later one of both counts.

All nodes of a generation continue from the same state: the newest one of an earlier generation. States that other nodes
have saved meanwhile do not count. The state is kept until the generation is over.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.redaction import without_password
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.loop_states import LoopStates, name_in_memory
from tfos_nb.runtime.recovery.memory_state import LastState, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.storage.checkpoint_directory import CheckpointDirectory, is_of_a_whole_epoch, write_place
from tfos_nb.runtime.storage.remote import writing
from tfos_nb.runtime.storage.shared_directory import mark_in
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads

__all__ = ["CheckpointCalls", "Checkpoints", "Resumed"]

logger = logging.getLogger(__name__)

_STATE = "state"


@dataclass(frozen=True)
class Resumed:
    """Result of ``ctx.resume``: the number of epochs in the restored state, 0 if none was restored.

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
    """Callbacks by which a node's process reports states to the driver.

    Attributes
    ----------
    held : callable
        Called when a state of whole epochs has been saved, so that a node that joins may begin from it.
    seen : callable
        Called with the directory of the states on this host, and the mark that was found in it
        (:mod:`tfos_nb.runtime.storage.shared_directory`).
    request : SaveRequest
        Says whether the driver wants a state.
    memory : LastState, optional
        Where states of a loop are kept in memory; only if nodes may be started again.
    """

    held: Callable[[], object]
    seen: Callable[[str, str], object]
    request: SaveRequest
    memory: LastState | None = None


class Checkpoints:
    """States that a program saves and restores.

    Parameters
    ----------
    directory : callable
        Returns the directory of the states: this cluster's, or that of the one whose training it continues.
    rows : RowQueue
        Rows of this node. After a restore they continue after the rows that the state includes.
    is_chief : bool
        Whether this node writes the states.
    workers : int
        How many nodes train.
    generation, restarts : int
        As in ``ctx``.
    held_states : collection of str
        Names of the states in the middle of a pass that all nodes have saved.
    saving : SavingFlag
        Set while something is saved.
    uploads : Uploads
        Uploads to remote stores.
    calls : CheckpointCalls
        Reports to the driver.
    stored_rows : callable
        Returns what knows which rows the states of an earlier cluster include, whose training this one continues.
    """

    def __init__(
        self,
        directory: Callable[[], str],
        rows: RowQueue,
        *,
        is_chief: bool,
        workers: int,
        generation: int,
        restarts: int,
        held_states: Collection[str],
        saving: SavingFlag,
        uploads: Uploads,
        calls: CheckpointCalls,
        stored_rows: Callable[[], StoredRows],
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
        self._stored_rows = stored_rows
        self._looked = False  # whether the directory has been checked and reported
        self._amid = 0  # number of states saved in the middle of a pass, on the disk or in memory
        self._loop = LoopStates(
            calls.memory, rows, calls.request, workers=workers, generation=generation, held_states=held_states
        )
        self._from = ""  # name of the restored state

    def save(
        self,
        model: Any,
        objects: dict[str, Any],
        *,
        epoch: int,
        rows: int | None,
        max_to_keep: int,
        step: int | None = None,
    ) -> str:
        """Save a state and return its directory.

        Every node must call this, because TensorFlow may read variables by a collective. Only the chief's state is
        kept.

        Parameters
        ----------
        model : keras.Model or None
            Model, saved with its optimizer.
        objects : dict
            Other objects to save, by name.
        epoch : int
            Number of epochs that the state includes.
        rows : int or None
            Number of rows since the last whole epoch. None: the state is of whole epochs, or of ``step``.
        max_to_keep : int
            Number of the newest states to keep.
        step : int or None
            Number of steps since the last whole epoch, in place of ``rows``.

        Raises
        ------
        ValueError
            If ``epoch``, ``rows`` or ``step`` is wrong, or there is nothing to save.
        TfosError
            If the directory cannot be written.
        """
        import tensorflow as tf

        _check_position(epoch, rows, step)
        self._loop.finish()
        state = tf.train.Checkpoint(**_named(model, objects))
        rows = self._rows.rows_after(step) if step is not None else rows
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

    def keep(
        self, model: Any, objects: dict[str, Any], *, epoch: int, rows: int | None, step: int | None = None
    ) -> None:
        """Keep a state in the memory of all nodes, if that is due; the parameters are those of :meth:`save`.

        Raises
        ------
        ValueError
            As :meth:`save`, if neither ``rows`` nor ``step`` is given, or from :meth:`LoopStates.step_has_ended`.
        """
        _check_position(epoch, rows, step)
        if rows is None and step is None:
            raise ValueError(
                "in_memory=True keeps states within an epoch: give step=, the number of steps since it began. "
                "Call ctx.checkpoint(…, epoch=) without in_memory=True after a whole epoch"
            )
        rows = rows if step is None else self._rows.rows_after(step)
        self._loop.step_has_ended(_named(model, objects), epoch, rows or 0, self._next_moment)

    def _next_moment(self, epoch: int) -> StateVersion:
        """Return when the next state in the middle of a pass is saved.

        It is the same on every node, because every node counts the states.
        """
        self._amid += 1
        return StateVersion(epoch, self._generation, self._amid)

    def _hand_over(self, name: str, epoch: int, rows: int | None) -> None:
        """Wait until the state is where it belongs, and then until the driver has started the nodes again."""
        self._uploads.finish()
        if rows is not None:
            self._rows.hold(name, epoch, rows, waits=True, stored=self._is_chief)
        self._calls.request.pause()

    @property
    def directory(self) -> str:
        """Directory of the states."""
        return self._directory()

    def look_at_place(self) -> None:
        """Report the directory's mark to the driver now. The driver ends the cluster if the nodes' marks differ."""
        self._place()

    def _place(self) -> CheckpointDirectory:
        """Return the directory. If nodes may be restarted, report its mark on this host to the driver, once."""
        place = CheckpointDirectory.at(self.directory)
        if self._restarts and place.local and not self._looked:
            self._looked, mark = True, ""
            # Only the chief must be able to write there.
            with writing(place.path) if self._is_chief else contextlib.suppress(OSError):
                mark = mark_in(place.path)
            self._calls.seen(place.path, mark)
        return place

    def _hold(self, epoch: int, rows: int) -> str:
        """Return the name of a state in the middle of a pass, and report the rows that it includes to the driver."""
        name = self._next_moment(epoch).directory
        self._rows.hold(name, epoch, rows, stored=self._is_chief)
        return name

    def resume(self, model: Any, objects: dict[str, Any]) -> Resumed:
        """Restore the newest state that was saved before the last loss, if there is one.

        Parameters
        ----------
        model : keras.Model or None
            Model, restored with its optimizer.
        objects : dict
            Other objects to restore, by name.

        Raises
        ------
        TfosError
            If the state does not match the objects.
        """
        import tensorflow as tf

        named, place = _named(model, objects), self._place()
        found = [(name, says) for name, says in place.checkpoints() if self._may_go_on(name, says)]
        kept = self._loop.restore(named, StateVersion.of(found[-1][0]) if found else None)
        if kept is not None:
            self._rows.resume(kept.epoch, name_in_memory(kept))
            logger.info("continues after epoch %d, from a state in memory, %s", kept.epoch, kept.directory)
            return Resumed(kept.epoch)
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
                    f"the state in {here} does not match the objects given to ctx.resume. Build the same objects as "
                    f"the program that saved it, or use another model_dir: {error}"
                ) from error
        self._from = name
        self._rows.resume(
            epoch,
            "" if is_of_a_whole_epoch(name) else name,
            rows=self._stored_rows().of(name) if self._is_chief else None,
        )
        logger.info("continues after epoch %d, from %s/%s", epoch, without_password(self.directory), name)
        return Resumed(epoch)

    def _may_go_on(self, name: str, says: Mapping[str, int]) -> bool:
        """Return whether this generation may continue from a state.

        It must be of an earlier generation, and either of whole epochs, or saved by all nodes.
        """
        if says["generation"] >= self._generation:
            return False
        known = is_of_a_whole_epoch(name) or name in self._held_states
        return known or self._stored_rows().of(name) is not None


@dataclass(frozen=True)
class _Upload:
    """Upload of a state from a local directory, which is then removed."""

    place: CheckpointDirectory
    scratch: str
    number: str
    begun_from: str
    keep: int
    held: Callable[[], object]

    def __call__(self) -> None:
        """Upload the state, and report it to the driver."""
        try:
            with writing(self.place.path):
                self.place.put(self.scratch, self.place.part(), self.number, self.begun_from, self.keep)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.held()


def _nothing() -> None:
    """Do nothing: a node that joins cannot begin from a state in the middle of a pass."""


def _write(state: Any, folder: str, epoch: int, generation: int) -> None:
    state.write(f"{folder}/{_STATE}")
    write_place(folder, epoch, generation)


def _check_position(epoch: object, rows: object, step: object) -> None:
    """Refuse what are no numbers of epochs, rows and steps."""
    if type(epoch) is not int or epoch < 0:
        raise ValueError(f"epoch must be the number of epochs that the state includes, 0 or more, got {epoch!r}")
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(f"rows must be the number of rows since the last whole epoch, 0 or more, got {rows!r}")
    if step is not None and (type(step) is not int or step < 0 or rows is not None):
        also = " beside rows=" if rows is not None else ""
        raise ValueError(f"step must be the number of steps since the last whole epoch, 0 or more, got {step!r}{also}")


def _named(model: Any, objects: dict[str, Any]) -> dict[str, Any]:
    named = {**objects, **({} if model is None else {"model": model})}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        named["model_optimizer"] = optimizer
    if not named:
        raise ValueError("ctx.checkpoint needs objects to save: ctx.checkpoint(model, epoch=1), or variables by name")
    return named


def _build(model: Any) -> None:
    """Create the optimizer's variables, so that they can be restored. Otherwise its first step creates them."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built and not getattr(optimizer, "built", True):
        optimizer.build(model.trainable_variables)
