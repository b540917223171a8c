"""Adapt ``BackupAndRestore`` to rows that are fed: report the restored epoch, and save only whole epochs.

Each epoch of a ``fit`` is one pass over the rows. So the number of epochs in a restored backup is the number of passes
that are not fed again. Keras 3 and tf_keras read this number at different places, both before the first row.

A backup in the middle of an epoch has weights that have seen some of its rows. Keras would continue with the epoch's
first row, and train on these rows twice. So if rows are fed and may be fed again, only whole epochs are saved.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.code.on_import import when_imported

__all__ = ["save_whole_epochs", "watch_restores"]

_log = logging.getLogger(__name__)

Tell = Callable[[int], object]


def watch_restores(tell: Tell) -> None:
    """Call ``tell`` with the number of epochs in the backup whenever a ``fit`` has restored one.

    Applies to Keras 3 and to tf_keras, now or when they are imported.
    """
    for flavour, watch in (("keras", _watch_keras), ("tf_keras", _watch_tf_keras)):
        when_imported(flavour, functools.partial(watch, tell=tell))


def save_whole_epochs() -> None:
    """Let ``BackupAndRestore(…, save_freq=100)`` save at the end of each epoch instead, and log a warning."""
    for flavour in ("keras", "tf_keras"):
        when_imported(flavour, _save_whole_epochs)


def _save_whole_epochs(keras: Any) -> None:
    backup = _backup_of(keras)
    if backup is None or hasattr(backup.on_train_begin, "whole_epochs"):  # keras may be an alias of tf_keras
        return
    on_train_begin, takes_false_for_one = backup.on_train_begin, _is_keras_3(backup)

    @functools.wraps(on_train_begin)
    def on_train_begin_of_whole_epochs(self: Any, logs: Any = None) -> None:
        if self.save_freq != "epoch" and (self.save_freq or takes_false_for_one):
            _log.warning(
                "BackupAndRestore(save_freq=%r) saves only at the end of each epoch here: from a state in the "
                "middle of an epoch Keras would train on some rows twice. ctx.checkpoint(rows=…) saves a state that "
                "avoids this",
                self.save_freq,
            )
            self.save_freq = "epoch"
        on_train_begin(self, logs)

    on_train_begin_of_whole_epochs.whole_epochs = True  # type: ignore[attr-defined]
    backup.on_train_begin = on_train_begin_of_whole_epochs


def _watch_keras(keras: Any, tell: Tell) -> None:
    backup = _backup_of(keras)
    if backup is None or not _is_keras_3(backup):  # keras may be an alias of tf_keras, or another version
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


def _backup_of(keras: Any) -> Any:
    return getattr(getattr(keras, "callbacks", None), "BackupAndRestore", None)


def _is_keras_3(backup: Any) -> bool:
    return hasattr(backup, "_load_model")
