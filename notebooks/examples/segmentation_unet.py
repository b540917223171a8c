"""Pets cut out of their pictures by a U-Net: pictures and masks from two folders, fed as they are encoded.

::

    python segmentation_unet.py                              drawn pets, on a local Spark
    python segmentation_unet.py --data DIR --size 128        Oxford-IIIT Pet: DIR/images, DIR/annotations/trimaps
    spark-submit segmentation_unet.py --data hdfs:///pets    Spark reads the files from wherever it can

A mask is a PNG of one channel: 1 is the pet, 2 the background, 3 the border between them. Ronneberger, Fischer, Brox:
U-Net (2015), with convolutions that keep the size of the picture. ``segmentation_unet.ipynb`` is the same program as a
notebook.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tfos_nb import launch, map_batches, predict, spark_session


def main(args, ctx):
    import keras
    import tensorflow as tf
    from keras import layers

    size, width, levels = args["size"], args["width"], args["levels"]

    def twice(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")(x)
        return x

    def build():
        inputs = layers.Input((size, size, 3), name="image")
        x, across = layers.Rescaling(1 / 127.5, offset=-1)(inputs), []
        for level in range(levels):
            across.append(twice(x, width << level))
            x = layers.MaxPooling2D()(across[-1])
        x = layers.Dropout(0.2)(twice(x, width << levels))
        for level in reversed(range(levels)):
            x = layers.Conv2DTranspose(width << level, 2, 2)(x)
            x = twice(layers.Concatenate()([across[level], x]), width << level)
        model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(x))
        model.compile(keras.optimizers.Adam(args["rate"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def decode(image, mask):
        image = tf.image.resize(tf.io.decode_jpeg(image, channels=3), (size, size))  # PNG too
        mask = tf.image.resize(tf.io.decode_png(mask, channels=1), (size, size), "nearest")
        both = tf.image.random_flip_left_right(tf.concat([image, tf.cast(mask, tf.float32)], axis=-1))
        return both[..., :3], tf.cast(both[..., 3:], tf.int32) - 1  # masks count from 1

    with ctx.strategy().scope():
        model = build()
    rows = ctx.dataset(args["batch_size"], x="image", y="mask", shuffle=500)
    rows = rows.unbatch().map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(args["batch_size"])
    model.fit(rows, epochs=args["epochs"], verbose=2)
    return ctx.save(model)


def draw_pets(folder, count, seed, size=48):
    """Draw pets, which are ellipses in a meadow, and their masks, in folders called as those of Oxford-IIIT Pet."""
    from PIL import Image

    images, masks = Path(folder) / "images", Path(folder) / "annotations/trimaps"
    images.mkdir(parents=True, exist_ok=True)
    masks.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    furs = np.array([[200, 150, 90], [90, 80, 80], [230, 225, 215]])
    for number in range(count):
        (down, right), turn = chance.uniform(-0.35, 0.35, 2), chance.uniform(0, np.pi)
        high, wide = chance.uniform(0.35, 0.7, 2)
        along = (x - right) * np.cos(turn) + (y - down) * np.sin(turn)
        aside = (y - down) * np.cos(turn) - (x - right) * np.sin(turn)
        distance = np.hypot(along / wide, aside / high)
        image = chance.integers(40, 160, (size, size, 3)) * [0.6, 1.0, 0.5]
        image[distance < 1] = furs[number % 3]
        image += chance.normal(0, 15, image.shape)
        mask = np.select([distance < 0.9, distance > 1.1], [1, 2], 3)
        Image.fromarray(image.clip(0, 255).astype("uint8")).save(images / f"pet_{number}.jpg", quality=90)
        Image.fromarray(mask.astype("uint8")).save(masks / f"pet_{number}.png")


def frame(spark, folder):
    """Return a DataFrame of the pictures and masks that have the same name: both as their files are."""
    name = r"regexp_extract(path, '([^/]+)[.][^.]+$', 1) AS name"
    binary = spark.read.format("binaryFile")
    images = binary.option("pathGlobFilter", "*.{jpg,jpeg,png}").load(f"{folder}/images")
    masks = binary.option("pathGlobFilter", "*.png").load(f"{folder}/annotations/trimaps")
    named = images.selectExpr(name, "content AS image"), masks.selectExpr(name, "content AS mask")
    return named[0].join(named[1], "name")


def parts(rows):
    """Return the rows to train on and every fifth, which is held out; a picture's name decides."""
    fifth = "pmod(crc32(cast(name AS binary)), 5) = 0"
    return rows.where(f"NOT {fifth}"), rows.where(fifth)


def overlap(prediction, mask):
    """Count, for each picture and class, the pixels that prediction and mask share, and those that either has."""
    import tensorflow as tf

    def scaled(png):
        return tf.image.resize(tf.io.decode_png(png, channels=1), tf.shape(prediction)[1:3], "nearest")[..., 0]

    def count(pixels):
        return tf.math.count_nonzero(pixels, axis=(1, 2), dtype=tf.int32)

    classes = tf.cast(tf.map_fn(scaled, mask, fn_output_signature=tf.uint8), tf.int32) - 1
    truth, found = tf.one_hot(classes, 3) > 0, tf.one_hot(tf.argmax(prediction, axis=-1), 3) > 0
    return {"shared": count(truth & found), "either": count(truth | found)}


def score(model, rows):
    """Return the intersection over union of the three classes, of all pixels together, and how many pictures there are.

    The saved model is applied where the rows are, and so is what compares its answers with the masks.
    """
    found = predict(rows, model, inputs="image", decode=["image"], keep=["mask"], batch_size=64)
    counted = map_batches(found, overlap, "shared array<int>, either array<int>", batch_size=64)
    ratios = [f"sum(shared[{kind}]) / sum(either[{kind}])" for kind in range(3)]
    *ious, count = counted.selectExpr(*ratios, "count(*)").first()
    return dict(zip(("pet", "background", "border"), ious, strict=True)), count


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="made", help="folder with images/ and annotations/trimaps/")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the pictures")
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step of all workers")
    parser.add_argument("--rate", type=float, default=0.002, help="the learning rate")
    parser.add_argument("--size", type=int, default=48, help="height and width of a picture")
    parser.add_argument("--width", type=int, default=8, help="filters at the top (the paper: 64)")
    parser.add_argument("--levels", type=int, default=3, help="halvings (the paper: 4)")
    parser.add_argument("--model-dir", default="tfos_models/pets", help="where the model goes")
    return vars(parser.parse_args(argv))


def run(args: dict[str, Any]) -> None:
    data = args["data"]
    if data == "made":
        data = str(Path("tfos_models/pets_data").absolute())
        draw_pets(data, count=300, seed=1)
    if args["size"] % (1 << args["levels"]):
        raise SystemExit(f"--size {args['size']} is no multiple of {1 << args['levels']}, as --levels needs")
    spark = spark_session(args["workers"] + 1)
    train, held_out = parts(frame(spark, data).cache())
    cluster = {"workers": args["workers"], "model_dir": args["model_dir"], "name": "pets"}
    with launch(main, args, spark=spark, **cluster) as pets:
        pets.train(train, epochs=args["epochs"])
    for epoch in pets.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f} by pixel".format(**epoch))
    ious, count = score(pets.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"IoU on {count} held-out pictures: {', '.join(f'{kind} {iou:.3f}' for kind, iou in ious.items())}")
    print(f"the model is in {pets.result()}")
    outcome = {"epochs": pets.history.epochs, "iou": ious, "held_out": count, "model": pets.result()}
    print(json.dumps({"example": "segmentation_unet", **outcome}))


if __name__ == "__main__":
    run(parse())
