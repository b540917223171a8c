"""Settings of the benchmarks, from the command line."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.data import PARTITIONS

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Parameters
    ----------
    rows : int or None
        Rows of each shape; None: each shape's default.
    repeat : int
        How often each figure is measured; the median counts.
    launches : int
        How many clusters the leak benchmark starts and closes, after two for warming up.
    lineage_rows : int or None
        Rows of each shape for TensorFlowOnSpark, at most as many as `rows`; None: each shape's default.
    lineage_partitions : int
        Number of partitions of TensorFlowOnSpark's rows.
    without_lineage : bool
        Leave TensorFlowOnSpark out: its environment takes minutes to install and gigabytes to keep.
    minutes : float
        How long the goodput benchmark causes faults.
    only_baselines : bool
        Measure only what tfos_nb is compared with.
    """

    rows: int | None = None
    repeat: int = 3
    launches: int = 20
    lineage_rows: int | None = None
    lineage_partitions: int = PARTITIONS
    without_lineage: bool = False
    minutes: float = 30.0
    only_baselines: bool = False

    def say(self, text: str) -> None:
        """Print how far the run is; results go elsewhere."""
        print(text, file=sys.stderr, flush=True)
