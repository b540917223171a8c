"""Spark, as the driver asks it: by its SparkContext, or over Spark Connect, which has none.

::

    context_of(spark) ─▶ Context      what tfos_nb asks of a Spark: settings, executors, places, jobs by tag, …
                          ├── Classic     PySpark's SparkContext, and Scala's behind it
                          └── Connect     a client of Spark Connect: what its protocol tells

Everything that needs a SparkContext is in :mod:`tfos_nb.spark.contexts.classic`, and so is nearly every call of
PySpark's inner parts; what runs on the executors needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfos_nb.spark.contexts.base import Context, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Context", "context_of", "is_connect"]


def context_of(spark: SparkSession) -> Context:
    """Return what answers for a session; it is cheap, and is not kept."""
    if is_connect(spark):
        from tfos_nb.spark.contexts.connect import Connect

        return Connect(spark)
    from tfos_nb.spark.contexts.classic import Classic

    return Classic(spark.sparkContext)
