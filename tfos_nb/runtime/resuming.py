"""A ``fit`` that goes on after a loss, by ``BackupAndRestore``, is fed from the epoch on that it goes on with.

Each epoch of such a ``fit`` is one pass over the rows, so the epochs that the backup holds are the passes that the
state holds. Keras 3 and tf_keras learn the epoch before the first row is read, each in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.on_import import when_imported

__all__ = ["watch_restores"]

Tell = Callable[[int], object]


def watch_restores(tell: Tell) -> None:
    """Have ``tell`` called with the number of epochs whenever a ``fit`` has put a backup back."""
    for flavour, watch in (("keras", _watch_keras), ("tf_keras", _watch_tf_keras)):
        when_imported(flavour, functools.partial(watch, tell=tell))


def _watch_keras(keras: Any, tell: Tell) -> None:
    backup = getattr(getattr(keras, "callbacks", None), "BackupAndRestore", None)
    if backup is None or not hasattr(backup, "_load_model"):  # tf_keras by the name of keras, or another Keras
        return
    on_train_begin = backup.on_train_begin

    @functools.wraps(on_train_begin)
    def on_train_begin_that_tells(self: Any, logs: Any = None) -> None:
        on_train_begin(self, logs)
        if epochs := self.model._initial_epoch or 0:
            tell(int(epochs))

    backup.on_train_begin = on_train_begin_that_tells


def _watch_tf_keras(keras: Any, tell: Tell) -> None:
    model: Any = getattr(keras, "Model", None)
    load: Any = getattr(model, "_maybe_load_initial_counters_from_ckpt", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_that_tells(self: Any, steps_per_epoch: Any, initial_epoch: int) -> tuple[int, int]:
        epoch, step = load(self, steps_per_epoch, initial_epoch)
        if epoch > initial_epoch:
            tell(int(epoch))
        return epoch, step

    model._maybe_load_initial_counters_from_ckpt = load_that_tells
