"""How much memory a process may still take: of the machine, or of its container's limit if that is less."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """Memory of the machine or of the container.

    Attributes
    ----------
    total : int
        Bytes of the machine, or the container's limit.
    free : int
        Bytes that can be taken without swapping; file cache counts, since the kernel frees it.

    Examples
    --------
    >>> Memory(total=8 << 30, free=2 << 30).free_fraction
    0.25
    """

    total: int
    free: int

    @property
    def free_fraction(self) -> float:
        """The part of the memory that is free, from 0 to 1."""
        return self.free / self.total

    @classmethod
    def now(cls) -> Memory:
        """Return the current figures for this process."""
        import psutil

        machine = psutil.virtual_memory()
        return min([cls(machine.total, machine.available), *_of_container()], key=lambda one: one.free_fraction)


def _of_container() -> list[Memory]:
    """Return the figures of this process's control group, if it has a limit; version 2 of control groups only."""
    with contextlib.suppress(OSError, ValueError):  # another version, or the limit is "max"
        own = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("0::/", 1)[-1].split("\n")[0]
        most, used = (int((own / name).read_text()) for name in ("memory.max", "memory.current"))
        counted = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
        used -= int(counted.get("inactive_file", 0))  # file cache, which the kernel frees when memory is needed
        return [Memory(most, max(0, most - used))]
    return []
