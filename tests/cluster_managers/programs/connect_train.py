"""A client of Spark Connect: it trains, is refused, fails, stops and loses an executor. The last line has its results.

``connect_train.py URL FOLDER``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

import tfos_nb
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.spark.session import active_session, is_stopped, slots_busy, slots_total

ROWS = 4000


def write_down(args: Any, ctx: Any) -> int:
    """Write down the ids of two passes; return their number."""
    seen = []
    for number in range(2):
        ids = [int(i) for batch in ctx.dataset(64, columns=["id"]) for i in batch["id"].numpy()]
        Path(args, f"{number}-{ctx.task_index}.json").write_text(json.dumps(ids))
        seen += ids
    return len(seen)


def exact_passes(folder: str) -> list[bool]:
    """Return for each pass whether every id was written down once."""
    passes = [sorted(Path(folder).glob(f"{number}-*.json")) for number in range(2)]
    ids = [sorted(one for file in files for one in json.loads(file.read_text())) for files in passes]
    return [one == list(range(ROWS)) for one in ids]


def fail(args: Any, ctx: Any) -> None:
    """Fail in one of the nodes."""
    if ctx.task_index == 1:
        raise ValueError("the second one fails")
    threading.Event().wait(60)


def idle(args: Any, ctx: Any) -> None:
    """Do nothing until it is stopped."""
    while not ctx.should_stop:
        time.sleep(0.1)


def wait_once(args: Any, ctx: Any) -> int:
    """Wait in the first process of the node; return the number of restarts."""
    if ctx.restarts == 0:
        threading.Event().wait(60)
    return int(ctx.restarts)


def train(spark: SparkSession, folder: str) -> dict[str, Any]:
    """Train on two of four slots; three more are refused meanwhile."""
    refused = ""
    with tfos_nb.launch(write_down, folder, spark=spark, workers=2) as cluster:
        held = [stage.tasks for stage in slots_busy(spark)]
        try:
            tfos_nb.launch(idle, spark=spark, workers=3, input_mode="tensorflow")
        except PlanError as error:
            refused = str(error)
        cluster.train(spark.range(0, ROWS, 1, 8), epochs=2)
    returned = sum(cluster.results().values())
    return {
        "held": held,
        "refused": refused,
        "exact": exact_passes(folder),
        "returned": returned,
    }


def failing(spark: SparkSession) -> str:
    """Return the error of a cluster in which one node fails."""
    try:
        with tfos_nb.launch(fail, spark=spark, workers=2, input_mode="tensorflow") as cluster:
            cluster.wait()
    except NodeFailed as error:
        return str(error)
    return ""


def stopped(spark: SparkSession) -> str:
    """Return the state of a cluster that was stopped."""
    cluster = tfos_nb.launch(idle, spark=spark, workers=2, input_mode="tensorflow")
    cluster.stop()
    return str(cluster.state.value)


def losing(spark: SparkSession) -> list[int]:
    """Kill an executor under two nodes; return how often each was started again."""
    application = spark.conf.get("spark.app.id")
    with tfos_nb.launch(wait_once, spark=spark, workers=2, restarts=1, input_mode="tensorflow") as cluster:
        lines = {one: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}
        executors = [one for one, words in lines.items() if application in words and "--executor-id" in words]
        executors[0].kill()
        cluster.wait()
    return sorted(cluster.results().values())


def main(url: str, folder: str) -> None:
    """Run all cases."""
    spark = SparkSession.builder.remote(url).getOrCreate()
    found: dict[str, Any] = {"active": active_session() is spark, "slots": slots_total(spark, at_least=4)}
    found["trained"] = train(spark, folder)
    found["failure"] = failing(spark)
    found["stopped"] = stopped(spark)
    found["alone"] = tfos_nb.parallel.run(lambda args, ctx: ctx.index, spark=spark, nodes=2, cpus=2, barrier=True)
    found["gathered"] = losing(spark)
    found["busy"] = len(slots_busy(spark))
    spark.stop()
    found["over"] = is_stopped(spark)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
