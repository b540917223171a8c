"""Spark on YARN, and files in HDFS: programs are submitted to Hadoop's daemons on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyspark
import pytest

from tests.cluster_managers import daemons
from tests.cluster_managers.hadoop import Hadoop, hadoop_cluster
from tests.cluster_managers.pages import as_written
from tests.cluster_managers.submit import (
    PROGRAMS,
    SECONDS_TO_PACK,
    as_options,
    outcome,
    printed,
    runs_in_what_was_shipped,
    submitted,
)
from tests.docs.reading import CHECKOUT
from tests.faults import steps_done_again, sum_of_ids
from tests.jupyter.test_tensorboard import ask_until
from tests.jupyter_server import JupyterServer, a_server
from tests.waiting import until

__all__ = ["a_server"]

pytestmark = pytest.mark.yarn

# Each program takes 2 executors of 2 GiB, of which 1.5 GiB are for Python and TensorFlow.
SETTINGS = {
    "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
    "spark.executor.instances": "2",
    "spark.executor.cores": "2",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "1536m",
    "spark.yarn.am.memory": "512m",
    "spark.driver.memory": "640m",
    "spark.driver.memoryOverhead": "896m",
    "spark.yarn.appMasterEnv.PYSPARK_PYTHON": "./environment/bin/python",
    "spark.executorEnv.PYSPARK_PYTHON": "./environment/bin/python",
    "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# In client mode the driver chooses the executors' Python. In cluster mode Spark would use the driver's.
HERE = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": "./environment/bin/python"}


@pytest.fixture(scope="module")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    with hadoop_cluster(tmp_path_factory.mktemp("hadoop")) as running:
        yield running


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment, packed to be shipped.

    It contains tfos_nb. A line in a .pth file adds TensorFlow and the rest, 2 GB, from this machine.
    """
    folder = tmp_path_factory.mktemp("environment")
    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    shutil.copytree(CHECKOUT / "tfos_nb", packages / "tfos_nb", ignore=shutil.ignore_patterns("__pycache__"))
    elsewhere = sysconfig.get_paths()["purelib"]
    (packages / "elsewhere.pth").write_text(f"import site; site.addsitedir({elsewhere!r})\n")
    packed = folder / "environment.tar.gz"
    subprocess.run([sys.executable, "-m", "venv_pack", "-p", place, "-o", packed], check=True, capture_output=True)
    return packed


@pytest.fixture
def hdfs(hadoop: Hadoop) -> Any:
    """HDFS, as a file system of this process."""
    return fsspec.filesystem("hdfs", host="127.0.0.1", port=hadoop.ports["namenode"])


def arguments(mode: str, archive: str | Path, program: str, *given: str) -> list[str]:
    cluster = ["--master", "yarn", "--deploy-mode", mode, "--archives", f"{archive}#environment"]
    return [*cluster, *as_options(SETTINGS), str(PROGRAMS / program), *given]


def environment(hadoop: Hadoop, **more: str) -> dict[str, str]:
    """Return the environment that a user sets: the folder of Hadoop's configuration."""
    return {"HADOOP_CONF_DIR": str(hadoop.conf), **more}


def written_in_containers(hadoop: Hadoop, name: str = "stdout") -> str:
    """Return the containers' output that YARN has kept, with the newest application last."""
    files = sorted(hadoop.folder.glob(f"node-*/logs/application_*/container_*/{name}"), key=lambda file: file.parts[-3])
    return "\n".join(file.read_text(errors="replace") for file in files)


