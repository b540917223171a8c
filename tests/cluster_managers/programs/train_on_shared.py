"""Keep everything on a shared file system: rows, records, checkpoints, logs, models. ``train_on_shared.py ROOT``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pandas as pd

from tfos_nb import TFModel, launch, spark_session, tfrecord

ROWS = 600


def fit(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train on the rows that are fed; leave a checkpoint, a Keras file and a SavedModel."""
    import keras

    import tfos_nb
    from tfos_nb.compat.compat import export_saved_model

    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Input((2,), name="x"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    epochs = len(model.fit(ctx.dataset(32, x="x", y="y"), epochs=args["epochs"], verbose=0).epoch)
    saved = {"checkpoint": ctx.checkpoint(model, epoch=epochs), "model": ctx.save(model)}
    ctx.save(model)  # overwrites the first one, which HDFS allows only on request
    export_saved_model(model, ctx.absolute_path("export"), ctx.is_chief)
    return {**saved, "python": sys.executable, "tfos_nb": tfos_nb.__file__, "folder": os.getcwd()}


def read(args: dict[str, Any], ctx: Any) -> dict[str, list[int]]:
    """Read this node's share of the same rows from both kinds of files."""
    found = {}
    for name, pattern in args.items():
        batches = [batch["id"].numpy() for batch in ctx.read(pattern, 32)]
        found[name] = sorted(int(number) for batch in batches for number in batch.ravel())
    return found


def run(root: str) -> dict[str, Any]:
    """Return the results."""
    spark = spark_session()
    for name, value in (
        ("enabled", "true"),
        ("fallback.enabled", "false"),
    ):  # otherwise Spark works without Arrow, slowly
        spark.conf.set(f"spark.sql.execution.arrow.pyspark.{name}", value)
    ids = spark.createDataFrame(pd.DataFrame({"id": range(ROWS)}), "id long").repartition(4)
    made = ids.selectExpr("id", "array(float(id % 7) / 7, float(id % 5) / 5) as x", "float(id % 7) / 7 as y")
    made.write.parquet(f"{root}/rows")
    tfrecord.write(made, f"{root}/records")
    rows = spark.read.parquet(f"{root}/rows")
    with launch(
        fit, {"epochs": 3}, spark=spark, workers=2, name="fed", model_dir=f"{root}/models", log_dir=f"{root}/logs"
    ) as fed:
        fed.train(rows.select("x", "y"), epochs=3)
    files = {"parquet": f"{root}/rows/*.parquet", "tfrecord": f"{root}/records"}
    with launch(read, files, spark=spark, workers=2, name="reading", input_mode="tensorflow") as reading:
        reading.wait()
    scored = {
        kind: TFModel(export_dir=place, input_mapping={"x": "x"}).transform(rows).count()
        for kind, place in {"keras": fed.result()["model"], "saved_model": f"{root}/models/export"}.items()
    }
    executors = sorted(node.executor for node in fed.snapshot().nodes)
    found = {"fed": fed.results(), "losses": [epoch["loss"] for epoch in fed.history.epochs], "scored": scored}
    records = tfrecord.read(spark, files["tfrecord"]).count()
    return {**found, "read": reading.results(), "executors": executors, "records": records}


if __name__ == "__main__":
    print(json.dumps({"outcome": run(sys.argv[1])}), flush=True)
