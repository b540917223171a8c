"""Each run leaves a record: while it trains, when it is done, when it fails, and when its kernel is killed."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

import tfos_nb
from tests.conftest import ENVIRONMENT
from tests.waiting import until
from tfos_nb import errors, launch
from tfos_nb.driver.membership.journal import replay


def counting(args: Any, ctx: Any) -> int:
    """Read all rows and report each pass as an epoch."""
    rows = 0
    for epoch in (1, 2):
        for batch in ctx.dataset(8):
            rows += int(batch["id"].shape[0])
        ctx.report(epoch=epoch, epoch_end=True, loss=args["loss"] / epoch)
        if epoch == args.get("fails_in"):
            raise ValueError("no good")
    return rows


def test_a_finished_run_leaves_its_record_beside_its_model(spark: SparkSession, tmp_path: Path) -> None:
    args = {"loss": 0.5, "api_key": "d34d", "odd": object}
    place = tmp_path / "models" / "mnist"
    with launch(counting, args, spark=spark, workers=2, name="mnist", model_dir=place, record=True) as cluster:
        cluster.train(spark.range(100).coalesce(4), epochs=2)
    (file,) = (place / "tfos_runs").iterdir()
    assert file.name.endswith(f"-{cluster.id}.json")
    assert "d34d" not in file.read_text()
    (run,) = tfos_nb.runs(tmp_path / "models")
    assert (run.id, run.name, run.outcome, run.error) == (cluster.id, "mnist", "done", "")
    assert run.plan == {"workers": 2}
    assert run.arguments == {"loss": 0.5, "api_key": "…"}
    assert run.rows == 200
    assert run["loss"] == [0.5, 0.25]
    assert [point.epoch for point in run.points if point.ends_epoch] == [1, 2]
    assert run.model_dir == str(place)
    assert run.spark == {"application": spark.sparkContext.applicationId, "master": spark.sparkContext.master}
    assert run.versions["tfos_nb"] == tfos_nb.__version__
    assert run.seconds == pytest.approx(cluster.snapshot().elapsed, abs=0.01)
    assert cluster.run.epochs == run.epochs
    replayed = replay(cluster.events())
    assert [one.status for one in replayed.members.values()] == [one.status for one in cluster.snapshot().nodes]


def test_the_record_of_a_failed_run_says_why_it_failed(spark: SparkSession, tmp_path: Path) -> None:
    args = {"loss": 0.5, "fails_in": 1}
    with (
        pytest.raises(errors.NodeFailed),
        launch(counting, args, spark=spark, workers=1, record=tmp_path) as cluster,
    ):
        cluster.train(spark.range(32), epochs=2)
    (run,) = tfos_nb.runs(tmp_path)
    assert (run.outcome, run["loss"]) == ("failed", [0.5])
    assert run.error.startswith("worker:0")
    assert "ValueError: no good" in run.error


def test_a_run_with_record_false_leaves_no_file(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with launch(counting, {"loss": 1.0}, spark=spark, record=False) as cluster:
        cluster.train(spark.range(8), epochs=2)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_written_causes_one_warning_and_no_failure(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), launch(counting, {"loss": 1.0}, spark=spark, record="/proc/no") as cluster:
        cluster.train(spark.range(8), epochs=2)
    assert cluster.result() == 8 * 2
    told = [record.getMessage() for record in caplog.records if "record" in record.getMessage()]
    assert len(told) == 1, told
    assert told[0].startswith("the run's record /proc/no/tfos_runs/")
    assert "record=DIR writes it elsewhere, and record=False nowhere" in told[0]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("", "record must be True or False, or the directory of the record, got ''"),
        (3, "record must be a path, or a URL, got 3"),
        (None, "record must be True or False"),
        ("hdfs:/runs", "record: hdfs:/…: a URL has two slashes"),
        (__file__, "is a file: give a directory"),
    ],
)
def test_an_invalid_record_is_refused(record: Any, told: str) -> None:
    with pytest.raises(errors.PlanError, match=told):
        launch(counting, record=record)


KERNEL = textwrap.dedent(
    """
    import tfos_nb
    from tests.end_to_end.test_run_records import counting_slowly

    cluster = tfos_nb.launch(counting_slowly, {"loss": 1.0}, workers=1, input_mode="tensorflow", model_dir="m")
    print(cluster.id, flush=True)
    cluster.wait()
    """
)


def counting_slowly(args: Any, ctx: Any) -> None:
    for epoch in range(1, 10_000):
        ctx.report(epoch=epoch, epoch_end=True, loss=args["loss"] / epoch)
        time.sleep(0.2)


def test_the_record_of_a_killed_kernels_run_has_all_epochs_so_far(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdout is not None
        name = kernel.stdout.readline().strip()
        children = psutil.Process(kernel.pid).children(recursive=True)
        assert until(lambda: (runs := tfos_nb.runs(tmp_path / "m")) and runs[0].epochs, 60)
        assert tfos_nb.runs(tmp_path / "m")[name].outcome == "running"
        os.kill(kernel.pid, signal.SIGKILL)
    run = tfos_nb.runs(tmp_path / "m")[name]
    assert (run.outcome, run["loss"][0]) == ("killed", 1.0)
    json.loads(Path(run.path).read_text())
    psutil.wait_procs(children, 60)
