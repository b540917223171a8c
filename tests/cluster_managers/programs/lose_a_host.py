"""A training that loses a host in a test, on rows of a shared file system. ``lose_a_host.py ROOT EPOCHS [OPTIONS]``.

The options are those of ``launch``, in JSON, ``program``, one of :mod:`tests.faults`, and ``args``, more of its
arguments, of which ``schedule`` is a list of the arguments of :class:`tests.faults.Exit`.
"""

from __future__ import annotations

import json
import sys

import fsspec
from pyspark import cloudpickle

from tests import faults
from tfos_nb import launch, spark_session

cloudpickle.register_pickle_by_value(faults)  # the executors do not have the tests

if __name__ == "__main__":
    root, epochs = sys.argv[1], int(sys.argv[2])
    spark = spark_session()
    spark.range(0, faults.ROWS, 1, 4).selectExpr("id", "CAST(0 AS FLOAT) AS y").write.parquet(f"{root}/rows")
    options = {"workers": 2, "restarts": 2, **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")}
    options = {"name": "losing", "model_dir": f"{root}/models", "spark": spark, **options}
    program, args = getattr(faults, options.pop("program", "counting_loop")), options.pop("args", {})
    args["schedule"] = [faults.Exit(*one) for one in args.get("schedule", ())]
    with launch(program, {"epochs": epochs, **args}, **options) as cluster:
        hosts = {node.node: node.host for node in cluster.snapshot().nodes}
        with fsspec.open(f"{root}/hosts.json", "w") as file:  # for a test that looks for a node's host
            json.dump(hosts, file)
        cluster.train(spark.read.parquet(f"{root}/rows"), epochs=epochs)
        after = {node.node: node.host for node in cluster.snapshot().nodes}
        left = cluster._controller.restarts_left
    found = {"results": cluster.results(), "hosts": hosts, "after": after, "restarts_left": left}
    print(json.dumps({"outcome": found}), flush=True)
