"""Print where a node's Python and its TensorFlow are, and whether they train: ``where_it_runs.py MODEL_DIR``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tfos_nb


def main(args: Any, ctx: Any) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    epochs = model.fit(ctx.dataset(16, x="x", y="y"), epochs=2, verbose=0).epoch
    ctx.save(model)
    return {"epochs": epochs, "python": sys.executable, "tensorflow": tf.__file__, "folder": os.getcwd()}


def run(model_dir: str) -> dict[str, Any]:
    spark = tfos_nb.spark_session()
    rows = spark.range(0, 200, 1, 4).selectExpr("array(float(id % 5)) x", "float(id % 5) * 2 y")
    with tfos_nb.launch(main, spark=spark, workers=2, model_dir=model_dir) as cluster:
        cluster.train(rows, epochs=2)
    return cluster.results()


if __name__ == "__main__":
    print(json.dumps({"outcome": run(sys.argv[1])}))
