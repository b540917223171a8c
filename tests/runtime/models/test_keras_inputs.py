"""Columns of every type as inputs of every shape: handled alike in fit and transform, or refused on the driver."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyspark.sql import DataFrame, SparkSession

from tests.saved_models import close
from tfos_nb import KerasEstimator
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.models.keras_inputs import KerasInputs
from tfos_nb.runtime.models.signature import Tensor

QUIET = {"progress": "none", "shuffle": 0}


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    rows = [(float(i) / 8, float(i) / 4) for i in range(8)]
    return spark.createDataFrame(rows, "x double, label double").coalesce(1)


@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
def test_a_number_is_accepted_by_an_input_of_one_value(shape: tuple[int, ...], numbers: DataFrame) -> None:
    given = keras.Input(shape)
    wide = given if shape else keras.ops.expand_dims(given, -1)
    model = keras.Model(given, keras.layers.Dense(1, kernel_initializer="ones")(wide))
    estimator = KerasEstimator(
        model, optimizer=keras.optimizers.SGD(0.5), loss="mse", featuresCol="x", epochs=2, **QUIET
    )
    scored = estimator.fit(numbers).transform(numbers).orderBy("x").collect()
    x = np.arange(8, dtype="float32") / 8
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(x.reshape(-1, *shape), 2 * x, batch_size=100, epochs=2, shuffle=False, verbose=0)
    assert close([row.prediction for row in scored], model.predict(x.reshape(-1, *shape), verbose=0)[:, 0])


@pytest.mark.parametrize("form", ["list", "dict"])
def test_several_inputs_are_given_by_their_layers_names_or_keys(form: str, numbers: DataFrame) -> None:
    named = "left" if form == "dict" else None  # Keras requires the names of a dictionary's inputs to be its keys
    left, right = keras.Input((1,), name=named), keras.Input((), name="right")
    given = [right, left] if form == "list" else {"right": right, "left": left}
    model = keras.Model(given, left * 10.0 + keras.ops.expand_dims(right, -1))
    name = (
        "left" if form == "dict" else model.layers[0].name if model.layers[0].name != "right" else model.layers[1].name
    )
    estimator = KerasEstimator(model, optimizer="sgd", loss="mse", input_mapping={"x": name, "y": "right"}, **QUIET)
    rows = numbers.selectExpr("x", "x + 1 y", "label")
    scored = estimator.fit(rows).transform(rows).orderBy("x").collect()
    assert close([row.prediction for row in scored], [11 * row.x + 1 for row in scored])


def build_of_any_shape() -> Any:
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def test_a_sequential_without_an_input_gets_its_shape_from_the_rows(numbers: DataFrame) -> None:
    rows = numbers.selectExpr("array(x, 2 * x) features", "label")
    fitted = KerasEstimator(build_of_any_shape, **QUIET).fit(rows)
    found = sorted(row.prediction for row in fitted.transform(rows).collect())
    assert close(found, np.arange(8) / 8 * 3)


def build_words() -> Any:
    layers = [
        keras.layers.TextVectorization(vocabulary=["good", "bad", "film", "very"], output_sequence_length=3),
        keras.layers.Embedding(6, 4),
        keras.layers.Flatten(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    model = keras.Sequential([keras.Input((1,), dtype="string"), *layers])
    model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    return model


def test_a_text_is_accepted_by_an_input_of_one_value(spark: SparkSession) -> None:
    texts = ["good film", "bad film", "very good", "very bad"] * 10
    words = spark.createDataFrame([(text, float("good" in text)) for text in texts], "text string, label double")
    estimator = KerasEstimator(
        build_words, featuresCol="text", epochs=15, batch_size=8, cluster_size=1, progress="none"
    )
    found = estimator.fit(words).transform(words).select("label", "prediction").distinct().collect()
    assert sorted(map(tuple, found)) == [(0.0, 0.0), (1.0, 1.0)]


def pixels(value: int, size: int = 4) -> bytes:
    content: bytes = tf.io.encode_png(np.full((size, size, 3), value, np.uint8)).numpy()
    return content


def picture_model() -> Any:
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(1, activation="sigmoid")]
    return keras.Sequential([keras.Input((4, 4, 3)), *layers])


def test_pictures_are_decoded_in_a_fit_as_in_a_transform(spark: SparkSession) -> None:
    rows = [(pixels(255 * (i % 2), 4 + i % 3), i % 2) for i in range(24)]
    pictures = spark.createDataFrame(rows, "content binary, label int")
    estimator = KerasEstimator(picture_model(), optimizer=keras.optimizers.Adam(0.1), loss="binary_crossentropy")
    estimator._set_all({"featuresCol": "content", "decode": ["content"], "epochs": 15, "batch_size": 8, **QUIET})
    found = estimator.fit(pictures).transform(pictures).select("label", "prediction").distinct().collect()
    assert sorted(map(tuple, found)) == [(0, 0.0), (1, 1.0)]


@pytest.fixture(scope="module")
def mixed(spark: SparkSession) -> DataFrame:
    row = (1.0, "a", pixels(1), [1.0, 2.0], 0)
    return spark.createDataFrame([row], "x double, t string, p binary, pair array<float>, label int")


@pytest.mark.parametrize(
    ("column", "params", "told"),
    [
        ("x", {"decode": ["q"]}, "decode: no column 'q'; there are x, t, p, pair, label"),
        ("x", {"decode": ["p"]}, "decode: column 'p' is not a feature (x): leave it out"),
        ("x", {"decode": ["x"]}, "decode: column 'x' must be binary, with encoded images, got double: leave it out"),
        ("p", {"decode": ["p"]}, "column p (binary) does not fit"),
        ("pair", {}, "column pair (array<float>) does not fit"),
        ("t", {}, "column t (string) does not fit"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_a_node_starts(
    column: str, params: dict[str, Any], told: str, mixed: DataFrame
) -> None:
    given = keras.Input(())
    model = keras.Model(given, keras.layers.Dense(1)(keras.ops.expand_dims(given, -1)))
    with pytest.raises(PlanError, match=re.escape(told)):
        KerasEstimator(model, optimizer="sgd", loss="mse", featuresCol=column, **params).fit(mixed)


def test_decode_is_checked_when_a_function_builds_the_model(mixed: DataFrame) -> None:
    with pytest.raises(PlanError, match="decode: column 'x' must be binary"):
        KerasEstimator(build_words, featuresCol="x", decode=["x"]).fit(mixed)


def made(columns: dict[str, Any], tensors: list[Tensor], x: Any, decode: frozenset[str] = frozenset()) -> Any:
    """Convert a batch to a model's inputs, as a node does."""
    inputs = KerasInputs(tuple(tensors), x, decode)
    given = columns[x] if isinstance(x, str) else columns
    dataset = tf.data.Dataset.from_tensors(given)
    batched = tf.nest.map_structure(
        lambda spec: tf.TensorSpec((None, *spec.shape[1:]), spec.dtype), dataset.element_spec
    )
    inputs.check(batched)
    return next(iter(dataset.map(inputs)))


