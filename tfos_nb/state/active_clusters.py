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
    """Interface of a cluster that has ended."""

    @property
    def log_bytes(self) -> int: ...

    def shorten_logs(self, most: int | None = None) -> None: ...


_LOGS_OF_ENDED = 32 << 20  # approximate bytes of log of all ended clusters; the oldest clusters keep few lines
_lock = threading.Lock()
_living: dict[str, Any] = {}
_ended: list[weakref.ref[_Ended]] = []


def begin(cluster: Any) -> None:
    """Record a started cluster by its ``id``."""
    with _lock:
        _living[cluster.id] = cluster


def end(cluster: Any) -> None:
    """Record that a cluster has ended, and shorten the logs of ended clusters to their common limit."""
    with _lock:
        _living.pop(cluster.id, None)
        _ended.append(weakref.ref(cluster))
        ended = [one for one in (ref() for ref in _ended) if one is not None]
        _ended[:] = map(weakref.ref, ended)
    left = _LOGS_OF_ENDED
    for one in reversed(ended):
        if one.log_bytes > left:  # the newest cluster, whose end a user may just have seen, keeps as much as possible
            one.shorten_logs(left if one is cluster else None)
        left -= min(one.log_bytes, left)


def active_clusters() -> tuple[Any, ...]:
    """Return the clusters that have not ended, the oldest first."""
    with _lock:
        return tuple(_living.values())
