"""Find the workers for which the others wait in each step, by how long each waits in collectives.

In synchronous training all workers make the same number of steps in the same time. A step of a worker consists of its
own part (rows, computation, callbacks) and of its wait for the slowest one. So a worker is slow if its own part is much
larger than that of the others. :class:`Stragglers` decides this from what the nodes report, without clock or lock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfos_nb.driver.hangs.explanation import describe_slow
from tfos_nb.runtime.node.stacks import HostFigures, StacksTaken

__all__ = ["Mark", "Straggler", "Stragglers", "say_slow"]

_SLOWER = 1.5  # times the median
_LOST = 0.25  # fraction of a step; smaller losses may be chance and are not reported
_STEPS, _SECONDS = 20, 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Mark:
    """How far a node has come: its number of steps so far, and its seconds of wait, at a time of its own clock."""

    at: float
    steps: int
    waited: float


@dataclass(frozen=True)
class Straggler:
    """A slow worker: its own part of a step, and the median of all workers' parts, as fractions of the step."""

    node: str
    own: float
    median: float


class Stragglers:
    """Workers of one cluster that are slower than the others for 20 steps, and for 5 seconds.

    Examples
    --------
    >>> found, marks = Stragglers(), {"worker:0": Mark(0.0, 0, 0.0), "worker:1": Mark(0.0, 0, 0.0)}
    >>> found.take(marks)
    ()
    >>> found.take({"worker:0": Mark(6.0, 30, 4.2), "worker:1": Mark(6.0, 30, 0.6)})
    (Straggler(node='worker:1', own=0.9, median=0.3),)
    """

    def __init__(self) -> None:
        self._marks: Mapping[str, Mark] = {}
        self._streaks: dict[str, _Streak] = {}
        self._slow: dict[str, Straggler] = {}

    def take(self, marks: Mapping[str, Mark]) -> tuple[Straggler, ...]:
        """Take the nodes' newest marks, and return the workers that are slow now.

        A worker stays slow until it was not slow for as many steps.
        """
        before = self._marks
        if marks.keys() != before.keys() or any(_is_new(mark, before[name]) for name, mark in marks.items()):
            self._marks, self._streaks, self._slow = dict(marks), {}, {}
            return ()
        if marks and all(mark.steps > before[name].steps and mark.at > before[name].at for name, mark in marks.items()):
            self._marks = dict(marks)
            self._compare(before, marks)
        return tuple(self._slow.values())

    def _compare(self, before: Mapping[str, Mark], marks: Mapping[str, Mark]) -> None:
        own = {name: _own_part(before[name], mark) for name, mark in marks.items()}
        median = statistics.median_low(own.values())
        for name, part in own.items():
            is_slow = part > _SLOWER * median and part - median > _LOST
            streak = self._streaks.get(name)
            if streak is None or streak.is_slow != is_slow:
                streak = self._streaks[name] = _Streak(is_slow)
            streak.steps += marks[name].steps - before[name].steps
            streak.seconds += marks[name].at - before[name].at
            if streak.steps >= _STEPS and streak.seconds >= _SECONDS:
                self._note(name, is_slow, Straggler(name, round(part, 3), round(median, 3)))

    def _note(self, name: str, is_slow: bool, found: Straggler) -> None:
        if is_slow:
            self._slow.setdefault(name, found)
        else:
            self._slow.pop(name, None)


@dataclass
class _Streak:
    """Steps in a row in which a worker was slow, or was not."""

    is_slow: bool
    steps: int = 0
    seconds: float = 0.0


def _is_new(mark: Mark, before: Mark) -> bool:
    """Whether a mark is of another process than the one before it."""
    return mark.steps < before.steps or mark.waited < before.waited


def _own_part(before: Mark, mark: Mark) -> float:
    """Return the part of the time since a mark in which a node did not wait for others."""
    return min(1.0, max(0.0, 1 - (mark.waited - before.waited) / (mark.at - before.at)))


def say_slow(found: Straggler, samples: Sequence[StacksTaken]) -> str:
    """Return a text about a slow worker, which follows the node's name.

    Parameters
    ----------
    found : Straggler
        The worker.
    samples : sequence of StacksTaken
        Its stacks at several moments, and its host's figures, as far as they have come.
    """
    parts = [f"is slow: its own part of a step is {found.own:.0%}, that of the others {found.median:.0%}"]
    if samples:
        parts += [f"it {describe_slow([replace(one, memory_pressure=0.0) for one in samples])}"]  # its host is below
    if samples and samples[-1].host is not None:
        parts += [_host(samples[-1].host, samples[-1].memory_pressure)]
    return "; ".join(parts)


def _host(figures: HostFigures, memory_pressure: float) -> str:
    pressure = f"{memory_pressure:.0f} %" if memory_pressure >= 0 else "unknown"
    limited = f"; its container waits {figures.throttled:.0f} % of the time for its CPU limit"
    return (
        f"its host: CPU {figures.cpu_percent:.0f} % of {figures.cpus}, memory pressure {pressure}, "
        f"network {figures.received / _MIB:.1f} MiB/s in and {figures.sent / _MIB:.1f} MiB/s out"
        f"{limited if figures.throttled >= 1 else ''}"
    )
