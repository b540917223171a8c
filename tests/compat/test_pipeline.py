"""TensorFlowOnSpark's pipeline: a training function in its style, its Params and its small functions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tfos_nb.compat import pipeline
from tfos_nb.compat.TFCluster import InputMode

NAMES = [name for name in pipeline.__all__ if name.startswith("Has")]


def train_fn(args: Any, ctx: Any) -> None:
    """Learn y = 3a - 2b from lists of rows, as such programs do."""
    import keras
    import numpy as np

    from tfos_nb.compat import TFNode, compat

    assert args.mine == "so"
    assert args.input_mode == InputMode.SPARK
    model = keras.Sequential([keras.Input((2,), name="ab"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    feed = TFNode.DataFeed(ctx.mgr, input_mapping=args.input_mapping)
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        if batch["y"]:
            model.train_on_batch(np.array(batch["ab"]), np.array(batch["y"]))
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    values = np.random.default_rng(1).normal(size=(400, 2))
    return spark.createDataFrame([(float(3 * a - 2 * b), [float(a), float(b)]) for a, b in values], ["sum", "parts"])


def test_a_pipeline_trains_exports_and_applies_a_model(rows: DataFrame, tmp_path: Path) -> None:
    estimator = (
        pipeline.TFEstimator(train_fn, {"mine": "so"})
        .setInputMapping({"parts": "ab", "sum": "y"})
        .setExportDir(str(tmp_path / "model"))
        .setClusterSize(1)
        .setMasterNode("chief")
        .setEpochs(30)
        .setBatchSize(20)
        .setGraceSecs(15)
    )
    model = estimator.fit(rows)
    assert isinstance(model, pipeline.TFModel)
    model.setTagSet("serve").setSignatureDefKey("serving_default").setOutputMapping({"output_0": "guess"})
    assert model.getInputMapping() == {"parts": "ab"}
    scored = model.transform(rows)
    assert scored.columns == ["guess"]
    guess = np.array([row.guess for row in scored.collect()])
    assert np.abs(guess - np.array([row["sum"] for row in rows.collect()])).max() < 0.2
    graph = pipeline.get_meta_graph_def(str(tmp_path / "model"), "serve")
    assert "serving_default" in graph.signature_def


def test_a_chief_with_parameter_servers_trains_and_num_gpus_is_read(spark: SparkSession) -> None:
    estimator = pipeline.TFEstimator(train_fn, {"num_gpus": 2}).setClusterSize(2).setNumPS(1).setMasterNode("chief")
    plan = estimator._plan()
    assert (plan["chief"], plan["workers"], plan["gpus"]) == ("trains", 0, 2)
    assert pipeline.TFEstimator(train_fn, {})._plan()["gpus"] == 0


def test_every_name_exists_and_the_mixins_have_setters() -> None:
    assert len(NAMES) == 18
    estimator = pipeline.TFEstimator(train_fn, {})
    for name in NAMES:
        assert isinstance(estimator, getattr(pipeline, name)), name
    assert pipeline.TFTypeConverters.toDict({1: 2}) == {1: 2}
    with pytest.raises(TypeError):
        pipeline.TFTypeConverters.toDict([1])


def test_rows_are_divided_into_batches_of_lists() -> None:
    rows = [(1, bytearray(b"a")), (2, "b"), (3, "c"), None, (4, "d")]
    assert list(pipeline.yield_batch(rows, 2, 2)) == [[[1, 2], [b"a", "b"]], [[3], ["c"]]]
    assert list(pipeline.yield_batch([], 2)) == []


def test_a_single_node_has_no_cluster_and_takes_a_list_as_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    pipeline.single_node_env(["program", "--rate", "1"])
    assert sys.argv == ["program", "--rate", "1"]
    assert "TF_CONFIG" not in os.environ
