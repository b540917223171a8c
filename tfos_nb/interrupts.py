"""Ctrl-C and a notebook's interrupt, while a call of ours waits."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible"]

_AGAIN_SECONDS = 0.05
_PATIENCE = 5.0  # seconds for the JVM to answer a question in the middle of which the interrupt has come


class _Handler:
    """Raises KeyboardInterrupt in the main thread, but not in the middle of a question to the JVM.

    py4j answers an exception there by closing all of its connections. The other threads' commands, which wait for their
    answers on those, are sent again by threads of the JVM without their tags: Spark's jobs would run a second time, and
    nobody could cancel them.
    """

    def __init__(self) -> None:
        self._until = math.inf
        self._lock = threading.Lock()
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._until = min(self._until, now + _PATIENCE)
        if now < self._until and _asks_the_jvm(frame):
            again = threading.Timer(_AGAIN_SECONDS, self._interrupt)
            again.daemon = True
            again.start()
            return
        self._until = math.inf
        raise KeyboardInterrupt

    def _interrupt(self) -> None:
        with self._lock:  # another handler's turn may have come
            if not self._is_over:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self) -> bool:
        """Stop handling interrupts; return whether one is still pending."""
        with self._lock:
            self._is_over = True
        return self._until < math.inf


def _asks_the_jvm(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "py4j":
            return True
        frame = frame.f_back
    return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the interrupt raise KeyboardInterrupt while the caller waits, and do nothing else.

    PySpark's handler is active in a script, and in the notebook's cell that made the session. It cancels all Spark jobs
    at once, so the nodes would be gone before they could be asked to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        waits = handler.end()
        if before is not None:  # None: not Python's own, which cannot be put back
            signal.signal(signal.SIGINT, before)
    if waits:
        raise KeyboardInterrupt
