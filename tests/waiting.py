"""Wait in a test for another process or thread that sets no event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["until"]


def until(reached: Callable[[], object], seconds: float = 30.0, every: float = 0.02) -> bool:
    """Poll until a condition holds or the time is over; return whether it holds."""
    deadline, never = time.monotonic() + seconds, threading.Event()
    while not reached():  # return at once: the condition may not hold any more at the next check
        if time.monotonic() >= deadline:
            return False
        never.wait(every)
    return True
