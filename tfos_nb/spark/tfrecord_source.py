"""The data source ``tfrecord``, made known to a Spark session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfos_nb.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "register_if_possible", "register_quietly"]

NAME = "tfrecord"
logger = logging.getLogger(__name__)


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
        import pyspark

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
        with _as_active(spark):
            spark.dataSource.register(TFRecordSource)
    return True


@contextlib.contextmanager
def _as_active(spark: SparkSession) -> Iterator[None]:
    """Have Spark look into this session, not the active one, for a source of that name (seen with 4.3)."""
    ours = getattr(spark, "_jsparkSession", None)
    if ours is None:
        yield
        return
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(ours)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def register_quietly(spark: SparkSession) -> None:
    """Register the data source where that works. Nothing else depends on it, so a refusal is ignored."""
    try:
        register_if_possible(spark)
    except Exception as error:  # noqa: BLE001 - whatever Spark has against it, the functions need no data source
        logger.info("format(%r) is not registered with this Spark: %s", NAME, error)


def _is_registered(spark: SparkSession) -> bool:
    session = getattr(spark, "_jsparkSession", None)
    if session is None:  # Spark Connect does not tell
        return False
    return bool(session.sessionState().dataSourceManager().dataSourceExists(NAME))
