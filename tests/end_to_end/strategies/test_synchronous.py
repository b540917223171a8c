"""Keras programs written for one process, under ``ctx.strategy()`` on two workers."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tfos_nb import launch

EPOCHS = 5
KINDS = ("best.keras", "w{epoch:02d}.weights.h5", "m{epoch:02d}.keras", "full.h5")


def train(args: Any, ctx: Any) -> dict[str, Any]:
    """Make the datasets before the strategy, and write each kind of checkpoint to one path for all workers."""
    rows = ctx.dataset(32, x="x", y="y")
    validation = ctx.validation(32, x="x", y="y")
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    saving = [
        keras.callbacks.ModelCheckpoint(
            f"{args}/{kind}", monitor="loss", save_best_only="best" in kind, save_weights_only="weights" in kind
        )
        for kind in KINDS
    ]
    history = model.fit(rows, validation_data=validation, epochs=EPOCHS, verbose=0, callbacks=saving).history
    last = keras.models.load_model(f"{args}/m{EPOCHS:02d}.keras", compile=False)
    same = [np.array_equal(*pair) for pair in zip(last.get_weights(), model.get_weights(), strict=True)]
    return {"losses": history["val_loss"], "same": all(same)}


def test_datasets_made_before_the_strategy_and_checkpoints_at_one_path_work(
    spark: SparkSession, tmp_path: Path
) -> None:
    keras = pytest.importorskip("keras")
    x = np.random.default_rng(7).normal(size=(400, 3)).astype("float32")
    rows = [(row.tolist(), float(row.sum())) for row in x]
    frame = spark.createDataFrame(rows, "x array<float>, y float").repartition(4)
    with launch(train, str(tmp_path), workers=2, name="synchronous") as cluster:
        cluster.train(frame, epochs=EPOCHS, validation=frame)
    for found in cluster.results().values():
        assert len(found["losses"]) == EPOCHS
        assert found["losses"] == sorted(found["losses"], reverse=True)
        assert found["same"], "every worker has read what was just saved"
    names = sorted(path.name for path in tmp_path.iterdir())
    numbered = [kind.format(epoch=epoch) for kind in KINDS[1:3] for epoch in range(1, EPOCHS + 1)]
    assert names == sorted(["best.keras", "full.h5", *numbered])
    for path in tmp_path.glob("*.keras"):
        assert zipfile.ZipFile(path).testzip() is None
        # Saving .h5 removes the optimizer from the configuration that the next .keras file is compiled with.
        keras.models.load_model(path, compile=False)
