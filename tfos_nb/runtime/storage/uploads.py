"""Writing what was saved to a place that is far, while the training goes on.

One upload at a time, in the order in which they were begun. An error of one is raised where the next is begun, or at
the end of ``main``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["SavingFlag", "Uploads"]


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
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def begin(self, upload: Callable[[], object]) -> None:
        """Run an upload in the background, once the one before it is through; raise that one's error."""
        self.finish()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="tfos_nb upload")
        self._saving.__enter__()
        self._last = self._thread.submit(self._run, upload)

    def finish(self) -> None:
        """Wait until all is written; raise the error of the last upload."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _run(self, upload: Callable[[], object]) -> None:
        try:
            upload()
        finally:
            self._saving.__exit__()
