"""An evaluator beside the training: it reads the checkpoints that come, ends after it, and may be allowed to fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tests.waiting import until
from tfos_nb import errors, launch

EPOCHS = 4


def train_and_evaluate(args: Any, ctx: Any) -> Any:
    """A worker writes a checkpoint each epoch; the evaluator reads each, while the training goes on."""
    import keras

    x = np.random.default_rng(7).normal(size=(256, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if ctx.job_name == "evaluator":
        ctx.strategy()
        found = []
        for path in ctx.checkpoints():
            loss = keras.models.load_model(path).evaluate(x, y, verbose=0)
            found.append({"path": os.path.basename(path), "loss": float(loss)})
            ctx.report(step=len(found), loss=float(loss))
        return found
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    seen = Path(ctx.model_dir, "seen")
    for epoch in range(EPOCHS):
        model.fit(x, y, epochs=1, verbose=0)
        ctx.save(model, f"checkpoints/epoch-{epoch:02}.keras")
        if epoch == 0:  # goes on when the evaluator has seen the first: it reads while this trains
            assert until(lambda: seen.exists() or not args["waits"], 60)
    return float(model.evaluate(x, y, verbose=0))


def evaluate_and_tell(args: Any, ctx: Any) -> Any:
    if ctx.job_name != "evaluator":
        return train_and_evaluate(args, ctx)
    import keras

    paths = []
    for path in ctx.checkpoints(pattern="*.keras", poll=0.1):
        keras.models.load_model(path)
        paths.append(os.path.basename(path))
        Path(ctx.model_dir, "seen").touch()
    return paths


def test_an_evaluator_reads_checkpoints_while_training_goes_on_and_the_last_after_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    stale = tmp_path / "checkpoints/epoch-99.keras"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier training")
    os.utime(stale, (1_000_000, 1_000_000))
    how = {"input_mode": "tensorflow", "model_dir": str(tmp_path)}
    with launch(evaluate_and_tell, {"waits": True}, workers=1, evaluator=True, spark=spark, **how) as cluster:
        pass
    paths = cluster.results()["evaluator:0"]
    assert paths[0] == "epoch-00.keras"
    assert paths[-1] == f"epoch-{EPOCHS - 1:02}.keras"
    assert paths == sorted(set(paths))
    assert {node.status.value for node in cluster.snapshot().nodes} == {"DONE"}


def test_the_newest_checkpoint_is_evaluated_to_the_trainings_own_loss(spark: SparkSession, tmp_path: Path) -> None:
    how = {"input_mode": "tensorflow", "model_dir": str(tmp_path), "evaluator_may_fail": True}
    with launch(train_and_evaluate, {"waits": False}, workers=1, evaluator=True, spark=spark, **how) as cluster:
        pass
    assert {node.status.value for node in cluster.snapshot().nodes} == {"DONE"}  # it may fail, and did not
    *_, last = cluster.results()["evaluator:0"]
    assert last["path"] == f"epoch-{EPOCHS - 1:02}.keras"
    assert last["loss"] == pytest.approx(cluster.result(), rel=1e-4)


def failing_beside(args: Any, ctx: Any) -> str:
    if ctx.job_name == "evaluator":
        if args == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError("no such metric")
    ids = [int(i) for batch in ctx.dataset(8) for i in batch["id"]]
    return f"trained on {len(ids)} rows"


@pytest.mark.parametrize("how", ["raised", "killed"])
def test_an_evaluator_that_may_fail_is_reported_and_training_goes_on(spark: SparkSession, how: str) -> None:
    options = {"evaluator": True, "evaluator_may_fail": True}
    with launch(failing_beside, how, workers=1, spark=spark, **options) as cluster:
        state = lambda: {node.node: node.status.value for node in cluster.snapshot().nodes}
        assert until(lambda: state()["evaluator:0"] == "FAILED")
        cluster.train(spark.range(50))
    assert cluster.result() == "trained on 50 rows"
    assert cluster.state.value == "DONE"
    assert state() == {"worker:0": "DONE", "evaluator:0": "FAILED"}
    assert "evaluator:0 failed, and the training goes on" in cluster.logs("evaluator:0")
    assert ("no such metric" if how == "raised" else "SIGKILL") in cluster.logs("evaluator:0")


def test_an_evaluator_that_fails_ends_the_cluster_unless_it_may(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match="^evaluator:0 .*no such metric") as caught:
        with launch(failing_beside, "raised", workers=1, evaluator=True, spark=spark) as cluster:
            cluster.train(spark.range(50))
    assert caught.value.node == "evaluator:0"


def never_through(args: Any, ctx: Any) -> str:
    if ctx.job_name == "evaluator":
        until(lambda: False, 600)
    return "trained"


def test_an_evaluator_without_an_end_is_not_waited_for_beyond_the_grace(spark: SparkSession) -> None:
    how = {"input_mode": "tensorflow", "grace": 1.0}
    with launch(never_through, workers=1, evaluator=True, spark=spark, **how) as cluster:
        pass
    assert cluster.result() == "trained"
    assert cluster.state.value == "DONE"
    assert {node.node: node.status.value for node in cluster.snapshot().nodes}["evaluator:0"] == "STOPPED"
    assert "was not through 1 s after the training" in cluster.logs("evaluator:0")
