"""A client of Spark Connect that attaches to the cluster ``far`` by Spark's tasks; ``connect_attach.py URL FOLDER``.

The last line of its output has what it has seen.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import tfos_nb
from tfos_nb.errors import PlanError


def nothing(args: Any, ctx: Any) -> None:
    """Do nothing: Spark has too few slots for it."""


def main() -> None:
    """Look at the cluster, end its program, and close it."""
    os.environ["TFOS_SERVER_RELAY"] = "1"  # as if this client did not reach the executors
    spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
    cluster = tfos_nb.attach("far", spark)
    seen: dict[str, Any] = {"running": cluster.state.value, "log": "waits for the end" in cluster.logs("worker:1")}
    try:
        cluster.train(lambda session: session.range(3))
    except PlanError as error:
        seen["train"] = str(error)
    try:
        cluster.wait(0.2)
    except TimeoutError as error:
        seen["timeout"] = str(error)
    Path(sys.argv[2], "end").touch()
    cluster.wait(120)
    seen |= {"rows": sum(cluster.results().values()), "state": cluster.state.value}
    seen["clusters"] = [one.status for one in tfos_nb.clusters()]
    cluster.close()
    try:
        options: dict[str, Any] = {"workers": 9, "input_mode": "tensorflow", "record": False}
        tfos_nb.launch(nothing, spark=spark, detach="executor", **options)
    except PlanError as error:
        seen["refused"] = str(error)
    seen["left"] = len(tfos_nb.clusters())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
