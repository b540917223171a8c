"""How much memory a process may still take: of the machine, or of its container's limit if that is less."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tfos_nb.runtime.host.control_group import OWN, ROOT, counts_in, folder_of

__all__ = ["ControlGroup", "Memory"]

_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_FILES_2 = ("memory.max", "memory.current", "memory.events", "inactive_file")
_UNLIMITED = 1 << 60  # version 1 gives a group without a limit the largest number of pages


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
        group = ControlGroup.own()
        limited = [cls(group.limit, max(0, group.limit - group.used))] if group else []
        return min([cls(machine.total, machine.available), *limited], key=lambda one: one.free_fraction)


@dataclass(frozen=True)
class ControlGroup:
    """The memory of a control group: a container's, or that of a job on a shared machine.

    Attributes
    ----------
    limit, used : int
        Bytes that the group may take at most, and that it has taken, less file cache, which the kernel frees.
    kills : int
        How many of its processes the kernel has killed because the group had reached its limit.
    """

    limit: int
    used: int
    kills: int

    @classmethod
    def own(cls, root: Path = ROOT, membership: Path = OWN) -> ControlGroup | None:
        """Return the group of this process, or None if it has no limit.

        Parameters
        ----------
        root, membership : Path
            As :func:`~tfos_nb.runtime.host.control_group.folder_of` takes them.
        """
        with contextlib.suppress(OSError, ValueError):  # no such group, or the limit is "max"
            if found := folder_of("memory", root, membership):
                folder, version = found
                return cls._read(folder, _FILES_1 if version == 1 else _FILES_2)
        return None

    @classmethod
    def _read(cls, folder: Path, names: tuple[str, str, str, str]) -> ControlGroup | None:
        limit, used, events, cache = names
        most, taken = (int((folder / name).read_text()) for name in (limit, used))
        if most >= _UNLIMITED:
            return None
        taken -= counts_in(folder / "memory.stat").get(cache, 0)
        return cls(most, taken, counts_in(folder / events).get("oom_kill", 0))
