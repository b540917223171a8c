"""Spark sessions for the measurements: executors are separate processes, as on a cluster."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EXECUTORS", "ROOT", "executors_folder", "spark_session"]

ROOT = Path(__file__).resolve().parent.parent
EXECUTORS = 2
_READY_SECONDS = 120.0


@contextmanager
def spark_session(
    cores: int = 2, memory_mb: int = 3072, settings: dict[str, str] | None = None
) -> Iterator[SparkSession]:
    """Start Spark with two executors, yield the session when both are up, and stop it.

    Parameters
    ----------
    cores : int
        Task slots of each executor.
    memory_mb : int
        Memory of each executor; the cache gets about half of it.
    settings : dict of str to str, optional
        More Spark settings.
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("tfos_nb benchmarks")
    for key, value in {**_settings(cores, memory_mb), **(settings or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    folder = executors_folder(spark)
    try:
        spark.sparkContext.setLogLevel("ERROR")
        _await_executors(spark)
        yield spark
    finally:
        spark.stop()
        # Spark leaves the executors' working folders in its installation: this copy is only ours.
        shutil.rmtree(folder, ignore_errors=True)


def executors_folder(spark: SparkSession) -> Path:
    """The folder that holds the executors' working directories."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home()) / "work" / spark.sparkContext.applicationId


def _settings(cores: int, memory_mb: int) -> dict[str, str]:
    return {
        "spark.master": f"local-cluster[{EXECUTORS},{cores},{memory_mb}]",
        "spark.executor.memory": f"{memory_mb}m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The executors import benchmarks.programs, and the package itself where it is not installed.
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executorEnv.TF_CPP_MIN_LOG_LEVEL": "2",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "",
    }


def _await_executors(spark: SparkSession) -> None:
    """Wait for the executors, so that no measurement counts their start."""
    deadline = time.monotonic() + _READY_SECONDS
    pause = threading.Event()
    java = spark.sparkContext._jsc.sc()
    while java.getExecutorMemoryStatus().size() - 1 < EXECUTORS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Spark did not start {EXECUTORS} executors within {_READY_SECONDS:.0f} s")
        pause.wait(0.05)
