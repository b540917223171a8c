"""TFEstimator: a training function that runs on a cluster gives a Model of Spark ML."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.pipeline import programs
from tests.saved_models import column
from tests.waiting import until
from tfos_nb import TFEstimator, TFModel
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.spark.admission import Need, Place, admitted
from tfos_nb.spark.session import slots_busy

MAPPING = {"sl": "x", "sw": "x", "pl": "x", "pw": "x", "label": "y"}


def right(scored: DataFrame, prediction: str) -> float:
    best = F.expr(f"array_position({prediction}, array_max({prediction})) - 1")
    found = scored.select(F.avg((best == F.col("label")).cast("double"))).first()
    assert found is not None
    return float(found[0])


@pytest.fixture(scope="module")
def estimator(tmp_path_factory: pytest.TempPathFactory) -> TFEstimator:
    place = tmp_path_factory.mktemp("fit")
    estimator = TFEstimator(programs.train, {"mine": 1}, model_dir=str(place / "model"), epochs=12, batch_size=16)
    estimator.setInputMapping(MAPPING).setOutputMapping({"kind": "kind"}).setClusterSize(2).setSeed(5).setTagSet(None)
    return estimator.setWeightCol("weight").setValidationIndicatorCol("held_out")


@pytest.fixture(scope="module")
def fitted(estimator: TFEstimator, iris: DataFrame) -> PipelineModel:
    return Pipeline(stages=[estimator]).fit(iris)


def test_a_fit_trains_on_all_nodes_and_gives_a_model_that_is_right(fitted: PipelineModel, iris: DataFrame) -> None:
    (model,) = fitted.stages
    assert isinstance(model, TFModel)
    assert model.getInputMapping() == dict.fromkeys(("sl", "sw", "pl", "pw"), "x")
    assert len(model.history) == 12
    assert set(model.history[-1]) >= {"loss", "accuracy", "val_loss", "val_accuracy"}
    scored = fitted.transform(iris)
    assert scored.columns == [*iris.columns, "kind"]
    assert right(scored, "kind") > 0.85


def test_estimator_and_model_are_saved_and_loaded_in_a_pipeline(
    estimator: TFEstimator, fitted: PipelineModel, iris: DataFrame, tmp_path: Path
) -> None:
    Pipeline(stages=[estimator]).save(str(tmp_path / "estimator"))
    (again,) = Pipeline.load(str(tmp_path / "estimator")).getStages()
    assert again.train_fn is programs.train
    assert again.export_fn is None
    assert (again.uid, again.args) == (estimator.uid, estimator.args)
    values = {param.name: value for param, value in again.extractParamMap().items()}
    assert values == {param.name: value for param, value in estimator.extractParamMap().items()}
    fitted.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].history == fitted.stages[0].history
    assert (column(loaded.transform(iris), "kind") == column(fitted.transform(iris), "kind")).all()


def test_changing_a_copy_does_not_change_the_original(estimator: TFEstimator) -> None:
    other = estimator.copy({estimator.epochs: 3})
    assert (other.getEpochs(), estimator.getEpochs()) == (3, 12)
    assert other.train_fn is programs.train
    assert "epochs: how often the rows are gone through (default: 1, current: 3)" in other.explainParams()


def test_rows_can_be_fed_by_files_and_exported_by_a_function(iris: DataFrame, tmp_path: Path) -> None:
    estimator = TFEstimator(programs.train_from_files, {"mine": "so"}, programs.export, validation=iris.limit(30))
    estimator.setInputMode("tensorflow").setTFRecordDir(str(tmp_path / "records")).setSteps(7).setBatchSize(16)
    estimator.setInputMapping(MAPPING).setEpochs(15).setModelDir(str(tmp_path / "model"))
    model = estimator.setExportDir(str(tmp_path / "exported")).fit(iris)
    assert model.getExportDir() == str(tmp_path / "exported")
    assert right(model.transform(iris), "prediction") > 0.85
    assert "val_loss" in model.history[-1]
    assert list((tmp_path / "records").iterdir()) == []


def test_an_error_of_the_function_is_raised_and_its_slots_are_freed(spark: SparkSession, iris: DataFrame) -> None:
    with pytest.raises(NodeFailed, match="no good so") as caught:
        TFEstimator(programs.fail, {"mine": "so"}).fit(iris)
    assert "chief:0" in str(caught.value)
    assert until(lambda: not slots_busy(spark))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_mapping": {"sl": "x", "lable": "y"}}, "no column 'lable'; did you mean 'label'"),
        ({"input_mapping": {"day": "x"}}, "column 'day' is date, for which TensorFlow has no tensor: cast it"),
        ({"input_mapping": {"sl": "x", "features": "x"}}, "they must be numbers; 'features' is vector"),
        ({"weightCol": "wait"}, "no column 'wait'"),
        ({"validationIndicatorCol": "label"}, "column 'label' is double, not boolean"),
        ({"num_ps": 1, "cluster_size": 2}, "with 1 ps and a chief no worker is left; raise it to 3"),
        ({"cluster_size": 9}, r"needs \d+ slots \(9 nodes.*Spark has 4"),
        ({"min_workers": 1}, "min_workers= needs restarts=: without restarts the first loss ends the cluster"),
        ({"restarts": 1, "resume": True}, "resume needs model_dir, where the fit that was interrupted"),
        ({"master_node": "boss"}, "master_node must be 'chief', or 'master'"),
        (
            {"input_mapping": {"nested": "x"}, "input_mode": "tensorflow"},
            "'x' is array<array<double>>.* or leave input_mode='spark'",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_a_node_starts(
    iris: DataFrame, changes: dict[str, Any], told: str
) -> None:
    df = iris.withColumn("day", F.current_date()).withColumn("nested", F.array(F.array("sl", "sw")))
    with pytest.raises(PlanError, match=told):
        TFEstimator(programs.train, **changes).fit(df)


def test_functions_and_keywords_are_checked(iris: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"train_fn is a NoneType: give a function that takes \(args, ctx\)"):
        TFEstimator().fit(iris)
    with pytest.raises(PlanError, match=r"train_one\(args.* is called as train_one\(args, ctx\): give it these"):
        TFEstimator(train_one).fit(iris)
    with pytest.raises(PlanError, match=r"export_fn is called as export_fn\(args\)"):
        TFEstimator(programs.train, export_fn=programs.train).fit(iris)
    with pytest.raises(PlanError, match="train_fn is defined in the notebook or inside a function"):
        TFEstimator(lambda args, ctx: None).save(str(tmp_path / "never"))
    with pytest.raises(PlanError, match="a validation DataFrame cannot be saved"):
        TFEstimator(programs.train, validation=iris).save(str(tmp_path / "never"))
    with pytest.raises(PlanError, match="exclude each other"):
        TFEstimator(programs.train, validation=iris, validationIndicatorCol="held_out").fit(iris)
    with pytest.raises(TypeError, match="no Param 'epoch'; did you mean 'epochs'"):
        TFEstimator(programs.train, epoch=3)


def train_one(args: Any) -> None:
    """Take only one argument, where two are required."""


# --- the queue of fits --------------------------------------------------------------------------------------------


class Fitter(threading.Thread):
    """A fit that holds its slots until the test releases it."""

    def __init__(self, spark: SparkSession, need: Need) -> None:
        super().__init__(daemon=True)
        self.spark, self.need = spark, need
        self.place: Place | None = None
        self.inside, self.leave, self.error = threading.Event(), threading.Event(), None
        self.start()

    def run(self) -> None:
        try:
            with admitted(self.spark, self.need, 60.0, logging.info) as place:
                self.place = place
                place.started()
                self.inside.set()
                self.leave.wait(60)
        except PlanError as error:
            self.error = error


def test_fits_run_concurrently_if_slots_are_free_and_otherwise_queue(spark: SparkSession) -> None:
    assert until(lambda: not slots_busy(spark))
    small = [Fitter(spark, Need(1)) for _ in range(3)]  # one of 4 slots stays free for feeding
    assert all(fitter.inside.wait(30) for fitter in small)
    large = Fitter(spark, Need(2))
    assert small[0].place is not None
    assert until(lambda: small[0].place.feeders() == 1)  # type: ignore[union-attr]
    small[0].leave.set()
    small[0].join(30)
    assert not large.inside.is_set()
    small[1].leave.set()
    assert large.inside.wait(30)
    for fitter in (*small, large):
        fitter.leave.set()
        fitter.join(30)
    alone = Fitter(spark, Need(2))
    assert alone.inside.wait(30)
    assert alone.place is not None
    assert alone.place.feeders() is None
    alone.leave.set()
    alone.join(30)


def test_two_concurrent_fits_cannot_write_the_same_directory(spark: SparkSession) -> None:
    first = Fitter(spark, Need(1, writes=("/models/a",)))
    assert first.inside.wait(30)
    second = Fitter(spark, Need(1, writes=("/models/a",)))
    second.join(30)
    assert "two fits at once would write /models/a" in str(second.error)
    first.leave.set()
    first.join(30)


def test_a_fit_waits_for_slots_in_use_and_reports_them(spark: SparkSession, tmp_path: Path) -> None:
    release = tmp_path / "release"
    holders = spark.sparkContext.parallelize(range(4), 4)
    held = threading.Thread(target=lambda: holders.foreach(Hold(os.fspath(release))), daemon=True)
    held.start()
    assert until(lambda: sum(stage.tasks for stage in slots_busy(spark)) == 4)
    with pytest.raises(PlanError, match=r"waited for its slots for 1 s \(slot_timeout\).*To fix this: stop what runs"):
        TFEstimator(programs.fail, slot_timeout=1).fit(spark.range(3))
    release.touch()
    held.join(30)


class Hold:
    """A task that holds its slot until a file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, _: int) -> None:
        import pathlib
        import time

        deadline = time.monotonic() + 60
        while not pathlib.Path(self.path).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