def test_a_program_in_the_cluster_reads_and_writes_everything_in_hdfs(
    hadoop: Hadoop, hdfs: Any, archive: Path, tmp_path: Path
) -> None:
    root = f"{hadoop.url}/whole"
    own = {
        "/etc/hadoop/conf": str(hadoop.conf),
        "environment.tar.gz#": f"{archive}#",
        "train.py": str(PROGRAMS / "train_on_shared.py"),
        "hdfs://namenode:8020/user/me": root,
    }
    here = {"PYTHONPATH": ""}
    with as_written("yarn-cluster-mode", own, tmp_path, settings=SETTINGS, environment=here) as running:
        try:
            outcome(running)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{written_in_containers(hadoop)[-6000:]}") from None
    found = printed(written_in_containers(hadoop))
    assert found["losses"][-1] < found["losses"][0]
    for node in found["fed"].values():
        assert Path(node["python"]).is_relative_to(node["folder"]), "the Python that was shipped"
        assert Path(node["tfos_nb"]).is_relative_to(hadoop.folder), "and the package in it"
    for kind in ("parquet", "tfrecord"):
        assert sorted(chain(*(node[kind] for node in found["read"].values()))) == list(range(600)), kind
    assert found["scored"] == {"keras": 600, "saved_model": 600}
    assert (found["records"], found["executors"]) == (600, ["1", "2"])
    assert hdfs.exists(found["fed"]["worker:0"]["checkpoint"] + "/state.index")
    assert [name for name in hdfs.find("/whole/logs") if "tfevents" in name]
    assert not [name for name in hdfs.find("/whole") if "/." in name], "nothing half-written is left"


BEFORE_IT = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
spark.range(0, 200, 1, 4).selectExpr("array(float(id % 5)) x", "float(id % 5) * 2 y").write.parquet("hdfs:///user/me/rows")
def main(args, ctx):
    import keras
    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    trained = model.fit(ctx.dataset(16, x="x", y="y"), epochs=3)
    ctx.save(model, "line.keras")
    return trained.epoch
"""
AFTER_IT = """
import json
print(json.dumps({"outcome": cluster.results()}))
"""


@pytest.mark.slow
def test_the_commands_of_the_page_train_from_hdfs_and_save_there(hadoop: Hadoop, hdfs: Any, tmp_path: Path) -> None:
    own = {"hdfs://namenode:8020": hadoop.url}
    here = environment(hadoop, PYSPARK_PYTHON=sys.executable)
    with as_written(
        "yarn-hdfs",
        own,
        tmp_path,
        settings={"spark.master": "local[4]", "spark.ui.enabled": "false"},
        environment=here,
        first=BEFORE_IT,
        then=AFTER_IT,
    ) as running:
        outcome(running)
    assert printed(running.log.read_text(errors="replace")) == {"worker:0": [0, 1, 2], "worker:1": [0, 1, 2]}
    assert hdfs.exists("/user/me/models/line.keras")


@pytest.mark.slow
def test_an_environment_with_tensorflow_is_shipped_by_hdfs(hadoop: Hadoop, hdfs: Any, tmp_path: Path) -> None:
    own = {"'.[hdfs]'": f"'{CHECKOUT}[hdfs]'"}
    with as_written("yarn-environment", own, tmp_path, environment={"PYTHONPATH": ""}) as packing:
        outcome(packing, SECONDS_TO_PACK)
    hdfs.put(str(tmp_path / "environment.tar.gz"), "/environment.tar.gz")
    given = arguments("cluster", f"{hadoop.url}/environment.tar.gz", "where_it_runs.py", f"{hadoop.url}/shipped")
    with submitted(given, environment(hadoop, PYTHONPATH=""), tmp_path) as running:
        outcome(running)
    runs_in_what_was_shipped(printed(written_in_containers(hadoop)))


@pytest.mark.slow
def test_tensorboard_over_hdfs_is_visible_while_a_program_runs_and_afterwards(
    hadoop: Hadoop, archive: Path, tmp_path: Path, a_server: JupyterServer
) -> None:
    given = arguments("client", archive, "show_tensorboard.py", f"{hadoop.url}/board", str(tmp_path))
    told = environment(hadoop, **HERE, JUPYTER_RUNTIME_DIR=a_server.runtime_dir)
    with submitted(given, told, tmp_path) as running:
        assert until(lambda: (tmp_path / "cluster").exists() or running.ended, 120), running.tail
        assert (tmp_path / "cluster").exists(), running.tail
        cluster = (tmp_path / "cluster").read_text()
        page = f"tfos-nb/tb/{cluster}/data/plugin/timeseries/tags"
        ask_until(a_server, page, "speed")
        a_server.ask(f"tfos-nb/api/clusters/{cluster}/stop", "POST")
        ask_until(a_server, page, "speed")
        (tmp_path / "end").touch()
        outcome(running)


def host_to_lose(hadoop: Hadoop) -> str:
    """Return the host that has an executor but not the application's master."""
    roles = {}
    for host in ("127.0.0.1", "127.0.0.2"):
        commands = " ".join(" ".join(process.cmdline()) for process in at_work(hadoop, host))
        roles[host] = ("ExecutorLauncher" in commands, "YarnCoarseGrainedExecutorBackend" in commands)
    chosen = [host for host, (master, executor) in roles.items() if executor and not master]
    assert chosen, f"(master, executor) by host: {roles}"
    return chosen[0]


