"""Launch a cluster and stop it, when a test says so; the session stays. ``stop_in_pod.py ROOT``."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark import cloudpickle

from tests.cluster_managers.programs import on_kubernetes
from tests.waiting import until
from tfos_nb import launch, spark_session
from tfos_nb.spark.session import slots_total

_PATIENCE = 120.0

cloudpickle.register_pickle_by_value(on_kubernetes)  # the executors do not have the tests


if __name__ == "__main__":
    root = Path(sys.argv[1])
    spark = spark_session()
    spark.range(0, 8, 1, slots_total(spark)).count()
    print("session", flush=True)
    assert until((root / "launch").exists, _PATIENCE)
    cluster = launch(on_kubernetes.serve_and_wait, spark=spark, workers=2, name="stopped", input_mode="tensorflow")
    print("running", flush=True)
    assert until((root / "stop").exists, _PATIENCE)
    cluster.stop()
    print("stopped", flush=True)
    assert until((root / "end").exists, _PATIENCE)
    spark.stop()
