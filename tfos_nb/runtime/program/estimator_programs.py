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
    """Call ``train_fn(args, ctx)``, and return its result if it is data, else None.

    Parameters
    ----------
    train_fn : callable
        The user's training function.
    seed : int or None
        Seed for Python, NumPy and TensorFlow.
    """

    train_fn: Callable[[Any, Any], Any]
    seed: int | None = None

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]:
        return self.train_fn

    def __call__(self, args: Any, ctx: Any) -> Any:
        """Train, and return the result of ``train_fn`` if it is data, else None."""
        if self.seed is not None:
            seed_everything(self.seed)
        if isinstance(getattr(args, "argv", None), list):
            sys.argv = list(args.argv)
        return _data(self.train_fn(args, ctx))


@dataclass(frozen=True)
class ExportProgram:
    """Call ``export_fn(args)`` in a separate process.

    Parameters
    ----------
    export_fn : callable
        The user's export function.
    """

    export_fn: Callable[[Any], Any]

    __signature__ = inspect.signature(lambda args, ctx: None)  # that of a program, not that of the user's function

    @property
    def __wrapped__(self) -> Callable[[Any], Any]:
        return self.export_fn

    def __call__(self, args: Any, ctx: Any) -> Any:
        """Export, and return the result of ``export_fn`` if it is data, else None."""
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
    np.random.seed(seed % 2**32)  # NumPy's global generator, which Keras and users use
    tf.random.set_seed(seed)
