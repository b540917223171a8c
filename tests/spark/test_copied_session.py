"""Configuration that another process's Spark application takes over from a session."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.spark.copied_session import copied_environment, copied_settings, settings_to_copy


def test_a_sessions_settings_are_copied_as_they_are_now(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", "7")
    copied = copied_settings(spark)
    spark.conf.unset("spark.sql.shuffle.partitions")
    assert copied is not None
    assert copied["spark.sql.shuffle.partitions"] == "7"
    assert copied["spark.master"] == spark.sparkContext.master
    assert not {"spark.app.id", "spark.app.startTime", "spark.executor.id", "spark.tfos_nb.log"} & copied.keys()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"spark.app.id": "app-1", "spark.app.name": "night"}, {"spark.app.name": "night"}),
        ({"spark.driver.port": "7100", "spark.yarn.app.id": "1"}, {"spark.driver.port": "7100"}),
        ({"spark.extraListeners": "sparkmonitor.listener.JupyterSparkMonitorListener"}, {}),
        ({"spark.extraListeners": "sparkmonitor.L,mine.L"}, {"spark.extraListeners": "mine.L"}),
        ({"spark.ui.filters": "org.apache.hadoop.yarn.server.webproxy.AmIpFilter"}, {}),
        ({"spark.ui.filters": "mine.Filter"}, {"spark.ui.filters": "mine.Filter"}),
    ],
)
def test_what_belongs_to_the_running_application_is_left_out(settings: dict[str, str], kept: dict[str, str]) -> None:
    assert settings_to_copy(settings) == kept


def test_a_server_of_spark_connect_is_refused_before_there_is_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.spark.copied_session.active_session", lambda: None)
    assert copied_settings(None) is None
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with pytest.raises(PlanError, match="detach: a Spark Connect session belongs to this kernel"):
        copied_settings(None)


def test_databricks_is_refused_with_what_to_do(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    with pytest.raises(PlanError, match="detach: on Databricks .* Run the notebook as a job instead"):
        copied_settings(spark)


def test_nothing_ties_the_process_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setenv("MY_TOKEN_FILE", "kept")
    found = copied_environment()
    assert "PYSPARK_GATEWAY_PORT" not in found
    assert found["MY_TOKEN_FILE"] == "kept"
