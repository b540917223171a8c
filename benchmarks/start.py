"""Measure the time from the start of the cell to the first training step, against the least possible time.

The least possible time is ``python -c "import tensorflow"`` plus an empty Spark job (a ``mapInArrow`` over four empty
tasks). `cold` is the first job, and the first cluster, of a fresh Spark session whose executors are up: Spark has no
Python worker yet. `warm` is the second of each. `prewarmed` is the first cluster of a session whose executors were
warmed in the background, as ``%load_ext tfos_nb`` and ``spark_session()`` do, against the second job. Neither side
counts the session's own start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import programs
from benchmarks.cluster_runs import WORKERS
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings

__all__ = ["empty_job_seconds", "prewarm", "run"]

TARGETS = {"cold": 2.0, "warm": 0.5, "prewarmed": 0.5}
WIDTH = 64
BATCH_SIZE = 64
WARM_SECONDS = 120


def run(settings: Settings) -> Result:
    """Measure the three figures in turns, with a new Spark session for each cold one."""
    names = ("import", "cold_job", "warm_job", "cold_start", "warm_start", "prewarmed_start")
    figures: dict[str, list[float]] = {name: [] for name in names}
    _import_seconds()  # brings TensorFlow's files into the page cache
    with spark_session() as spark:
        empty_job_seconds(spark)  # the driver's JVM serves all sessions: the first one would include its start
    for number in range(settings.repeat):
        figures["import"].append(_import_seconds())
        with spark_session() as spark:
            figures["cold_job"].append(empty_job_seconds(spark))
            figures["warm_job"].append(empty_job_seconds(spark))
        if not settings.only_baselines:
            with spark_session() as spark:
                figures["cold_start"].append(_first_step_seconds(spark))
                figures["warm_start"].append(_first_step_seconds(spark))
            with spark_session() as spark:
                prewarm(spark)
                figures["prewarmed_start"].append(_first_step_seconds(spark))
        newest = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in figures.items() if values)
        settings.say(f"start: {number + 1}/{settings.repeat}: {newest}")
    return Result("start", tuple(_ratios(figures)), dict(figures))


def _ratios(figures: dict[str, list[float]]) -> list[Ratio]:
    if not figures["cold_start"]:
        return []
    imported = median(figures["import"])
    return [
        Ratio(
            f"launch to first step / import tensorflow + empty job, {kind}",
            median(figures[f"{kind}_start"]),
            imported + median(figures[f"{job}_job"]),
            "s",
            TARGETS[kind],
            at_most=True,
        )
        for kind, job in (("cold", "cold"), ("warm", "warm"), ("prewarmed", "warm"))
    ]


def _import_seconds() -> float:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import tensorflow"], check=True, env=environment, stderr=subprocess.DEVNULL, timeout=300
    )
    return time.perf_counter() - started


def empty_job_seconds(spark: SparkSession) -> float:
    """Run an empty job; return its seconds."""
    started = time.perf_counter()
    spark.range(0, 4, 1, 4).mapInArrow(programs.no_rows, "id long").collect()
    return time.perf_counter() - started


def prewarm(spark: SparkSession) -> None:
    """Warm the executors, and wait until they are warm."""
    from tfos_nb.driver.prewarm import begin, look

    begin(spark)
    deadline = time.monotonic() + WARM_SECONDS
    while set(states := look(spark).values()) != {"warm"}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the executors are not warm after {WARM_SECONDS} s: {sorted(states)}")
        time.sleep(0.5)


def _first_step_seconds(spark: SparkSession) -> float:
    """Start two workers and feed them; return the seconds until both have done their first step."""
    from tfos_nb import launch

    columns = (
        f"transform(sequence(1, {WIDTH}), i -> cast(hash(id, i) % 256 as float)) AS features",
        "id % 10 AS label",
    )
    frame = spark.range(0, 8 * BATCH_SIZE, 1, 2).selectExpr(*columns)
    args: dict[str, Any] = {"width": WIDTH, "batch_size": BATCH_SIZE}
    started = time.time()
    with launch(programs.train_tiny_model, args, spark=spark, workers=WORKERS, name="start") as cluster:
        cluster.train(frame, epochs=1)
        cluster.wait()
        results = cluster.results()
    return float(max(result["first_step"] for result in results.values()) - started)
