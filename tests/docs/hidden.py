"""Definitions that the pages' blocks need and do not show: a cell for each page, which runs before its first block.

They are text and not functions, so that their definitions belong to the notebook and go to the nodes by value.
"""

from __future__ import annotations

__all__ = ["FIRST", "OF_PAGE"]

FIRST = """
pixels_of = lambda i: [float((3 * i + 5 * j) % 16) for j in range(64)]
rows = [(i, pixels_of(i), i % 10) for i in range(256)]
frame = spark.createDataFrame(rows, "id long, pixels array<float>, label long")
df = train = frame.repartition(2).cache()
held_out = frame.limit(64)

def build(units=8):
    import keras
    hidden, last = keras.layers.Dense(units, activation="relu"), keras.layers.Dense(10, activation="softmax")
    model = keras.Sequential([hidden, last])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""

_FEEDING = """
frame.write.parquet(folder + "/digits")
stream = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(folder + "/digits")

def restore(ctx):
    import json, os
    if not os.path.exists(ctx.absolute_path("done.json")):
        return build(), -1
    import keras
    with open(ctx.absolute_path("done.json")) as file:
        return keras.models.load_model(ctx.absolute_path("stream.keras")), json.load(file)

def save(ctx, model, batch):
    import json
    ctx.save(model, "stream.keras")
    with open(ctx.absolute_path("done.json"), "w") as file:
        json.dump(batch, file)
"""

_RECOVERY = """
import tfos_nb

def build_by_hand(strategy=None):
    import tensorflow as tf
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        state = tf.train.Checkpoint(seen=tf.Variable(0, dtype=tf.int64))
    def step(batch):
        rows = sum(len(part) for part in strategy.experimental_local_results(batch[1]))
        state.seen.assign_add(tf.cast(rows, tf.int64))
    return state, step
"""

_STRATEGIES = """
import numpy as np
pixels, labels = np.array([pixels_of(i) for i in range(32)], "float32"), np.arange(32) % 10
"""

_INFERENCE = """
import keras
import tensorflow as tf
from pyspark.ml.feature import StringIndexer

_layers = keras.layers
_digits = keras.Sequential([keras.Input((64,), name="x"), _layers.Dense(10, activation="softmax", name="dense")])
_digits.save("mnist.keras")
_digits.export("mnist", verbose=False)
_pictures = [_layers.Rescaling(1 / 255), _layers.Conv2D(4, 3), _layers.GlobalAveragePooling2D(name="avg_pool")]
keras.Sequential([keras.Input((16, 16, 3)), *_pictures, _layers.Dense(2)]).save("resnet.keras")

df.createOrReplaceTempView("letters")
indexer = StringIndexer(inputCol="label", outputCol="index").fit(df)
_png = [bytes(tf.io.encode_png(tf.fill([20, 20, 3], tf.cast(40 * i, tf.uint8))).numpy()) for i in range(6)]
pictures = spark.createDataFrame([(png, float(i % 2)) for i, png in enumerate(_png)], "file binary, label double")
"""

_PIPELINE = """
model = build()
model.build((None, 64))
"""

_TFRECORD = """
import glob
from pyspark.sql import functions as F
from tfos_nb import tfrecord as _tfrecord

path, damaged = folder + "/records", folder + "/damaged"
df = frame.select("pixels", F.col("label").cast("int").alias("label"), F.lit("2026-11-21").cast("date").alias("day"))
_tfrecord.write(df.drop("day").coalesce(1), damaged)
with open(glob.glob(damaged + "/part-*")[0], "r+b") as _file:
    _file.seek(60)
    _file.write(b"damage")
"""

_MIGRATING = """
import argparse
sc = spark.sparkContext
args = argparse.Namespace(batch_size=16, epochs=2, cluster_size=2)
images_labels = sc.parallelize([(pixels_of(i), i % 10) for i in range(128)], 2)
make_model = build
"""

_MLFLOW = """
import os
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"

def main(args, ctx):
    with ctx.strategy().scope():
        model = build()
    columns = {"x": "pixels", "y": "label"}
    model.fit(ctx.dataset(64, **columns), validation_data=ctx.validation(64, **columns), epochs=3, verbose=0)
    return ctx.save(model)
"""

_MAGICS = """
import os
os.makedirs("logs")
"""

_RUNS = """
import os as _os
from tfos_nb.records.run import Run as _Run, to_json as _to_json
_os.makedirs("models/digits/tfos_runs")
for _number, _lr in enumerate((0.01, 0.001)):
    _run = _Run(f"6f2c{_number}", "digits", "DONE", 1.7e9 + _number, 1.7e9, 60.0, arguments={"learning_rate": _lr},
                epochs=({"epoch": 1, "loss": 0.5},))
    with open(f"models/digits/tfos_runs/{_number}.json", "w") as _file:
        _file.write(_to_json(_run))
"""

_DETACHED = """
frame.write.parquet(folder + "/mnist")
"""

OF_PAGE = {
    "feeding": _FEEDING,
    "recovery": _RECOVERY,
    "strategies": _STRATEGIES,
    "inference": _INFERENCE,
    "pipeline": _PIPELINE,
    "tfrecord": _TFRECORD,
    "migrating": _MIGRATING,
    "mlflow": _MLFLOW,
    "magics": _MAGICS,
    "runs": _RUNS,
    "detached": _DETACHED,
}