def test_lists_and_numbers_are_reshaped_to_the_axes_of_their_inputs() -> None:
    x = np.arange(12, dtype="float32")
    columns = {"a": x, "b": x.reshape(2, 6)[[0, 1] * 6], "c": np.array([b"w"] * 12)}
    tensors = [Tensor("a", "float32", (1, 1)), Tensor("b", "float32", (2, 3)), Tensor("c", "string", (1,))]
    found = made(columns, tensors, ("a", "b", "c"))
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "a": (12, 1, 1),
        "b": (12, 2, 3),
        "c": (12, 1),
    }
    assert found["b"].numpy()[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_column_that_does_not_fit_is_named() -> None:
    x, text = np.zeros((2, 2), "float32"), np.array([b"a", b"b"])
    one, word = Tensor("i", "float32", (4,)), Tensor("i", "string", ())
    with pytest.raises(
        FeedFailed, match=re.escape("column 'two' has shape (2,), and the model's input 'i' expects (4,)")
    ):
        made({"two": x}, [one], "two")
    with pytest.raises(FeedFailed, match="column 'two' is float32, and the model's input 'i' takes string"):
        made({"two": x[:, 0]}, [word], "two")
    with pytest.raises(FeedFailed, match="if it holds encoded pictures, name it in decode"):
        made({"p": text}, [Tensor("i", "float32", (4, 4, 3))], "p")
    with pytest.raises(PlanError, match=r"featuresCol='p' names one column, and the model takes a .*, b "):
        made({"p": text}, [Tensor("a", "string", ()), Tensor("b", "string", ())], "p")
    with pytest.raises(PlanError, match="no input 'c'"):
        made({"a": text, "c": text}, [Tensor("a", "string", ()), Tensor("b", "string", ())], ("a", "c"))


def test_the_error_of_an_invalid_picture_is_kept() -> None:
    inputs = KerasInputs((Tensor("i", "uint8", (4, 4, 3)),), "p", frozenset({"p"}))
    good = tf.data.Dataset.from_tensors(np.array([pixels(7), pixels(7, 8)])).map(inputs)
    assert next(iter(good)).numpy().tolist() == np.full((2, 4, 4, 3), 7).tolist()
    bad = tf.data.Dataset.from_tensors(np.array([pixels(7), b"none"])).map(inputs)
    with pytest.raises(tf.errors.OpError):
        next(iter(bad))
    assert str(inputs.failures[0]).startswith(
        "column 'p' has 4 bytes that are no image and begin with b'none' (row 1 of a batch)"
    )
