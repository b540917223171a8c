"""Interface to Spark for the driver, through a SparkContext or through Spark Connect, which has none.

::

    context_of(spark) ─▶ Context      common interface: settings, executors, places, jobs by tag, …
                          ├── Classic     PySpark's SparkContext, and Scala's behind it
                          └── Connect     a client of Spark Connect, limited to its protocol

The input is a session. The output is jobs, settings and executors, in the same form for both kinds of session.
Everything that needs a SparkContext is in :mod:`tfos_nb.spark.contexts.classic`, and so is nearly every use of
PySpark's private API. ``spark``, ``driver``, ``cluster``, ``inference``, ``tfrecord``, ``pipeline``, ``widgets`` and
``magics.diagnosis`` import this package. Code that runs on the executors does not.
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
