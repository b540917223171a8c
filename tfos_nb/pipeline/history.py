"""The metrics of each epoch of a fit."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, KeysView
from typing import Any, overload

__all__ = ["History"]


class History(list[dict[str, Any]]):
    """The metrics of each epoch: ``history[-1]["loss"]``; or by metric, as Keras has them: ``history["loss"][-1]``.

    Parameters
    ----------
    epochs : iterable of dict
        The metrics of each epoch.
    """

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
