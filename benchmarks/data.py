"""The rows that are fed: generated in Spark from their own number, in the two shapes of the measurements.

The values are pseudo-random and mean nothing. They cost what real ones cost: Spark's cache compresses neither floats in
arrays nor doubles, and nobody on the way looks at a value. This module also runs in the environment of
TensorFlowOnSpark, so it imports nothing but the standard library at its head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PARTITIONS", "SCALARS", "SHAPES", "VECTORS", "Shape", "cached_frame", "cached_on_disk"]

PARTITIONS = 8


@dataclass(frozen=True)
class Shape:
    """One shape of row.

    Parameters
    ----------
    name : str
        How the shape is called in the results.
    describes : str
        The shape in words, for the table.
    columns : tuple of str
        Spark SQL expressions over ``id``.
    rows : int
        How many rows the feed takes by default: some seconds' worth, so that a start of half a second is no large part.
    lineage_rows : int
        How many TensorFlowOnSpark takes: it is slower by far, and more rows
        do not change its rate.
    """

    name: str
    describes: str
    columns: tuple[str, ...]
    rows: int
    lineage_rows: int


VECTORS = Shape(
    name="vectors",
    describes="array<float>[784] + label",
    columns=(
        "transform(sequence(0, 783), i -> cast(pmod(hash(id, i), 256) / 255 as float)) AS features",
        "pmod(id, 10) AS label",
    ),
    rows=400_000,
    lineage_rows=40_000,
)
SCALARS = Shape(
    name="scalars",
    describes="16 double columns",
    columns=tuple(f"pmod(hash(id, {index}), 1000003) / 1000003.0D AS c{index:02d}" for index in range(16)),
    rows=8_000_000,
    lineage_rows=200_000,
)
SHAPES = (VECTORS, SCALARS)


def cached_frame(spark: SparkSession, shape: Shape, rows: int, partitions: int = PARTITIONS) -> DataFrame:
    """Generate `rows` rows of `shape`, cache them in Spark's memory, and fill the cache."""
    frame = spark.range(0, rows, 1, partitions).selectExpr(*shape.columns).cache()
    frame.count()
    return frame


def cached_on_disk(spark: SparkSession) -> int:
    """Bytes of cached data that did not fit in memory: a feed measured with any would measure the disk."""
    infos = spark.sparkContext._jsc.sc().getRDDStorageInfo()
    return sum(int(info.diskSize()) for info in infos)
