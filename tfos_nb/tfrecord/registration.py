"""The data source ``tfrecord``, made known to a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

from tfos_nb.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "register_if_possible"]

NAME = "tfrecord"


def register(spark: SparkSession) -> None:
    """Let a session read and write ``format("tfrecord")``.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Of Spark 4 or newer. Every function of this package that gets a session does this by itself.

    Raises
    ------
    PlanError
        If this Spark has no data sources in Python.

    Examples
    --------
    >>> register(spark)  # doctest: +SKIP
    >>> df.write.format("tfrecord").mode("overwrite").save("digits")  # doctest: +SKIP
    >>> spark.read.format("tfrecord").load("digits")  # doctest: +SKIP
    """
    if not hasattr(spark, "createDataFrame"):
        raise PlanError(f"spark is a {type(spark).__name__}, not a SparkSession")
    if not register_if_possible(spark):
        raise PlanError(
            f"Spark {pyspark.__version__} has no data sources in Python (Spark 4 has): use tfos_nb.tfrecord.write(df, "
            "path) and tfos_nb.tfrecord.read(spark, path)"
        )


def register_if_possible(spark: SparkSession) -> bool:
    """Register the data source where Spark has such; whether it has."""
    try:
        from tfos_nb.runtime.tfrecord.source import TFRecordSource
    except ImportError:
        return False
    if not _is_registered(spark):  # a second time Spark would warn that it replaces the first
        spark.dataSource.register(TFRecordSource)
    return True


def _is_registered(spark: SparkSession) -> bool:
    session = getattr(spark, "_jsparkSession", None)
    if session is None:  # Spark Connect does not tell
        return False
    return bool(session.sessionState().dataSourceManager().dataSourceExists(NAME))
