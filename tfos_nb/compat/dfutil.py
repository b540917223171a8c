"""Rows as TFRecords, as TensorFlowOnSpark calls it: wired up in :mod:`tfos_nb.compat._deferred`."""

from __future__ import annotations

from typing import Any

from tfos_nb.compat._deferred import DFUTIL, resolve


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(DFUTIL, name, __name__)
