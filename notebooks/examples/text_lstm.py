"""Reviews, classified as praise or blame by a bidirectional LSTM over the words that Spark ML has counted.

::

    python text_lstm.py                                      made reviews, on a local Spark
    python text_lstm.py --data FILE --length 200             lines of 0 or 1, a tab, and the text
    spark-submit text_lstm.py --data hdfs:///reviews         Spark reads the lines from wherever it can

Spark ML's Tokenizer and CountVectorizer make the vocabulary, and each row becomes an array of indices of one length: 0
is nothing, 1 a word that the vocabulary does not have. ``text_lstm.ipynb`` is the same program as a notebook.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfos_nb import TFModel, launch, spark_session


def main(args, ctx):
    import keras
    from keras import layers

    with ctx.strategy().scope():
        model = keras.Sequential(
            [
                layers.Input((args["length"],), dtype="int32"),
                layers.Embedding(args["words"] + 2, args["width"], mask_zero=True),
                layers.Bidirectional(layers.LSTM(args["width"])),
                layers.Dropout(0.3),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(keras.optimizers.Adam(args["rate"]), "binary_crossentropy", metrics=["accuracy"])
    rows = ctx.dataset(args["batch_size"], x="ids", y="label", shuffle=10_000)
    model.fit(rows, epochs=args["epochs"], verbose=2)
    return ctx.save(model)


def make_reviews(path, rows, seed):
    """Write reviews in which one word praises or blames, and a "not" before it turns that round."""
    chance = np.random.default_rng(seed)
    praise, blame = ["superb", "moving", "clever", "funny"], ["dull", "clumsy", "boring", "awful"]
    filling = ["the", "this", "film", "plot", "cast", "story", "scene", "actor", "music", "is", "and", "of", "quite"]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            good, turned = chance.integers(0, 2, 2)
            words = list(chance.choice(filling, chance.integers(5, 12)))
            told = [str(chance.choice(praise if good else blame))]
            at = chance.integers(0, len(words) + 1)
            words[at:at] = ["not", *told] if turned else told
            file.write(f"{good ^ turned}\t{' '.join(words)}\n")


def download(path):
    """Write the reviews that keras.datasets.imdb downloads, as words again."""
    import keras

    words = {number + 3: word for word, number in keras.datasets.imdb.get_word_index().items()}
    with open(path, "w", encoding="utf-8") as file:
        for reviews, labels in keras.datasets.imdb.load_data(num_words=20_000):
            for review, label in zip(reviews, labels, strict=True):
                file.write(f"{label}\t{' '.join(words.get(number, '') for number in review[1:])}\n")


def frame(spark, path):
    """Return a DataFrame of lines: a label, and the words of the text."""
    from pyspark.ml.feature import Tokenizer

    lines = spark.read.option("sep", "\t").option("quote", "").csv(path, schema="label int, text string").dropna()
    return Tokenizer(inputCol="text", outputCol="words").transform(lines)


def parts(rows):
    """Return the rows to train on and every fifth, which is held out; the text decides."""
    fifth = "pmod(crc32(cast(text AS binary)), 5) = 0"
    return rows.where(f"NOT {fifth}"), rows.where(fifth)


@dataclass(frozen=True)
class Numbered:
    """Words become their places in the vocabulary, counted from 2; Spark's tasks call it."""

    vocabulary: tuple[str, ...]

    def __call__(self, batches):
        import pyarrow as pa
        import pyarrow.compute as pc

        known = pa.array(self.vocabulary)
        for batch in batches:
            labels, words = batch.columns
            places = pc.fill_null(pc.add(pc.index_in(words.flatten(), known), 2), 1).cast("int32")
            starts = pc.subtract(words.offsets, words.offsets[0])
            yield pa.RecordBatch.from_arrays([labels, pa.ListArray.from_arrays(starts, places)], ["label", "ids"])


def vocabulary_of(rows, size):
    """Return the most frequent words that at least two rows have, as Spark ML counts them."""
    from pyspark.ml.feature import CountVectorizer

    return tuple(CountVectorizer(inputCol="words", vocabSize=size, minDF=2).fit(rows).vocabulary)


def numbered(rows, vocabulary, length):
    """Return a DataFrame of labels and arrays of indices, cut or filled with 0 to one length."""
    found = rows.select("label", "words").mapInArrow(Numbered(vocabulary), "label int, ids array<int>")
    return found.selectExpr("label", f"slice(concat(ids, array_repeat(0, {length})), 1, {length}) AS ids")


def score(model, rows):
    """Apply the saved model where the rows are; return the share that it gets right, and how many rows there are."""
    right = "avg(double(int(prediction > 0.5) = label))"
    return tuple(TFModel(export_dir=model).transform(rows).selectExpr(right, "count(*)").first())


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="made", help="file or folder of lines, or keras to download IMDB's")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the rows")
    parser.add_argument("--batch-size", type=int, default=64, help="rows in a step of all workers")
    parser.add_argument("--rate", type=float, default=0.005, help="the learning rate")
    parser.add_argument("--length", type=int, default=16, help="words of a text that count")
    parser.add_argument("--words", type=int, default=20_000, help="size of the vocabulary")
    parser.add_argument("--width", type=int, default=16, help="of a word's vector, and of the LSTM")
    parser.add_argument("--model-dir", default="tfos_models/reviews", help="where the model goes")
    return vars(parser.parse_args(argv))


def run(args: dict[str, Any]) -> None:
    data = args["data"]
    if data in ("made", "keras"):
        path = Path("tfos_models/reviews.tsv").absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        download(path) if data == "keras" else make_reviews(path, rows=3000, seed=1)
        data = str(path)
    spark = spark_session(args["workers"] + 1)
    train, held_out = parts(frame(spark, data))
    vocabulary = vocabulary_of(train, args["words"])
    args["words"] = len(vocabulary)
    train, held_out = (numbered(rows, vocabulary, args["length"]) for rows in (train, held_out))
    cluster = {"workers": args["workers"], "model_dir": args["model_dir"], "name": "reviews"}
    with launch(main, args, spark=spark, **cluster) as reviews:
        reviews.train(train, epochs=args["epochs"])
    for epoch in reviews.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**epoch))
    accuracy, count = score(reviews.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"{accuracy:.1%} of {count} held-out reviews are right; the model is in {reviews.result()}")
    outcome = {"epochs": reviews.history.epochs, "accuracy": accuracy, "held_out": count, "model": reviews.result()}
    print(json.dumps({"example": "text_lstm", "words": len(vocabulary), **outcome}))


if __name__ == "__main__":
    run(parse())
