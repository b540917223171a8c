"""Slots in use: running stages, plus node tasks submitted to Spark that have not started.

A Spark task starts a moment after it was submitted. Without this module, a cluster launched in that moment would count
the same slots as free, and wait for them until its timeout. A task also holds its slot for a moment after its job has
failed or was cancelled. A cluster launched in that moment would be refused, although the slot is about to be free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ENDING_SECONDS",
    "Busy",
    "PendingSlots",
    "are_nodes",
    "ending",
    "expect",
    "held",
    "still_ending",
    "still_pending",
]

ENDING_SECONDS = 10.0
"""How long tasks of a cancelled job may hold their slots: Spark gives each Python worker of a task 2 s to end
(``spark.python.task.killTimeout``), and then ends it."""


@dataclass(frozen=True)
class Busy:
    """One running stage: its job's description, its number of running tasks, and the CPUs and GPUs that they hold.

    ``ends`` says that it has failed or was cancelled, so that its tasks are being killed. ``number`` is Spark's number
    of the stage: the jobs of a cell that runs again have the same description.
    """

    description: str
    tasks: int
    cpus: int
    gpus: float
    ends: bool = False
    number: int | None = None


@dataclass(frozen=True)
class PendingSlots:
    """Nodes that were requested from Spark. Until all of them run, their slots count as taken, busy or not.

    ``missing`` returns the number of nodes that do not run yet. ``left`` returns the number of running nodes that hold
    no slot any more. ``over`` returns whether Spark's job has ended.
    """

    description: str
    nodes: int
    cpus: int
    gpus: float
    missing: Callable[[], int]
    left: Callable[[], int]
    over: Callable[[], bool]

    def still(self, stages: tuple[Busy, ...]) -> Busy | None:
        """Return the slots of the nodes that are not yet among the running ``stages``; None if there are none."""
        missing = 0 if self.over() else self.missing()
        running = sum(stage.tasks for stage in stages if stage.description == self.description)
        started = max(0, running - (self.nodes - missing - self.left()))
        left = max(0, missing - started)
        return Busy(f"{self.description}, about to start", left, left * self.cpus, left * self.gpus) if left else None

    def held(self) -> Busy | None:
        """Return the slots that the running nodes hold; None if they hold none."""
        here = 0 if self.over() else self.nodes - self.missing() - self.left()
        return Busy(self.description, here, here * self.cpus, here * self.gpus) if here else None


_pending: list[PendingSlots] = []
_ending: dict[tuple[str, int | None], float] = {}
"""Until when (monotonic) the tasks of a stage may end, by its job's description and its number; None: of any stage."""


def expect(promised: PendingSlots) -> None:
    """Count the slots as taken until the nodes run or their job has ended."""
    _pending.append(promised)


def held() -> tuple[Busy, ...]:
    """Return the slots that this process's nodes hold, for a Spark that does not report its running stages."""
    return tuple(filter(None, (one.held() for one in _pending)))


def are_nodes(stages: tuple[Busy, ...]) -> bool:
    """Return whether all running stages are nodes of this process, which end only with their clusters."""
    nodes = {one.description for one in _pending if not one.over()}
    return all(stage.description in nodes for stage in stages)


def still_pending(stages: tuple[Busy, ...]) -> tuple[Busy, ...]:
    """Return the slots of requested nodes that are not yet among the running ``stages``."""
    _pending[:] = [one for one in _pending if not one.over()]
    return tuple(filter(None, (one.still(stages) for one in _pending)))


def ending(description: str) -> None:
    """Record that a job has failed or was cancelled, so that its tasks will soon leave their slots."""
    _ending[description, None] = time.monotonic() + ENDING_SECONDS


def still_ending(stages: tuple[Busy, ...]) -> bool:
    """Return whether tasks of failed or cancelled jobs still run, which will soon leave their slots."""
    now = time.monotonic()
    for stage in stages:
        if stage.ends:
            _ending.setdefault((stage.description, stage.number), now + ENDING_SECONDS)
    running = {(stage.description, number) for stage in stages for number in (stage.number, None)}
    for one in list(_ending):
        if one not in running:
            _ending.pop(one, None)
    return any(until > now for until in _ending.values())
