"""Who earns more than 50,000 dollars: a wide and a deep model of the Adult census, in step or with parameter servers.

::

    python wide_and_deep.py                                  made rows of the same columns, on a local Spark
    python wide_and_deep.py --data adult.data                the file of UCI's machine learning repository
    spark-submit wide_and_deep.py --data hdfs:///adult.data --ps 1

Spark ML numbers the categories and scales the numbers; the crossed columns are hashed in SQL. With ``--ps N`` the
variables are on N parameter servers, and tf_keras takes the place of Keras 3, which does not train that way. Cheng et
al.: Wide & Deep Learning for Recommender Systems (2016), with one optimizer for both parts. ``wide_and_deep.ipynb`` is
the same program as a notebook.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tfos_nb import TFModel, launch, spark_session

NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
CATEGORIES = ["workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country"]
CROSSES = [["education", "occupation"], ["native_country", "occupation"], ["age_group", "education", "occupation"]]
SCHEMA = """age double, workclass string, fnlwgt double, education string, education_num double, marital_status string,
    occupation string, relationship string, race string, sex string, capital_gain double, capital_loss double,
    hours_per_week double, native_country string, income string"""


def main(args, ctx):
    import importlib

    if args["ps"] and not ctx.is_chief:
        return ctx.serve()
    keras = importlib.import_module("tf_keras" if args["ps"] else "keras")
    layers = keras.layers

    def build():
        inputs = {name: keras.Input((), dtype="int32", name=name) for name in args["sizes"]}
        embedded = [layers.Embedding(size, args["width"])(inputs[name]) for name, size in args["sizes"].items()]
        inputs["numbers"] = keras.Input((args["numbers"],), name="numbers")
        inputs["wide"] = keras.Input((args["crossed"],), dtype="int32", name="wide")
        deep = layers.Concatenate()([inputs["numbers"], *embedded])
        for units in (12 * args["width"], 6 * args["width"]):
            deep = layers.Dense(units, activation="relu")(deep)
        wide = layers.Flatten()(layers.Embedding(args["buckets"], 1)(inputs["wide"]))
        outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([wide, deep]))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(args["rate"]), "binary_crossentropy", metrics=["accuracy"])
        return model

    with ctx.strategy().scope():
        model = build()
    columns = {"x": [*args["sizes"], "numbers", "wide"], "y": "label", "shuffle": 10_000}
    if args["ps"]:  # the chief gives steps to the workers, and each takes rows of its own
        rows = ctx.coordinator_dataset(args["batch_size"], repeat=True, **columns)
        rows = keras.utils.experimental.DatasetCreator(rows)
    else:
        rows = ctx.dataset(args["batch_size"], **columns)
    model.fit(rows, epochs=args["epochs"], steps_per_epoch=args["steps"], verbose=2)
    return ctx.save(model)


def make_census(path, rows, seed):
    """Write rows of the census' columns, whose income depends on schooling, hours, age, marriage and occupation."""
    chance = np.random.default_rng(seed)
    schools = {9: "HS-grad", 10: "Some-college", 13: "Bachelors", 14: "Masters", 16: "Doctorate"}
    jobs = {"Sales": 0.0, "Craft-repair": -0.5, "Exec-managerial": 1.0, "Tech-support": 0.5, "Other-service": -1.0}
    unions = {"Married-civ-spouse": ("Husband", "Wife"), "Never-married": ("Own-child", "Not-in-family")}
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            age, hours = int(chance.integers(18, 70)), int(chance.integers(15, 65))
            years, job, union = (str(chance.choice(list(known))) for known in (schools, jobs, unions))
            gain = int(chance.integers(3000, 15000)) if chance.random() < 0.1 else 0
            married, man = union.startswith("Married"), bool(chance.integers(0, 2))
            sure = 0.5 * (int(years) - 12) + 0.05 * (hours - 40) + 0.04 * (age - 42) + 2 * jobs[job] + 2 * married
            sure += gain / 4000 - 1.5 + (2 if (years, job) == ("9", "Craft-repair") else 0)
            income = ">50K" if chance.logistic(2 * sure) > 0 else "<=50K"
            values = [age, chance.choice(["Private", "State-gov", "?"]), int(chance.integers(2e4, 4e5))]
            values += [schools[int(years)], years, union, job, unions[union][0 if man else 1], "White"]
            values += ["Male" if man else "Female", gain, 0, hours, chance.choice(["United-States", "Mexico"]), income]
            file.write(", ".join(map(str, values)) + "\n")


