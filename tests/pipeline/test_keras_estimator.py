"""KerasEstimator needs only a compiled model, and its results work with Spark ML's evaluators and tuners."""

from __future__ import annotations

import pickle
import re
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.faults import Killer, its_host
from tests.pipeline.programs import build
from tests.saved_models import column
from tests.waiting import until
from tfos_nb import Cluster, KerasEstimator, KerasModel, launch
from tfos_nb.errors import ClusterClosed, NodeFailed, PlanError
from tfos_nb.pipeline import fitting
from tfos_nb.pipeline.history import History
from tfos_nb.pipeline.selection import filled, without_nulls
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput, Task
from tfos_nb.runtime.models.signature import ModelUnusable, Tensor


def build_binary() -> Any:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    return model


def furthest(y: Any, p: Any) -> Any:
    import keras

    return keras.ops.max(keras.ops.abs(keras.ops.ravel(y) - keras.ops.ravel(p)))


def squared(y_true: Any, y_pred: Any) -> Any:
    import keras

    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Launched:
    """Launches clusters, and counts how many exist at the same time."""

    def __init__(self) -> None:
        self.clusters: list[Cluster] = []
        self.most = 0

    def __call__(self, *args: Any, **options: Any) -> Cluster:
        self.clusters.append(launch(*args, **options))
        self.most = max(self.most, sum(not cluster.state.ended for cluster in self.clusters))
        return self.clusters[-1]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    clusters = Launched()
    monkeypatch.setattr(fitting, "launch", clusters)
    return clusters


@pytest.mark.slow
def test_a_cross_validator_runs_its_clusters_one_after_another(
    iris: DataFrame, launched: Launched, tmp_path: Path
) -> None:
    """Fits of two nodes each on four slots, two at a time: they wait for each other."""
    indexer = StringIndexer(inputCol="species", outputCol="kind")
    assembler = VectorAssembler(inputCols=["sl", "sw", "pl", "pw"], outputCol="x")
    estimator = KerasEstimator(
        build, cluster_size=2, epochs=40, batch_size=32, seed=1, featuresCol="x", labelCol="kind"
    )
    evaluator = MulticlassClassificationEvaluator(labelCol="kind", metricName="accuracy")
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.02]).build()
    pipeline = Pipeline(stages=[indexer, assembler, estimator])
    tuner = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2, seed=3
    )
    found = tuner.fit(iris)
    assert found.avgMetrics[0] > 0.8
    assert (len(launched.clusters), launched.most) == (3, 1)
    found.save(str(tmp_path / "tuned"))
    again = CrossValidatorModel.load(str(tmp_path / "tuned"))
    assert isinstance(again.bestModel, PipelineModel)
    assert isinstance(again.bestModel.stages[-1], KerasModel)
    scored, rescored = found.transform(iris), again.transform(iris)
    assert (column(scored, "prediction") == column(rescored, "prediction")).all()
    assert evaluator.evaluate(scored) > 0.85


@pytest.mark.slow
def test_concurrent_fits_have_separate_clusters_and_the_better_one_wins(iris: DataFrame, launched: Launched) -> None:
    estimator = KerasEstimator(build, epochs=40, batch_size=16, seed=1, validationIndicatorCol="held_out")
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.02, 1e-6]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuner = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, parallelism=2, seed=3, collectSubModels=True
    )
    found = tuner.fit(iris)
    assert (len(launched.clusters), launched.most) == (3, 2)
    good, bad = found.validationMetrics
    assert good > 0.6 > bad  # with some orders of the rows, two of the three classes are still mixed up at the end
    assert found.bestModel.uid == estimator.uid
    assert "val_loss" in found.bestModel.history[-1]
    losses = [model.history[-1]["loss"] for model in found.subModels]
    assert losses[0] < losses[1]


@pytest.fixture(scope="module")
def two_kinds(iris: DataFrame) -> DataFrame:
    return iris.where("label > 0").withColumn("label", F.col("label") - 1)


@pytest.fixture(scope="module")
def binary(two_kinds: DataFrame) -> KerasModel:
    import keras

    model = build_binary()
    before = [weights.copy() for weights in model.get_weights()]
    early = keras.callbacks.EarlyStopping("loss", patience=30)
    estimator = KerasEstimator(model, callbacks=[early], epochs=60, batch_size=8, seed=2, keep_columns=["id", "label"])
    fitted = estimator.fit(two_kinds)
    assert all(map(np.array_equal, model.get_weights(), before)), "a fit leaves the model alone"
    return fitted


