"""Patch TensorFlow and Keras before and while the user's ``main`` runs."""

from __future__ import annotations

import importlib.util
import os

from tfos_nb.runtime.datasets.tuning import tune_no_devices
from tfos_nb.runtime.keras import fit
from tfos_nb.runtime.keras.collective_wait import measure_waits, waited
from tfos_nb.runtime.keras.distributed_datasets import cut_of, divide_datasets
from tfos_nb.runtime.keras.own_loops import patch_own_loops
from tfos_nb.runtime.keras.progress import PastEpoch, autolog, progress_callback, was_stopped
from tfos_nb.runtime.keras.saved_files import write_files_once
from tfos_nb.runtime.keras.shuffling import patch_datasets, patch_legacy_arrays
from tfos_nb.runtime.keras.versions import uses_tf_keras
from tfos_nb.runtime.program.strategies import refuse_what_fails
from tfos_nb.runtime.recovery.keras_state import FitHooks, FitKeeping

__all__ = ["FIT_HOOKS", "FitKeeping", "PastEpoch", "autolog", "patch_keras_fit", "progress_callback", "waited"]

FIT_HOOKS = FitHooks(cut_of, fit.iterator_of, fit.build_early, fit.count_from, was_stopped)
"""Facts about the patched Keras that :class:`FitKeeping` needs."""


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
    patch_own_loops()
    patch_datasets()
    if uses_tf_keras(os.environ) and importlib.util.find_spec("tf_keras") is not None:
        patch_legacy_arrays()
    write_files_once()
    measure_waits()
    tune_no_devices()
    return note
