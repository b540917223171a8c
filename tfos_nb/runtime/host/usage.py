"""Measure with psutil the resources that a process and all its children use."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ProcessUse"]

_CHILDREN_EVERY = 5.0  # seconds; to look for them is to look at every process of the machine


class ProcessUse:
    """CPU and memory of a process and of all that it started.

    ``cpu_percent`` is 100 for one core that is busy; None when the process has gone. ``memory_bytes`` is resident
    memory, and stays as it was last. Both are None before they were measured.

    Parameters
    ----------
    pid : int
        The first process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._processes: dict[int, Any] = {}
        self._looked = -math.inf
        self.cpu_percent: float | None = None
        self.memory_bytes: int | None = None
        self.stopped_at: float | None = None  # since when the first process has been seen stopped

    def measure(self, now: float) -> None:
        """Look at them; the memory stays as it was when they have gone."""
        import psutil

        if now - self._looked >= _CHILDREN_EVERY:
            self._looked = now
            self._find()
        cpu, memory = 0.0, 0
        for pid, process in list(self._processes.items()):
            try:
                cpu += process.cpu_percent()
                memory += process.memory_info().rss
            except psutil.Error:
                del self._processes[pid]
        self.cpu_percent = cpu if self._processes else None
        self.memory_bytes = memory or self.memory_bytes

    def look_whether_stopped(self, now: float) -> None:
        """See whether the first process stands still, by a signal."""
        import psutil

        first = self._processes.get(self._pid)
        try:
            stopped = first is not None and first.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            stopped = False
        self.stopped_at = (self.stopped_at or now) if stopped else None

    def _find(self) -> None:
        import psutil

        try:
            first = psutil.Process(self._pid)
            found = [first, *first.children(recursive=True)]
        except psutil.Error:
            return
        # The ones that are known stay: CPU is counted from one look at an object to the next.
        self._processes = {one.pid: one if one != (old := self._processes.get(one.pid)) else old for one in found}
