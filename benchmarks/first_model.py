"""Time a session's first rows through a model, with Python workers forked from the warm process and without.

On both sides, the executors were warmed in the background, and Spark has run a Python function. In the second
measurement, the workers have the model already.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import start
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median
from tfos_nb.runtime.node.warm_process import DAEMON_CONF, PYTHON_DAEMON

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings

__all__ = ["run"]

DAEMONS = {"forked": PYTHON_DAEMON, "importing": "pyspark.daemon"}
TARGET = 0.5


def run(settings: Settings) -> Result:
    """Measure sessions of both daemons in turns."""
    import keras

    figures: dict[str, list[float]] = {f"{when}_{kind}": [] for kind in DAEMONS for when in ("first", "second")}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.keras"
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(64), keras.layers.Dense(1)]).save(model)
        for number in range(settings.repeat):
            for kind, daemon in DAEMONS.items():
                with spark_session(settings={DAEMON_CONF: daemon}) as spark:
                    start.prewarm(spark)
                    start.empty_job_seconds(spark)
                    figures[f"first_{kind}"].append(_applied_seconds(spark, model))
                    figures[f"second_{kind}"].append(_applied_seconds(spark, model))
            newest = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in figures.items())
            settings.say(f"first_model: {number + 1}/{settings.repeat}: {newest}")
    first, importing = median(figures["first_forked"]), median(figures["first_importing"])
    name = "first rows through a model: workers forked / workers that import TensorFlow"
    return Result("first_model", (Ratio(name, first, importing, "s", TARGET, at_most=True),), dict(figures))


def _applied_seconds(spark: SparkSession, model: Path) -> float:
    from tfos_nb import predict

    rows = spark.range(0, 1000, 1, 4).selectExpr("CAST(id AS FLOAT) x")
    started = time.perf_counter()
    predict(rows, str(model)).collect()
    return time.perf_counter() - started
