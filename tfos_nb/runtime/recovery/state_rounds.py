"""Save states within an epoch after the same steps on all workers, while the training goes on.

::

    training    ─ step ─ step ┬ snapshot ─ step ─ step ─ answer ─ step ─ step ─ …
    a thread                  └▶ sums of all workers ──┴▶ write, and report to the driver

A *round* is what all workers do together after a step. Each takes what its next step would change, and a thread does
the rest; another one asks whether the driver wants a state, while a state may still be written. All read the answer
after the same later step, or at once if steps take longer than a tenth of a second. They also wait for the writing if
the driver wants the state, or if it is the last one.

Before a round with a state, each worker waits until its last state was written and its rows were reported to the
driver. So all workers have the older one of the two states that a memory holds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
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

__all__ = ["Snapshot", "StateRounds", "Write"]

_ROUNDING = 1e-6  # of the variance of equal numbers
_STATES = 15  # of which the median is taken


@dataclass(frozen=True)
class Snapshot:
    """A worker's state after a step, without its metrics: these are of all workers. ``rest`` has no index yet."""

    moment: StateVersion
    passes: int
    variables: Sequence[Any]
    rest: StateMetadata
    position: PositionHeld


@dataclass(frozen=True)
class _Answer:
    """What all workers know after a round.

    ``busy`` and ``cost`` are means: the seconds of the steps since the state before, and those that saving it took.
    ``asked``: the driver wants a state of any of them. ``is_agreed``: all have a state of this step, in one pass, so it
    is written. ``metrics`` are the values over all workers.
    """

    busy: float
    cost: float
    asked: bool
    is_agreed: bool
    metrics: list[Any]


@dataclass(frozen=True)
class _Written:
    """Whether a state was written and reported, and the seconds of one thread that its round took."""

    succeeded: bool
    seconds: float


@dataclass(frozen=True)
class _Round:
    """A round whose answer was not read: after which step, and how many after the state before."""

    step: int
    steps: int
    has_state: bool
    answer: Future[_Answer]


Write = Callable[[Snapshot, list[Any], bytes], bool]
"""Writes a state with these arrays, and the encoded rest, and reports its position; returns whether it could."""


