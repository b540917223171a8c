"""Thread that keeps the record of a run up to date, from the first node to the outcome (:mod:`tfos_nb.records.run`).

::

    every 2 s: something new?  ──▶ write, at most every 10 s, and every 60 s in any case
    finish()                   ──▶ write the outcome; waits for it, at most 10 s

The file is written whole and renamed, so that a reader never sees half of it, and a killed kernel leaves the newest. A
place that cannot be written is told of once, and never stops a training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tfos_nb.records.run import Run, to_json
from tfos_nb.runtime.storage.remote import Draft
from tfos_nb.truncate import without_password

__all__ = ["RunRecorder"]

logger = logging.getLogger(__name__)

_LOOKS, _WRITES, _SIGNS = 2.0, 10.0, 60.0  # seconds between two
_LAST_WITHIN = 10.0  # seconds that the end of a cluster waits for its last write


class RunRecorder:
    """Write one run's file again and again.

    Parameters
    ----------
    place : str
        The file: a path, or a URL that fsspec knows.
    run : callable
        Returns the run as it is now.
    """

    def __init__(self, place: str, run: Callable[[], Run]) -> None:
        self._place, self._run = place, run
        self._over = threading.Event()
        self._written: Run | None = None
        self._written_at = 0.0
        self._told = False
        self._thread = threading.Thread(target=self._keep, name="tfos_nb run recorder", daemon=True)

    def start(self) -> None:
        """Write from now on, in a thread."""
        self._thread.start()

    def finish(self) -> None:
        """Write the run's outcome, and end the thread. Returns after 10 seconds if the store takes longer."""
        self._over.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_WITHIN)

    def _keep(self) -> None:
        self._write(self._run())
        while not self._over.wait(_LOOKS):
            now, since = self._run(), time.monotonic() - self._written_at
            if since > _SIGNS or (since > _WRITES and self._is_news(now)):
                self._write(now)
        self._write(self._run())

    def _is_news(self, now: Run) -> bool:
        before = self._written
        return before is None or now != replace(before, updated=now.updated, seconds=now.seconds)

    def _write(self, run: Run) -> None:
        self._written, self._written_at = run, time.monotonic()
        try:
            with Draft(self._place) as draft, open(draft.path, "w", encoding="utf-8") as file:
                file.write(to_json(run))
        except Exception as error:  # noqa: BLE001 - a store may raise anything, and a training goes on without it
            self._tell(str(error) or type(error).__name__)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            place = without_password(self._place)
            logger.warning(
                "the run's record %s cannot be written: %s. record=DIR writes it elsewhere, and record=False nowhere",
                place,
                without_password(why),
            )
