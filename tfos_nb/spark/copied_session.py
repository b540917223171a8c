"""Configuration of a session, from which another process makes an application of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts.base import is_connect
from tfos_nb.spark.session import REMOTE, active_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["copied_environment", "copied_settings", "settings_to_copy"]

# Set by Spark for the running application, or valid in its process only.
_OF_THE_APPLICATION = (
    *("spark.app.id", "spark.app.startTime", "spark.app.submitTime", "spark.app.initial."),
    *("spark.executor.id", "spark.repl.", "spark.driver.appUIAddress", "spark.yarn.app.", "spark.org.apache.hadoop."),
    *("spark.sql.artifact.", "spark.tfos_nb.log", "spark.driver.extraJavaOptions.", "spark.remote"),
)
_LISTENERS = "spark.extraListeners"
_FILTERS = "spark.ui.filters"  # YARN adds one for the running application
_OF_A_LOCAL_SERVER = "SPARK_LOCAL_REMOTE"  # set by PySpark where the kernel has started the server
_ENVIRONMENT = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "JPY_PARENT_PID", "SPARKMONITOR_KERNEL_PORT")


def copied_settings(spark: SparkSession | None) -> dict[str, str] | None:
    """Return the configuration for an application like this session's; None if there is no session.

    Raises
    ------
    PlanError
        If the session is of Databricks, or of a Spark Connect server that cannot be found or continue without this
        process.
    """
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        raise PlanError(
            "detach: on Databricks a process of its own gets no executors, since the compute's driver has them all. "
            "Run the notebook as a job instead: it continues when the browser is closed"
        )
    session = active_session() if spark is None else spark
    if session is None:
        return None
    of_sql = {key: str(value) for key, value in session.conf.getAll.items() if key.startswith("spark.sql.")}
    if is_connect(session):
        return {REMOTE: _server_of(session), **settings_to_copy(of_sql)}
    return settings_to_copy(dict(session.sparkContext.getConf().getAll()) | of_sql)


def _server_of(session: Any) -> str:
    """Return the URL of a session's Spark Connect server, with its token."""
    if _OF_A_LOCAL_SERVER in os.environ:
        raise PlanError(
            "detach: this kernel has started its own Spark Connect server, which ends with it. Connect to a server "
            "that runs by itself, as in SparkSession.builder.remote('sc://host:15002')"
        )
    url = getattr(getattr(session.client, "_builder", None), "url", None)  # absent if a program made the channel itself
    if url is None:
        raise PlanError(
            "detach: this Spark Connect session has a channel of its own, which another process cannot make again. "
            "Make the session with SparkSession.builder.remote(URL)"
        )
    return str(url._replace(scheme="sc").geturl())


def settings_to_copy(settings: Mapping[str, str]) -> dict[str, str]:
    """Return a configuration without what belongs to the running application, its kernel or its host's page."""
    kept = {key: value for key, value in settings.items() if not key.startswith(_OF_THE_APPLICATION)}
    for key, others in ((_LISTENERS, "sparkmonitor"), (_FILTERS, "org.apache.hadoop.yarn")):
        if others in kept.get(key, ""):
            names = [name for name in kept.pop(key).split(",") if not name.strip().startswith(others)]
            kept |= {key: ",".join(names)} if names else {}
    return kept


def copied_environment() -> dict[str, str]:
    """Return this process's environment without what ties a process to this kernel and its JVM."""
    return {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
