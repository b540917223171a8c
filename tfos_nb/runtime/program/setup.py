"""Patch TensorFlow and Keras before and while the user's ``main`` runs."""

from __future__ import annotations

from tfos_nb.runtime.datasets.tuning import tune_no_devices
from tfos_nb.runtime.keras import fit
from tfos_nb.runtime.keras.distributed_datasets import divide_datasets
from tfos_nb.runtime.keras.own_loops import mend_own_loops
from tfos_nb.runtime.keras.progress import autolog, progress_callback
from tfos_nb.runtime.keras.saved_files import write_files_once
from tfos_nb.runtime.program.strategies import refuse_what_fails
from tfos_nb.runtime.recovery.keras_state import keep_fits

__all__ = ["autolog", "keep_fits", "patch_keras_fit", "progress_callback"]


def patch_keras_fit() -> str:
    """Patch Keras' ``fit``, refuse calls that would hang or fail, and stop TensorFlow from waiting for its tuning.

    Returns
    -------
    str
        One line for the log: which parts of Keras were patched.
    """
    note = fit.patch_keras_fit()
    refuse_what_fails()
    divide_datasets()
    mend_own_loops()
    write_files_once()
    tune_no_devices()
    return note
