"""The rows that are fed, in the two shapes of the measurements: Spark generates each row from its number.

The values are pseudo-random. They cost as much as real ones: Spark's cache compresses neither floats in arrays nor
doubles, and no step on the way depends on the values. This module also runs in the environment of TensorFlowOnSpark, so
it imports only the standard library at its top.
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
        Name of the shape in the results.
    describes : str
        The shape in words, for the table.
    columns : tuple of str
        Spark SQL expressions over ``id``.
    rows : int
        Default number of rows of the feed: enough for several seconds, so that a start of half a second hardly counts.
    lineage_rows : int
        Default number of rows of TensorFlowOnSpark: it is much slower, and more rows do not change its rate.
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
    """Return the bytes of cached data that did not fit in memory; if there are any, a feed would measure the disk."""
    infos = spark.sparkContext._jsc.sc().getRDDStorageInfo()
    return sum(int(info.diskSize()) for info in infos)
