"""Write states of a Keras ``fit`` to the cluster's ``model_dir`` every so many seconds, and read the newest one.

::

    chief: state of a step ──▶ LastState                      every few steps, in memory
                           └─▶ StoredStates ──▶ checkpoints/RUN/fit/00000002-0001-00000040/  of the second fit: fit-2/
                                                  state         the format of recovery.memory_state
                                                  place.json    written last

They are for what the memory of the supervisors does not outlive: the loss of all nodes at once. A thread writes them,
so that the training does not wait. A failed write is logged, and the next one is tried when it is due.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfos_nb.redaction import without_password
from tfos_nb.runtime.recovery.memory_state import State, StateVersion, read_state, write_state
from tfos_nb.runtime.storage.checkpoint_directory import CheckpointDirectory, write_place
from tfos_nb.runtime.storage.remote import writing
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads

__all__ = ["StoredStates"]

_log = logging.getLogger(__name__)

_STATE = "state"
_KEPT = 2
_TOLD_EVERY = 600.0  # seconds between two warnings of failed writes


class StoredStates:
    """States of a fit in a directory, on a disk or in a remote store. Only the chief has one.

    Parameters
    ----------
    directory : str
        The directory of the cluster's checkpoints: a path, or a URL that fsspec knows.
    every : float
        Seconds from the beginning of one write to that of the next. They are counted over generations: if nodes are
        lost more often than that, states are written all the same.
    saving : SavingFlag
        Set while a state is written.
    fit : int, optional
        The number of the fit in ``main``.

    Examples
    --------
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     states = StoredStates(directory, 0.0, SavingFlag(lambda going_on: None))
    ...     states.begin(StateVersion(2, 1, 40), 2, [np.arange(3.0)], b"")
    ...     states.finish()
    ...     states.newest(lambda moment: True).moment
    True
    StateVersion(fit=0, epoch=2, generation=1, step=40)
    """

    def __init__(self, directory: str, every: float, saving: SavingFlag, fit: int = 0) -> None:
        self._directory, self._saving = directory.rstrip("/"), saving
        self._fit = fit
        self._url = f"{self._directory}/{StateVersion(0, fit=fit).folder}"
        self._every = every
        self._uploads = Uploads(saving)
        self._begun_at = time.monotonic()
        self._told_at = -_TOLD_EVERY  # when a failure was logged
        self._from = ""  # the state from which this generation has begun; others may be written and not be usable

    def of_fit(self, fit: int) -> StoredStates:
        """Return the states of another fit of this cluster, which are written as if they were those of this one."""
        other = StoredStates(self._directory, self._every, self._saving, fit)
        other._begun_at, other._told_at, other._uploads = self._begun_at, self._told_at, self._uploads
        return other

    def last_fit(self, accepts: Callable[[StateVersion], bool]) -> int:
        """Return the last fit after this one that has a state of a moment that is accepted; this one if there is none.

        Raises
        ------
        OSError
            If the directory cannot be read.
        """
        last = self._fit
        for fit in itertools.count(self._fit + 1):
            moments = [StateVersion.of(name, fit) for name, _ in self.of_fit(fit)._there.checkpoints()]
            if not any(map(accepts, moments)):
                return last
            last = fit
        raise AssertionError("unreachable")

    def drop_later_fits(self) -> None:
        """Remove the states of later fits: the training goes on from this one."""
        try:
            for fit in range(self._fit + 1, self.last_fit(lambda moment: True) + 1):
                self.of_fit(fit).drop_all()
        except OSError as error:
            _log.warning("the states of later fits could not be looked for in %s: %s", self._place, error)

    @property
    def writes(self) -> bool:
        """Whether states are written there, and not only read."""
        return math.isfinite(self._every)

    @property
    def is_due(self) -> bool:
        """Whether a state should be written now."""
        return time.monotonic() >= self._begun_at + self._every and not self._uploads.goes_on

    def begin(self, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes) -> None:
        """Write a state in the background; NumPy arrays of numbers. A write under way is waited for."""
        self.finish()
        self._begun_at = time.monotonic()
        self._uploads.begin(partial(self._write, moment, passes, arrays, rest), self._place)

    def finish(self) -> bool:
        """Wait for the last write, and log its error; return whether it succeeded."""
        try:
            self._uploads.finish()
        except Exception as error:  # noqa: BLE001 - the training goes on without this state
            if time.monotonic() - self._told_at >= _TOLD_EVERY:
                self._told_at = time.monotonic()
                _log.warning(
                    "the state of fit could not be written to %s: %s. It is tried again every %g s; until then the "
                    "training could not continue if all nodes were lost at once",
                    self._place,
                    error,
                    self._every,
                )
            return False
        return True

    def newest(self, accepts: Callable[[StateVersion], bool], after: StateVersion | None = None) -> State | None:
        """Return the newest complete state of a moment that is accepted, and later than ``after``; None without one.

        Raises
        ------
        OSError
            If the directory cannot be read.
        """
        directory = self._there
        found = list(directory.checkpoints())
        if found:
            written = max(float(says.get("written", 0)) for _, says in found)
            self._begun_at = time.monotonic() - max(0.0, time.time() - written)
        for name, _ in reversed(found):
            moment = StateVersion.of(name, self._fit)
            if after is not None and moment <= after:
                return None
            if accepts(moment):
                with tempfile.TemporaryDirectory(prefix="tfos_nb-checkpoint-") as scratch:
                    state = read_state(f"{directory.get(name, scratch)}/{_STATE}")
                if state is not None:
                    self._from = name
                    return state
        return None

    def drop_after(self, moment: StateVersion) -> None:
        """Remove states that are later: the training goes on from an earlier one."""
        self._drop(lambda other: other > moment)

    def clear(self) -> None:
        """Remove all states, also the one that is being written."""
        self.finish()
        self.drop_all()

    def drop_all(self) -> None:
        """Remove all states that were written."""
        self._drop(lambda moment: True)

    @property
    def _there(self) -> CheckpointDirectory:
        return CheckpointDirectory.at(self._url)

    @property
    def _place(self) -> str:
        return without_password(self._url)

    def _drop(self, unwanted: Callable[[StateVersion], bool]) -> None:
        directory = self._there
        try:
            for name, _ in list(directory.checkpoints()):
                if unwanted(StateVersion.of(name, self._fit)):
                    directory.remove(name)
        except OSError as error:
            _log.warning("a state that is not valid any more could not be removed from %s: %s", self._place, error)

    def _write(self, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes) -> None:
        directory = self._there
        with writing(directory.path):
            part = directory.part()
            folder = part if directory.local else tempfile.mkdtemp(prefix="tfos_nb-checkpoint-")
            try:
                _write_durably(f"{folder}/{_STATE}", moment, passes, arrays, rest)
                write_place(folder, moment.epoch, moment.generation)
                directory.put(folder, part, moment.directory, self._from, _KEPT)
            finally:
                if folder != part:
                    shutil.rmtree(folder, ignore_errors=True)


def _write_durably(path: str, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes) -> None:
    """Write a state that outlives a sudden end of the host, too."""
    with open(path, "xb") as file:
        write_state(path, moment, passes, arrays, rest)
        os.fsync(file.fileno())
