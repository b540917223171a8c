"""Measure with psutil the resources that a process and all its children use."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ProcessUse"]

_CHILDREN_EVERY = 5.0  # seconds between searches for child processes, which read all processes of the machine


class ProcessUse:
    """CPU and memory use of a process and all its descendants.

    Parameters
    ----------
    pid : int
        Id of the process.

    Attributes
    ----------
    cpu_percent : float or None
        CPU use; 100 is one busy core. None before the first measurement, and after the process has ended.
    memory_bytes : int or None
        Resident memory, also after the process has ended. None before the first measurement.
    stopped_at : float or None
        Time of the first check that found the process stopped by a signal. None if it is not stopped.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._processes: dict[int, Any] = {}
        self._looked = -math.inf
        self.cpu_percent: float | None = None
        self.memory_bytes: int | None = None
        self.stopped_at: float | None = None

    def measure(self, now: float) -> None:
        """Measure CPU and memory. ``now`` is the monotonic time in seconds."""
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
        """Check whether the process is stopped by a signal, and set ``stopped_at``."""
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
        # Keep known objects, because psutil computes CPU use between two calls on the same object.
        self._processes = {one.pid: one if one != (old := self._processes.get(one.pid)) else old for one in found}
