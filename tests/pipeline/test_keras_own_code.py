"""A user's custom classes and functions, registered with Keras or not, are sent to the nodes and to a transform."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.pipeline.own_layers import Plain, Shift, shrunk
from tests.saved_models import close
from tfos_nb import KerasEstimator, predict
from tfos_nb.errors import PlanError
from tfos_nb.runtime.code.user_classes import own_objects, own_objects_of

X = np.arange(8, dtype="float32")


@keras.saving.register_keras_serializable(package="mine")
class Twice(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x * 2


@keras.saving.register_keras_serializable(package="mine")
class Absolute(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


class Small(keras.regularizers.Regularizer):
    def __call__(self, x: Any) -> Any:
        return 0.0 * keras.ops.sum(x)

    def get_config(self) -> dict[str, Any]:
        return {}


def build() -> Any:
    layers = [Twice(), Shift(), Plain(), keras.layers.Dense(1, shrunk, kernel_initializer="ones", trainable=False)]
    return keras.Sequential([keras.Input((1,)), *layers])


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    rows = [(i, [float(x)], float(2 * x)) for i, x in enumerate(X)]
    return spark.createDataFrame(rows, "id int, features array<float>, label double").coalesce(1)


def values(scored: DataFrame) -> list[float]:
    return [row.prediction for row in scored.orderBy("id").collect()]


def test_custom_code_of_a_model_is_found_under_its_names_in_a_file() -> None:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_true - y_pred, axis=-1)

    model = build()
    model.add(keras.layers.Dense(1, kernel_regularizer=Small()))
    model.compile("sgd", loss, metrics=[keras.metrics.MeanSquaredError()])
    expected = {
        "mine>Twice": Twice,
        "shop>Shift": Shift,
        "Plain": Plain,
        "Custom>shrunk": shrunk,
        "Small": Small,
        "loss": loss,
    }
    assert own_objects(model) == expected
    assert own_objects(Absolute()) == {"mine>Absolute": Absolute}
    assert own_objects(keras.optimizers.Adam()) == {}


def test_custom_code_of_a_function_is_found_through_other_functions() -> None:
    found = own_objects_of(lambda: build())
    assert found == {"mine>Twice": Twice, "shop>Shift": Shift, "Plain": Plain, "Custom>shrunk": shrunk}
    assert own_objects_of(keras.Sequential) == {}


@pytest.mark.parametrize("given", ["object", "function"])
def test_custom_code_of_every_kind_is_fitted_and_applied(given: str, numbers: DataFrame) -> None:
    model = build() if given == "object" else build
    estimator = KerasEstimator(model, optimizer="sgd", loss=Absolute(), metrics=["mae"], progress="none")
    assert close(values(estimator.fit(numbers).transform(numbers)), (X * 2 + 1) * 4 / 2)


def test_a_lambda_layer_of_a_model_object_is_fitted_and_applied(numbers: DataFrame) -> None:
    model = keras.Sequential([keras.Input((1,)), Twice(), keras.layers.Lambda(lambda x: x + 1)])
    estimator = KerasEstimator(model, optimizer="sgd", loss="mse", progress="none")
    assert close(values(estimator.fit(numbers).transform(numbers)), X * 2 + 1)
    assert close(values(predict(numbers, model, inputs="features")), X * 2 + 1)


def test_a_class_given_only_by_name_is_found(numbers: DataFrame) -> None:
    model = keras.Sequential([keras.Input((1,)), Twice()])
    estimator = KerasEstimator(model, optimizer="sgd", loss="mine>Absolute", custom_objects={"Twice": Twice})
    assert estimator.custom_objects == {"Twice": Twice, "mine>Absolute": Absolute}


def test_an_unregistered_name_is_refused(numbers: DataFrame) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    told = "loss: Keras has no 'shop>Nothing': it is not registered here, so import the module that registers it"
    with pytest.raises(PlanError, match=re.escape(told)):
        KerasEstimator(model, optimizer="sgd", loss="shop>Nothing").fit(numbers)
    with pytest.raises(PlanError, match=re.escape("losses: 3, a int, is not an object of Keras")):
        KerasEstimator(model, optimizer="sgd", loss=3)
