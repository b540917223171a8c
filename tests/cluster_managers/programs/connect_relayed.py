"""A client of Spark Connect that no executor can dial: it trains, fails and stops. The last line has its results.

``connect_relayed.py URL FOLDER``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil
from pyspark.sql import SparkSession

import tfos_nb
from tests.cluster_managers.programs.connect_train import ROWS, exact_passes, idle, write_down
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.spark.contexts.connect import Connect

NOWHERE = "192.0.2.1"  # an address for documentation (RFC 5737), which no host has


def fail(args: Any, ctx: Any) -> None:
    """Fail in one of the nodes."""
    if ctx.task_index == 1:
        raise ValueError("the second one fails")
    while not ctx.should_stop:
        time.sleep(0.1)


def alone(args: Any, ctx: Any) -> int:
    """Return the number of this program."""
    return int(ctx.index)


def relays() -> int:
    """Count the relays of this machine."""
    commands = (" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
    return sum("tfos_nb.runtime.control.relay" in command for command in commands)


def refused(spark: SparkSession) -> str:
    """Ask for as many nodes as there are slots: no slot is left for the relay."""
    try:
        tfos_nb.launch(idle, spark=spark, workers=4, input_mode="tensorflow")
    except PlanError as error:
        return str(error)
    return ""


def run(spark: SparkSession, folder: str) -> dict[str, Any]:
    """Return the results."""
    with tfos_nb.launch(write_down, folder, spark=spark, workers=2) as cluster:
        here = relays()
        cluster.train(spark.range(0, ROWS, 1, 8), epochs=2)
    try:
        with tfos_nb.launch(fail, spark=spark, workers=2, input_mode="tensorflow") as cluster:
            cluster.wait()
    except NodeFailed as error:
        failure = str(error)
    stopping = tfos_nb.launch(idle, spark=spark, workers=2, input_mode="tensorflow")
    stopping.stop()
    programs = tfos_nb.parallel.run(alone, nodes=2, spark=spark)
    deadline = time.monotonic() + 30
    while relays() and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        "exact": exact_passes(folder),
        "relays": [here, relays()],
        "failure": failure,
        "stopped": stopping.state.value,
        "programs": programs,
        "refused": refused(spark),
    }


if __name__ == "__main__":
    url, folder = sys.argv[1:]
    Connect._address = lambda self: (NOWHERE, "127.0.0.1")  # type: ignore[method-assign]
    print(json.dumps(run(SparkSession.builder.remote(url).getOrCreate(), folder)))
