"""TensorBoard on the chief's executor, requested from a logged-in page, and after the cluster's end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.jupyter_server import Answer, JupyterServer, a_server
from tfos_nb import launch
from tfos_nb.errors import NodeFailed
from tfos_nb.jupyter.endpoint import Endpoint
from tfos_nb.state.cluster_state import ClusterStatus

__all__ = ["a_server"]

SECONDS = 60.0


def write_and_wait(args: Any, ctx: Any) -> str:
    """Write five numbers on the chief, then run until the user stops it."""
    import tensorflow as tf

    if ctx.is_chief:
        with tf.summary.create_file_writer(f"{ctx.log_dir}/mine").as_default() as writer:
            for step in range(5):
                tf.summary.scalar("speed", 2.0 * step, step=step)
            writer.flush()
    ctx.report(step=1)
    while not ctx.should_stop:
        threading.Event().wait(0.05)
    return str(ctx.log_dir)


def fit_a_little(args: Any, ctx: Any) -> None:
    """Fit without any code for TensorBoard."""
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(ctx.dataset(8, x="x", y="y"), epochs=2, shuffle=False)


@pytest.fixture
def endpoint(a_server: JupyterServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", a_server.runtime_dir)
    made = Endpoint()
    yield made
    made.close()


def ask_until(server: JupyterServer, path: str, found: str) -> Answer:
    """Repeat a request until its answer has a text, like a page that reloads."""
    deadline = time.monotonic() + SECONDS
    while True:
        answer = server.ask(path)
        if answer.status == 200 and found in answer.text:
            return answer
        assert time.monotonic() < deadline, f"{answer.status} {answer.text[:500]}"
        assert answer.status in (200, 503), answer.text[:500]
        threading.Event().wait(0.3)


def test_the_chiefs_numbers_are_shown_during_and_after_the_run(
    spark: SparkSession, a_server: JupyterServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    logs = str(tmp_path / "logs")
    cluster = launch(write_and_wait, spark=spark, workers=2, input_mode="tensorflow", name="board", log_dir=logs)
    try:
        endpoint.serve(cluster)
        base = f"tfos-nb/tb/{cluster.id}/"
        ask_until(a_server, base + "data/plugin/timeseries/tags", "speed")
        assert not endpoint._boards, "it came through the tunnel, not from this machine"
        assert "<title>TensorBoard</title>" in a_server.ask(base).text
        assert json.loads(a_server.ask(f"tfos-nb/api/clusters/{cluster.id}/log?node=worker:1").body)["lines"]
        said = json.loads(a_server.ask(f"tfos-nb/api/clusters/{cluster.id}/stop", "POST").body)["said"]
        assert "stopping board" in said
        assert cluster.results() == {"worker:0": logs, "worker:1": logs}
        assert cluster.state is ClusterStatus.STOPPED
        ask_until(a_server, base + "data/plugin/timeseries/tags", "speed")
        assert len(endpoint._boards) == 1, "and this one runs beside the kernel"
    finally:
        cluster.close()


def test_a_log_directory_that_cannot_be_created_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NodeFailed, match="log directory .*file/logs cannot be made on .*: Not a directory") as raised:
        with launch(
            write_and_wait, spark=spark, workers=1, input_mode="tensorflow", log_dir=f"{tmp_path}/file/logs"
        ) as cluster:
            cluster.wait()
    assert str(raised.value).count("cannot be made") == 1, "there is no traceback of the user's to show beside it"


@pytest.mark.slow
def test_keras_epochs_are_written_without_a_callback_of_the_user(
    spark: SparkSession, a_server: JupyterServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([([float(i), 1.0], float(i)) for i in range(32)], "x array<float>, y float")
    with launch(fit_a_little, spark=spark, workers=2, name="fits", tensorboard=True, model_dir=str(tmp_path)) as fits:
        endpoint.serve(fits)
        fits.train(rows, epochs=2)
    assert fits.snapshot().log_dir == f"{tmp_path}/logs"
    ask_until(a_server, f"tfos-nb/tb/{fits.id}/data/plugin/timeseries/tags", "epoch_loss")


def test_without_tensorboard_nothing_is_written(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([([float(i), 1.0], float(i)) for i in range(32)], "x array<float>, y float")
    with launch(fit_a_little, spark=spark, workers=2, name="quiet", model_dir=str(tmp_path)) as quiet:
        quiet.train(rows, epochs=2)
    assert quiet.snapshot().log_dir == ""
    assert not list(tmp_path.iterdir())
