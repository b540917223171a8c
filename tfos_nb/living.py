"""The clusters of this process that have not ended, whether a variable of the user's holds them or not.

A cluster lives in its threads and in Spark: to lose its variable does not end it, and somebody must be able to.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["begin", "end", "living"]

_lock = threading.Lock()
_living: dict[str, Any] = {}


def begin(cluster: Any) -> None:
    """Note that a cluster has been started; it is known by its ``id``."""
    with _lock:
        _living[cluster.id] = cluster


def end(cluster: Any) -> None:
    """Note that it has ended."""
    with _lock:
        _living.pop(cluster.id, None)


def living() -> tuple[Any, ...]:
    """Return those that have not ended, the oldest first."""
    with _lock:
        return tuple(_living.values())
