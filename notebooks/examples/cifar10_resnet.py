"""CIFAR-10 by ResNet-20, with the augmentation and the learning rates of the paper.

::

    python cifar10_resnet.py                                 small made pictures, on a local Spark
    python cifar10_resnet.py --data DIR --epochs 164         the binary version: DIR/data_batch_1.bin … test_batch.bin
    spark-submit cifar10_resnet.py --data hdfs:///cifar10    Spark reads the files from wherever it can

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (2015), section 4.2. The means of the three channels
take the place of the mean of each pixel. ``cifar10_resnet.ipynb`` is the same program as a notebook.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tfos_nb import TFModel, launch, spark_session


def main(args, ctx):
    import keras
    import tensorflow as tf
    from keras import layers

    def conv(x, filters, stride=1):
        x = layers.Conv2D(filters, 3, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    def block(x, filters, stride):
        y = conv(layers.Activation("relu")(conv(x, filters, stride)), filters)
        if stride == 2:  # the paper's option A: every second pixel, and zeros for the new channels
            new = filters - x.shape[-1]
            x = layers.AveragePooling2D(1, strides=2)(x)
            x = layers.ZeroPadding2D(((0, 0), (new // 2, new - new // 2)), data_format="channels_first")(x)
        return layers.Activation("relu")(layers.Add()([x, y]))

    def build():
        inputs = layers.Input((32, 32, 3))
        x = layers.Normalization(mean=[125.3, 123.0, 113.9], variance=[3969.0, 3856.0, 4449.0])(inputs)
        x = layers.Activation("relu")(conv(x, args["width"]))
        for stage in range(3):
            for number in range(args["blocks"]):
                x = block(x, args["width"] << stage, 2 if stage and not number else 1)
        outputs = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(args["rate"], momentum=0.9, weight_decay=1e-4)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def augment(pixels, label):
        """Shift each picture by up to four pixels, with black beyond its edges, and mirror every second one."""
        images = tf.reshape(tf.cast(pixels, tf.float32), (-1, 32, 32, 3))
        images = tf.pad(images, [[0, 0], [4, 4], [4, 4], [0, 0]])
        corners = tf.random.uniform((tf.shape(images)[0], 2), 0, 9, tf.int32)
        images = tf.gather(images, corners[:, :1] + tf.range(32), axis=1, batch_dims=1)
        images = tf.gather(images, corners[:, 1:] + tf.range(32), axis=2, batch_dims=1)
        return tf.image.random_flip_left_right(images), label

    def rate(epoch):  # a tenth after half of the epochs, a hundredth after three quarters
        return args["rate"] * 0.1 ** ((2 * epoch >= args["epochs"]) + (4 * epoch >= 3 * args["epochs"]))

    with ctx.strategy().scope():
        model = build()
    rows = ctx.dataset(args["batch_size"], x="pixels", y="label", shuffle=10_000).map(augment)
    model.fit(rows, epochs=args["epochs"], callbacks=[keras.callbacks.LearningRateScheduler(rate)], verbose=2)
    return ctx.save(model)


def write_batch(path, images, labels):
    """Write pictures as CIFAR-10's binary version: a byte of label, then 1,024 bytes each of red, green and blue."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    np.concatenate([labels.reshape(-1, 1), planes], axis=1).astype("uint8").tofile(path)


def make_pictures(folder, rows, seed):
    """Write pictures of ten kinds: a square of one of five colours, or a ring of it, somewhere on grey noise."""
    chance = np.random.default_rng(seed)
    colours = np.array([[220, 40, 40], [40, 200, 40], [50, 60, 230], [220, 210, 40], [200, 40, 210]])
    for name, count in (("data_batch_1.bin", rows), ("test_batch.bin", rows // 4)):
        images, labels = chance.integers(60, 180, (count, 32, 32, 3)), chance.integers(0, 10, count)
        for image, label, corner, size in zip(
            images, labels, chance.integers(2, 10, (count, 2)), chance.integers(12, 20, count), strict=True
        ):
            (top, left), edge = corner, 0 if label < 5 else size // 4
            hole = image[top + edge : top + size - edge, left + edge : left + size - edge].copy()
            image[top : top + size, left : left + size] = colours[label % 5]
            if edge:
                image[top + edge : top + size - edge, left + edge : left + size - edge] = hole
        write_batch(Path(folder) / name, images, labels)


def download(folder):
    """Write what keras.datasets.cifar10 downloads as files of the binary version."""
    import keras

    for name, part in zip(("data_batch_1.bin", "test_batch.bin"), keras.datasets.cifar10.load_data(), strict=True):
        write_batch(Path(folder) / name, *part)


def unpack(batches):
    """Turn records of 3,073 bytes into labels and pixels by row, column and colour; Spark's tasks call it."""
    import numpy as np
    import pyarrow as pa

    for batch in batches:
        records = np.frombuffer(b"".join(batch.column(0).to_pylist()), "uint8").reshape(-1, 3073)
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype("int16")
        starts = np.arange(len(records) + 1, dtype="int32") * 3072
        pixels = pa.ListArray.from_arrays(pa.array(starts), pa.array(pixels.reshape(-1)))
        yield pa.RecordBatch.from_arrays([pa.array(records[:, 0].astype("int32")), pixels], ["label", "pixels"])


def as_row(record):
    """Make a row of one column of a record."""
    return (bytes(record),)


def frame(spark, path):
    """Return a DataFrame of the records in the files that match: a label, and 3,072 values from 0 to 255."""
    records = spark.sparkContext.binaryRecords(path, 3073).map(as_row)
    return spark.createDataFrame(records, "record binary").mapInArrow(unpack, "label int, pixels array<short>")


def score(model, rows):
    """Apply the saved model where the rows are; return the share that it gets right, and how many rows there are."""
    right = "avg(double(array_position(prediction, array_max(prediction)) - 1 = label))"
    return tuple(TFModel(export_dir=model).transform(rows).selectExpr(right, "count(*)").first())


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="made", help="folder of the .bin files, or keras to download them")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the rows (the paper: 164)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows in a step of all workers")
    parser.add_argument("--rate", type=float, default=0.1, help="the first learning rate")
    parser.add_argument("--width", type=int, default=16, help="filters of the first stage")
    parser.add_argument("--blocks", type=int, default=3, help="n, for 6n + 2 layers")
    parser.add_argument("--model-dir", default="tfos_models/cifar10", help="where the model goes")
    return vars(parser.parse_args(argv))


def run(args: dict[str, Any]) -> None:
    data = args["data"]
    if data in ("made", "keras"):
        folder = Path("tfos_models/cifar10_data").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        download(folder) if data == "keras" else make_pictures(folder, rows=2000, seed=1)
        data = str(folder)
    spark = spark_session(args["workers"] + 1)
    train, held_out = frame(spark, f"{data}/data_batch_*.bin"), frame(spark, f"{data}/test_batch.bin")
    cluster = {"workers": args["workers"], "model_dir": args["model_dir"], "name": "cifar10"}
    with launch(main, args, spark=spark, **cluster) as cifar10:
        cifar10.train(train, epochs=args["epochs"])
    for epoch in cifar10.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**epoch))
    accuracy, rows = score(cifar10.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"{accuracy:.1%} of {rows} held-out pictures are right; the model is in {cifar10.result()}")
    outcome = {"epochs": cifar10.history.epochs, "accuracy": accuracy, "held_out": rows, "model": cifar10.result()}
    print(json.dumps({"example": "cifar10_resnet", **outcome}))


if __name__ == "__main__":
    run(parse())
