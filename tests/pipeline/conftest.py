"""The rows that the tests of estimators train on."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="session")
def iris(spark: SparkSession) -> DataFrame:
    """Scikit-learn's irises: four numbers, their vector, the class by name and number, a weight, a fifth held out."""
    from pyspark.ml.linalg import Vectors
    from sklearn.datasets import load_iris

    bunch = load_iris()
    names, weights = list(map(str, bunch.target_names)), (1.0, 1.0, 2.0)
    values = [
        (i, *map(float, x), Vectors.dense(x), names[kind], float(kind), weights[kind], i % 5 == 0)
        for i, (x, kind) in enumerate(zip(bunch.data, bunch.target.tolist(), strict=True))
    ]
    columns = ["id", "sl", "sw", "pl", "pw", "features", "species", "label", "weight", "held_out"]
    return spark.createDataFrame(values, columns).repartition(3).cache()
