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
        Rows of each shape; None: each shape's own number.
    repeat : int
        How often each figure is taken; the median counts.
    launches : int
        How many clusters the leak benchmark starts and closes, after two to warm up.
    lineage_rows : int or None
        Rows that TensorFlowOnSpark takes of each shape, at most as many as the others; None: each shape's own number.
    lineage_partitions : int
        In how many partitions it gets them.
    without_lineage : bool
        Leave TensorFlowOnSpark out: its environment takes minutes to install and gigabytes to keep.
    minutes : float
        For how long a training is hurt, in the goodput benchmark.
    only_baselines : bool
        Measure what the product is compared with, and not the product.
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
        """Tell whoever watches how far the run is; results go elsewhere."""
        print(text, file=sys.stderr, flush=True)
