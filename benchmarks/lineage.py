"""Feed the same rows by TensorFlowOnSpark 2.2.5. Runs in its own environment; prints one line of JSON.

TensorFlowOnSpark runs in its best configuration: one slot an executor as it requires, nodes that have loaded TensorFlow
before the first row comes, one conversion to tensors for each batch of 100. It spends up to a second on each
partition, so its rate depends on the rows of a partition: ``--lineage-partitions 2`` gives each worker one large one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.data import SHAPES, Shape, cached_frame
from benchmarks.programs import lineage_count_rows
from benchmarks.session import EXECUTORS, spark_session

_READY_SECONDS = 180.0


def main(shape_name: str, rows: int, partitions: int, repeat: int) -> dict[str, Any]:
    """Measure `repeat` clusters, one after another in one Spark session."""
    shape = next(shape for shape in SHAPES if shape.name == shape_name)
    found: dict[str, Any] = {"rows": rows, "partitions": partitions, "wall": [], "steady": []}
    with spark_session(cores=1) as spark:
        frame = cached_frame(spark, shape, rows, partitions)
        for _ in range(repeat):
            nodes, seconds = _one_cluster(spark, frame, shape)
            taken = sum(node["rows"] for node in nodes)
            if taken != rows:
                raise RuntimeError(f"the nodes took {taken} rows of {rows}")
            found["wall"].append(rows / seconds)
            steady_rows = rows - sum(node["first_rows"] for node in nodes)
            began = min(node["first"] for node in nodes)
            found["steady"].append(steady_rows / (max(node["last"] for node in nodes) - began))
    return found


def _one_cluster(spark: Any, frame: Any, shape: Shape) -> tuple[list[dict[str, float]], float]:
    from tensorflowonspark import TFCluster

    with tempfile.TemporaryDirectory(prefix=f"tfos-{shape.name}-") as name:
        folder = Path(name)
        cluster = TFCluster.run(
            spark.sparkContext,
            lineage_count_rows,
            argparse.Namespace(folder=name, num_gpus=0),
            num_executors=EXECUTORS,
            num_ps=0,
            input_mode=TFCluster.InputMode.SPARK,
        )
        _await_files(folder, "*.ready")
        started = time.time()
        cluster.train(frame.rdd, num_epochs=1)
        returned = time.time()
        cluster.shutdown()
        _await_files(folder, "*.json")
        nodes = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return nodes, max(returned, *(node["last"] for node in nodes)) - started


def _await_files(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    pause = threading.Event()
    while len(list(folder.glob(pattern))) < EXECUTORS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {pattern} of {EXECUTORS} nodes within {_READY_SECONDS:.0f} s")
        pause.wait(0.05)


if __name__ == "__main__":
    answer = main(sys.argv[1], *(int(number) for number in sys.argv[2:5]))
    print(json.dumps(answer))
