"""Decide after how many steps a training saves its state, and looks whether it must: often, but at little cost."""

from __future__ import annotations

import math

__all__ = ["SaveSchedule"]

_MOST = 0.01  # of the time of the steps is spent on saving them
_LITTLE = 0.003  # of it, if the steps since the last state are soon done again
_FEW_STEPS = 40
_SECONDS = 0.1  # a driver with few workers can take a position as often
_SECONDS_A_WORKER = 0.02
_GROWTH = 4
_LOOK_SECONDS = 0.4
_ANSWER_SECONDS = 0.1


class SaveSchedule:
    """After which steps to save. It is only state: all workers give it the same numbers, and save after the same steps.

    The interval is the shortest one in which saving takes at most 0.3 % of the time. If that would be more than 40
    steps, it is 40 steps, or the shortest one in which saving takes at most 1 %. It is no shorter than 0.1 s, or 0.02 s
    for each worker. It begins with a few steps and grows at most fourfold at a time, as the first steps tell little.
    Between two states the workers look every 0.4 s whether the driver wants one. What they have asked each other, they
    know 0.1 s later, or at once if steps take longer.

    Parameters
    ----------
    workers : int
        How many workers save: each tells the driver.

    Examples
    --------
    >>> schedule = SaveSchedule(2)
    >>> schedule.is_due(1), schedule.is_due(2)
    (False, True)
    >>> for step in (2, 10, 42):
    ...     schedule.saved(step, per_step=0.010, cost=0.004)
    ...     print(schedule.interval, schedule.is_due(step + schedule.interval - 1))
    8 False
    32 False
    40 False
    >>> schedule.begun(100)
    >>> schedule.saved(100, per_step=0.010, cost=1.0)
    >>> schedule.is_due(120), schedule.is_look_due(139), schedule.is_look_due(140)
    (False, False, True)
    >>> schedule.answer_steps
    10

    Attributes
    ----------
    interval : int
        Steps from one state to the next.
    answer_steps : int
        Steps after which all workers read each other's answers.
    """

    def __init__(self, workers: int) -> None:
        self._least = max(_SECONDS, _SECONDS_A_WORKER * workers)
        self._next = 2  # the first step also traces
        self.interval = self._look_interval = self._next_look = 2
        self.answer_steps = 0

    def is_due(self, step: int) -> bool:
        """Whether to save after a step; they are counted over all epochs."""
        return step >= self._next

    def begun(self, step: int) -> None:
        """Record that the state after ``step`` is being saved; what that costs is not known yet."""
        self._next = step + self.interval
        self.looked(step)

    def saved(self, step: int, *, per_step: float, cost: float) -> None:
        """Record that the state was saved after ``step``; a step takes ``per_step`` seconds, and saving ``cost``."""
        seconds = max(cost / _MOST, min(cost / _LITTLE, _FEW_STEPS * per_step), self._least)
        wanted = math.ceil(round(seconds / max(per_step, 1e-6), 6))  # 40 steps, not 41 for an error in the last digit
        self.interval = max(1, min(wanted, _GROWTH * self.interval))
        self._next = step + self.interval
        self._look_interval = max(1, math.ceil(_LOOK_SECONDS / max(per_step, 1e-6)))
        self.answer_steps = int(_ANSWER_SECONDS / max(per_step, 1e-6))

    def postponed(self, step: int) -> None:
        """Record that no state could be saved after ``step``: it is tried again soon."""
        self._next = step + max(1, self.interval // _GROWTH)

    def is_look_due(self, step: int) -> bool:
        """Whether to look after a step if a state is wanted."""
        return step >= self._next_look

    def looked(self, step: int) -> None:
        """Record that the workers have looked."""
        self._next_look = step + self._look_interval
