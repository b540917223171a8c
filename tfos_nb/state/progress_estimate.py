"""Estimate a node's remaining training time from its recent pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import ge
from typing import NamedTuple

from tfos_nb.runtime.control.reports import EVALUATE, OVER, StepReport

__all__ = ["ProgressEstimate"]

_OF_LATE = 30.0  # seconds of training over which the pace is measured
_AT_LEAST = 6  # minimum number of closings and openings that are kept, even if they took longer than that
_KEPT = 256
_KNOWN_AFTER = 1.0  # seconds that must have been measured before there is an estimate


class _Mark(NamedTuple):
    time: float
    position: float  # in epochs, from 0
    ended: int  # number of ended epochs, including their validations and callbacks


class _Interval(NamedTuple):
    """Difference between one mark and a later one."""

    seconds: float = 0.0
    epochs: float = 0.0
    ends: int = 0

    def plus(self, other: _Interval) -> _Interval:
        return _Interval(self.seconds + other.seconds, self.epochs + other.epochs, self.ends + other.ends)


class ProgressEstimate:
    """Estimate progress from the reports of one node, by that node's clock.

    The time of an epoch's steps and the time between epochs are measured separately. The former comes from the steps of
    the last half minute. The latter has two parts, each from its last few occurrences: the end of an epoch (validation,
    checkpoints), and the start of the next one (its dataset). So the estimate does not jump at an epoch's end, and a
    validation does not count as slow training.
    """

    def __init__(self) -> None:
        self._news = False
        self._left: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._last: _Mark | None = None
        self._epochs = 0
        self._steps: deque[_Interval] = deque(maxlen=_KEPT)  # only training steps
        self._between: deque[_Interval] = deque(maxlen=_KEPT)  # ends of epochs (``ends`` > 0) and starts of epochs
        self._closing = _Interval()  # the current end of an epoch
        self._evaluated_meanwhile = False  # whether there was an evaluation since the last mark
        self._evaluating_since: float | None = None
        self._evaluated = 0.0
        self._share_evaluated = 0.0

    def take(self, report: StepReport) -> None:
        """Use the next report."""
        self._news = True
        if report.phase == EVALUATE:
            self._take_evaluation(report)
            return
        if report.phase == OVER and report.epoch is not None:
            self._forget()
            return
        mark = self._mark(report)
        if mark is not None and report.epochs is not None:
            last = self._last
            if last is not None and report.epochs == self._epochs and all(map(ge, mark, last)):
                self._go(last, mark)
            else:
                self._forget()  # the first report, another fit, or a restart
            self._last, self._epochs, self._evaluated_meanwhile = mark, report.epochs, False
        self._evaluating_since = None

    def _mark(self, report: StepReport) -> _Mark | None:
        if report.epoch is None:
            return None
        before = report.epoch - 1
        if report.epoch_end:
            return _Mark(report.time, before + 1.0, before + 1)
        if report.step is not None and report.steps:
            return _Mark(report.time, before + min(1.0, report.step / report.steps), before)
        # The epoch's length is unknown: the first step counts as its start, and later steps give no position.
        return _Mark(report.time, float(before), before) if self._last is None else None

    def _go(self, last: _Mark, mark: _Mark) -> None:
        way = _Interval(mark.time - last.time, mark.position - last.position, mark.ended - last.ended)
        if way.ends:
            _keep(self._between, self._closing.plus(way), _AT_LEAST)
            self._closing = _Interval()
        elif _is_end(last):
            _keep(self._between, way, _AT_LEAST)
        elif self._evaluated_meanwhile:
            self._closing = self._closing.plus(way)
        else:
            _keep(self._steps, way, 1)

    def _take_evaluation(self, report: StepReport) -> None:
        if self._evaluating_since is None:
            self._evaluating_since = report.time
        self._evaluated_meanwhile = True
        self._evaluated = max(0.0, report.time - self._evaluating_since)
        self._share_evaluated = min(1.0, (report.step or 0) / report.steps) if report.steps else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last epoch ends, estimated at the last report; None until they are known."""
        if self._news:
            self._news = False
            left = self._reckon()
            self._left = None if left is None else max(0.0, left)
        return self._left

    def _reckon(self) -> float | None:
        last = self._last
        if last is None:
            return None
        steps, closings = _sum(self._steps), _sum(way for way in self._between if way.ends)
        seen = [way for way in self._between if not way.ends]
        openings = _sum(seen)
        known = steps.seconds + closings.seconds + openings.seconds
        if known < _KNOWN_AFTER or not (steps.epochs or closings.ends):
            return None
        # If epochs are too short for a report of a step, all their time counts as closing and opening.
        for_steps = steps.seconds / steps.epochs if steps.epochs else 0.0
        closing = self._for_closing(for_steps, closings)
        if closing is None:
            return None
        # If an epoch is too short for a report of its opening, its closing includes the opening.
        count = len(seen) if len(seen) + 1 >= closings.ends else closings.ends
        opening = max(0.0, openings.seconds - for_steps * openings.epochs) / max(1, count)
        to_close = self._epochs - last.ended
        to_open = to_close - (not _is_end(last))
        gone = self._closing.seconds + (self._evaluated if self._evaluating_since is not None else 0.0)
        left = for_steps * (self._epochs - last.position) + opening * to_open
        return left + closing * to_close - (min(gone, closing) if to_close else 0.0)

    def _for_closing(self, for_steps: float, closings: _Interval) -> float | None:
        if closings.ends:
            return max(0.0, closings.seconds - for_steps * closings.epochs) / closings.ends
        if self._evaluating_since is None:
            return 0.0
        # The first evaluation is running.
        return self._evaluated / self._share_evaluated if self._share_evaluated else None


def _is_end(mark: _Mark) -> bool:
    return mark.position == mark.ended and mark.ended > 0


def _keep(ways: deque[_Interval], way: _Interval, least: int) -> None:
    """Append ``way``, and drop the oldest ones beyond the last ``_OF_LATE`` seconds, but keep at least ``least``."""
    ways.append(way)
    seconds = sum(one.seconds for one in ways)
    while len(ways) > least and seconds - ways[0].seconds >= _OF_LATE:
        seconds -= ways.popleft().seconds


def _sum(ways: Iterable[_Interval]) -> _Interval:
    total = _Interval()
    for way in ways:
        total = total.plus(way)
    return total
