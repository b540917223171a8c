"""The control group of this process: a container's, or that of a job on a shared machine (``man 7 cgroups``)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OWN", "ROOT", "Throttling", "counts_in", "folder_of"]

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folder_of(controller: str, root: Path = ROOT, membership: Path = OWN) -> tuple[Path, int] | None:
    """Return the folder with this process's figures of a controller, and the version of control groups; None without.

    Parameters
    ----------
    controller : str
        ``"memory"`` or ``"cpu"``.
    root, membership : Path
        Where the groups are mounted, and the kernel's list of this process's groups. In a container the list may name
        a folder of the host's, and its own group is then at the root.

    Raises
    ------
    OSError
        If the system has no control groups.
    """
    groups: dict[str, str] = {}
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    if controller in groups:  # version 1
        return _inside(root / controller, groups[controller]), 1
    return (_inside(root, groups[""]), 2) if "" in groups else None


def _inside(root: Path, path: str) -> Path:
    named = root / path.strip("/")
    return named if named.is_dir() else root


def counts_in(file: Path) -> dict[str, int]:
    """Return the numbers in a file of a name and a number in each line."""
    return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}


@dataclass(frozen=True)
class Throttling:
    """How often the group has used up its share of the processors.

    A container with a limit of two CPUs may use 200 ms of processor time in each period of 100 ms. If it has used them
    up, all of its threads wait for the next period (the kernel's ``Documentation/scheduler/sched-bwc.rst``).

    Attributes
    ----------
    periods, throttled : int
        Periods in which the group wanted to run, and those in which it had to wait.

    Examples
    --------
    >>> Throttling(30, 20).since(Throttling(20, 15))
    50.0
    """

    periods: int
    throttled: int

    @classmethod
    def now(cls) -> Throttling:
        """Return the current figures; zeros if the group has no limit, or the system has no groups."""
        with contextlib.suppress(OSError, ValueError):
            if found := folder_of("cpu"):
                counts = counts_in(found[0] / "cpu.stat")
                return cls(counts.get("nr_periods", 0), counts.get("nr_throttled", 0))
        return cls(0, 0)

    def since(self, before: Throttling) -> float:
        """Return the part of the periods since then in which the group had to wait, in percent."""
        periods = self.periods - before.periods
        return 100 * (self.throttled - before.throttled) / periods if periods > 0 else 0.0
