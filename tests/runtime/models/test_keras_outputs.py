"""Models with several outputs, in lists, dictionaries or nested: their labels, losses, metrics and columns."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyspark.sql import DataFrame, SparkSession

from tests.saved_models import close, column
from tfos_nb import KerasEstimator, KerasModel, TFModel, predict
from tfos_nb.errors import PlanError
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput, Task
from tfos_nb.runtime.models.keras_model import keras_model
from tfos_nb.runtime.models.keras_outputs import Outputs
from tfos_nb.runtime.models.model import Use
from tfos_nb.runtime.models.signature import ModelUnusable

SPARSE = "sparse_categorical_crossentropy"
ROWS = np.random.RandomState(3).randn(40, 2).astype("float32")
PRICE, KIND = 3 * ROWS[:, 0] - 1, (ROWS[:, 1] > 0).astype("int32")


def dense(units: int, name: str, given: Any, activation: str | None = None) -> Any:
    return keras.layers.Dense(units, activation, kernel_initializer="zeros", name=name)(given)


def two_outputs(form: str) -> Any:
    given = keras.Input((2,), name="x")
    price, kind = dense(1, "price", given), dense(2, "kind", given, "softmax")
    nested = {"sums": [price], "kinds": {"kind": kind}}
    return keras.Model(given, {"list": [price, kind], "dict": {"price": price, "kind": kind}, "nested": nested}[form])


@pytest.fixture(scope="module")
def sold(spark: SparkSession) -> DataFrame:
    rows = [(i, x.tolist(), float(p), int(k)) for i, (x, p, k) in enumerate(zip(ROWS, PRICE, KIND, strict=True))]
    return spark.createDataFrame(rows, "id int, features array<float>, paid double, label int").coalesce(1)


def by_keras() -> tuple[Any, Any]:
    """Return the predictions of both outputs after Keras' own fit in one process."""
    model = two_outputs("list")
    model.compile(keras.optimizers.SGD(0.2), ["mse", SPARSE])
    model.fit(ROWS, [PRICE, KIND], batch_size=10, epochs=3, shuffle=False, verbose=0)
    price, kind = model.predict(ROWS, verbose=0)
    return price[:, 0], kind


@pytest.mark.parametrize(
    ("form", "loss", "metrics", "labels", "names"),
    [
        ("list", ["mse", SPARSE], [["mae"], ["accuracy"]], ["paid", "label"], ("price", "kind")),
        pytest.param(
            *("dict", {"price": "mse", "kind": SPARSE}, {"kind": "accuracy"}, None, ("price", "kind")),
            marks=pytest.mark.slow,
        ),
        ("nested", {"sums": ["mse"], "kinds": {"kind": SPARSE}}, None, None, ("sums_0", "kinds_kind")),
    ],
    ids=["list", "dict", "nested"],
)
def test_each_output_is_trained_on_its_label_as_in_keras(
    form: str, loss: Any, metrics: Any, labels: Any, names: tuple[str, str], sold: DataFrame
) -> None:
    price, kind = names
    estimator = KerasEstimator(two_outputs(form), optimizer=keras.optimizers.SGD(0.2), loss=loss, metrics=metrics)
    estimator.setLabelCols(labels or {price: "paid", kind: "label"}).setBatchSize(10).setEpochs(3).setShuffle(0)
    fitted = estimator.fit(sold)
    scored = fitted.transform(sold)
    given = [f"prediction_{price}"] + [f"{what}_{kind}" for what in ("rawPrediction", "probability", "prediction")]
    assert sorted(scored.columns[4:]) == sorted(given)
    expected_price, expected_kind = by_keras()
    assert close(column(scored, f"prediction_{price}"), expected_price)
    assert close(column(scored, f"probability_{kind}"), expected_kind)
    assert (column(scored, f"prediction_{kind}") == expected_kind.argmax(1)).all()
    if metrics:
        assert {"price_loss", "kind_loss", "kind_accuracy"} <= set(fitted.history[-1])


def test_the_columns_of_several_outputs_can_be_named_or_left_out(sold: DataFrame) -> None:
    model = KerasModel(model=two_outputs("list"), head="values, classes", predictionCol="guess", rawPredictionCol="")
    scored = model.setInputMapping({"features": "x"}).transform(sold)
    assert scored.columns[4:] == ["guess_price", "probability_kind", "guess_kind"]
    alike = KerasModel(model=two_outputs("list")).transform(sold)
    assert alike.columns[4:] == ["prediction_price", "prediction_kind"]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (
            {"loss": "mse"},
            "the model has 2 outputs, price, kind, and labelCol names one column, 'label': give the label",
        ),
        ({"loss": ["mse", SPARSE]}, "give the label of each with label_cols={'price': …, 'kind': …}"),
        ({"loss": ["mse"]}, "loss: it has 1 entry, and the model's outputs are price, kind"),
        ({"loss": {"prize": "mse"}}, "loss: no output is called 'prize'; did you mean 'price'?"),
        ({"loss": "mse", "metrics": ["mae"]}, "metrics: it has 1 entry, and the model's outputs are price, kind"),
        ({"loss": "mse", "label_cols": ["paid"]}, "label_cols: it has 1 entry"),
        ({"loss": "mse", "label_cols": {"price": "paid"}}, "names no column for output 'kind', which has a loss"),
        ({"loss": "mse", "label_cols": ["paid", "what"]}, "label_cols: no column 'what'; there are id, features, paid"),
        ({"loss": ["mse", "msee"]}, "loss: Keras has no 'msee'"),
    ],
)
def test_labels_and_losses_without_an_output_are_refused_before_a_node_starts(
    params: dict[str, Any], told: str, sold: DataFrame
) -> None:
    with pytest.raises(PlanError, match=re.escape(told)):
        KerasEstimator(two_outputs("list"), optimizer="sgd", **params).fit(sold)