def frame(spark, path):
    """Return a DataFrame of the census' rows, as adult.data and adult.test have them, with a label and an age group."""
    rows = spark.read.option("ignoreLeadingWhiteSpace", True).option("ignoreTrailingWhiteSpace", True)
    rows = rows.csv(path, schema=SCHEMA).dropna()
    return rows.selectExpr("*", "int(income LIKE '>50K%') AS label", "string(int(age / 5)) AS age_group")


def parts(rows):
    """Return the rows to train on and every fifth, which is held out; what is in a row decides."""
    fifth = "pmod(hash(age, fnlwgt, education, occupation, hours_per_week), 5) = 0"
    return rows.where(f"NOT {fifth}"), rows.where(fifth)


def preparation(rows):
    """Return what Spark ML learns of the rows: the categories by frequency, and the mean and spread of the numbers."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler

    numbered = StringIndexer(inputCols=CATEGORIES, outputCols=[f"{c}_" for c in CATEGORIES], handleInvalid="keep")
    together = VectorAssembler(inputCols=NUMBERS, outputCol="measured")
    scaled = StandardScaler(inputCol="measured", outputCol="numbers", withMean=True)
    return Pipeline(stages=[numbered, together, scaled]).fit(rows)


def features(rows, prepared, buckets):
    """Return a DataFrame of what the model takes: a number for each category, a vector, and places of the crosses."""
    crossed = [[name] for name in CATEGORIES] + CROSSES
    places = ", ".join(f"int(pmod(hash('{' x '.join(names)}', {', '.join(names)}), {buckets}))" for names in crossed)
    categories = [f"int({name}_) AS {name}" for name in CATEGORIES]
    return prepared.transform(rows).selectExpr("label", "numbers", f"array({places}) AS wide", *categories)


def sizes_of(prepared):
    """Return how many numbers each category takes; the last is for what was not seen."""
    return {name: len(labels) + 1 for name, labels in zip(CATEGORIES, prepared.stages[0].labelsArray, strict=True)}


def score(model, rows):
    """Apply the saved model where the rows are; return the shares that it and a guess get right, and how many rows."""
    right = "avg(double(int(prediction > 0.5) = label))"
    guess = "greatest(avg(label), 1 - avg(label))"
    return tuple(TFModel(export_dir=model).transform(rows).selectExpr(right, guess, "count(*)").first())


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    about, form = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--data", default="made", help="adult.data, or a pattern of such files")
    parser.add_argument("--workers", type=int, default=2, help="nodes that train")
    parser.add_argument("--ps", type=int, default=0, help="parameter servers; 0: all workers in step")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the rows")
    parser.add_argument("--batch-size", type=int, default=64, help="rows in a step")
    parser.add_argument("--rate", type=float, default=0.003, help="the learning rate")
    parser.add_argument("--width", type=int, default=8, help="of a category's vector")
    parser.add_argument("--buckets", type=int, default=5000, help="places for the crossed columns")
    parser.add_argument("--model-dir", default="tfos_models/census", help="where the model goes")
    return vars(parser.parse_args(argv))


def run(args: dict[str, Any]) -> None:
    data = args["data"]
    if data == "made":
        path = Path("tfos_models/census.csv").absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        make_census(path, rows=4000, seed=1)
        data = str(path)
    spark = spark_session(args["workers"] + args["ps"] + 2)
    train, held_out = parts(frame(spark, data))
    prepared = preparation(train)
    train, held_out = (features(rows, prepared, args["buckets"]) for rows in (train.cache(), held_out))
    args["sizes"] = sizes_of(prepared)
    args["numbers"], args["crossed"] = len(NUMBERS), len(CATEGORIES) + len(CROSSES)
    args["steps"] = train.count() // args["batch_size"] if args["ps"] else None
    cluster = {"workers": args["workers"], "ps": args["ps"], "model_dir": args["model_dir"], "name": "census"}
    with launch(main, args, spark=spark, **cluster) as census:
        census.train(train, epochs=1 if args["ps"] else args["epochs"])
    for epoch in census.history.epochs:
        print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**epoch))
    accuracy, guess, count = score(census.result(), held_out.coalesce(args["workers"]))  # each task loads TensorFlow
    print(f"{accuracy:.1%} of {count} held-out rows are right, and {guess:.1%} if one always said the same")
    print(f"the model is in {census.result()}")
    outcome = {"epochs": census.history.epochs, "accuracy": accuracy, "guess": guess, "held_out": count}
    print(json.dumps({"example": "wide_and_deep", "ps": args["ps"], **outcome, "model": census.result()}))


if __name__ == "__main__":
    run(parse())
