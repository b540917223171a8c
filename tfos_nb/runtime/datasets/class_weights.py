"""Compute the weight of each row from its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfos_nb.errors import FeedFailed

__all__ = ["weights_of"]


def weights_of(labels: np.ndarray[Any, Any], table: Mapping[Any, float], column: str) -> np.ndarray[Any, Any]:
    """Return the weight of each row, as float32 of shape ``(rows,)``.

    Parameters
    ----------
    labels : numpy.ndarray
        One class per row, of shape ``(rows,)`` or ``(rows, 1)``, or one-hot of shape ``(rows, classes)``.
    table : mapping
        Weights by class, which is a number or text. A class that is missing has the weight 1.
    column : str
        Name of the labels' column, for errors.

    Raises
    ------
    FeedFailed
        If the labels have another shape or type than the table's classes, or a weight is no number.

    Examples
    --------
    >>> weights_of(np.array([0, 1, 1, 2]), {0: 0.5, 1: 2.0}, "label").tolist()
    [0.5, 2.0, 2.0, 1.0]
    """
    if labels.ndim > 2:
        raise FeedFailed(
            f"class_weight: column {column!r} must have one class for each row, got shape {labels.shape[1:]}; give y a "
            "column of numbers, of text, or of one-hot vectors"
        )
    if labels.ndim == 2 and labels.shape[1] > 1:
        labels = labels.argmax(axis=1)
    _check_table(labels, table, column)
    known = {key.encode() if isinstance(key, str) else key: float(weight) for key, weight in table.items()}
    classes, places = np.unique(labels.reshape(len(labels)), return_inverse=True)
    weights = np.array([known.get(one, 1.0) for one in classes.tolist()], dtype=np.float32)
    found: np.ndarray[Any, Any] = weights[places.reshape(-1)] if len(labels) else np.zeros(0, np.float32)
    return found


def _check_table(labels: np.ndarray[Any, Any], table: Mapping[Any, float], column: str) -> None:
    """Raise FeedFailed for a class of another type than the labels, or for a weight that is no number.

    A class of another type would never match, so its rows would have the weight 1 without notice.
    """
    text = labels.dtype.kind in "OSU"
    for key, weight in table.items():
        if isinstance(key, (str, bytes)) != text:
            holds = "text: name it in quotes" if text else f"{labels.dtype}: name it by a number, without quotes"
            raise FeedFailed(f"class_weight names the class {key!r}, but column {column!r} has {holds}")
        if not isinstance(weight, (int, float, np.number)):
            raise FeedFailed(f"class_weight: the weight of class {key!r} must be a number, got {weight!r}")
