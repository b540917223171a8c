"""A real Spark whose executors are processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tfos_nb.java import find_java

__all__ = ["ON_LOOPBACK", "PYTHONPATH", "builder", "environment"]

PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


ON_LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def environment(home: Path) -> dict[str, str]:
    """Return the variables that Spark and its executors need: this Python, this checkout, a home with Spark's jars."""
    return {
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": PYTHONPATH,
    }


def builder(executors: int, cores: int) -> SparkSession.Builder:
    """Return the builder of a session with so many executors of so many slots, without a page of its own."""
    found: SparkSession.Builder = SparkSession.builder.master(f"local-cluster[{executors},{cores},1024]")
    for name, value in ON_LOOPBACK.items():
        found = found.config(name, value)
    return found.config("spark.ui.showConsoleProgress", "false")