def test_label_cols_must_be_a_list_or_a_dictionary_of_names() -> None:
    assert KerasEstimator(label_cols={"a": "x"}).getLabelCols() == {"a": "x"}
    for wrong in ("x", [], [1], {"a": 1}):
        with pytest.raises(TypeError, match="must be a list of columns or a dictionary"):
            KerasEstimator(label_cols=wrong)


def test_an_output_without_a_loss_needs_no_label() -> None:
    outputs = Outputs.of(two_outputs("dict"))
    losses = outputs.losses({"price": "mse"})
    assert dict(zip(outputs.names, losses, strict=True)) == {"kind": None, "price": "mse"}
    assert outputs.labels({"price": "paid"}, losses) == [None, "paid"]
    labels = outputs.packed_labels([None, "paid"], {"paid": tf.constant([1.0, 2.0])}, 2)
    assert {name: value.numpy().tolist() for name, value in labels.items()} == {"kind": [0, 0], "price": [1, 2]}
    assert outputs.classifier_outputs({"price": "mse"}, None) == (
        ClassifierOutput(Task.VALUES),
        ClassifierOutput(Task.VALUES),
    )


def test_a_model_without_a_description_of_its_outputs_is_refused(sold: DataFrame) -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(
        PlanError, match=r"a Own does not describe its inputs and outputs: build it with keras.Sequential"
    ):
        KerasEstimator(model).fit(sold)


# --- applying a model


def test_the_result_of_an_operator_is_a_column(rows: DataFrame, known: Any) -> None:
    given = keras.Input((4,))
    model = keras.Model(given, keras.layers.Dense(1, kernel_initializer="ones")(given) * 100.0)
    assert model.outputs[0].sparse, "Keras takes it for sparse; it is not"
    (name,) = (layer.name for layer in model.layers if isinstance(layer, keras.layers.InputLayer))
    scored = TFModel(model=model).setInputMapping({"x": name}).transform(rows)
    assert scored.dtypes[-1] == ("prediction", "float")
    assert close(column(scored), known["x"].sum(1) * 100)


def test_nested_outputs_are_columns_named_by_their_keys(rows: DataFrame, known: Any) -> None:
    given = keras.Input((4,), name="x")
    model = keras.Model(given, {"z": [given * 2, given * 3.0], "a": {"deep": given * 4.0}})
    scored = predict(rows, model)
    assert scored.columns[-3:] == ["prediction_a_deep", "prediction_z_0", "prediction_z_1"]
    for name, times in (("a_deep", 4), ("z_0", 2), ("z_1", 3)):
        assert close(column(scored, f"prediction_{name}"), known["x"] * times)
    chosen = predict(rows, model, output={"z_1": "thrice"})
    assert chosen.columns[-1] == "thrice"
    assert close(column(chosen, "thrice"), known["x"] * 3)


class Words(keras.layers.Layer):
    def call(self, text: Any) -> Any:
        return tf.strings.split(text)


def test_a_ragged_text_is_a_column_of_arrays(spark: SparkSession) -> None:
    given = keras.Input((), dtype="string", name="t")
    texts = spark.createDataFrame([(0, "a b"), (1, "c"), (2, "")], "id int, t string")
    scored = predict(texts, keras.Model(given, Words()(given)), batch_size=2)
    assert scored.dtypes[-1] == ("prediction", "array<string>")
    assert [row.prediction for row in scored.orderBy("id").collect()] == [["a", "b"], ["c"], []]


def test_outputs_get_consistent_names_in_any_structure() -> None:
    given = keras.Input((2,))
    one, two = dense(1, "one", given), dense(2, "two", given)
    x = np.ones((3, 2), "float32")
    for structure, names in (
        (one, ["output_0"]),
        ([one], ["one"]),
        ({"p": one}, ["p"]),
        ([two, one], ["two", "one"]),
        ({"q": two, "p": one}, ["p", "q"]),
        ([two, {"p": one}], ["two", "p"]),
        ([given * 2, given * 3], None),
    ):
        model = keras_model(keras.Model(given, structure), Use())
        found = [tensor.name for tensor in model.signature.outputs]
        assert len(set(found)) == len(found)
        assert names is None or found == names or (structure is one and found == ["one"])
        shapes = [(3, *tensor.shape) for tensor in model.signature.outputs]
        assert [result.shape for result in model.apply([x])] == shapes
    with pytest.raises(ModelUnusable, match="output 'sum' has no axis for rows"):
        keras_model(keras.Model(given, keras.ops.sum(given)), Use())
