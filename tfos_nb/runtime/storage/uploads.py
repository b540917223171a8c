"""Writing what was saved to a place that is far, while the training goes on.

One upload at a time, in the order in which they were begun. An error of one is raised where the next is begun, or at
the end of ``main``. A place that has taken nothing for minutes is waited for no longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong

from tfos_nb.errors import TfosError
from tfos_nb.runtime.storage.remote import last_sign

__all__ = ["SavingFlag", "Uploads"]

_SILENT = 300.0  # seconds: object stores try each request again for a minute or two


class SavingFlag:
    """Tells that something is being saved, from the first of several savings to the end of the last.

    Parameters
    ----------
    tell : callable
        Called with True and False.
    """

    def __init__(self, tell: Callable[[bool], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> SavingFlag:
        self._change(1)
        return self

    def __exit__(self, *exc: object) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            before, self._count = self._count, self._count + by
            if (before > 0) != (self._count > 0):
                self._tell(self._count > 0)


class Uploads:
    """The uploads of one process.

    Parameters
    ----------
    saving : SavingFlag
        Up while one runs: who is asked to stop finishes it.

    Examples
    --------
    >>> uploads = Uploads(SavingFlag(lambda going_on: None))
    >>> uploads.begin(lambda: print("written"))
    >>> uploads.finish()
    written
    """

    def __init__(self, saving: SavingFlag) -> None:
        self._saving = saving
        self._last: Future[None] | None = None
        self._begun_at = 0.0
        self._place = ""

    def begin(self, upload: Callable[[], object], place: str = "") -> None:
        """Run an upload in the background, once the one before it is through; raise that one's error."""
        self.finish()
        self._last, self._begun_at, self._place = Future(), time.monotonic(), place
        run = threading.Thread(target=self._run, args=(upload, self._last), name="tfos_nb upload", daemon=True)
        self._saving.__enter__()
        run.start()

    def finish(self) -> None:
        """Wait until all is written.

        Raises
        ------
        TfosError
            If the place has taken nothing for :data:`_SILENT` seconds. The upload is given up.
        Exception
            Of the last upload.
        """
        last, self._last = self._last, None
        if last is None:
            return
        while not last.done():
            left = max(self._begun_at, last_sign()) + _SILENT - time.monotonic()
            try:
                last.result(max(0.0, left))
            except WaitedTooLong:
                if left <= 0 and last.cancel():
                    self._saving.__exit__()
                    raise TfosError(
                        f"the saved files are not at {self._place or 'their place'}: the store has accepted nothing "
                        "for "
                        f"{_SILENT:g} s. Check that it runs and that this host reaches it"
                    ) from None
        last.result(0)

    def _run(self, upload: Callable[[], object], done: Future[None]) -> None:
        error: BaseException | None = None
        try:
            upload()
        except BaseException as raised:  # noqa: BLE001 - it is raised in the thread that waits
            error = raised
        if not done.set_running_or_notify_cancel():  # no thread waits any more
            return
        self._saving.__exit__()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
