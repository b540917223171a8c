"""What is refused, or said, before the process of a detached cluster starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfos_nb import launch
from tfos_nb.detached import starting
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError


def main(args: Any, ctx: Any) -> None:
    """Do nothing: no node starts."""


def rows(spark: Any) -> None:
    """Read nothing."""


def rows_of_a_day(spark: Any, day: str) -> None:
    """Read nothing."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"detach": True, "keep": -1}, "keep must be a number of hours, 0 or more and at most 10000, got -1"),
        ({"detach": True, "keep": float("nan")}, "keep must be a number of hours"),
        ({"detach": True, "epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"detach": True, "validation": rows}, "validation= needs data="),
        ({"detach": True, "data": "rows.parquet"}, "data: a detached cluster reads its rows itself"),
        (
            {"detach": True, "data": rows_of_a_day},
            r"data: rows_of_a_day\(spark: .*, day: .*\) .* is called as rows_of_a_day\(spark\): give",
        ),
        ({"detach": True, "data": rows, "input_mode": "tensorflow"}, "the nodes read files themselves"),
        ({"detach": "cluster"}, "detach must be True, False or 'executor', got 'cluster'"),
        ({"detach": "executor", "data": rows}, "detach='executor' needs a session of Spark Connect"),
        ({"data": rows}, r"data= goes with detach=True: without it, call cluster\.train\(df\)"),
        ({"validation": rows}, "validation= goes with detach=True"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        launch(main, **options)


def test_a_frame_in_the_args_is_refused_with_what_a_detached_cluster_takes() -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})()
    with pytest.raises(PlanError, match="args, a DataFrame, .*: a detached cluster reads its rows itself") as caught:
        launch(main, frame, detach=True)
    assert "feed it with" not in str(caught.value)
    with pytest.raises(PlanError, match="args, a DataFrame, .*: feed it with --data args"):
        launch(main, frame)


def test_an_active_mlflow_run_of_the_kernel_is_not_continued_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    try:
        starting._warn_of_active_run(None)
        assert caplog.text == ""
        with mlflow.start_run():
            starting._warn_of_active_run(False)
            assert "active MLflow run" not in caplog.text
            starting._warn_of_active_run(None)
    finally:
        mlflow.set_tracking_uri(before)
    assert "not logged to this kernel's active MLflow run" in caplog.text


def test_relative_paths_are_the_kernels_for_a_process_on_an_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = Settings().with_absolute_paths("mnist")
    assert (usual.model_dir, usual.log_dir, usual.record) == (f"{tmp_path}/tfos_models/mnist", None, True)
    given = Settings(model_dir="models", log_dir="logs", record="records").with_absolute_paths("mnist")
    assert (given.model_dir, given.log_dir, given.record) == tuple(
        f"{tmp_path}/{name}" for name in ("models", "logs", "records")
    )
    assert Settings(model_dir="hdfs://h/m").with_absolute_paths("mnist").model_dir == "hdfs://h/m"
