"""Doors of clusters that have ended: a few stay open, so that tasks of a lazy result get the reason at once.

``cluster.inference`` returns a DataFrame or an RDD that Spark computes only when it is used, perhaps after the cluster
has ended. If the door were closed, Spark would run each task four times before its action ended, and none would know
why. An open door gives the reason, and cancels the stage.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["EndedDoors", "ended_doors"]


class EndedDoors:
    """The newest doors of ended clusters, at most ``most``.

    Examples
    --------
    >>> doors = EndedDoors(most=1)
    >>> doors.keep(lambda: print("the first one is closed"))
    >>> doors.keep(lambda: print("the second one is closed"))
    the first one is closed
    >>> doors.close_all()
    the second one is closed
    True
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._closes: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def keep(self, close: Callable[[], None]) -> None:
        """Leave a door open until there are newer ones; ``close`` closes it."""
        with self._lock:
            self._closes.append(close)
            oldest = self._closes.popleft() if len(self._closes) > self._most else None
        if oldest is not None:
            oldest()

    def close_all(self) -> bool:
        """Close all, as when a new door finds no port; return whether there were any."""
        with self._lock:
            closes = list(self._closes)
            self._closes.clear()
        for close in closes:
            close()
        return bool(closes)


ended_doors = EndedDoors(most=16)
"""Those of this process."""