def host_to_lose_after(running: daemons.Daemon, hadoop: Hadoop, hdfs: Any, saved: str) -> str:
    """Wait until a program has written a file, and return that host."""
    assert until(lambda: running.ended or hdfs.glob(saved), 180, every=0.5), running.tail
    assert not running.ended, running.tail
    return host_to_lose(hadoop)


def at_work(hadoop: Hadoop, host: str) -> list[psutil.Process]:
    return list(daemons.processes_in(hadoop.node_folder(host)))


def test_a_node_leaves_a_host_that_yarn_decommissions(hadoop: Hadoop, hdfs: Any, archive: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    args = {"fits": [{"epochs": 3}], "pause_step": 0.05, "steps": str(steps)}
    training = json.dumps({"program": "several_fits", "args": args, "checkpoint_every": 1})
    given = arguments("client", archive, "lose_a_host.py", f"{hadoop.url}/leaving", "3", training)
    enabled = {"spark.decommission.enabled": "true", "spark.yarn.executor.decommission.enabled": "true"}
    with submitted([*as_options(enabled), *given], environment(hadoop, **HERE), tmp_path) as running:
        left = host_to_lose_after(running, hadoop, hdfs, "/leaving/models/checkpoints/*/fit/*/place.json")
        hadoop.decommission(left)
        outcome(running)
    hadoop.recommission()
    found = printed(running.log.read_text(errors="replace"))
    assert found["restarts_left"] == 2, "its end was announced"
    for result in found["results"].values():
        assert result["generation"] == 2
        assert result["after"][0][:2] == [3, 3], "each row once an epoch"
    assert steps_done_again(steps) == 0


def test_a_training_that_loses_a_host_continues_from_its_checkpoint_in_hdfs(
    hadoop: Hadoop, hdfs: Any, archive: Path, tmp_path: Path
) -> None:
    epochs = 3
    given = arguments("client", archive, "lose_a_host.py", f"{hadoop.url}/losing", str(epochs))
    with submitted(given, environment(hadoop, **HERE), tmp_path) as running:
        lost = host_to_lose_after(running, hadoop, hdfs, "/losing/models/checkpoints/*/00000001/place.json")
        hadoop.lose_node(lost)
        outcome(running)
    results = printed(running.log.read_text(errors="replace"))["results"]
    assert set(map(tuple, results.values())) == {(sum_of_ids(epochs), 2)}, "each row once an epoch, in two generations"
    assert hadoop.nodes("LOST") == 1


def test_no_process_of_an_application_is_left_after_its_end(hadoop: Hadoop) -> None:
    assert until(lambda: not [*at_work(hadoop, "127.0.0.1"), *at_work(hadoop, "127.0.0.2")], 60, every=0.5), [
        process.cmdline() for process in at_work(hadoop, "127.0.0.1")
    ]
