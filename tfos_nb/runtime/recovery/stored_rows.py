"""Keep, beside the states in the ``model_dir``, which rows of a pass they include: for a later cluster.

::

    driver: HeldPositions ── RowsOfState ──▶ the node that has written the state: {checkpoint_dir}/[fit/]NAME.rows
    a cluster launched with resume=: its chief reads the file ── FeedFrom(passes, state, rows) ──▶ driver

Nodes that start again need no such file: their driver knows the rows. The driver of a later cluster does not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from tfos_nb.redaction import without_password
from tfos_nb.runtime.control.wire import encode, expect
from tfos_nb.runtime.feed.messages import HeldRows
from tfos_nb.runtime.feed.positions import RowsOfState
from tfos_nb.runtime.storage.checkpoint_directory import CheckpointDirectory, generation_of, rows_file
from tfos_nb.runtime.storage.remote import Draft

__all__ = ["StoredRows"]

_log = logging.getLogger(__name__)
_WITHIN = 5.0  # seconds


class StoredRows:
    """The rows of the states of one run.

    Parameters
    ----------
    directory : str
        The directory of the run's checkpoints: a path, or a URL that fsspec knows.
    since : int
        The first generation of this cluster. Only rows of earlier ones are read: of later states the driver knows the
        rows, and all nodes must hear the same of them.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     StoredRows(directory).keep(RowsOfState("00000002-0001-00000003", HeldRows({0: ((0, 40),)})))
    ...     StoredRows(directory, since=2).of("00000002-0001-00000003").spans
    {0: ((0, 40),)}
    """

    def __init__(self, directory: str, since: int = 1) -> None:
        self._directory = directory.rstrip("/")
        self._since = since
        self._writer = ThreadPoolExecutor(1, "tfos_nb rows of states")
        self._has_failed = False
        self._changed = threading.Condition()
        self._kept = ""  # the last state whose rows were written

    @property
    def since(self) -> int:
        """The first generation of this cluster."""
        return self._since

    def keep_soon(self, message: RowsOfState) -> None:
        """Write the rows of a state in the background."""
        self._writer.submit(self._try_to_keep, message)

    def _try_to_keep(self, message: RowsOfState) -> None:
        try:
            self.keep(message)
        except Exception as error:  # noqa: BLE001 - of any store; the training goes on without
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "the rows of a state could not be written to %s: %s. A later cluster could not continue within "
                    "the epoch",
                    without_password(self._directory),
                    error,
                )

    def keep(self, message: RowsOfState) -> None:
        """Write the rows of a state.

        Raises
        ------
        OSError
            If the directory cannot be written.
        """
        folder, name = self._place(message.state)
        with Draft(f"{folder}/{rows_file(name)}") as draft, open(draft.path, "wb") as file:
            file.write(encode(message))
        with self._changed:
            self._kept = message.state
            self._changed.notify_all()

    def await_kept(self, state: str) -> bool:
        """Wait a while until the rows of a state have come from the driver and were written; return whether so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._kept == state, _WITHIN)

    def of(self, state: str) -> HeldRows | None:
        """Return which rows of its pass a state of an earlier cluster includes; None if that is not known."""
        folder, name = self._place(state)
        if generation_of(name) >= self._since:
            return None
        directory = CheckpointDirectory.at(folder)
        with contextlib.suppress(FileNotFoundError):
            return expect(RowsOfState, directory.filesystem.cat_file(f"{directory.path}/{rows_file(name)}")).rows
        return None

    def _place(self, state: str) -> tuple[str, str]:
        """Return the directory of a state, and its name there."""
        folder, _, name = state.rpartition("/")
        return f"{self._directory}/{folder}".rstrip("/"), name
