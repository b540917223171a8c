"""Handwritten digits by a convolutional network, whose rows Spark feeds or the nodes read from Parquet files.

::

    python mnist.py                                          scikit-learn's 1,797 digits, on a local Spark
    python mnist.py --data DIR --epochs 6                    MNIST's IDX files, as they are, or compressed with gzip
    spark-submit mnist.py --data DIR --input tensorflow      on the Spark that is there; the nodes read files

``mnist.ipynb`` is the same program as a notebook.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tfos_nb import TFModel, launch, spark_session


def main(args, ctx):
    import keras
    from keras import layers

    def build(width):
        model = keras.Sequential(
            [
                layers.Input((784,)),
                layers.Rescaling(1 / 255),
                layers.Reshape((28, 28, 1)),
                layers.Conv2D(width, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(2 * width, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dropout(0.4),
                layers.Dense(4 * width, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.002), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with ctx.strategy().scope():
        model = build(args["width"])
    if args["input"] == "tensorflow":
        rows = ctx.read(args["files"], args["batch_size"], x="pixels", y="label", shuffle=10_000)
    else:
        rows = ctx.dataset(args["batch_size"], x="pixels", y="label", shuffle=10_000)
    model.fit(rows, epochs=args["epochs"], verbose=2)
    return ctx.save(model)


def read_idx(folder, name):
    """Return the array in an IDX file; the format is described at http://yann.lecun.com/exdb/mnist/."""
    path = Path(folder) / name
    data = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    sizes = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, "uint8", offset=4 + 4 * len(sizes)).reshape(sizes)


def scikit_digits():
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged to MNIST's 28 x 28."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    enlarged = np.kron(bunch.images, np.ones((1, 3, 3))) * 255 / 16
    return np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).astype("uint8"), bunch.target


def digits(data):
    """Return (images, labels) to train on, and (images, labels) held out: of a folder, of Keras, or scikit-learn's."""
    if data == "keras":
        import keras

        return keras.datasets.mnist.load_data()
    if list(Path(data).glob("train-images-idx3-ubyte*")):
        kinds = ("train", "t10k")
        return [(read_idx(data, f"{k}-images-idx3-ubyte"), read_idx(data, f"{k}-labels-idx1-ubyte")) for k in kinds]
    if data == "scikit-learn":
        images, labels = scikit_digits()
    else:  # the test set alone
        images, labels = read_idx(data, "t10k-images-idx3-ubyte"), read_idx(data, "t10k-labels-idx1-ubyte")
    held_out = np.random.default_rng(11).random(len(labels)) < 0.2
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def frame(spark, images, labels):
    """Return a DataFrame: 784 grey values from 0 to 255 and a label in each row."""
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    pixels = images.reshape(len(images), -1).astype("int16")
    rows = pd.DataFrame({"pixels": list(pixels), "label": labels.astype("int32")})
    return spark.createDataFrame(rows, "pixels array<short>, label int")


def score(model, rows):
    """Apply the saved model where the rows are; return the share that it gets right, and how many rows there are."""
    right = "avg(double(array_position(prediction, array_max(prediction)) - 1 = label))"
    return tuple(TFModel(export_dir=model).transform(rows).selectExpr(right, "count(*)").first())


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="scikit-learn", help="folder of the IDX files, or keras to download them")
    parser.add_argument("--input", choices=["spark", "tensorflow"], default="spark", help="who reads the rows")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the rows")
    parser.add_argument("--batch-size", type=int, default=64, help="rows in a step of all workers")
    parser.add_argument("--width", type=int, default=32, help="filters of the first layer")
    parser.add_argument("--model-dir", default="tfos_models/mnist", help="where the model goes")
    found = parser.parse_args(argv)
    if found.data not in ("scikit-learn", "keras") and not list(Path(found.data).glob("t10k-images-idx3-ubyte*")):
        parser.error(f"--data {found.data}: no folder with MNIST's IDX files (t10k-images-idx3-ubyte, …)")
    return vars(found)


def run(args: dict[str, Any]) -> None:
    where = args["model_dir"] if "://" in args["model_dir"] else os.path.abspath(args["model_dir"])
    spark = spark_session(args["workers"] + 1)
    train, held_out = (frame(spark, *part) for part in digits(args["data"]))
    cluster = {"workers": args["workers"], "input_mode": args["input"], "model_dir": where, "name": "mnist"}
    if args["input"] == "tensorflow":
        args["files"] = f"{where}/rows"
        train.write.mode("overwrite").parquet(args["files"])
    with launch(main, args, spark=spark, **cluster) as mnist:
        if args["input"] == "spark":
            mnist.train(train, epochs=args["epochs"])
    for epoch in mnist.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**epoch))
    accuracy, rows = score(mnist.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"{accuracy:.1%} of {rows} held-out digits are right; the model is in {mnist.result()}")
    outcome = {"epochs": mnist.history.epochs, "accuracy": accuracy, "held_out": rows, "model": mnist.result()}
    print(json.dumps({"example": "mnist", **outcome}))


if __name__ == "__main__":
    run(parse())
