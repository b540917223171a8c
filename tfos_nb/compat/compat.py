"""``compat``: functions that hide differences between versions of TensorFlow, under TensorFlowOnSpark's names."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tfos_nb.compat import gpu_info
from tfos_nb.runtime.storage.remote import Draft

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a Keras model as a SavedModel. The chief writes it; other nodes take part, and discard their copy."""
    if is_chief:
        with Draft(export_dir) as draft:
            _export(model, draft.path)
        return
    with tempfile.TemporaryDirectory(prefix="tfos_nb-export-") as scratch:
        _export(model, os.path.join(scratch, "model"))


def _export(model: Any, directory: str) -> None:
    if hasattr(model, "export"):
        model.export(directory)
    else:
        model.save(directory, save_format="tf")


def disable_auto_shard(options: Any) -> None:
    """Set ``tf.data.Options`` so that TensorFlow does not divide the rows among workers again."""
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


def is_gpu_available() -> bool:
    """Return whether this host has a GPU."""
    return gpu_info.is_gpu_available()