def test_a_binary_classifier_has_spark_mls_output_columns(binary: KerasModel, two_kinds: DataFrame) -> None:
    scored = binary.transform(two_kinds)
    assert scored.columns == ["id", "label", "rawPrediction", "probability", "prediction"]
    kinds = [field.dataType.simpleString() for field in scored.schema.fields[2:]]
    assert kinds == ["vector", "vector", "double"]
    raw, probability = column(scored, "rawPrediction"), column(scored, "probability")
    assert np.allclose(raw[:, 0], -raw[:, 1])
    assert np.allclose(probability[:, 1], 1 / (1 + np.exp(-raw[:, 1])))
    assert (column(scored, "prediction") == (raw[:, 1] > 0)).all()
    assert BinaryClassificationEvaluator().evaluate(scored) > 0.95


def test_a_fitted_model_is_saved_and_output_columns_can_be_omitted(
    binary: KerasModel, two_kinds: DataFrame, tmp_path: Path
) -> None:
    binary.save(str(tmp_path / "model"))
    again = KerasModel.load(str(tmp_path / "model")).setRawPredictionCol("").setPredictionCol("guess")
    scored = again.transform(two_kinds)
    assert scored.columns == ["id", "label", "probability", "guess"]
    assert (column(scored, "guess") == column(binary.transform(two_kinds), "prediction")).all()


def test_the_estimator_is_saved_with_its_model(two_kinds: DataFrame, tmp_path: Path) -> None:
    model = build_binary()
    estimator = KerasEstimator(model, optimizer="sgd", metrics=["AUC"], epochs=2, learning_rate=0.5)
    estimator.save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"))
    assert isinstance(again.model, bytes)
    assert (again.getEpochs(), again.getLearningRate()) == (2, 0.5)
    assert again.getOrDefault(again.optimizer) == "sgd"
    by_function = KerasEstimator(build, loss=squared)
    by_function.save(str(tmp_path / "function"))
    found = KerasEstimator.load(str(tmp_path / "function"))
    assert found.model is build
    assert found.custom_objects == {"squared": squared}


@pytest.mark.faults
def test_a_fit_goes_on_without_a_lost_host(iris: DataFrame, launched: Launched) -> None:
    kept = {"restarts": 1, "min_workers": 1, "progress": "none"}
    estimator = KerasEstimator(
        build, cluster_size=2, epochs=60, batch_size=8, featuresCol="features", labelCol="label", **kept
    )
    with ThreadPool(1) as pool:
        under_way = pool.apply_async(estimator.fit, (iris,))
        assert until(lambda: launched.clusters, 60)
        killer = Killer(launched.clusters[0], "worker:1", 400, its_host)
        fitted = under_way.get(180)
    assert killer.killed
    assert launched.clusters[0].snapshot().generation > 1
    assert len(fitted.history) == 60, "each epoch is there, and once"
    assert fitted.history[-1]["loss"] < fitted.history[0]["loss"]


def test_a_fit_whose_cluster_is_gone_is_continued(iris: DataFrame, launched: Launched, tmp_path: Path) -> None:
    kept = {"restarts": 1, "checkpoint_every": 0.1, "model_dir": str(tmp_path), "progress": "none"}
    estimator = KerasEstimator(
        build, cluster_size=1, epochs=60, batch_size=8, featuresCol="features", labelCol="label", **kept
    )
    with pytest.raises(PlanError, match=r"resume=: no run in .* has a state"):
        estimator.copy({estimator.resume: True}).fit(iris)
    with pytest.raises(PlanError, match="resume continues one fit"):
        estimator.copy({estimator.resume: True}).fit(iris, [{estimator.epochs: 1}, {estimator.epochs: 2}])
    with ThreadPool(1) as pool:
        with pytest.raises(PlanError, match="in the main thread"):
            pool.apply(estimator.copy({estimator.resume: True}).fit, (iris,))
        under_way = pool.apply_async(estimator.fit, (iris,))
        assert until(lambda: launched.clusters and len(launched.clusters[0].history.epochs) >= 10, 60)
        launched.clusters[0].close()
        with pytest.raises(ClusterClosed):
            under_way.get(60)
    before = len(launched.clusters[0].history.epochs)
    assert before < 60
    fitted = estimator.setResume(True).fit(iris)
    resumed = launched.clusters[1]
    assert resumed.checkpoint_run == launched.clusters[0].checkpoint_run
    assert resumed.snapshot().generation == 2
    assert len(fitted.history) == 60, "with the epochs of the first fit"
    assert fitted.history[:5] == launched.clusters[0].history.epochs[:5]


