"""Spark Connect: clients that have no SparkContext, and a server in a process of its own."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import tfos_nb
from tests.cluster_managers.connect_server import connect_server
from tests.cluster_managers.submit import PROGRAMS
from tests.conftest import ENVIRONMENT
from tests.versions import SPARK, connect_client
from tests.waiting import until
from tfos_nb.detached import places
from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts import connect
from tfos_nb.spark.contexts.connect import Connect

SECONDS = 300


@pytest.fixture(scope="module")
def server(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(spark_home, tmp_path_factory.mktemp("connect"), executors=2, cores=2) as url:
        yield url


def ended(program: str, server: str, folder: Path, code: int = 0, *arguments: str, **variables: str) -> str:
    """Run a client in a process of its own, which must end with this code; return its output."""
    environment = {**ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    command = [sys.executable, str(PROGRAMS / program), server, str(folder), *arguments]
    client = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert client.returncode == code, f"{client.stdout}\n{client.stderr}"
    return client.stdout


def run(program: str, server: str, folder: Path) -> dict[str, Any]:
    """Run a client in a process of its own; return the results in its last line."""
    found: dict[str, Any] = json.loads(ended(program, server, folder).splitlines()[-1])
    return found


@connect_client
def test_a_client_trains_and_its_clusters_fail_stop_and_recover(server: str, tmp_path: Path) -> None:
    found = run("connect_train.py", server, tmp_path)
    trained = found["trained"]
    assert (found["active"], found["slots"], found["over"]) == (True, 4, True)
    assert trained["held"] == [2]
    assert "running: 2 tasks of 'tfos_nb cluster tfos: worker:0, worker:1'" in trained["refused"]
    assert trained["exact"] == [True, True], "a row was lost, or came twice"
    assert trained["returned"] == 2 * 4000
    assert "worker:1" in found["failure"]
    assert "ValueError: the second one fails" in found["failure"]
    assert found["stopped"] == "STOPPED"
    assert found["alone"] == [0, 1], "programs of two CPUs each, by a profile"
    assert found["gathered"] == [1, 1], "an executor was killed"
    assert found["busy"] == 0


@connect_client
def test_a_detached_cluster_outlives_its_client(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(tmp_path / "data")
    monkeypatch.setenv("XDG_DATA_HOME", data)
    ended("connect_detach.py", server, tmp_path, -signal.SIGKILL, XDG_DATA_HOME=data)
    cluster = tfos_nb.attach("far")
    assert cluster.id == (tmp_path / "id").read_text()
    (tmp_path / "end").touch()
    cluster.wait(60)
    assert sum(cluster.results().values()) == 1000
    psutil.Process(places.find(cluster.id).process.pid).terminate()  # type: ignore[union-attr]


@connect_client
def test_a_cluster_whose_process_is_on_an_executor_outlives_its_clients_host(server: str, tmp_path: Path) -> None:
    data = {"XDG_DATA_HOME": str(tmp_path / "data")}
    ended("connect_detach.py", server, tmp_path, -signal.SIGKILL, "executor", **data)
    (place,) = (tmp_path / "data/tfos_nb/detached").glob("*.json")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600, "it has the token"
    process = psutil.Process(json.loads(place.read_text())["process"]["pid"])
    workers = [parent for parent in process.parents() if parent.name() == "java"]
    assert workers or process.ppid() == 1, "it is an executor's, or it has outlived the task that started it"
    seen = json.loads(ended("connect_attach.py", server, tmp_path, **data).splitlines()[-1])
    assert (seen["running"], seen["log"]) == ("RUNNING", True)
    assert "takes its rows with its launch" in seen["train"]
    assert "still runs after 0.2 s" in seen["timeout"]
    assert (seen["rows"], seen["state"], seen["clusters"]) == (1000, "DONE", ["DONE"])
    assert "needs 9 slots" in seen["refused"]
    assert seen["left"] == 0
    assert until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 60)


@connect_client
def test_a_cluster_whose_process_is_on_an_executor_survives_its_losses(server: str, tmp_path: Path) -> None:
    output = ended("connect_losses.py", server, tmp_path, XDG_DATA_HOME=str(tmp_path / "data"))
    seen = json.loads(output.splitlines()[-1])
    assert (seen["page"], seen["mode"], seen["ended"], seen["socket"]) == (True, 0o600, "DONE", "")
    squares = sum(number**2 for number in range(3000)) / 3000
    assert seen["board"]["generation"] == 2, "a node's processes outlive its executor"
    assert seen["resumed"]["generation"] >= 2
    for trained in (seen["board"], seen["resumed"]):
        assert trained["epochs"] == [0, 1, 2, 3]
        assert trained["loss"] == pytest.approx([squares] * 4, rel=1e-5), "a row was lost, or came twice"
    assert seen["state"] == "FAILED"
    assert "has gone without a result" in seen["error"]
    assert f"Its last complete checkpoint is {tmp_path}/models" in seen["attach"]
    assert (seen["gone"], seen["listed"], seen["left"]) == (2, ["LOST"], 0)


@pytest.mark.slow
@connect_client
def test_a_client_applies_models_and_uses_the_magics(server: str, tmp_path: Path) -> None:
    found = run("connect_apply.py", server, tmp_path)
    assert found["predicted"] == found["loaded"] == [0.0, 0.002, 0.004]
    if SPARK >= (4, 1):
        assert found["sql"] == [0.0, 0.002, 0.004]
    else:
        assert "register_udf needs Spark 4.1 or newer" in found["sql"]
    assert len(found["fitted"]) == 3
    assert found["records"] == [1000, 1000]
    assert found["cells"] == [True] * 4
    assert found["scored"] == 1000
    assert "a stream of Spark Connect cannot be fed" in found["stream"]


@pytest.mark.slow
@connect_client
def test_a_client_that_no_executor_can_reach_trains_with_a_relay(server: str, tmp_path: Path) -> None:
    found = run("connect_relayed.py", server, tmp_path)
    assert found["exact"] == [True, True], "a row was lost, or came twice"
    assert found["relays"] == [1, 0], "it is gone with its cluster"
    assert "ValueError: the second one fails" in found["failure"]
    assert found["stopped"] == "STOPPED"
    assert found["programs"] == [0, 1]
    assert "needs 5 slots (4 nodes, and 1 for the relay); Spark has 4" in found["refused"]


# --- facts from the server


class Settings:
    """A server's configuration, and its plan of a range."""

    def __init__(self, splits: int, **settings: str) -> None:
        self.values = {name.replace("_", "."): value for name, value in settings.items()}
        self.splits = splits
        self.conf = SimpleNamespace(getAll=self.values)

    def range(self, rows: int) -> Any:
        plan = f"== Physical Plan ==\n*(1) Range (0, {rows}, step=1, splits={self.splits})\n"
        return SimpleNamespace(_explain_string=lambda: plan)


