"""The metrics of each epoch of a fit."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, KeysView, Sequence
from typing import Any, overload

from tfos_nb.rich import Rich
from tfos_nb.state import figure, training_curve
from tfos_nb.state.training_curve import Point

__all__ = ["History"]


class History(Rich, list[dict[str, Any]]):
    """The metrics of each epoch: ``history[-1]["loss"]``; or by metric, as Keras has them: ``history["loss"][-1]``.

    :meth:`plot` draws the curves, and :meth:`to_pandas` returns the numbers as a table. At the end of a notebook's cell
    it shows its charts.

    Parameters
    ----------
    epochs : iterable of dict
        The metrics of each epoch.
    """

    _rich = "history"

    def __init__(self, epochs: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(epochs)

    @overload  # type: ignore[override]
    def __getitem__(self, key: str) -> list[Any]: ...

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, key: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, key: Any) -> Any:
        """Return an epoch by its place, or a metric of all epochs by its name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        metrics = self.by_metric()
        if key not in metrics:
            raise KeyError(f"no metric {key!r}; the history has {', '.join(metrics) or 'none'}")
        return metrics[key]

    def by_metric(self) -> dict[str, list[Any]]:
        """Return ``{metric: its value in each epoch that has it}``."""
        names = dict.fromkeys(name for epoch in self for name in epoch)
        return {name: [epoch[name] for epoch in self if name in epoch] for name in names}

    def keys(self) -> KeysView[str]:
        """Return the metrics' names."""
        return self.by_metric().keys()

    def items(self) -> ItemsView[str, list[Any]]:
        """Return the metrics with their values in each epoch."""
        return self.by_metric().items()

    def points(self) -> list[Point]:
        """Return the training curve: a point for each epoch."""
        made = []
        for number, epoch in enumerate(self, 1):
            numbers = {name: float(value) for name, value in epoch.items() if isinstance(value, (int, float))}
            numbers.pop("epoch", None)
            made.append(Point(number, number, numbers, ends_epoch=True))
        return made

    def to_pandas(self) -> Any:
        """Return the numbers as a pandas DataFrame, with a row for each epoch and a column for each metric."""
        return training_curve.to_pandas(self.points())

    def plot(self, metrics: str | Sequence[str] | None = None, *, log: bool = False) -> Any:
        """Return the curves as a matplotlib figure: a chart for each metric, training and validation in one.

        Parameters
        ----------
        metrics : str or sequence of str, optional
            Which metrics, such as ``"loss"``. Default: all.
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
            If there is no epoch, or ``metrics`` names one that does not exist.
        """
        return figure.figure(self.points(), metrics, "epoch", log)
