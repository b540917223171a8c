"""Save states within an epoch after the same steps on all workers, while the training goes on.

::

    training   ─ step ─ step ┬ snapshot ─ step ─ step ─ step ┬ answer ─ step ─ …
    thread                   └▶ the metrics of all workers, ─┘
                                what they say; write, report

A *round* is what all workers do together after a step. Each takes what its next step would change, and a thread does
the rest. All read the answer after the same later step. If the driver wants a state, or the user stops the cluster,
they wait for the round at once.

Before a round, each worker waits until its last state was written and its rows were reported to the driver. So all
workers have the older one of the two states that a memory holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tfos_nb.runtime.control.wire import encode
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.recovery.fit_agreement import Taken, Totals, WorkersBeside
from tfos_nb.runtime.recovery.fit_contents import StateMetadata, shapes_of
from tfos_nb.runtime.recovery.memory_state import StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.save_schedule import SaveSchedule

__all__ = ["Answer", "Snapshot", "StateRounds", "Write"]

_ROUNDING = 1e-6  # of the variance of equal numbers


@dataclass(frozen=True)
class Snapshot:
    """A worker's state after a step, without its metrics: these are of all workers. ``rest`` has no index yet."""

    moment: StateVersion
    passes: int
    variables: Sequence[Any]
    rest: StateMetadata
    position: PositionHeld


@dataclass(frozen=True)
class Answer:
    """What all workers know after a round, and the seconds of one of the processors that it took here.

    ``busy`` and ``cost`` are means: the seconds of the steps since the round before, and those of the last state.
    ``asked``: the driver wants a state of any of them. ``is_saved``: all know which rows the state includes.
    """

    busy: float
    cost: float
    asked: bool
    is_saved: bool
    seconds: float


@dataclass(frozen=True)
class _Round:
    """A round under way: after which step, how many steps after the one before, and whether it has a state."""

    step: int
    steps: int
    has_state: bool
    answer: Future[Answer]


Write = Callable[[Snapshot, list[Any], bytes], object]
"""Writes a state with these arrays, and the encoded rest; then it reports the state's position."""


class StateRounds:
    """The rounds of one training, on one worker.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy.
    request : SaveRequest
        Says whether the driver wants a state.
    workers : int
        How many workers train.
    write : callable
        Writes a state: :data:`Write`. The thread calls it.

    Attributes
    ----------
    steps : int
        How many steps there were.
    """

    def __init__(self, strategy: Any, request: SaveRequest, workers: int, write: Write) -> None:
        self._strategy, self._request, self._write = strategy, request, write
        self._schedule = SaveSchedule(workers)
        self._thread = ThreadPoolExecutor(1, "tfos_nb state")
        self._round: _Round | None = None
        self._totals: Totals | None = None
        self._workers = WorkersBeside(strategy)
        self._of_looks = Totals(strategy, [], self._workers)
        self._is_wanted = False  # a state, by the driver, as all workers know
        self.steps = 0
        self._since = 0  # the step of the last round with a state
        self._busy = self._began = 0.0  # seconds of the steps since then
        self._cost = 0.0  # seconds that the last state took

    def step_begins(self) -> None:
        """Note the time."""
        self._began = time.perf_counter()

    def step_has_ended(self) -> bool:
        """Return whether to save a state after this step, as all workers do then: :meth:`save`."""
        self._busy += time.perf_counter() - self._began
        self.steps += 1
        is_due = self._schedule.is_due(self.steps)
        if not is_due and self._schedule.is_look_due(self.steps):
            self._look()
        is_answer_due = self._round is not None and self.steps >= self._round.step + self._schedule.answer_steps
        return (is_answer_due and self.finish()) or is_due

    @property
    def can_save(self) -> bool:
        """Whether the variables of metrics are known: :meth:`sum_up`."""
        return self._totals is not None

    def sum_up(self, metrics: Sequence[Any]) -> None:
        """Save these variables of metrics, over all workers; no round may be under way."""
        self._totals = Totals(self._strategy, metrics, self._workers)

    def save(self, snapshot: Snapshot | None, passes: int, *, began: float, is_last: bool = False) -> Answer | None:
        """Save the state after the last step, if all workers have a snapshot of it, and have made so many ``passes``.

        ``is_last``: the training is left after it. ``began`` is the time at which the snapshot was begun. Return the
        answer, if it is known: if the state was wanted, or is the last one.
        """
        assert self._totals is not None, "its variables are known"
        waits = is_last or self._is_wanted or not self._schedule.answer_steps
        self._begin(self._totals, snapshot, passes, has_state=True, waits=waits)
        self._schedule.begun(self.steps)
        self._since, self._busy = self.steps, 0.0
        self._cost = time.perf_counter() - began
        return self._answer() if waits else None

    def finish(self) -> bool:
        """Wait for the last round, if its answer was not read yet; return whether the driver wants a state."""
        if self._round is not None:
            began = time.perf_counter()
            self._answer()
            self._cost += time.perf_counter() - began
        return self._is_wanted

    def _look(self) -> None:
        """Ask all workers whether the driver wants a state of any of them."""
        self.finish()
        self._schedule.looked(self.steps)
        self._begin(self._of_looks, None, 0, has_state=False, waits=False)

    def _begin(self, totals: Totals, snapshot: Snapshot | None, passes: int, *, has_state: bool, waits: bool) -> None:
        mine = self._busy, self._cost, float(self._request.asked), float(snapshot is None), passes, passes**2
        answer = self._thread.submit(self._made, totals, totals.take(mine), snapshot, waits)
        self._round = _Round(self.steps, self.steps - self._since, has_state, answer)

    def _made(self, totals: Totals, taken: Taken, snapshot: Snapshot | None, waits: bool) -> Answer:
        """Learn what all workers say, and write the state if all have one. ``waits``: no step runs meanwhile."""
        began = time.thread_time()  # it waits most of the time, for the other workers and for the training's thread
        metrics, (busy, cost, asked, lacking, mean, of_squares) = totals.read(taken)
        is_saved = not lacking and of_squares - mean**2 <= _ROUNDING
        if snapshot is not None and is_saved:
            arrays = [*snapshot.variables, *metrics]
            position = replace(snapshot.position, waits=waits and asked > 0)
            rest = encode(replace(snapshot.rest, index=shapes_of(arrays)))
            self._write(replace(snapshot, position=position), arrays, rest)
        seconds = (time.thread_time() - began) / (os.cpu_count() or 1)
        return Answer(busy, cost, asked > 0, is_saved, seconds)

    def _answer(self) -> Answer:
        assert self._round is not None, "a round is under way"
        made, self._round = self._round, None
        answer = made.answer.result()
        self._is_wanted = answer.asked
        if made.has_state:
            self._cost += answer.seconds
        if made.has_state and not answer.is_saved:
            self._schedule.postponed(self.steps)
        elif made.has_state and made.steps:  # none if the last step was saved, and is to be kept as the last one
            self._schedule.saved(made.step, per_step=answer.busy / made.steps, cost=answer.cost)
        return answer