def context(splits: int = 12, **settings: str) -> Connect:
    return Connect(Settings(splits, **settings))


def profile(**wanted: float) -> Any:
    return SimpleNamespace(taskResources={name: SimpleNamespace(amount=amount) for name, amount in wanted.items()})


def test_a_server_that_does_not_answer_is_neither_waited_for_nor_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.spark.contexts.connect._ANSWER_SECONDS", 0.05)
    asked, back = context(), threading.Event()
    assert asked.in_time(lambda: 12) == 12
    assert asked.in_time(back.wait) is None
    assert asked.in_time(lambda: 12) is None, "the thread before it still waits"
    back.set()
    assert until(lambda: asked.in_time(lambda: 12) == 12)

    def fail() -> int:
        raise OSError("the server is gone")

    assert asked.in_time(fail) is None


def test_slots_are_counted_by_the_executors_cores_and_gpus() -> None:
    yarn = context(spark_master="yarn", spark_executor_cores="4", spark_executor_resource_gpu_amount="2")
    assert (yarn.cores(), yarn.executors()) == (12, 3)
    assert yarn.places(None) == 12
    assert yarn.places(profile(cpus=3)) == 3, "one each: the fourth core is too little for another"
    assert yarn.places(profile(cpus=1, gpu=1)) == 6
    whole = context(spark_master="spark://host:7077", spark_task_cpus="2")
    assert (whole.executor_cores, whole.places(None)) == (None, 6)


def test_cores_are_not_counted_by_a_range_if_the_parallelism_is_set() -> None:
    fixed = {"spark_default_parallelism": "200", "spark_executor_instances": "3", "spark_executor_cores": "4"}
    assert context(200, spark_master="yarn", **fixed).cores() == 12
    assert context(200, spark_master="local-cluster[2,2,1024]", spark_default_parallelism="200").cores() == 4
    assert context(200, spark_master="yarn", spark_default_parallelism="200").cores() == 200, "nothing else is told"


def test_a_model_too_large_for_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_MAX_MODEL_BYTES", 1 << 20)
    assert context().shared(b"small").value == b"small"
    with pytest.raises(PlanError, match="this model is 2 MiB, .* a task carries at most 1 MiB: save it where"):
        context().shared(bytes(2 << 20))


def test_executors_connect_to_the_address_that_the_server_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    near = context(spark_driver_host="10.0.0.7")
    near.spark.client = SimpleNamespace(host="127.0.0.1")
    assert near.address() == ("10.0.0.7", "10.0.0.7"), "the server is on this machine, and executors reach it so"
    monkeypatch.setenv("TFOS_SERVER_HOST", "10.0.0.9")
    assert near.address() == ("10.0.0.9", "10.0.0.9")
