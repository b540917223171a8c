"""A real Spark whose executors are separate processes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tfos_nb.spark.java import find_java

__all__ = ["ARCHIVE", "BRIEF_JAVA", "ON_LOOPBACK", "PYTHONPATH", "QUICK_JAVA", "builder", "environment", "java_options"]

PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
"""Of the classes that Spark loads; :mod:`tests.quick_java` writes it. A JVM that it does not fit does without."""

# A test ends before the optimizing compiler pays off; Java's warnings about an archive do not matter.
BRIEF_JAVA = ("-XX:TieredStopAtLevel=1", "-Xlog:disable", "-Xlog:all=error:stderr")

ON_LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def java_options(driver: str = "", executors: str = "") -> dict[str, str]:
    """Return the variable that makes the JVMs of a driver and its executors start quickly, with one more option each.

    The driver reads options that begin with ``spark.`` as Spark's configuration.
    """
    of_executors = shlex.join([*BRIEF_JAVA, *filter(None, [executors])])
    of_driver = [*BRIEF_JAVA, *filter(None, [driver]), f"-Dspark.executor.extraJavaOptions={of_executors}"]
    return {"SPARK_SUBMIT_OPTS": shlex.join(of_driver)}


_ARCHIVED = f"-XX:SharedArchiveFile={ARCHIVE}"
QUICK_JAVA = java_options(_ARCHIVED, _ARCHIVED)


def environment(home: Path) -> dict[str, str]:
    """Return the variables that Spark and its executors need: this Python, this checkout, a home with Spark's jars."""
    return {
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": PYTHONPATH,
        **QUICK_JAVA,
    }


def builder(executors: int, cores: int) -> SparkSession.Builder:
    """Return the builder of a session with this number of executors and slots, without Spark's UI."""
    found: SparkSession.Builder = SparkSession.builder.master(f"local-cluster[{executors},{cores},1024]")
    for name, value in ON_LOOPBACK.items():
        found = found.config(name, value)
    return found.config("spark.ui.showConsoleProgress", "false")
