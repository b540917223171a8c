"""A client of Spark Connect that applies models in every way. The last line has its results.

``connect_apply.py URL FOLDER``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
from IPython.core.interactiveshell import InteractiveShell
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

import tfos_nb
from tfos_nb import KerasEstimator, TFModel, predict, register_udf, tfrecord
from tfos_nb.errors import PlanError

CELL = """%%tfos_cluster lines --workers 2 --data rows --epochs 3 --model-dir {folder}
def main(args, ctx):
    import keras
    model = keras.Sequential([keras.Input((1,), name="x"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(ctx.dataset(32, x="x", y="y"), epochs=3, verbose=0)
    ctx.save(model)
"""


def doubled() -> keras.Model:
    """Return a model that doubles its input, x."""
    two = keras.initializers.Constant(2)
    return keras.Sequential([keras.Input((1,), name="x"), keras.layers.Dense(1, kernel_initializer=two)])


def idle(args: Any, ctx: Any) -> None:
    """Do nothing until it is stopped."""
    while not ctx.should_stop:
        time.sleep(0.1)


def told(frame: DataFrame, column: str = "prediction") -> list[float]:
    """Return a column's first values."""
    return [round(float(row[column]), 3) for row in frame.orderBy(column).limit(3).collect()]


def in_cells(rows: DataFrame, folder: Path) -> dict[str, Any]:
    """Apply models as a notebook does, in cells."""
    shell = InteractiveShell.instance()
    shell.user_ns.update(spark=rows.sparkSession, rows=rows)
    cells = [
        "%load_ext tfos_nb",
        "%tfos_doctor",
        CELL.format(folder=folder / "lines"),
        f"%tfos_inference rows --model {folder / 'lines'} -o scored",
    ]
    ended = [bool(shell.run_cell(cell).success) for cell in cells]
    return {"cells": ended, "scored": shell.user_ns["scored"].count()}


def main(url: str, where: str) -> None:
    """Run all cases."""
    folder = Path(where)
    spark = SparkSession.builder.remote(url).getOrCreate()
    values = (F.col("id") / 1000).cast("float")
    rows = spark.range(1000).select(F.array(values).alias("x"), (2 * values).alias("y"))
    model = doubled()
    found: dict[str, Any] = {"predicted": told(predict(rows, model))}

    stage = TFModel(model=model).setInputMapping({"x": model.inputs[0].name})
    for _ in range(2):
        stage.write().overwrite().save(str(folder / "stage"))
    found["loaded"] = told(TFModel.load(str(folder / "stage")).transform(rows))

    try:
        register_udf(spark, "doubled", model)
        rows.createOrReplaceTempView("rows")
        found["sql"] = told(spark.sql("SELECT doubled(x) AS prediction FROM rows"))
    except PlanError as error:
        found["sql"] = str(error)

    compiled = doubled()
    compiled.compile("sgd", "mse")
    columns = {"featuresCol": "x", "labelCol": "y"}
    where_to = str(folder / "fit")
    estimator = KerasEstimator(compiled, cluster_size=2, epochs=2, progress="none", model_dir=where_to, **columns)
    found["fitted"] = told(estimator.fit(rows).transform(rows))

    tfrecord.write(rows, str(folder / "records"))
    found["records"] = [tfrecord.read(spark, str(folder / "records")).count()]
    found["records"] += [spark.read.format("tfrecord").load(str(folder / "records")).count()]

    found |= in_cells(rows, folder)
    cluster = tfos_nb.launch(idle, spark=spark)
    try:
        cluster.train(spark.readStream.format("rate").load())
    except PlanError as error:
        found["stream"] = str(error)
    cluster.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
