"""A training whose slow feed task Spark runs a second time while the first still sends. ``speculate.py ROOT CHANGES``.

The first attempt at partition 0 reads slowly, so Spark starts a second one on another host. If ``CHANGES`` is 1, that
attempt reads its rows in the opposite order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext, cloudpickle

from tests import faults
from tfos_nb import launch, spark_session

cloudpickle.register_pickle_by_value(faults)  # the executors do not have the tests

ROWS = 80_000


def slowly(batches: Iterator[Any], root: str, changes: bool) -> Iterator[Any]:
    """Yield the rows; the first attempt at partition 0 becomes slow after some batches."""
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == 0:
        Path(root, f"attempt-{context.attemptNumber()}").touch()
    for number, batch in enumerate(reversed(list(batches)) if changes and context.attemptNumber() else batches):
        yield batch
        if context.partitionId() == 0 and context.attemptNumber() == 0 and number > 10:
            time.sleep(0.5)


def main() -> None:
    """Train once over the rows, and print what the nodes saw."""
    root, changes = sys.argv[1], sys.argv[2] == "1"
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    spark = spark_session()
    spark.range(0, ROWS, 1, 4).selectExpr("id", "CAST(0 AS FLOAT) AS y").write.parquet(f"{root}/rows")
    rows = spark.read.parquet(f"{root}/rows")
    fed = rows.mapInArrow(lambda batches: slowly(batches, root, changes), rows.schema)
    with launch(faults.counting_loop, {"epochs": 1}, name="speculating", workers=2, spark=spark) as cluster:
        cluster.train(fed)
    print(json.dumps({"outcome": {"results": cluster.results()}}), flush=True)


if __name__ == "__main__":
    main()
