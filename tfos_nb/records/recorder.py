"""Thread that writes a run's record again and again, from the first node to the outcome (:mod:`tfos_nb.records.run`).

::

    every 10 s: something new?  ──▶ write, and every 60 s in any case
    finish()                    ──▶ write the outcome; waits for it, at most 10 s

A record goes to a file (:func:`write_file`), or to a tracking server (:mod:`tfos_nb.mlflow`). A place that cannot be
written is reported once, and never stops a training: it is tried again after 10 s, and at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tfos_nb.records.run import Run, to_json
from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage.remote import Draft

__all__ = ["RunRecorder", "write_file"]

_WRITES, _SIGNS = 10.0, 60.0  # seconds between two
_LAST_WITHIN = 10.0  # seconds that the end of a cluster waits for its last write


class RunRecorder:
    """Write one run's record.

    Parameters
    ----------
    run : callable
        Returns the run as it is now.
    write : callable
        Writes it.
    tell : callable
        Takes the text of the first error, for a warning.

    Attributes
    ----------
    failed, is_late : bool
        Whether the newest write has failed, and whether the last one takes too long.
    """

    def __init__(self, run: Callable[[], Run], write: Callable[[Run], None], tell: Callable[[str], object]) -> None:
        self._run, self._put, self._tell = run, write, tell
        self._is_told = False
        self._over = threading.Event()
        self._written: Run | None = None
        self._written_at = 0.0
        self._thread = threading.Thread(target=self._keep, name="tfos_nb run recorder", daemon=True)
        self.failed = self.is_late = False

    def start(self) -> None:
        """Write from now on, in a thread."""
        self._thread.start()

    def finish(self, within: float | None = None) -> bool:
        """Write the run's outcome and end the thread; return whether it was written in time, by default 10 seconds.

        If it takes longer, ``is_late`` is set, and a later error is not reported. Another call waits for it again.
        """
        self._over.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_WITHIN if within is None else within)
        self.is_late = self._thread.is_alive()
        return not self.is_late and not self.failed

    def _keep(self) -> None:
        self._write(self._run())
        while not self._over.wait(_WRITES):
            now = self._run()
            if time.monotonic() - self._written_at > _SIGNS or self._is_news(now):
                self._write(now)
        self._write(self._run())

    def _is_news(self, now: Run) -> bool:
        before = self._written
        return before is None or now != replace(before, updated=now.updated, seconds=now.seconds)

    def _write(self, run: Run) -> None:
        began = time.monotonic()
        try:
            self._put(run)
        except Exception as error:  # noqa: BLE001 - a store may raise anything, and a training goes on without it
            self._written, self.failed = None, True
            if not self._is_told and not self.is_late:
                self._is_told = True
                self._tell(without_password(str(error).strip() or type(error).__name__))
        else:
            self._written, self._written_at, self.failed = run, began, False


def write_file(place: str, run: Run) -> None:
    """Write a run's file, a path or a URL, as a whole: a reader never sees half of it."""
    # A lone surrogate, as in some file names, is written as a JSON escape.
    with Draft(place) as draft, open(draft.path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(to_json(run))