class _Usual:
    """The median of the last numbers: one state may have waited for something else."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_STATES)

    def add(self, number: float) -> None:
        """Add a number."""
        self._last.append(number)

    @property
    def value(self) -> float:
        """The median; 0 without numbers."""
        return statistics.median(self._last) if self._last else 0.0


class _Costs:
    """What a state costs a worker.

    ``waited`` are the seconds for which it holds up the training, and ``worked`` those of a thread, as a part of all
    processors. ``longer`` says by how much the next step takes longer: TensorFlow copies a variable that is still
    being written when this step changes it.
    """

    def __init__(self) -> None:
        self._waited, self._worked, self._longer = _Usual(), _Usual(), _Usual()
        self.waited = 0.0  # by the last state
        self.steps: list[float] = []  # seconds of those since the last state
        self._has_state = False  # the first of them follows a state

    def written(self, worked: float) -> None:
        """Add what the last state has cost, but for the next step."""
        self._waited.add(self.waited)
        self._worked.add(worked)

    def begin(self, waited: float) -> None:
        """Begin with another state, which has held up the training so far."""
        first, *others = self.steps or [0.0]
        if others and self._has_state:
            self._longer.add(first - statistics.median(others))
        self.steps, self.waited, self._has_state = [], waited, True

    @property
    def usual(self) -> float:
        """Seconds that a state costs."""
        return self._waited.value + max(self._worked.value, self._longer.value)


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
    is_wanted : bool
        Whether the driver wanted a state in the last round, as all workers know.
    """

    def __init__(self, strategy: Any, request: SaveRequest, workers: int, write: Write) -> None:
        self._strategy, self._request, self._write = strategy, request, write
        self._schedule = SaveSchedule(workers)
        self._saving = ThreadPoolExecutor(1, "tfos_nb state")
        self._looking = ThreadPoolExecutor(1, "tfos_nb look")
        self._workers = WorkersBeside(strategy)
        self._of_looks = Totals(strategy, [], self._workers)
        self._totals: Totals | None = None
        self._round: _Round | None = None
        self._writing: Future[_Written] | None = None
        self.is_wanted = False
        self.steps = 0
        self._began = 0.0
        self._costs = _Costs()

    def step_begins(self) -> None:
        """Note the time."""
        self._began = time.perf_counter()

    def step_has_ended(self) -> bool:
        """Return whether to save a state after this step, as all workers do then: :meth:`save`."""
        self._costs.steps.append(time.perf_counter() - self._began)
        self.steps += 1
        is_due = self._schedule.is_due(self.steps)
        if not is_due and self._round is None and self._schedule.is_look_due(self.steps):
            self._schedule.looked(self.steps)
            answer, taken = self._begin(self._of_looks, None, has_state=False)
            self._looking.submit(_ask, answer, self._of_looks, taken)
        if self._round is not None and self.steps >= self._round.step + self._schedule.answer_steps:
            self._read()
        return is_due or self.is_wanted

    def sum_up(self, metrics: Sequence[Any]) -> None:
        """Save these variables of metrics, over all workers."""
        self._totals = Totals(self._strategy, metrics, self._workers)

    def save(self, snapshot: Snapshot | None, *, began: float, is_last: bool = False) -> bool:
        """Save the state after the last step, if all workers have a snapshot of it, with the same number of passes.

        :meth:`finish` comes before, and ``began`` is the time of the snapshot. ``is_last``: the training is left after
        it. Return whether the state was written, and no step may run now: the driver wants it, or it is the last one.
        """
        assert self._totals is not None, "its variables are known"
        waits = is_last or self.is_wanted or not self._schedule.answer_steps
        self._schedule.begun(self.steps)
        answer, taken = self._begin(self._totals, snapshot, has_state=True)
        self._writing = self._saving.submit(self._ask_and_write, answer, self._totals, taken, snapshot, waits)
        self._costs.begin(time.perf_counter() - began)
        return waits and (self._read().asked or is_last) and self.finish()

    def finish(self) -> bool:
        """Wait until the last state was written; return whether it was."""
        if self._round is not None:
            self._read()
        if self._writing is None:
            return False
        began = time.perf_counter()
        written, self._writing = self._writing.result(), None
        self._costs.waited += time.perf_counter() - began
        self._costs.written(written.seconds / (os.cpu_count() or 1))
        return written.succeeded

    def _begin(self, totals: Totals, snapshot: Snapshot | None, *, has_state: bool) -> tuple[Future[_Answer], Taken]:
        """Begin a round; return its answer to come, and what this worker brings, in the order of :func:`_ask`."""
        answer, costs = Future[_Answer](), self._costs
        self._round = _Round(self.steps, len(costs.steps), has_state, answer)
        passes = snapshot.passes if snapshot is not None else 0
        asked, lacking = float(self._request.asked), float(snapshot is None)
        return answer, totals.take((sum(costs.steps), costs.usual, asked, lacking, passes, passes**2))

    def _ask_and_write(
        self, answer: Future[_Answer], totals: Totals, taken: Taken, snapshot: Snapshot | None, waits: bool
    ) -> _Written:
        """Ask all workers, and write the state if all have one. ``waits``: no step runs meanwhile, if it is wanted."""
        began = time.thread_time()  # a thread waits for the training's most of the time
        told = _ask(answer, totals, taken)
        if snapshot is None or not told.is_agreed:
            return _Written(False, time.thread_time() - began)
        arrays = [*snapshot.variables, *told.metrics]
        position = replace(snapshot.position, waits=waits and told.asked)
        rest = encode(replace(snapshot.rest, index=shapes_of(arrays)))
        succeeded = self._write(replace(snapshot, position=position), arrays, rest)
        return _Written(succeeded, time.thread_time() - began)

    def _read(self) -> _Answer:
        assert self._round is not None, "a round is under way"
        made, self._round = self._round, None
        began = time.perf_counter()
        answer = made.answer.result()
        self._costs.waited += time.perf_counter() - began
        self.is_wanted = answer.asked
        if made.has_state and not answer.is_agreed:
            self._schedule.postponed(self.steps)
        elif made.has_state and made.steps:  # none if the last step was saved, and is to be kept as the last one
            self._schedule.saved(made.step, per_step=answer.busy / made.steps, cost=answer.cost)
        return answer


def _ask(answer: Future[_Answer], totals: Totals, taken: Taken) -> _Answer:
    """Wait for what all workers say, and give the answer."""
    try:
        metrics, (busy, cost, asked, lacking, mean, of_squares) = totals.read(taken)
    except BaseException as error:
        answer.set_exception(error)
        raise
    is_agreed = not lacking and of_squares - mean**2 <= _ROUNDING
    answer.set_result(told := _Answer(busy, cost, asked > 0, is_agreed, metrics))
    return told
