"""An evaluator beside the training: it reads new checkpoints, ends after the training, and may be allowed to fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tests.waiting import until
from tfos_nb import Cluster, errors, launch

EPOCHS = 4


def train_and_evaluate(args: Any, ctx: Any) -> dict[str, Any]:
    """Checkpoints of two kinds: tf_keras' for its own SidecarEvaluator, then Keras 3's for ``ctx.checkpoints``."""
    x = np.random.default_rng(7).normal(size=(256, 4)).astype("float32")
    rows = x, x.sum(axis=1, keepdims=True)
    sidecar = sidecar_evaluates if ctx.job_name == "evaluator" else trains_with_a_sidecar
    ours = evaluates if ctx.job_name == "evaluator" else trains
    return {"sidecar": sidecar(ctx, *rows), "ours": ours(ctx, *rows)}


def legacy_model() -> Any:
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(4,))])
    model.compile(tf_keras.optimizers.SGD(0.02), "mse")
    return model


def trains_with_a_sidecar(ctx: Any, x: Any, y: Any) -> float:
    import tf_keras

    model, path = legacy_model(), f"{ctx.model_dir}/sidecar/ckpt-{{epoch}}"
    saving = tf_keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    model.fit(x, y, epochs=EPOCHS, verbose=0, callbacks=[saving])
    return float(model.evaluate(x, y, verbose=0))


def sidecar_evaluates(ctx: Any, x: Any, y: Any) -> list[float]:
    import tensorflow as tf
    import tf_keras

    losses: list[float] = []
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    keep = tf_keras.callbacks.LambdaCallback(on_test_end=lambda logs: losses.append(float(logs["loss"])))
    watching = {"max_evaluations": EPOCHS, "callbacks": [keep]}
    tf_keras.utils.SidecarEvaluator(legacy_model(), rows, f"{ctx.model_dir}/sidecar", **watching).start()
    return losses


def trains(ctx: Any, x: Any, y: Any) -> float:
    """Write a checkpoint each epoch; continue once the evaluator has seen the first one."""
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    for epoch in range(EPOCHS):
        model.fit(x, y, epochs=1, verbose=0)
        ctx.save(model, f"checkpoints/epoch-{epoch:02}.keras")
        if epoch == 0:
            assert until(Path(ctx.model_dir, "seen").exists, 60)
    return float(model.evaluate(x, y, verbose=0))


def evaluates(ctx: Any, x: Any, y: Any) -> list[dict[str, Any]]:
    """Evaluate each checkpoint while the training continues."""
    import keras

    ctx.strategy()
    found = []
    for path in ctx.checkpoints(pattern="*.keras", poll=0.1):
        loss = keras.models.load_model(path).evaluate(x, y, verbose=0)
        found.append({"path": os.path.basename(path), "loss": float(loss)})
        Path(ctx.model_dir, "seen").touch()
    return found


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("judged")
    stale = folder / "checkpoints/epoch-99.keras"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier training")
    os.utime(stale, (1_000_000, 1_000_000))
    how = {"input_mode": "tensorflow", "model_dir": str(folder), "evaluator_may_fail": True}
    with launch(train_and_evaluate, workers=1, evaluator=True, spark=spark, **how) as cluster:
        pass
    return cluster


def test_an_evaluator_reads_checkpoints_during_the_training_and_the_last_one_after_it(judged: Cluster) -> None:
    paths = [found["path"] for found in judged.results()["evaluator:0"]["ours"]]
    assert paths[0] == "epoch-00.keras"
    assert paths[-1] == f"epoch-{EPOCHS - 1:02}.keras"
    assert paths == sorted(set(paths))
    assert {node.status.value for node in judged.snapshot().nodes} == {"DONE"}  # it was allowed to fail, and did not


def test_the_loss_of_the_newest_checkpoint_equals_that_of_the_training(judged: Cluster) -> None:
    last = judged.results()["evaluator:0"]["ours"][-1]
    assert last["loss"] == pytest.approx(judged.result()["ours"], rel=1e-4)


def test_the_loss_of_tf_keras_sidecar_evaluator_equals_that_of_the_training(judged: Cluster) -> None:
    *_, last = judged.results()["evaluator:0"]["sidecar"]
    assert last == pytest.approx(judged.result()["sidecar"], rel=1e-4)


def failing_beside(args: Any, ctx: Any) -> str:
    if ctx.job_name == "evaluator":
        if args == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError("no such metric")
    ids = [int(i) for batch in ctx.dataset(8) for i in batch["id"]]
    return f"trained on {len(ids)} rows"


@pytest.mark.parametrize("how", ["raised", "killed"])
def test_an_evaluator_that_may_fail_is_reported_and_training_continues(spark: SparkSession, how: str) -> None:
    options = {"evaluator": True, "evaluator_may_fail": True}
    with launch(failing_beside, how, workers=1, spark=spark, **options) as cluster:
        state = lambda: {node.node: node.status.value for node in cluster.snapshot().nodes}
        assert until(lambda: state()["evaluator:0"] == "FAILED")
        cluster.train(spark.range(50))
    assert cluster.result() == "trained on 50 rows"
    assert cluster.state.value == "DONE"
    assert state() == {"worker:0": "DONE", "evaluator:0": "FAILED"}
    assert "evaluator:0 failed, and the training continues" in cluster.logs("evaluator:0")
    assert ("no such metric" if how == "raised" else "SIGKILL") in cluster.logs("evaluator:0")


def test_an_evaluator_that_fails_fails_the_cluster_unless_it_may_fail(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match="^evaluator:0 .*no such metric") as caught:
        with launch(failing_beside, "raised", workers=1, evaluator=True, spark=spark) as cluster:
            cluster.train(spark.range(50))
    assert caught.value.node == "evaluator:0"


def never_through(args: Any, ctx: Any) -> str:
    if ctx.job_name == "evaluator":
        until(lambda: False, 600)
    return "trained"


def test_an_evaluator_that_never_ends_is_not_waited_for_beyond_the_grace_period(spark: SparkSession) -> None:
    how = {"input_mode": "tensorflow", "grace": 1.0}
    with launch(never_through, workers=1, evaluator=True, spark=spark, **how) as cluster:
        pass
    assert cluster.result() == "trained"
    assert cluster.state.value == "DONE"
    assert {node.node: node.status.value for node in cluster.snapshot().nodes}["evaluator:0"] == "STOPPED"
    assert "had not ended 1 s after the training" in cluster.logs("evaluator:0")
