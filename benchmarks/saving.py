"""Measure the cost of saving state each epoch.

Two workers under MultiWorkerMirroredStrategy, a dense model of 1.9 million weights with Adam (22 MB of state), 20,000
rows an epoch. In one cluster, epochs with and without ``ctx.checkpoint`` alternate, on a local path and on a URL. The
state in memory, which ``restarts=`` saves without a callback, is measured by two clusters that alternate.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks import saving_programs
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings

__all__ = ["run"]

TARGET = 0.97
_ARGUMENTS = {"rows": 20_000, "batch_size": 128, "epochs": 6}
_SECONDS = 600.0
_KINDS = {"local path": "", "URL": "dir::file://"}  # the URL is written by fsspec, as remote storage would be


def run(settings: Settings) -> Result:
    """Measure the clusters in turns."""
    figures: dict[str, dict[str, list[float]]] = {
        kind: {"saved": [], "not saved": []} for kind in (*_KINDS, "in memory")
    }
    with spark_session() as spark, tempfile.TemporaryDirectory() as folder:
        for number in range(settings.repeat):
            for kind, place in _KINDS.items():
                model_dir = f"{place}{folder}/{kind}-{number}"
                told = _train(spark, saving_programs.turns, model_dir=model_dir, restarts=1)
                for name, seconds in told.items():
                    figures[kind][name] += seconds
            for name, restarts in (("saved", 1), ("not saved", 0)):
                options: dict[str, Any] = {"restarts": restarts, "model_dir": f"{folder}/m{number}"}
                figures["in memory"][name] += _train(spark, saving_programs.fit, **options)
            newest = ", ".join(
                f"{kind} {median(told['saved']):.2f} and {median(told['not saved']):.2f} s"
                for kind, told in figures.items()
            )
            settings.say(f"saving {number + 1}/{settings.repeat}: an epoch {newest}")
    rows = _ARGUMENTS["rows"]
    ratios = tuple(
        Ratio(
            f"an epoch whose state is saved: {kind}",
            rows / median(told["saved"]),
            rows / median(told["not saved"]),
            "rows/s",
            TARGET,
        )
        for kind, told in figures.items()
    )
    return Result("saving", ratios, dict(figures))


def _train(spark: SparkSession, main: Any, **options: Any) -> Any:
    from tfos_nb import launch

    cluster = launch(
        main, _ARGUMENTS, spark=spark, workers=2, input_mode="tensorflow", name="saving", autolog=False, **options
    )
    cluster.wait(timeout=_SECONDS)
    return cluster.result()
