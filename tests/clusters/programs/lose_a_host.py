"""A training that somebody does harm, on rows of a shared file system. ``lose_a_host.py ROOT EPOCHS``."""

from __future__ import annotations

import json
import sys

from pyspark import cloudpickle

from tests import faults
from tfos_nb import launch, spark_session

cloudpickle.register_pickle_by_value(faults)  # the executors have no tests

if __name__ == "__main__":
    root, epochs = sys.argv[1], int(sys.argv[2])
    spark = spark_session()
    spark.range(0, faults.ROWS, 1, 4).write.parquet(f"{root}/rows")
    args = {"epochs": epochs}
    with launch(
        faults.counting_loop, args, spark=spark, workers=2, restarts=2, name="losing", model_dir=f"{root}/models"
    ) as cluster:
        cluster.train(spark.read.parquet(f"{root}/rows"), epochs=epochs)
    print(json.dumps({"outcome": {"results": cluster.results()}}), flush=True)
