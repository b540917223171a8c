"""Configuration that another process's Spark application takes over from a session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from tests.versions import connect_client
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


class RemoteSession:
    """What is asked of a session of Spark Connect."""

    def __init__(self, builder: Any) -> None:
        self.client = SimpleNamespace(_builder=builder)
        self.conf = SimpleNamespace(getAll={"spark.sql.ansi.enabled": "false", "spark.app.id": "app-1"})


@connect_client
def test_the_server_of_a_spark_connect_session_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    monkeypatch.setattr("tfos_nb.spark.copied_session.is_connect", lambda session: True)
    url = "sc://host:15003/;token=d34d;user_id=me"
    session: Any = RemoteSession(DefaultChannelBuilder(url))
    assert copied_settings(session) == {"spark.remote": url, "spark.sql.ansi.enabled": "false"}
    with pytest.raises(
        PlanError, match=r"has a channel of its own.* Make the session with SparkSession.builder.remote"
    ):
        copied_settings(cast(Any, RemoteSession(object())))
    monkeypatch.setenv("SPARK_LOCAL_REMOTE", "1")
    with pytest.raises(PlanError, match="has started its own Spark Connect server, which ends with it. Connect to a"):
        copied_settings(session)


def test_without_a_session_the_process_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.spark.copied_session.active_session", lambda: None)
    assert copied_settings(None) is None


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
