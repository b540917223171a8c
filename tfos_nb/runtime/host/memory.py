"""How much memory a process may still take: of the machine, or of its container's limit if that is less."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlGroup", "Memory"]

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
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
    def own(cls, root: Path = _ROOT, membership: Path = _OWN) -> ControlGroup | None:
        """Return the group of this process, or None if it has no limit.

        Parameters
        ----------
        root, membership : Path
            Where the groups are mounted, and the kernel's list of this process's groups (``man 7 cgroups``). In a
            container the list may name a folder of the host's, and its own group is then at the root.
        """
        with contextlib.suppress(OSError, ValueError):  # no such group, or the limit is "max"
            groups = dict(_without_number(line) for line in membership.read_text().splitlines())
            if "memory" in groups:  # version 1
                return cls._read(_inside(root / "memory", groups["memory"]), _FILES_1)
            if "" in groups:
                return cls._read(_inside(root, groups[""]), _FILES_2)
        return None

    @classmethod
    def _read(cls, folder: Path, names: tuple[str, str, str, str]) -> ControlGroup | None:
        limit, used, events, cache = names
        most, taken = (int((folder / name).read_text()) for name in (limit, used))
        if most >= _UNLIMITED:
            return None
        taken -= _counts(folder / "memory.stat").get(cache, 0)
        return cls(most, taken, _counts(folder / events).get("oom_kill", 0))


def _without_number(line: str) -> tuple[str, str]:
    _, controllers, path = line.split(":", 2)
    return ("memory" if "memory" in controllers.split(",") else controllers), path


def _inside(root: Path, path: str) -> Path:
    named = root / path.strip("/")
    return named if named.is_dir() else root


def _counts(file: Path) -> dict[str, int]:
    return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}
