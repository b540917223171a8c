"""Models cut off at a layer, before Spark ML's own."""

from __future__ import annotations

import keras
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.linalg import VectorUDT

from tests.saved_models import close, column
from tfos_nb import TFFeaturizer, featurize
from tfos_nb.errors import PlanError


def test_a_layers_output_is_a_vector_column(rows, kinds, known):
    found = featurize(kinds / "dense.keras", "middle", "x").transform(rows)
    assert found.columns == [*rows.columns, "features"]
    assert found.schema["features"].dataType == VectorUDT()
    assert close([v.toArray() for v in (r.features for r in found.orderBy("id").collect())], known["features"])


def test_a_layer_can_be_counted_from_the_end_and_arrays_can_stay(rows, kinds, known):
    model = keras.models.load_model(kinds / "dense.keras")
    found = featurize(model, -2, output_col="f", vector=False).transform(rows)
    assert found.dtypes[-1] == ("f", "array<float>")
    assert close(column(found, "f"), known["features"])


@pytest.mark.slow
def test_features_of_several_axes_become_one_vector(spark, kinds):
    content = [(0, bytearray((kinds / "small.png").read_bytes()))]
    pictures = spark.createDataFrame(content, "id int, file binary")
    found = featurize(kinds / "picture.keras", "picture", "file", decode=["file"]).transform(pictures)
    assert found.first().features.toArray().tolist()[:6] == [200, 0, 10, 200, 0, 10]
    assert len(found.first().features) == 4 * 6 * 3


def test_features_feed_a_model_of_spark_in_a_saved_pipeline(rows, kinds, tmp_path):
    labelled = rows.selectExpr("*", "double(b % 2) AS label")
    stages = [TFFeaturizer(export_dir=str(kinds / "dense.keras"), layer="middle"), LogisticRegression(maxIter=2)]
    fitted = Pipeline(stages=stages).fit(labelled)
    fitted.save(str(tmp_path / "fitted"))
    expected = column(fitted.transform(labelled))
    assert close(column(PipelineModel.load(str(tmp_path / "fitted")).transform(labelled)), expected)


def test_missing_layers_are_refused_with_the_existing_ones(rows, kinds):
    cases = [
        ("dense.keras", "midle", "it has no layer 'midle'; did you mean 'middle'?. Its layers are x, middle, last"),
        ("dense.keras", 7, "it has 3 layers, and none at 7"),
        ("dense", "middle", "a SavedModel has no layers: give the .keras file"),
    ]
    for place, layer, told in cases:
        with pytest.raises(PlanError) as raised:
            featurize(kinds / place, layer).transform(rows)
        assert told in str(raised.value)
    for params, param in (
        ({"input_col": "xx"}, "input_col: no"),
        ({"output_col": "x"}, "another name with output_col="),
    ):
        with pytest.raises(PlanError, match=param):
            featurize(kinds / "dense.keras", "middle", **params).transform(rows)
    with pytest.raises(PlanError, match="the model is missing: give model or export_dir"):
        TFFeaturizer().transform(rows)
