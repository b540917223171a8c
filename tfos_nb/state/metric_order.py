"""Order of metrics, which is the same in every view and independent of the order in which the nodes report."""

from __future__ import annotations

import functools
from collections.abc import Iterable

__all__ = ["in_order", "rank"]

_PREFIXES = ("val_", "test_")
_SETTINGS = ("learning_rate", "lr")  # Keras puts them among an epoch's numbers


def rank(name: str) -> tuple[int, bool, str]:
    """Return the sort key of a metric.

    The training's metrics come first: the loss, then the others by name, as in Keras 3. Then come those of the
    validation (``val_…``), also with the loss first, and those of an evaluation (``test_…``). Values that are set
    rather than measured come last.

    Examples
    --------
    >>> sorted(["val_auc", "lr", "val_loss", "auc", "accuracy", "test_loss", "loss"], key=rank)
    ['loss', 'accuracy', 'auc', 'val_loss', 'val_auc', 'test_loss', 'lr']
    """
    if name in _SETTINGS:
        return (len(_PREFIXES) + 1, True, name)
    for place, prefix in enumerate(_PREFIXES, 1):
        if name.startswith(prefix):
            return (place, name != f"{prefix}loss", name)
    return (0, name != "loss", name)


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once, in the order of :func:`rank`."""
    return list(_sorted(tuple(dict.fromkeys(names))))


@functools.lru_cache(maxsize=256)
def _sorted(names: tuple[str, ...]) -> tuple[str, ...]:
    """Sort names. The result is cached, because all nodes of a cluster report the same names with each step."""
    return tuple(sorted(names, key=rank))
