"""Clusters of this process that have not ended, whether a user's variable refers to them or not.

A cluster runs in its threads and in Spark, so it does not end when its variable is lost. The user must still be able to
end it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

__all__ = ["active_clusters", "begin", "end"]


class _Ended(Protocol):
    """What is asked of a cluster that has ended."""

    @property
    def log_bytes(self) -> int: ...

    def shorten_logs(self, most: int | None = None) -> None: ...


_LOGS_OF_ENDED = 32 << 20  # bytes, about, of all clusters that have ended; of the oldest ones little is left
_lock = threading.Lock()
_living: dict[str, Any] = {}
_ended: list[weakref.ref[_Ended]] = []


def begin(cluster: Any) -> None:
    """Note that a cluster has been started; it is known by its ``id``."""
    with _lock:
        _living[cluster.id] = cluster


def end(cluster: Any) -> None:
    """Note that it has ended, and have those that have ended keep no more than so much of their logs together."""
    with _lock:
        _living.pop(cluster.id, None)
        _ended.append(weakref.ref(cluster))
        ended = [one for one in (ref() for ref in _ended) if one is not None]
        _ended[:] = map(weakref.ref, ended)
    left = _LOGS_OF_ENDED
    for one in reversed(ended):
        if one.log_bytes > left:  # of the newest one, of which somebody may just have seen the end, as much as can be
            one.shorten_logs(left if one is cluster else None)
        left -= min(one.log_bytes, left)


def active_clusters() -> tuple[Any, ...]:
    """Return those that have not ended, the oldest first."""
    with _lock:
        return tuple(_living.values())
