"""Runs in MLflow: a real tracking server on SQLite, read by its REST API, and real clusters."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession

import tfos_nb
from tests.cluster_managers.daemons import free_ports
from tests.records.test_run import a_run
from tests.waiting import until
from tfos_nb import errors, launch
from tfos_nb.mlflow import destination, following, writing
from tfos_nb.mlflow.destination import Destination
from tfos_nb.mlflow.following import RunNotLogged
from tfos_nb.mlflow.writing import RunWriter
from tfos_nb.records import recorder
from tfos_nb.state.training_curve import Point

mlflow = pytest.importorskip("mlflow")


class Server:
    """MLflow's tracking server."""

    def __init__(self, home: Path) -> None:
        self.uri = f"http://127.0.0.1:{free_ports(1)[0]}"
        self._home = home
        self.start()

    def start(self) -> None:
        """Start it, also after its end."""
        home, port = self._home, self.uri.rpartition(":")[2]
        store = ["--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--artifacts-destination", str(home / "files")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", port, "--workers", "1"],
            cwd=home,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert until(self._answers, 90), "MLflow's server did not start"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, call: str, **question: str) -> Any:
        """Call its REST API, as its page does."""
        url = f"{self.uri}/api/2.0/mlflow/{call}?{urllib.parse.urlencode(question)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    def run(self, run_id: str) -> dict[str, Any]:
        """Return a run: its info, parameters, newest metrics and tags."""
        found = self.get("runs/get", run_id=run_id)["run"]
        data = found["data"]
        return {
            **found["info"],
            "params": {one["key"]: one["value"] for one in data.get("params", [])},
            "metrics": {one["key"]: one["value"] for one in data.get("metrics", [])},
            "tags": {one["key"]: one["value"] for one in data.get("tags", [])},
        }

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Return a metric's steps and values, in the order of their times."""
        found = self.get("metrics/get-history", run_id=run_id, metric_key=metric)["metrics"]
        return [(int(one.get("step", 0)), float(one["value"])) for one in found]

    def file(self, run_id: str, path: str) -> str:
        """Return an artifact, as its page shows it."""
        query = urllib.parse.urlencode({"path": path, "run_uuid": run_id})
        with urllib.request.urlopen(f"{self.uri}/get-artifact?{query}", timeout=30) as answer:
            return str(answer.read().decode())

    def runs_of(self, experiment: str) -> list[str]:
        """Return the ids of an experiment's runs, the newest first."""
        found = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]
        body = json.dumps({"experiment_ids": [found["experiment_id"]]}).encode()
        asked = urllib.request.Request(
            f"{self.uri}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return [run["info"]["run_id"] for run in json.load(answer).get("runs", [])]

    def end(self) -> None:
        """End the server and its workers, which have the port a moment longer than their parent."""
        os.killpg(self._process.pid, 9)
        self._process.wait(30)
        assert until(self._is_closed, 30), "a worker still listens"

    def _is_closed(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", int(self.uri.rpartition(":")[2]))) == errno.ECONNREFUSED


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("mlflow"))
    yield made
    made.end()


@pytest.fixture(autouse=True)
def tracked(server: Server) -> Iterator[None]:
    mlflow.set_tracking_uri(server.uri)
    mlflow.set_experiment("usual")
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()


def fitting(args: Any, ctx: Any) -> str:
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(args["units"]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(args["lr"]), "mse", metrics=["mae"])
    rows, held_out = ctx.dataset(16, x="x", y="y"), ctx.validation(16, x="x", y="y")
    model.fit(rows, epochs=3, verbose=0, validation_data=held_out)
    path: str = ctx.save(model)
    return path


def reporting(args: Any, ctx: Any) -> None:
    for epoch in (1, 2):
        ctx.report(epoch=epoch, epoch_end=True, loss=args["loss"] / epoch)
    if args.get("fails"):
        raise ValueError("no good")


def table(spark: SparkSession, rows: int = 48) -> Any:
    content = [(i, [float(i % 3), 1.0, 2.0], float(i % 3)) for i in range(rows)]
    return spark.createDataFrame(content, "id long, x array<float>, y float")


def test_a_training_in_an_active_run_is_logged_with_its_model(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    frame = table(spark)
    args = {"units": 4, "lr": 0.01, "net": {"depth": 2}, "api_key": "d34d"}
    with mlflow.start_run(run_name="mine") as active:
        with launch(fitting, args, workers=2, spark=spark, model_dir=tmp_path, name="digits") as cluster:
            cluster.train(frame, epochs=3, validation=frame)
        assert mlflow.active_run().info.run_id == active.info.run_id
        assert server.run(active.info.run_id)["status"] == "RUNNING", "the user's run is ended by the user"
    found = server.run(active.info.run_id)
    assert found["status"] == "FINISHED"
    assert found["params"] == {"units": "4", "lr": "0.01", "net.depth": "2", "api_key": "…", "plan.workers": "2"}
    assert found["tags"]["tfos_nb.run"] == cluster.id
    assert found["tags"]["tfos_nb.outcome"] == "done"
    assert found["tags"]["tfos_nb.spark.application"] == spark.sparkContext.applicationId
    for metric in ("loss", "mae", "val_loss", "val_mae"):
        assert server.history(active.info.run_id, metric) == list(enumerate(cluster.history[metric], 1))
    page = server.file(active.info.run_id, "tfos_nb/panel.html")
    assert "digits" in page
    assert "worker:1" in page
    assert json.loads(server.file(active.info.run_id, "tfos_nb/run.json"))["id"] == cluster.id
    assert "d34d" not in json.dumps(found) + page

    (logged,) = mlflow.search_logged_models(
        [found["experiment_id"]], f"source_run_id = '{active.info.run_id}'", output_format="list"
    )
    model = mlflow.pyfunc.load_model(logged.model_uri)
    assert [spec.shape for spec in model.metadata.signature.inputs.inputs] == [(-1, 3)]
    assert model.input_example.shape == (5, 3)
    scored = tfos_nb.predict(frame, cluster.result(), inputs="x").toPandas()
    assert model.predict(np.stack(scored["x"]).astype("float32"))[:, 0] == pytest.approx(
        [row[0] if hasattr(row, "__len__") else row for row in scored["prediction"]], rel=1e-5
    )


def test_a_run_has_the_outcome_of_its_cluster(spark: SparkSession, server: Server, tmp_path: Path) -> None:
    options = {"spark": spark, "input_mode": "tensorflow", "model_dir": tmp_path, "mlflow": "outcomes"}
    with launch(reporting, {"loss": 1.0}, name="good", **options):
        pass
    with pytest.raises(errors.NodeFailed), launch(reporting, {"loss": 2.0, "fails": True}, name="bad", **options):
        pass
    failed, done = (server.run(run_id) for run_id in server.runs_of("outcomes"))
    assert (done["status"], done["run_name"], done["metrics"]) == ("FINISHED", "good", {"loss": 0.5})
    assert (failed["status"], failed["run_name"], failed["metrics"]) == ("FAILED", "bad", {"loss": 1.0})
    assert "ValueError: no good" in failed["tags"]["tfos_nb.error"]
    assert failed["params"] == {"loss": "2.0", "fails": "True", "plan.workers": "1", "plan.input_mode": "tensorflow"}


def test_a_second_cluster_within_a_run_gets_a_child_run(spark: SparkSession, server: Server) -> None:
    with mlflow.start_run() as active:
        for loss in (1.0, 2.0):
            with launch(reporting, {"loss": loss}, spark=spark, input_mode="tensorflow", name=f"n{loss:g}"):
                pass
    assert server.run(active.info.run_id)["params"]["loss"] == "1.0"
    (below,) = [
        found
        for run_id in server.runs_of("usual")
        if (found := server.run(run_id))["tags"].get("mlflow.parentRunId") == active.info.run_id
    ]
    assert (below["run_name"], below["params"]["loss"], below["status"]) == ("n2", "2.0", "FINISHED")


def test_without_the_option_or_an_active_run_nothing_is_logged(spark: SparkSession, server: Server) -> None:
    before = server.runs_of("usual")
    with launch(reporting, {"loss": 1.0}, spark=spark, input_mode="tensorflow"):
        pass
    with (
        mlflow.start_run() as active,
        launch(reporting, {"loss": 1.0}, spark=spark, input_mode="tensorflow", mlflow=False),
    ):
        pass
    assert server.runs_of("usual") == [active.info.run_id, *before]
    assert "tfos_nb.run" not in server.run(active.info.run_id)["tags"]


def test_training_continues_without_a_server_and_can_be_logged_later(
    spark: SparkSession, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:1")
    experiment = mlflow.tracking.fluent._active_experiment_id
    with (
        caplog.at_level(logging.WARNING),
        launch(
            reporting, {"loss": 1.0}, spark=spark, input_mode="tensorflow", mlflow="late", record=tmp_path, name="late"
        ) as cluster,
    ):
        pass
    assert cluster.state.value == "DONE"
    told = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert len(told) == 1, told
    assert told[0].startswith("the run is not logged to MLflow: no server answers at 127.0.0.1:1")
    assert told[0].endswith("tries again until it ends; tfos_nb.mlflow.log(RUN) logs it afterwards")
    (run,) = tfos_nb.runs(tmp_path)
    with pytest.raises(RunNotLogged, match=f"MLflow did not take the run {run.id}: no server answers at 127.0.0.1:1"):
        tfos_nb.mlflow.log(run)
    mlflow.set_tracking_uri(server.uri)
    mlflow.tracking.fluent._active_experiment_id = experiment
    run_id = tfos_nb.mlflow.log(tfos_nb.runs(tmp_path)[0], experiment="late")
    found = server.run(run_id)
    assert (found["status"], found["run_name"], found["params"]["loss"]) == ("FINISHED", "late", "1.0")
    assert server.history(run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert found["end_time"] - found["start_time"] == pytest.approx(1000 * cluster.run.seconds, abs=20)


def hold_until_told(args: Any, ctx: Any) -> None:
    ctx.report(epoch=1, epoch_end=True, loss=1.0)
    while not os.path.exists(args["told"]):
        time.sleep(0.05)
    ctx.report(epoch=2, epoch_end=True, loss=0.5)


def test_a_server_that_answers_again_gets_the_whole_run(
    spark: SparkSession, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"spark": spark, "input_mode": "tensorflow", "mlflow": "flapping"}
    server.end()
    try:
        with caplog.at_level(logging.WARNING):
            cluster = launch(hold_until_told, {"told": str(tmp_path / "told")}, name="flapping", **options)
            assert until(lambda: any("is not logged to MLflow" in one.getMessage() for one in caplog.records), 60)
    finally:
        server.start()
    (tmp_path / "told").touch()
    cluster.wait(60)
    (run_id,) = server.runs_of("flapping")
    assert server.run(run_id)["status"] == "FINISHED"
    assert server.history(run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert sum("is not logged to MLflow" in one.getMessage() for one in caplog.records) == 1


def test_a_write_that_failed_goes_on_in_the_same_run_also_in_another_process(server: Server) -> None:
    whole = replace(a_run(), epochs=tuple({"epoch": epoch, "loss": 1 / epoch} for epoch in (1, 2, 3)))
    begun = replace(whole, status="RUNNING", updated=time.time(), epochs=whole.epochs[:2])
    writer = RunWriter(Destination(server.uri, experiment="resumed"))
    writer.write(begun)
    server.end()
    try:
        with pytest.raises(OSError, match="no server answers at 127.0.0.1:.*refused"):
            writer.write(whole)
    finally:
        server.start()
    assert server.run(writer.run_id)["status"] == "RUNNING"
    assert tfos_nb.mlflow.log(whole, experiment="resumed") == writer.run_id
    assert server.runs_of("resumed") == [writer.run_id]
    assert server.run(writer.run_id)["status"] == "FINISHED"
    assert server.history(writer.run_id, "loss") == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
    assert tfos_nb.mlflow.log(whole, experiment="resumed") != writer.run_id, "a run that is whole is not changed"


def test_logging_again_to_an_active_run_adds_only_what_is_new(server: Server) -> None:
    whole = replace(a_run(), epochs=tuple({"epoch": epoch, "loss": 1 / epoch} for epoch in (1, 2, 3)))
    with mlflow.start_run() as active:
        for count in (2, 3, 3):
            assert tfos_nb.mlflow.log(replace(whole, epochs=whole.epochs[:count])) == active.info.run_id
    assert server.history(active.info.run_id, "loss") == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]


def test_a_run_that_still_goes_on_stays_running_until_it_is_logged_again(server: Server) -> None:
    whole = a_run()
    running = replace(whole, status="RUNNING", updated=time.time(), process=None)
    run_id = tfos_nb.mlflow.log(running, experiment="going on")
    assert server.run(run_id)["status"] == "RUNNING"
    assert tfos_nb.mlflow.log(whole, experiment="going on") == run_id
    assert server.run(run_id)["status"] == "FINISHED"


def test_logging_a_run_whose_last_write_is_late_waits_for_it(
    spark: SparkSession, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def hang(uri: str) -> None:
        answers.wait(60)

    monkeypatch.setattr(writing, "check_server", hang)
    monkeypatch.setattr(recorder, "_LAST_WITHIN", 0.3)
    with caplog.at_level(logging.WARNING):
        options = {"spark": spark, "input_mode": "tensorflow", "mlflow": "late write", "name": "slow"}
        with launch(reporting, {"loss": 1.0}, **options) as cluster:
            pass
    assert "MLflow's server did not take the run's outcome within" in caplog.text
    threading.Timer(0.5, answers.set).start()
    run_id = tfos_nb.mlflow.log(cluster, experiment="late write")
    assert server.runs_of("late write") == [run_id]
    assert server.run(run_id)["status"] == "FINISHED"
    assert server.history(run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_a_refused_metric_does_not_affect_the_others(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "_name", str)  # which makes names that MLflow accepts
    epochs = tuple({"epoch": epoch, "loss": 0.5, "a/../b": 1.0} for epoch in (1, 2))
    with caplog.at_level(logging.WARNING):
        run_id = tfos_nb.mlflow.log(replace(a_run(), epochs=epochs))
    assert server.run(run_id)["status"] == "FINISHED"
    assert server.history(run_id, "loss") == [(1, 0.5), (2, 0.5)]
    told = [record.getMessage() for record in caplog.records if "MLflow did not take" in record.getMessage()]
    assert len(told) == 1, told
    assert told[0].startswith("MLflow did not take the metrics a/../b: ")


@pytest.fixture
def mute() -> Iterator[str]:
    """URI of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_never_answers_is_told_in_time(mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "_ANSWERS", 0.5)
    mlflow.set_tracking_uri(mute)
    with pytest.raises(RunNotLogged, match=r"takes connections, and does not answer within 0.5 s\. Call log\(\) again"):
        tfos_nb.mlflow.log(a_run())
    monkeypatch.setattr(destination, "_ANSWERS", 60.0)
    monkeypatch.setattr(following, "_ANSWERS_WITHIN", 0.5)
    with pytest.raises(RunNotLogged, match=r"within 0.5 s\. Call log\(\) again when the server answers"):
        tfos_nb.mlflow.log(a_run())


def missing_database(server: Server) -> None:
    mlflow.set_tracking_uri("sqlite:////dev/null/mlflow.db")


def unknown_scheme(server: Server) -> None:
    mlflow.set_tracking_uri("foo://bar")


@pytest.mark.parametrize("prepare", [missing_database, unknown_scheme])
def test_a_store_that_cannot_be_opened_is_an_error_that_says_why(
    server: Server, prepare: Callable[[Server], None]
) -> None:
    prepare(server)
    with pytest.raises(RunNotLogged, match=r"did not take the run 6f2c0a: .{9,}\. Call log\(\) again when this is"):
        tfos_nb.mlflow.log(a_run())


def test_a_deleted_experiment_is_named(server: Server) -> None:
    number = mlflow.MlflowClient().create_experiment("gone")
    mlflow.MlflowClient().delete_experiment(number)
    with pytest.raises(errors.PlanError, match=f"experiment 'gone' is deleted: .* experiments restore -x {number}"):
        tfos_nb.mlflow.log(a_run(), experiment="gone")


def test_odd_numbers_and_names_are_logged(server: Server) -> None:
    odd = {"epoch": 1, "top@5": 0.5, "loss": math.nan, "a/../b": 1.0, "loss/": 2.0, "/x//y": 3.0, "..": 4.0}
    odd |= {"top_5": 0.7, "n" * 300: 6.0}
    long = {f"argument {number}": "x" * 600 for number in range(150)}
    run = replace(a_run(arguments=long), epochs=(odd,), points=(Point(1, 1, {"loss": math.nan}, True),))
    found = server.run(tfos_nb.mlflow.log(run))
    assert [found["metrics"][name] for name in ("top_5", "a/_/b", "loss/_", "x/_/y", "_")] == [0.5, 1, 2, 3, 4]
    (cut,) = (name for name in found["metrics"] if name.startswith("nnn"))
    assert (found["metrics"]["top_5_"], found["metrics"][cut]) == (0.7, 6.0)
    assert math.isnan(float(found["metrics"]["loss"]))
    assert len(found["params"]) == 150 + 1


def test_a_refused_parameter_does_not_affect_the_others(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"lr": 0.01, "a@b": 1, "a_b": 2, "/abs": 3, "plan": {"workers": 9}, "units": 4}
    with caplog.at_level(logging.WARNING), mlflow.start_run() as active:
        mlflow.log_param("lr", "1e-2")
        tfos_nb.mlflow.log(a_run(arguments=arguments))
    found = server.run(active.info.run_id)
    assert found["params"]["lr"] == "1e-2"
    assert (found["params"]["units"], found["params"]["plan.workers"]) == ("4", "2")
    assert found["params"]["args.plan.workers"] == "9"
    assert sorted(found["params"][name] for name in ("a_b", "args.a_b", "abs")) == ["1", "2", "3"]
    assert found["metrics"] == {"loss": 0.25, "val_loss": 0.5}
    told = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert len(told) == 1, told
    assert told[0].startswith("MLflow did not take the parameters lr: ")


def test_the_step_counts_epochs_over_several_fits(server: Server) -> None:
    epochs = tuple({"epoch": epoch, "loss": float(epoch)} for epoch in (4, 5, 1, 2))
    run_id = tfos_nb.mlflow.log(replace(a_run(), epochs=epochs))
    assert server.history(run_id, "loss") == [(4, 4.0), (5, 5.0), (6, 1.0), (7, 2.0)]


def test_models_of_other_kinds_are_logged_in_the_runs_experiment(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    import keras
    import tensorflow as tf

    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    texts = keras.Sequential([keras.Input((1,), dtype="string"), lookup, keras.layers.Dense(2)])
    texts.save(tmp_path / "texts.keras")
    numbers = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    numbers.export(tmp_path / "numbers", verbose=False)
    frame = spark.createDataFrame([("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0])], "word string, x array<float>")
    given = {"texts.keras": ("word", np.array([["a"], ["b"]])), "numbers": ("x", np.ones((2, 3), "float32"))}
    for name, (column, example) in given.items():
        options = {"model": tmp_path / name, "rows": frame.select(column)}
        run_id = tfos_nb.mlflow.log(a_run(name=name), experiment="kinds", **options)
        found = server.run(run_id)
        where = f"source_run_id = '{run_id}'"
        (logged,) = mlflow.search_logged_models([found["experiment_id"]], where, output_format="list")
        assert mlflow.pyfunc.load_model(logged.model_uri).metadata.signature is not None, name
        scored = mlflow.tensorflow.load_model(logged.model_uri)(tf.constant(example))
        scored = next(iter(scored.values())) if isinstance(scored, dict) else scored
        assert np.asarray(scored).shape == (2, 2)


def test_launch_does_not_wait_for_a_server_that_is_down(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:1")
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    begun = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        launch(reporting, {"loss": 1.0}, spark=spark, input_mode="tensorflow", mlflow=True),
    ):
        pass
    assert time.monotonic() - begun < 100, "MLflow's client tries for 245 s"
    assert sum("is not logged to MLflow" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"experiment": 5}, "experiment must be the name of an experiment, got 5"),
        ({"model": 5}, "model must be the path or the URL of a saved model, got 5"),
        ({"model": "/dev/null/model"}, "model='/dev/null/model' is not on this machine's disk"),
        ({"model": "/"}, "model='/' is a directory without a saved_model.pb: give a .keras file"),
        ({"rows": 5}, "rows must be a DataFrame, and needs model="),
    ],
)
def test_wrong_arguments_of_log_are_refused_before_a_run_is_made(
    server: Server, options: dict[str, Any], told: str
) -> None:
    before = server.runs_of("usual")
    with pytest.raises(errors.PlanError, match=told):
        tfos_nb.mlflow.log(a_run(), **options)
    assert server.runs_of("usual") == before


@pytest.mark.parametrize("wrong", [3, "", " ", ["digits"], 1.0])
def test_a_wrong_option_is_refused_before_any_node_starts(wrong: Any) -> None:
    with pytest.raises(errors.PlanError, match="mlflow must be True, False, or the name of an experiment"):
        launch(reporting, mlflow=wrong)


def test_an_object_that_is_not_a_run_is_refused() -> None:
    with pytest.raises(errors.PlanError, match=r"run must be a Run, such as tfos_nb.runs\(\)\[0\], or a cluster"):
        tfos_nb.mlflow.log({"loss": 1.0})  # type: ignore[arg-type]


def test_a_missing_mlflow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(errors.MissingPackage, match=r"pip install 'tfos_nb\[mlflow\]'"):
        launch(reporting, mlflow=True)


@pytest.mark.slow
def test_a_tuners_fits_are_child_runs_and_the_users_run_has_the_best(spark: SparkSession, server: Server) -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    estimator = tfos_nb.KerasEstimator(
        model, optimizer="sgd", loss="mse", featuresCol="x", labelCol="y", epochs=2, batch_size=16, progress="none"
    )
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.01, 0.001]).build()
    tuner = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=2,
        seed=3,
    )
    with mlflow.start_run() as active:
        tuner.fit(table(spark))
    best = server.run(active.info.run_id)
    assert best["params"]["learning_rate"] in ("0.01", "0.001")
    below = [
        found
        for run_id in server.runs_of("usual")
        if (found := server.run(run_id))["tags"].get("mlflow.parentRunId") == active.info.run_id
    ]
    assert sorted(found["params"]["learning_rate"] for found in below) == ["0.001", "0.001", "0.01", "0.01"]
    assert {found["status"] for found in below} == {"FINISHED"}
    models = mlflow.search_logged_models([best["experiment_id"]], output_format="list")
    assert [one.source_run_id for one in models if one.source_run_id == active.info.run_id] == [active.info.run_id]
    assert not [one for one in models if one.source_run_id in {found["run_id"] for found in below}]
