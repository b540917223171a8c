"""History of a training in the driver: the metrics of each epoch, and the reported steps, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfos_nb.rich import Rich
from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, PAST, StepReport
from tfos_nb.state import figure, training_curve
from tfos_nb.state.training_curve import Point, points_of

__all__ = ["History"]

_STEPS_KEPT, _STEPS_KEPT_OF_ALL, _STEPS_AT_LEAST = 10_000, 500_000, 100

_Report = tuple[int, StepReport]
"""A report and the generation of the cluster that made it."""


class History(Rich, Mapping[str, list[float]]):
    """Metrics of a training: for each metric the value at the end of each epoch, as in Keras' ``History.history``.

    :meth:`plot` draws them and :meth:`to_pandas` returns them as a table, by epoch or by step. At the end of a
    notebook's cell it shows its charts. The steps of evaluations are left out.

    Parameters
    ----------
    chief : str
        The node whose epochs count.
    nodes : int
        How many nodes report. With many nodes, fewer steps are kept of each, but always the most of the chief.

    Examples
    --------
    >>> history = History("worker:0")
    >>> history.record("worker:0", StepReport(epoch=1, metrics={"loss": 0.5}, epoch_end=True))
    >>> history["loss"]
    [0.5]
    """

    _rich = "history"

    def __init__(self, chief: str, nodes: int = 1) -> None:
        self._chief = chief
        self._each = max(_STEPS_AT_LEAST, min(_STEPS_KEPT, _STEPS_KEPT_OF_ALL // nodes))
        self._lock = threading.Lock()
        self._epochs: list[StepReport] = []
        self._steps: dict[str, deque[_Report]] = {}
        self._of_chief: list[_Report] = []  # of whichever node was the chief
        self._within = 0  # reports in it that do not end an epoch
        self._generation = 1
        self._anew = False
        self._has_own = False  # a report of this cluster's own
        self._drawn: tuple[int, list[Point]] = (0, [])  # the chief's points, and of how many reports they are
        self._reports = 0
        self._fetch: Callable[[str], Sequence[_Report]] | None = None
        self._others: tuple[str, ...] = ()  # nodes whose steps it gets

    def parts(self) -> tuple[str, tuple[StepReport, ...], tuple[_Report, ...], dict[str, tuple[_Report, ...]]]:
        """Return what :meth:`of_parts` makes the same history of: the chief, its epochs and reports, and all steps."""
        for node in self._others:
            self.reports(node)  # fetches them
        with self._lock:
            steps = {node: tuple(reports) for node, reports in self._steps.items()}
            return self._chief, tuple(self._epochs), tuple(self._of_chief), steps

    @classmethod
    def of_parts(
        cls,
        chief: str,
        epochs: Sequence[StepReport],
        of_chief: Sequence[_Report],
        steps: Mapping[str, Sequence[_Report]],
    ) -> History:
        """Return the history of these parts."""
        made = cls(chief, max(1, len(steps)))
        made._epochs, made._of_chief, made._reports = list(epochs), list(of_chief), len(of_chief)
        made._steps = {
            node: deque(reports, _STEPS_KEPT if node == chief else made._each) for node, reports in steps.items()
        }
        made._generation = max((generation for generation, _ in of_chief), default=1)
        return made

    def fetch_from(self, fetch: Callable[[str], Sequence[_Report]], others: Sequence[str]) -> None:
        """Get the steps of other nodes by a call, when they are asked for."""
        self._fetch, self._others = fetch, tuple(others)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy it by its parts: it has a lock."""
        return History.of_parts, self.parts()

    def begin_anew(self) -> None:
        """Record that training continues from an earlier state: epochs that are trained again count once."""
        with self._lock:
            self._anew = True
            self._generation += 1
            if not self._has_own:  # the next nodes tell all of them again
                self._epochs.clear()
                self._of_chief.clear()
                self._steps.clear()
                self._within = 0

    def follow(self, chief: str) -> None:
        """Set the node whose epochs count from now on."""
        with self._lock:
            self._chief = chief

    def record(self, node: str, report: StepReport) -> None:
        """Keep a report of training."""
        only_phase = report.phase == FIT and not report.metrics and not report.epoch_end
        if only_phase or report.phase in (EVALUATE, OVER):
            return
        with self._lock:
            self._has_own |= node == self._chief
            self._record(node, report)

    def record_past(self, node: str, report: StepReport) -> None:
        """Keep the end of an epoch that an earlier cluster has done: nodes tell them before their first step.

        Each generation tells them, also those that this cluster has done. They count until the chief has done a step.
        """
        with self._lock:
            if not self._has_own:
                self._record(node, report)

    def _record(self, node: str, report: StepReport) -> None:
        if node not in self._steps:
            self._steps[node] = deque(maxlen=_STEPS_KEPT if node == self._chief else self._each)
        self._steps[node].append((self._generation, report))
        if node == self._chief:
            self._keep(self._generation, report)
            if report.epoch_end:
                self._go_back(report.epoch)
                self._epochs.append(report)

    def record_late(self, node: str, report: StepReport) -> None:
        """Keep a report that a process made before its end, and that came while its successor was awaited."""
        with self._lock:
            newest = (self._epochs[-1].epoch or 0) if self._epochs else 0
            is_end = report.epoch_end and report.phase != PAST
            if is_end and node == self._chief and (report.epoch or 0) > newest:
                self._epochs.append(report)
                self._keep(self._generation - 1 if self._anew else self._generation, report)

    def _keep(self, generation: int, report: StepReport) -> None:
        """Keep a report of the chief. If they are too many, keep every other one, and all ends of epochs."""
        self._of_chief.append((generation, report))
        self._reports += 1
        self._within += not report.epoch_end
        if self._within > _STEPS_KEPT:
            kept = self._of_chief
            kept[:] = [one for place, one in enumerate(kept) if one[1].epoch_end or place % 2 == 0]
            self._within = sum(not one.epoch_end for _, one in kept)

    def _go_back(self, epoch: int | None) -> None:
        while self._anew and epoch is not None and self._epochs and (self._epochs[-1].epoch or 0) >= epoch:
            self._epochs.pop()
        self._anew = False

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The chief's metrics at the end of each epoch, in order; ``epoch`` counts from 1."""
        with self._lock:
            return [
                {"epoch": report.epoch or number, **report.metrics} for number, report in enumerate(self._epochs, 1)
            ]

    def steps(self, node: str | None = None) -> list[StepReport]:
        """Return the last reports of a node (the chief by default), the oldest first."""
        return [report for _, report in self.reports(node or self._chief)]

    def reports(self, node: str) -> Sequence[_Report]:
        """Return the last reports of a node, each with the generation that made it, the oldest first.

        Raises
        ------
        TfosError
            If they are to be fetched from a detached cluster that has gone.
        """
        fetched = self._fetch(node) if self._fetch is not None and node not in self._steps else ()
        with self._lock:
            if self._fetch is not None:
                self._steps.setdefault(node, deque(fetched))
            return list(self._steps.get(node, ()))

    def points(self, node: str = "") -> list[Point]:
        """Return a node's training curve: each reported step that was not trained again, the oldest first.

        Without ``node`` it is that of the chief, over the whole training. In a long one every other step is left out,
        and again when they are too many.
        """
        if node and node != self._chief:
            return points_of(self.reports(node))
        with self._lock:
            if self._drawn[0] != self._reports:
                self._drawn = (self._reports, points_of(self._of_chief))
            return list(self._drawn[1])

    def to_pandas(self, by: str = "epoch") -> Any:
        """Return the numbers as a pandas DataFrame, with a column for each metric.

        Parameters
        ----------
        by : str
            ``"epoch"``: a row for each epoch. ``"step"``: a row for each step that reached the driver, at most two a
            second, and one for each end of an epoch. From 500 nodes on it is at most one a second.

        Returns
        -------
        pandas.DataFrame
            Its index is the epoch or the step, counted from 1 over the whole training. A metric that was not reported
            is NaN.

        Raises
        ------
        PlanError
            If ``by`` is neither.
        """
        return training_curve.to_pandas(self.points(), training_curve.check_axis(by))

    def plot(self, metrics: str | Sequence[str] | None = None, *, by: str | None = None, log: bool = False) -> Any:
        """Return the curves as a matplotlib figure: a chart for each metric, training and validation in one.

        Lines have a gap where the cluster recovered.

        Parameters
        ----------
        metrics : str or sequence of str, optional
            Which metrics, such as ``"loss"``. Default: all.
        by : str, optional
            ``"epoch"`` or ``"step"``. Default: epochs, if two have ended.
        log : bool, optional
            Whether the y axis is logarithmic.

        Returns
        -------
        matplotlib.figure.Figure
            The figure: a notebook shows it, ``figure.savefig("loss.png")`` saves it.

        Raises
        ------
        MissingPackage
            If matplotlib is not installed.
        PlanError
            If nothing was reported yet, or an argument names something that does not exist.
        """
        return figure.figure(self.points(), metrics, by, log)

    def __getitem__(self, metric: str) -> list[float]:
        values = [epoch[metric] for epoch in self.epochs if metric in epoch and metric != "epoch"]
        if not values:
            raise KeyError(metric)
        return values

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for epoch in self.epochs for name in epoch if name != "epoch"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        if names := self._names():
            return f"<History {len(self._epochs)} epochs: {', '.join(names)}>"
        points = self.points()
        if not points:
            return "<History 0 epochs: nothing reported>"
        within = dict.fromkeys(name for point in points for name in point.metrics)
        return f"<History 0 epochs, {len(points)} steps: {', '.join(within)}>"
