"""Pictures of flowers, classified by GoogLeNet's Inception modules, which read TFRecord files.

::

    python flowers_inception.py                              drawn flowers, on a local Spark
    python flowers_inception.py --data DIR --epochs 30       a folder of JPEG or PNG files for each kind: DIR/rose/1.jpg
    spark-submit flowers_inception.py --data hdfs:///flowers --records hdfs:///records

Spark makes TFRecords of the files; each node reads its share of the records, decodes and augments them in tf.data. The
records have to be where all nodes see them. Szegedy et al.: Going Deeper with Convolutions (2014), with the batch
normalization that its authors added in 2015, and without the classifiers on the way. ``flowers_inception.ipynb`` is the
same program as a notebook.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tfos_nb import TFModel, launch, spark_session, tfrecord


def main(args, ctx):
    import keras
    import tensorflow as tf
    from keras import layers

    size = args["size"]
    # Table 1 of the paper: filters of 1x1, before and of 3x3, before and of 5x5, and after the pooling
    table = [
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    ]

    def conv(x, filters, kernel, stride=1):
        x = layers.Conv2D(max(4, int(filters * args["width"])), kernel, stride, "same", use_bias=False)(x)
        return layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))

    def inception(x, filters):
        one, before_three, three, before_five, five, pooled = filters
        wide = conv(conv(x, before_three, 1), three, 3)
        wider = conv(conv(x, before_five, 1), five, 5)
        beside = conv(layers.MaxPooling2D(3, 1, "same")(x), pooled, 1)
        return layers.Concatenate()([conv(x, one, 1), wide, wider, beside])

    def build():
        inputs = layers.Input((size, size, 3), name="image")
        x = conv(layers.Rescaling(1 / 127.5, offset=-1)(inputs), 64, 7, 2)
        x = conv(conv(layers.MaxPooling2D(3, 2, "same")(x), 64, 1), 192, 3)
        for number, filters in enumerate(table[: args["modules"]]):
            if number in (0, 2, 7):
                x = layers.MaxPooling2D(3, 2, "same")(x)
            x = inception(x, filters)
        x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, layers.Dense(args["kinds"], activation="softmax")(x))
        model.compile(keras.optimizers.Adam(args["rate"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def picture(encoded, label):
        image = tf.image.resize(tf.io.decode_jpeg(encoded, channels=3), (size * 9 // 8, size * 9 // 8))  # PNG too
        return tf.image.random_flip_left_right(tf.image.random_crop(image, (size, size, 3))), label

    with ctx.strategy().scope():
        model = build()
    rows = ctx.read(args["records"], args["batch_size"], format="tfrecord", x="image", y="label", shuffle=1000)
    rows = rows.unbatch().map(picture, num_parallel_calls=tf.data.AUTOTUNE).batch(args["batch_size"])
    model.fit(rows, epochs=args["epochs"], verbose=2)
    return ctx.save(model)


def draw_flowers(folder, count, seed, size=64):
    """Draw flowers of four kinds, which differ in their petals and colours: PNG files in a folder for each kind."""
    from PIL import Image

    chance = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    kinds = {"daisy": (11, [235, 235, 235]), "rose": (5, [200, 30, 60]), "sunflower": (17, [235, 190, 20])}
    for kind, (petals, colour) in {**kinds, "tulip": (3, [225, 120, 200])}.items():
        (Path(folder) / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (down, right), radius, turn = chance.uniform(-0.3, 0.3, 2), chance.uniform(0.5, 0.9), chance.uniform(0, 6.3)
            distance, angle = np.hypot(y - down, x - right), np.arctan2(y - down, x - right)
            image = chance.integers(30, 140, (size, size, 3)) * [0.5, 1.0, 0.4]
            image[distance < radius * (0.7 + 0.3 * np.cos(petals * angle + turn))] = colour
            image[distance < radius / 4] = [120, 80, 20]
            image += chance.normal(0, 12, image.shape)
            Image.fromarray(image.clip(0, 255).astype("uint8")).save(Path(folder) / kind / f"{number}.png")


def frame(spark, folder):
    """Return a DataFrame of the files in a folder of folders (the file, its kind as a number), and the kinds' names."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", True).load(folder)
    files = files.where("lower(path) RLIKE '[.](png|jpe?g)$'").selectExpr(
        "path", "content AS image", "element_at(split(path, '/'), -2) AS kind"
    )
    kinds = sorted(row.kind for row in files.select("kind").distinct().collect())
    names = ", ".join("'" + kind.replace("'", "\\'") + "'" for kind in kinds)
    return files.selectExpr("path", "image", f"int(array_position(array({names}), kind) - 1) AS label"), kinds


def parts(rows):
    """Return the rows to train on and every fifth, which is held out; a file's name decides."""
    fifth = "pmod(crc32(cast(path AS binary)), 5) = 0"
    return rows.where(f"NOT {fifth}"), rows.where(fifth)


def score(model, rows):
    """Apply the saved model where the files are; return the share that it gets right, and how many files there are."""
    right = "avg(double(array_position(prediction, array_max(prediction)) - 1 = label))"
    scored = TFModel(export_dir=model, decode=["image"]).transform(rows.select("image", "label"))
    return tuple(scored.selectExpr(right, "count(*)").first())


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="made", help="folder with a folder of pictures for each kind")
    parser.add_argument("--records", default="", help="where the TFRecords go; if empty, beside the model")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the pictures")
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a step of all workers")
    parser.add_argument("--rate", type=float, default=0.002, help="the learning rate")
    parser.add_argument("--size", type=int, default=64, help="height and width of a picture")
    parser.add_argument("--width", type=float, default=0.25, help="share of the paper's filters")
    parser.add_argument("--modules", type=int, default=4, help="of the paper's nine modules")
    parser.add_argument("--model-dir", default="tfos_models/flowers", help="where the model goes")
    return vars(parser.parse_args(argv))


def run(args: dict[str, Any]) -> None:
    where = args["model_dir"] if "://" in args["model_dir"] else os.path.abspath(args["model_dir"])
    data, args["records"] = args["data"], args["records"] or f"{where}/records"
    if data == "made":
        data = str(Path("tfos_models/flowers_data").absolute())
        draw_flowers(data, count=150, seed=1)
    spark = spark_session(args["workers"] + 1)
    rows, kinds = frame(spark, data)
    args["kinds"] = len(kinds)
    train, held_out = parts(rows)
    print(tfrecord.write(train.select("image", "label").repartition(4), args["records"], mode="overwrite"))
    cluster = {"workers": args["workers"], "input_mode": "tensorflow", "model_dir": where, "name": "flowers"}
    with launch(main, args, spark=spark, **cluster) as flowers:
        pass  # the nodes read the records by themselves
    for epoch in flowers.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**epoch))
    accuracy, count = score(flowers.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"{accuracy:.1%} of {count} held-out pictures are right; the model is in {flowers.result()}")
    outcome = {"epochs": flowers.history.epochs, "accuracy": accuracy, "held_out": count, "model": flowers.result()}
    print(json.dumps({"example": "flowers_inception", "kinds": kinds, **outcome}))


if __name__ == "__main__":
    run(parse())
