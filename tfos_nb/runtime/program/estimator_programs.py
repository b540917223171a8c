"""Programs that a node runs for an Estimator: the user's training function, and the export function."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.control import wire

__all__ = ["ExportProgram", "TrainProgram", "seed_everything"]


@dataclass(frozen=True)
class TrainProgram:
    """Call ``train_fn(args, ctx)``, and return its result only if it is data.

    Parameters
    ----------
    train_fn : callable
        The user's.
    seed : int or None
        Seed for Python, NumPy and TensorFlow.
    """

    train_fn: Callable[[Any, Any], Any]
    seed: int | None = None

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]:
        return self.train_fn

    def __call__(self, args: Any, ctx: Any) -> Any:
        """Train."""
        if self.seed is not None:
            seed_everything(self.seed)
        if isinstance(getattr(args, "argv", None), list):
            sys.argv = list(args.argv)
        return _data(self.train_fn(args, ctx))


@dataclass(frozen=True)
class ExportProgram:
    """Call ``export_fn(args)`` in a process of its own.

    Parameters
    ----------
    export_fn : callable
        The user's.
    """

    export_fn: Callable[[Any], Any]

    __signature__ = inspect.signature(lambda args, ctx: None)  # as a program's, whatever the user's function takes

    @property
    def __wrapped__(self) -> Callable[[Any], Any]:
        return self.export_fn

    def __call__(self, args: Any, ctx: Any) -> Any:
        """Export."""
        return _data(self.export_fn(args))


def _data(result: Any) -> Any:
    """Return a result if it is data, else None: the caller does not need other results."""
    given = os.fspath(result) if isinstance(result, os.PathLike) else result
    try:
        wire.encode_result(given)
    except wire.NotData:
        return None
    return given


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and TensorFlow, and with it Keras."""
    import tensorflow as tf

    random.seed(seed)
    np.random.seed(seed % 2**32)  # the one that Keras and users draw from
    tf.random.set_seed(seed)
