"""Waiting in a test for what another process or thread does, of which no event tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["until"]


def until(reached: Callable[[], object], seconds: float = 30.0, every: float = 0.02) -> bool:
    """Look again and again whether something has come about, for so long at the most; say whether it has."""
    deadline, never = time.monotonic() + seconds, threading.Event()
    while not reached():  # the look that found it is the answer: by the next one it may have passed
        if time.monotonic() >= deadline:
            return False
        never.wait(every)
    return True
