"""Measure the rows a second of ``Cluster.inference`` with two nodes.

They are compared with two figures. The first is one process that holds the rows in memory as arrays and applies the
same model. The second is TensorFlowOnSpark 2.2.5's ``inference`` on the same rows, where both return a constant a row.

Run as a script, this module measures TensorFlowOnSpark in its own environment.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.data import SHAPES, VECTORS, Shape, cached_frame
from benchmarks.session import EXECUTORS, spark_session

__all__ = ["run"]

# Target against TensorFlowOnSpark, for rows given as arrays.
TARGETS = {VECTORS.name: 25.0, "scalars": 100.0}
BATCH = 1024
LINEAGE_BATCH = 100


def run(settings: Any) -> Any:
    """Measure both shapes; TensorFlowOnSpark comes last, when this Spark has ended."""
    from benchmarks import lineage_venv
    from benchmarks.table import Result

    figures: dict[str, Any] = {}
    with spark_session() as spark:
        for shape in SHAPES:
            rows = (settings.rows or shape.rows) // 4
            settings.say(f"cluster_inference: {rows:,} rows of {shape.describes}")
            figures[shape.name] = _measure(spark, shape, rows, settings)
    if not settings.without_lineage:
        for shape in SHAPES:
            rows = min(settings.lineage_rows or shape.lineage_rows, figures[shape.name]["rows"])
            settings.say(f"cluster_inference: {rows:,} rows of {shape.describes} through TensorFlowOnSpark")
            figures[shape.name]["lineage"] = lineage_venv.measure(
                shape.name, rows, settings.lineage_partitions, settings.repeat, "benchmarks.cluster_inference"
            )
    ratios = [ratio for shape in SHAPES for ratio in _ratios(shape, figures[shape.name])]
    return Result("cluster_inference", tuple(ratios), figures, _notes(figures))


# --- programs of the nodes ----------------------------------------------------------------------------------------


def answer(args: dict[str, Any], ctx: Any) -> None:
    """Answer rows in one of three ways: a constant by arrays, a constant by lists, a model's outputs by arrays."""
    if args["way"] == "lists":
        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            rows = feed.next_batch(LINEAGE_BATCH)
            if rows:
                feed.batch_results([0] * len(rows))
        return
    model = Model(args["width"]) if args["way"] == "model" else None
    for batch in ctx.requests(BATCH, across_partitions=True):
        if model is None:
            arrays = [batch[name] for name in batch]  # a model needs every column as an array
            batch.reply({"prediction": _zeros(len(arrays[0]))})
        else:
            batch.reply({"prediction": model(_matrix(batch))})


def _zeros(rows: int) -> Any:
    import numpy as np

    return np.zeros(rows, "float32")


def _matrix(batch: Any) -> Any:
    import numpy as np

    if "features" in batch:
        return batch["features"]
    return np.column_stack([batch[name] for name in batch]).astype("float32")


class Model:
    """A small dense model, as a ``tf.function``: the same wherever it runs."""

    def __init__(self, width: int) -> None:
        import tensorflow as tf

        seed = tf.random.Generator.from_seed(1)
        first, second = seed.normal((width, 64)), seed.normal((64, 1))

        @tf.function(input_signature=[tf.TensorSpec((None, width), tf.float32)])
        def apply(x: Any) -> Any:
            return tf.nn.relu(x @ first) @ second

        self._apply = apply
        self._apply(tf.zeros((1, width)))

    def __call__(self, x: Any) -> Any:
        """Return an output a row."""
        return self._apply(x).numpy()[:, 0]


