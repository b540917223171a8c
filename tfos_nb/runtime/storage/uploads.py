"""Upload saved files to a remote store in the background, while the training goes on.

Uploads run one at a time, in their order. The error of an upload is raised when the next one is begun, or at the end of
``main``. An upload is abandoned if the store has accepted no data for 300 s.
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

_SILENT = 300.0  # seconds; clients of object stores retry each request for a minute or two


class SavingFlag:
    """Context manager that reports whether anything is being saved. Several threads may be in it at once.

    Parameters
    ----------
    tell : callable
        Called with True when the first save begins, and with False when the last one ends.
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
    """Uploads of one process.

    Parameters
    ----------
    saving : SavingFlag
        Set while an upload runs, so that a node that is asked to stop finishes it first.

    Examples
    --------
    >>> uploads = Uploads(SavingFlag(lambda going_on: None))
    >>> store = []
    >>> uploads.begin(lambda: store.append("model"))
    >>> uploads.finish()
    >>> store
    ['model']
    """

    def __init__(self, saving: SavingFlag) -> None:
        self._saving = saving
        self._last: Future[None] | None = None
        self._begun_at = 0.0
        self._place = ""

    def begin(self, upload: Callable[[], object], place: str = "") -> None:
        """Wait for the previous upload, raise its error if it failed, and run an upload in the background.

        ``place`` is the URL for messages.
        """
        self.finish()
        self._last, self._begun_at, self._place = Future(), time.monotonic(), place
        run = threading.Thread(target=self._run, args=(upload, self._last), name="tfos_nb upload", daemon=True)
        self._saving.__enter__()
        run.start()

    @property
    def goes_on(self) -> bool:
        """Whether an upload runs, and the store accepts its data."""
        return self._last is not None and not self._last.done() and self._seconds_left() > 0

    def _seconds_left(self) -> float:
        """Return after how many seconds the upload under way is abandoned, if the store accepts nothing until then."""
        return max(self._begun_at, last_sign()) + _SILENT - time.monotonic()

    def finish(self) -> None:
        """Wait for the last upload.

        Raises
        ------
        TfosError
            If the store has accepted no data for :data:`_SILENT` seconds. The upload is abandoned.
        Exception
            The error of the last upload.
        """
        last, self._last = self._last, None
        if last is None:
            return
        while not last.done():
            left = self._seconds_left()
            try:
                last.result(max(0.0, left))
            except WaitedTooLong:
                if left <= 0 and last.cancel():
                    self._saving.__exit__()
                    raise TfosError(
                        f"the saved files are not at {self._place or 'their place'}: the store has accepted nothing "
                        f"for {_SILENT:g} s. Check that it runs and that this host reaches it"
                    ) from None
        last.result(0)

    def _run(self, upload: Callable[[], object], done: Future[None]) -> None:
        error: BaseException | None = None
        try:
            upload()
        except BaseException as raised:  # noqa: BLE001 - finish() raises it
            error = raised
        if not done.set_running_or_notify_cancel():  # the upload was abandoned
            return
        self._saving.__exit__()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
