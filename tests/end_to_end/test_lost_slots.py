"""An executor is lost and not replaced: the rows get the slot of a node, which continues without it."""

from __future__ import annotations

import pytest

from tests.conftest import RunScript

SPARK = """
import os, sys
import pyspark
from pathlib import Path
from tests.faults import ROWS, Killer, counting_loop, its_executor, its_host, sum_of_ids
from tests.local_cluster import builder, environment
from tfos_nb import errors, launch

def keep(executors):
    "Have Spark start no executor beyond so many."
    context = spark.sparkContext
    none = context._jvm.PythonUtils.toScalaMap({})
    assert context._jsc.sc().requestTotalExecutors(executors, 0, none)

if __name__ == "__main__":
    os.environ.update(environment(Path(pyspark.__file__).parent))
    spark = builder(executors=2, cores=2).getOrCreate()
    rows = spark.range(0, ROWS, 1, 4)
"""

ONE_IS_LEFT = """
    args, options = {"epochs": 2}, {"workers": 2, "spark": spark, "restarts": 1, "model_dir": sys.argv[0] + "-model"}
    with launch(counting_loop, args, min_workers=1, **options) as cluster:
        keep(1)
        killer = Killer(cluster, "worker:1", ROWS // 4, its_host)
        cluster.train(rows, epochs=2)
        executors = {node.executor for node in cluster.snapshot().nodes if node.executor}
        left = cluster._controller.left_slots
    total, generation = cluster.result()
    print("SAID", killer.killed is not None, total == sum_of_ids(2), generation >= 2, len(executors), len(left) >= 1)
"""

ITS_NODE_GOES_ON = """
    with launch(counting_loop, {"epochs": 3}, workers=2, spark=spark, model_dir=sys.argv[0] + "-model") as cluster:
        keep(1)
        killer = Killer(cluster, "worker:1", ROWS // 4, its_executor)
        cluster.train(rows, epochs=3)
    print("SAID", killer.killed is not None, cluster.result() == (sum_of_ids(3), 1))
"""

NONE_IS_LEFT = """
    keep(0)
    try:
        with launch(counting_loop, {"epochs": 9}, workers=1, spark=spark, feed_timeout=3.0) as cluster:
            killer = Killer(cluster, "worker:0", ROWS // 4, its_executor)
            cluster.train(rows, epochs=9, spill=False)
    except errors.FeedTimeout as error:
        print("SAID", error)
    spark.stop()
"""


def said(output: str) -> list[str]:
    return [line.removeprefix("SAID ") for line in output.splitlines() if line.startswith("SAID ")]


@pytest.mark.slow
def test_rows_get_the_slot_of_a_node_and_fail_without_an_executor(run_script: RunScript) -> None:
    ended = run_script(SPARK + ONE_IS_LEFT + NONE_IS_LEFT)
    found, told = said(ended.stdout)
    assert found == "True True True 1 True"
    assert told.startswith("the rows of epoch ")
    assert "waited 3 s for Spark, which has no executor any more" in told


@pytest.mark.faults
def test_a_node_that_outlives_its_executor_leaves_the_slot_of_its_next_task(run_script: RunScript) -> None:
    ended = run_script(SPARK + ITS_NODE_GOES_ON + "    spark.stop()\n")
    assert said(ended.stdout) == ["True True"]
