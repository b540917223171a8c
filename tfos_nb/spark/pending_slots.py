"""Slots in use: running stages, plus node tasks submitted to Spark that have not started.

A Spark task starts a moment after it was submitted. Without this module, a cluster launched in that moment would count
the same slots as free, and wait for them until its timeout. A task also holds its slot for a moment after its job has
failed or was cancelled. A cluster launched in that moment would be refused, although the slot is about to be free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Busy", "PendingSlots", "are_nodes", "ending", "expect", "held", "still_ending", "still_pending"]

_ENDING_SECONDS = 10.0  # Spark gives a task of Python 2 s to end (spark.python.task.killTimeout), and then ends it


@dataclass(frozen=True)
class Busy:
    """One running stage: what its job is called, how many tasks of it run, and the CPUs and GPUs that they hold."""

    description: str
    tasks: int
    cpus: int
    gpus: float


@dataclass(frozen=True)
class PendingSlots:
    """Nodes that Spark was asked for. Until all of them have come, their slots are taken, busy or not.

    ``missing`` tells how many have not come; ``left`` how many of those that have come keep no slot; ``over`` whether
    Spark's job has ended.
    """

    description: str
    nodes: int
    cpus: int
    gpus: float
    missing: Callable[[], int]
    left: Callable[[], int]
    over: Callable[[], bool]

    def still(self, stages: tuple[Busy, ...]) -> Busy | None:
        """Return what is not among the stages that run."""
        missing = 0 if self.over() else self.missing()
        running = sum(stage.tasks for stage in stages if stage.description == self.description)
        started = max(0, running - (self.nodes - missing - self.left()))
        left = max(0, missing - started)
        return Busy(f"{self.description}, about to start", left, left * self.cpus, left * self.gpus) if left else None

    def held(self) -> Busy | None:
        """Return the slots that nodes hold which have come."""
        here = 0 if self.over() else self.nodes - self.missing() - self.left()
        return Busy(self.description, here, here * self.cpus, here * self.gpus) if here else None


_pending: list[PendingSlots] = []
_ending: dict[str, float] = {}  # what a job is called, and until when its tasks may take to end


def expect(promised: PendingSlots) -> None:
    """Have slots counted as taken until the nodes have come, or their job has ended."""
    _pending.append(promised)


def held() -> tuple[Busy, ...]:
    """Return what nodes hold that this process has asked for, where Spark does not tell which stages run."""
    return tuple(filter(None, (one.held() for one in _pending)))


def are_nodes(stages: tuple[Busy, ...]) -> bool:
    """Whether all that runs are nodes that this process has asked for: they end with their clusters, and no sooner."""
    nodes = {one.description for one in _pending if not one.over()}
    return all(stage.description in nodes for stage in stages)


def still_pending(stages: tuple[Busy, ...]) -> tuple[Busy, ...]:
    """Return what was promised and is not among the stages that run."""
    _pending[:] = [one for one in _pending if not one.over()]
    return tuple(filter(None, (one.still(stages) for one in _pending)))


def ending(description: str) -> None:
    """Note that a job has failed or was cancelled: its tasks are about to leave their slots."""
    _ending[description] = time.monotonic() + _ENDING_SECONDS


def still_ending(stages: tuple[Busy, ...]) -> bool:
    """Whether tasks run that are about to leave their slots."""
    now, running = time.monotonic(), {stage.description for stage in stages}
    for description, until in list(_ending.items()):
        if description not in running or now > until:
            _ending.pop(description, None)
    return bool(_ending)
