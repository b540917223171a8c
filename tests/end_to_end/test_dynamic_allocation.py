"""Dynamic allocation: executors come when a cluster asks, and those with GPUs for nodes with GPUs alone.

No GPU is needed: a discovery script prints addresses of GPUs that do not exist.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import RunScript

SPARK = """
import json, os, sys
import pyspark
from pathlib import Path
from tests.faults import ROWS, Killer, counting_loop, its_executor, sum_of_ids
from tests.local_cluster import ON_LOOPBACK, environment
from tfos_nb import errors, launch, parallel
from tfos_nb.driver.launching import survey
from tfos_nb.magics.diagnosis.preflight import preflight
from tfos_nb.magics.diagnosis.spark_checks import describe_session
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.spark.session import most_slots
from tfos_nb.widgets.hosts import detect_host

def main(args, ctx):
    return os.environ["CUDA_VISIBLE_DEVICES"]

def executors():
    return spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1

def survey_of(main, spark, **options):
    survey(spark, ClusterPlan(input_mode=InputMode.SPARK, **options))

def refused(call, **options):
    try:
        call(main, spark=spark, **options)
    except errors.TfosError as error:
        return str(error)

if __name__ == "__main__":
    os.environ.update(environment(Path(pyspark.__file__).parent))
    gpu, allocation = "resource.gpu", "spark.dynamicAllocation"
    conf = {
        **ON_LOOPBACK, "spark.executor.cores": 1, "spark.executor.memory": "500m", f"{allocation}.enabled": "true",
        f"{allocation}.maxExecutors": 4,
        f"spark.worker.{gpu}.amount": 1, f"spark.worker.{gpu}.discoveryScript": SCRIPT,
        f"spark.executor.{gpu}.amount": 0, f"spark.executor.{gpu}.discoveryScript": SCRIPT,
    }
    builder = pyspark.sql.SparkSession.builder.master("local-cluster[2,4,4096]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    told = {"at_first": executors()}
"""

ROLES = """
    nodes = {"workers": 2, "ps": 1, "evaluator": True, "chief": False, "gpus": 1, "input_mode": "tensorflow"}
    for name in ("roles", "again"):
        with launch(main, spark=spark, **nodes) as cluster:
            cluster.wait(timeout=300)
            told[f"{name}_on"] = sorted(node.executor for node in cluster.snapshot().nodes)
        told[name] = cluster.results()
    told["executors"] = executors()
"""

REFUSED = """
    told["slots"] = most_slots(spark)
    told["too_many"] = refused(launch, workers=4)
    told["gpus"] = refused(launch, workers=5, gpus=1, input_mode="tensorflow")
    told["beside"] = [refused(survey_of, workers=4, gpus=1), refused(survey_of, workers=5, gpus=1)]
    told["cpus"] = refused(launch, workers=1, cpus=2)
    plan = ClusterPlan(workers=2, ps=1, chief=False, evaluator=True, input_mode=InputMode.TENSORFLOW, gpus=1)
    told["plan"] = preflight(plan)
    told["doctor"] = [one.told for one in describe_session(spark, detect_host()) if one.what == "slots"]
    told["barrier"] = refused(parallel.run, nodes=2, barrier=True)
    # There are two GPUs.
    told["late"] = refused(launch, workers=3, gpus=1, input_mode="tensorflow", rendezvous_timeout=12.0)
"""

FED = """
    options = {"workers": 2, "model_dir": sys.argv[0] + "-model", "restarts": 1}
    with launch(counting_loop, {"epochs": 3}, spark=spark, **options) as it:
        killer = Killer(it, "worker:1", ROWS // 4, its_executor)
        it.train(spark.range(0, ROWS, 1, 4), epochs=3)
    told["fed"] = [killer.killed is not None, it.result()[0] == sum_of_ids(3)]
"""

END = """
    print("TOLD" + json.dumps(told))
    spark.stop()
"""


def test_executors_come_when_a_cluster_asks_and_have_gpus_for_its_workers_alone(
    run_script: RunScript, tmp_path: Path
) -> None:
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    script.chmod(0o755)
    ended = run_script(f"SCRIPT = {str(script)!r}\n" + SPARK + REFUSED + ROLES + FED + END)
    told = json.loads(next(line for line in ended.stdout.splitlines() if "TOLD" in line).partition("TOLD")[2])
    assert (told["at_first"], told["slots"]) == (0, 4)
    assert told["roles"] == {
        "worker:0": "0",
        "worker:1": "0",
        "ps:0": "-1",
        "evaluator:0": "-1",
    }
    assert told["again"] == told["roles"]
    assert len(set(told["roles_on"])) == told["executors"] == 4
    assert told["roles_on"] == told["again_on"], "the second cluster's nodes are on the executors of the first one"
    assert told["fed"] == [True, True]
    assert "needs 5 slots (4 nodes and at least 1 for feeding); Spark has 4 (local-cluster" in told["too_many"]
    assert "at most 4 executors x 1 cores" in told["too_many"]
    assert "start Spark with more: spark.dynamicAllocation.maxExecutors or spark.executor.cores" in told["too_many"]
    assert "needs 5 slots (5 nodes with 1 GPU each)" in told["gpus"]
    assert told["beside"][0] is None, "the tasks that feed take no slot of an executor with GPUs"
    assert "needs 5 slots (5 nodes with 1 GPU each)" in told["beside"][1]
    assert "an executor has 1 cores" in told["cpus"]
    with_gpus = "with 1 GPU each for worker:0, worker:1 and without GPUs for ps:0, evaluator:0"
    assert told["plan"] == f"The plan fits: Spark starts executors that are missing, {with_gpus}. Nothing was started."
    assert told["doctor"] == ["0 of 0 busy; Spark starts executors for tasks that wait (dynamic allocation)"]
    assert "2 of 3 nodes reserved within 12 s" in told["late"]
    assert "Spark has not started its task: dynamic allocation has asked for an executor, and none came" in told["late"]
    assert told["barrier"].startswith("barrier=True: Spark runs no barrier tasks under spark.dynamicAllocation")