def test_a_regression_with_a_custom_loss_returns_numbers(iris: DataFrame) -> None:
    import keras

    start = keras.initializers.GlorotUniform(seed=4)  # not close to the solution, as a random start may be
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=start)])
    training = {"loss": squared, "metrics": [furthest], "epochs": 40, "batch_size": 16, "seed": 4}
    estimator = KerasEstimator(model, optimizer=keras.optimizers.Adam(0.1), labelCol="pw", **training)
    assert dict(iris.dtypes)["pw"] == "double"
    fitted = estimator.setFeaturesCol("two").fit(iris.select("id", "pw", F.array("sl", "pl").alias("two")))
    assert fitted.task is Task.VALUES
    assert fitted.history[-1]["furthest"] < fitted.history[0]["furthest"]
    found = fitted.transform(iris.select("id", "pw", F.array("sl", "pl").alias("two")))
    assert found.columns == ["id", "pw", "two", "prediction"]
    assert np.abs(column(found, "prediction") - column(found, "pw")).mean() < 0.3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"featuresCol": "feature"}, "featuresCol: no column 'feature'; did you mean 'features'"),
        ({"labelCol": "species"}, "column 'species' is string, not numbers: index it with StringIndexer"),
        ({"labelCol": "kind"}, "labelCol: no column 'kind'"),
        ({"weightCol": "w"}, "weightCol: no column 'w'"),
    ],
)
def test_unsuitable_columns_are_refused_before_a_node_starts(
    iris: DataFrame, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        KerasEstimator(build, **changes).fit(iris)


def test_a_model_that_cannot_be_trained_is_refused(iris: DataFrame, tmp_path: Path) -> None:
    import keras

    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(PlanError, match=r"the model is not compiled: give loss="):
        KerasEstimator(bare).fit(iris)
    names = [
        ({"optimizer": "sdg"}, "optimizer: Keras has no 'sdg'; did you mean 'sgd'?"),
        ({"loss": "msee"}, "loss: Keras has no 'msee'"),
        ({"metrics": "acuracy"}, "metrics: Keras has no 'acuracy'; did you mean 'accuracy'?"),
    ]
    for wrong, told in names:
        with pytest.raises(PlanError, match=re.escape(told)):
            KerasEstimator(bare, **{"loss": "mse", **wrong}).fit(iris)
    known = KerasEstimator(bare, optimizer="adam_w", loss="kld", metrics=["acc", "mean_io_u", "mae"], labelCol="none")
    with pytest.raises(PlanError, match="labelCol: no column 'none'"):  # so Keras knows the names
        known.fit(iris)
    with pytest.raises(PlanError, match="model is a str: give a Keras model, or a function that builds one"):
        KerasEstimator("model.keras").fit(iris)
    with pytest.raises(TypeError, match=r"must be 'auto', 'classification' or 'regression', got 'both'"):
        KerasEstimator(bare, task="both")
    with pytest.raises(PlanError, match="callbacks cannot be saved"):
        KerasEstimator(build, callbacks=[keras.callbacks.TerminateOnNaN()]).save(str(tmp_path / "never"))


def test_a_fit_applies_the_null_policy_like_a_transform(iris: DataFrame) -> None:
    cut = F.array("sl", "sw", "pl", F.when(F.col("id") != 3, F.col("pw")))
    holes = iris.withColumn("features", cut).withColumn("label", F.when(F.col("id") != 5, F.col("label")))
    for policy, rows, count in (("skip", holes, 1), ("fill", holes.where("id <> 5"), 2)):
        fitted = KerasEstimator(build, seed=1, null_policy=policy).fit(rows)
        assert fitted.transform(holes.where("id in (3, 4)")).count() == count
    with pytest.raises(PlanError, match="got 'featurs'; did you mean 'features'"):
        KerasEstimator(build, null_policy="fill", fill={"featurs": 1}).fit(holes)


def test_rows_with_nulls_are_dropped_or_filled_at_every_depth(spark: SparkSession) -> None:
    content = [(1, [1.0, None], "a"), (None, [2.0], "b"), (3, [3.0], None), (4, [4.0], "d")]
    rows = spark.createDataFrame(content, "`a.b` int, x array<float>, t string").coalesce(1)
    assert without_nulls(rows).collect() == [(4, [4.0], "d")]
    found = filled(rows, ["a.b", "x"], {"a.b": 7})
    assert found.schema["a.b"].dataType == rows.schema["a.b"].dataType
    assert found.collect() == [(1, [1.0, 0.0], "a"), (7, [2.0], "b"), (3, [3.0], None), (4, [4.0], "d")]
    with pytest.raises(PlanError, match=r"fill: 0.5 does not fit column 'a.b', which is int"):
        filled(rows, ["a.b"], 0.5)


def test_features_of_another_width_are_refused_by_column(iris: DataFrame) -> None:
    with pytest.raises(NodeFailed, match=r"column 'two' has shape \(2,\), and the model's input 'x' expects \(4,\)"):
        KerasEstimator(build, featuresCol="two").fit(iris.select("label", F.array("sl", "sw").alias("two")))


def test_a_stopped_fit_returns_the_model_trained_so_far(iris: DataFrame, launched: Launched) -> None:
    fits = ThreadPool(1)
    fit = fits.apply_async(KerasEstimator(build, epochs=100_000, batch_size=16, shuffle=0).fit, (iris,))
    assert until(lambda: launched.clusters and len(launched.clusters[0].history.epochs) > 2, 90)
    launched.clusters[0].request_stop()
    model = fit.get(90)
    fits.close()
    fits.join()
    assert 2 < len(model.history) < 100_000
    assert model.transform(iris).select("prediction").count() == 150


def test_the_history_is_indexed_by_epoch_and_by_metric() -> None:
    history = History([{"loss": 2.0}, {"loss": 1.0, "val_loss": 3.0}])
    assert (history[-1]["loss"], history["loss"], history["val_loss"]) == (1.0, [2.0, 1.0], [3.0])
    assert dict(history.items()) == {"loss": [2.0, 1.0], "val_loss": [3.0]}
    assert history == [{"loss": 2.0}, {"loss": 1.0, "val_loss": 3.0}]
    with pytest.raises(KeyError, match="no metric 'acc'; the history has loss, val_loss"):
        history["acc"]


def test_the_classifier_outputs_agree_with_their_definitions() -> None:
    logits = np.array([[1.0, 2.0, -800.0], [700.0, 0.0, 0.0]])
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = powers / powers.sum(axis=1, keepdims=True)
    raw, probability, best = ClassifierOutput(Task.CLASSES, logits=True).columns(logits)
    assert np.array_equal(raw, logits)
    assert np.allclose(probability, softmax)
    assert best.tolist() == [1.0, 0.0]
    raw, probability, best = ClassifierOutput(Task.CLASSES).columns(np.array([[0.2, 0.8], [1.0, 0.0]]))
    assert np.isfinite(raw).all()
    assert np.allclose(np.exp(raw), probability)
    yes = np.array([[0.0], [0.25], [1.0]])
    raw, probability, best = ClassifierOutput(Task.BINARY).columns(yes)
    assert np.isfinite(raw).all()
    assert probability.tolist() == [[1.0, 0.0], [0.75, 0.25], [0.0, 1.0]]
    assert best.tolist() == [0.0, 0.0, 1.0]
    assert np.allclose(raw[1], [np.log(3), -np.log(3)])
    (values,) = ClassifierOutput(Task.VALUES).columns(yes)
    assert values.tolist() == [0.0, 0.25, 1.0]
    with pytest.raises(ModelUnusable, match="a number for each of several classes"):
        ClassifierOutput(Task.CLASSES).signature(Tensor("y", "float32", (4, 4)))
    assert pickle.loads(pickle.dumps(ClassifierOutput(Task.BINARY))) == ClassifierOutput(Task.BINARY)


def test_a_value_that_is_not_a_frame_is_refused(spark: SparkSession) -> None:
    with pytest.raises(PlanError, match="df must be a Spark DataFrame"):
        KerasEstimator(build).fit([])
