"""Register the data source ``tfrecord`` with a Spark session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts import check_session

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
        A session of Spark 4 or newer. Every function of this package that gets a session calls this automatically.

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
    check_session(spark, "give the session, as in register(spark)")
    if not register_if_possible(spark):
        import pyspark

        raise PlanError(
            f"Spark {pyspark.__version__} has no data sources in Python (Spark 4 has): use tfos_nb.tfrecord.write(df, "
            "path) and tfos_nb.tfrecord.read(spark, path)"
        )


def register_if_possible(spark: SparkSession) -> bool:
    """Register the data source if this Spark supports data sources in Python; return whether it does."""
    try:
        from tfos_nb.runtime.tfrecord.source import TFRecordSource
    except ImportError:
        return False
    if not _is_registered(spark):  # the second time, Spark would warn that it replaces the first one
        with _as_active(spark):
            spark.dataSource.register(TFRecordSource)
    return True


@contextlib.contextmanager
def _as_active(spark: SparkSession) -> Iterator[None]:
    """Make this the active session in the block: Spark looks there for a source of the same name (seen with 4.3)."""
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
    """Register the data source if possible. Nothing else depends on it, so a failure is only logged."""
    try:
        register_if_possible(spark)
    except Exception as error:  # noqa: BLE001 - whatever Spark has against it, the functions need no data source
        logger.info("format(%r) is not registered with this Spark: %s", NAME, error)


def _is_registered(spark: SparkSession) -> bool:
    session = getattr(spark, "_jsparkSession", None)
    if session is None:  # Spark Connect does not report it
        return False
    return bool(session.sessionState().dataSourceManager().dataSourceExists(NAME))