def in_memory(args: dict[str, Any], ctx: Any) -> float:
    """Apply the model in one process that holds the rows as an array; return rows a second."""
    import numpy as np

    model, rows = Model(args["width"]), min(args["rows"], 200_000_000 // args["width"] // 4)
    matrix = np.random.default_rng(0).random((rows, args["width"]), "float32")
    started = time.perf_counter()
    found = [model(matrix[start : start + BATCH]) for start in range(0, rows, BATCH)]
    if sum(map(len, found)) != rows:
        raise RuntimeError("not every row has an output")
    return rows / (time.perf_counter() - started)


# --- measuring ----------------------------------------------------------------------------------------------------


def _measure(spark: Any, shape: Shape, rows: int, settings: Any) -> dict[str, Any]:
    from benchmarks.feed import ceiling_rate
    from tfos_nb import launch, parallel

    frame = cached_frame(spark, shape, rows)
    width = 784 if shape is VECTORS else len(shape.columns)
    args = {"rows": rows, "width": width}
    ceiling_rate(frame, rows)
    found: dict[str, Any] = {"rows": rows, "memory": [], "ceiling": [], "arrays": [], "lists": [], "model": []}
    for number in range(settings.repeat):
        found["memory"] += parallel.run(in_memory, args, nodes=1, spark=spark)
        found["ceiling"].append(ceiling_rate(frame, rows))
        for way in ("arrays", "model", "lists"):
            with launch(answer, {**args, "way": way}, workers=EXECUTORS, spark=spark, name="bench") as cluster:
                data = (
                    frame if way != "lists" else frame.limit(min(rows, 20 * shape.lineage_rows)).repartition(8).cache()
                )
                asked = data.count()
                scored = cluster.inference(data, "prediction float", keep=False)
                scored.limit(1).collect()  # the nodes are up and have answered their first batch
                started = time.perf_counter()
                counted = scored.groupBy().count().first()[0]
                found[way].append(asked / (time.perf_counter() - started))
                if counted != asked:
                    raise RuntimeError(f"{counted} results for {asked} rows")
                if way == "lists":
                    data.unpersist(blocking=True)
            settings.say(f"cluster_inference: {shape.name} {number + 1}, {way}: {found[way][-1]:,.0f} rows/s")
    frame.unpersist(blocking=True)
    return found


def _ratios(shape: Shape, found: dict[str, Any]) -> list[Any]:
    from benchmarks.table import Ratio, median

    what = shape.describes
    arrays, lists = median(found["arrays"]), median(found["lists"])
    ratios = [
        Ratio(f"{what}, a model / one process, in memory", median(found["model"]), median(found["memory"]), "rows/s"),
        Ratio(f"{what}, constant by arrays / empty mapInArrow", arrays, median(found["ceiling"]), "rows/s"),
    ]
    if "lineage" in found:
        lineage = median(found["lineage"]["wall"])
        ratios.append(
            Ratio(f"{what}, constant by arrays / TensorFlowOnSpark", arrays, lineage, "rows/s", TARGETS[shape.name])
        )
        ratios.append(Ratio(f"{what}, constant by lists / TensorFlowOnSpark", lists, lineage, "rows/s"))
    return ratios


def _notes(figures: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"whole Spark jobs that count the results; batches of {BATCH} rows by arrays, of {LINEAGE_BATCH} by lists.",
        "the process in memory has all cores of the machine; the cluster's two nodes share them with Spark.",
    ]
    for name, found in figures.items():
        if "lineage" in found:
            text = f"{name}: TensorFlowOnSpark answered {found['lineage']['rows']:,} rows a run"
            notes.append(f"{text}, the arrays were of {found['rows']:,}; rates are compared.")
    return tuple(notes)


# --- TensorFlowOnSpark's part, in its own environment -------------------------------------------------------------


def lineage_answer(args: Any, ctx: Any) -> None:
    """Answer each row with a constant, as a TensorFlowOnSpark 2.2.5 program."""
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        rows = feed.next_batch(LINEAGE_BATCH)
        if rows:
            feed.batch_results([0] * len(rows))


def main(shape_name: str, rows: int, partitions: int, repeat: int) -> dict[str, Any]:
    """Measure TensorFlowOnSpark's inference, `repeat` times through one cluster."""
    import argparse

    from tensorflowonspark import TFCluster

    from benchmarks import cluster_inference

    shape = next(shape for shape in SHAPES if shape.name == shape_name)
    found: dict[str, Any] = {"rows": rows, "partitions": partitions, "wall": []}
    with spark_session(cores=1) as spark:
        frame = cached_frame(spark, shape, rows, partitions)
        cluster = TFCluster.run(
            spark.sparkContext,
            cluster_inference.lineage_answer,
            argparse.Namespace(num_gpus=0),
            num_executors=EXECUTORS,
            num_ps=0,
            input_mode=TFCluster.InputMode.SPARK,
        )
        cluster.inference(frame.limit(200).rdd.repartition(EXECUTORS)).count()  # TensorFlow is loaded
        for _ in range(repeat):
            started = time.perf_counter()
            counted = cluster.inference(frame.rdd).count()
            found["wall"].append(rows / (time.perf_counter() - started))
            if counted != rows:
                raise RuntimeError(f"{counted} results for {rows} rows")
        cluster.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *(int(number) for number in sys.argv[2:5]))))
