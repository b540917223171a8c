"""Interface to Spark for the driver, through a SparkContext or through Spark Connect, which has none.

The input is a session. The output is a ``Context`` with its jobs, settings and executors, in the same form for both
kinds of session. Only ``classic`` uses a SparkContext, and it has nearly every use of PySpark's private API.
``cluster``, ``detached``, ``driver``, ``inference``, ``magics.diagnosis``, ``pipeline``, ``spark``, ``tfrecord`` and
``widgets`` import this package. Code that runs on the executors does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError, with_article
from tfos_nb.spark.contexts.base import Context, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Context", "check_session", "context_of", "is_connect"]


def check_session(spark: Any, remedy: str) -> None:
    """Raise PlanError if a value is not a SparkSession; the message ends with ``remedy``."""
    if not hasattr(spark, "createDataFrame"):
        raise PlanError(f"spark must be a SparkSession, got {with_article(type(spark).__name__)}; {remedy}")


def context_of(spark: SparkSession) -> Context:
    """Return a new :class:`Context` for a session. Making one is cheap, so it need not be kept."""
    if is_connect(spark):
        from tfos_nb.spark.contexts.connect import Connect

        return Connect(spark)
    from tfos_nb.spark.contexts.classic import Classic

    return Classic(spark.sparkContext)
