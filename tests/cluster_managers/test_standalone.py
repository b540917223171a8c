"""A Spark standalone cluster: programs and a notebook are submitted to its daemons, in both deploy modes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.cluster_managers import daemons
from tests.cluster_managers.pages import as_written
from tests.cluster_managers.standalone import Standalone, standalone_cluster
from tests.cluster_managers.submit import (
    PROGRAMS,
    SECONDS_TO_PACK,
    as_options,
    outcome,
    printed,
    runs_in_what_was_shipped,
    submitted,
)
from tests.conftest import PYTHONPATH
from tests.docs.reading import CHECKOUT
from tests.faults import steps_done_again
from tests.versions import connect_client
from tests.waiting import until

pytestmark = pytest.mark.standalone

MASTER = "spark://master:7077"
PYTHON = "/shared/environment/bin/python"


@pytest.fixture(scope="module")
def cluster(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("standalone")
    with standalone_cluster(spark_home, folder, workers=2, cores=3, memory="2g") as running:
        yield running


@pytest.fixture
def settings(cluster: Standalone) -> dict[str, str]:
    """The settings of this cluster's administrator."""
    return {
        "spark.master": cluster.url,
        "spark.executor.cores": "2",
        "spark.executor.memory": "640m",
        "spark.driver.memory": "640m",
        "spark.cores.max": "4",
        "spark.executorEnv.PYTHONPATH": PYTHONPATH,
        "spark.ui.enabled": "false",
    }


@pytest.mark.slow
def test_the_daemons_of_the_page_connect_to_each_other(tmp_path: Path) -> None:
    port, page = daemons.free_ports(2)
    own = {
        "--host master --port 7077": f"--host 127.0.0.1 --port {port} --webui-port {page} &",  # its own host there
        MASTER: f"spark://127.0.0.1:{port}",
    }
    places = {"SPARK_WORKER_DIR": str(tmp_path / "work"), "SPARK_DAEMON_MEMORY": "256m"}
    with as_written("standalone-daemons", own, tmp_path, environment=places) as running:
        assert running.told(r"Successfully registered with master (\S+)") == f"spark://127.0.0.1:{port}"


def test_a_script_is_submitted_in_client_mode(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    own = {MASTER: cluster.url, PYTHON: sys.executable, "/shared": str(tmp_path)}
    with as_written("standalone-script", own, tmp_path, settings=settings, home=spark_home) as running:
        outcome(running)
    found = last_line(running.log.read_text(errors="replace"))
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2]
    assert found["epochs"][1]["loss"] < found["epochs"][0]["loss"]
    assert found["held_out"] > 300
    assert Path(found["model"]).is_relative_to(tmp_path)


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text[text.rindex('{"example"') :].partition("\n")[0])
    return found


CELLS = [
    "%load_ext tfos_nb",
    "import tfos_nb\nspark = tfos_nb.spark_session()\nprint(spark.conf.get('spark.master'))",
    "rows = spark.range(0, 200, 1, 4).selectExpr('array(float(id % 5)) x', 'float(id % 5) * 2 y')",
    """%%tfos_cluster line --workers 2 --data rows --epochs 2
def main(args, ctx):
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return len(model.fit(ctx.dataset(16, x="x", y="y"), epochs=2).epoch)""",
    "print(line.results())",
]


def test_a_notebook_is_submitted_and_its_kernel_gets_the_submitted_session(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in CELLS]), tmp_path / "line.ipynb")
    own = {MASTER: cluster.url, "notebooks/01_quickstart.ipynb": "line.ipynb"}
    here = {"PYSPARK_PYTHON": sys.executable}
    with as_written(
        "standalone-notebook", own, tmp_path, settings=settings, environment=here, home=spark_home
    ) as running:
        outcome(running)
    done = nbformat.read(tmp_path / "done.ipynb", 4)
    text = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in done["cells"]]
    assert cluster.url in text[1]
    assert text[-1].strip() == "{'worker:0': 2, 'worker:1': 2}"


@pytest.mark.slow  # the same commands as the two tests above, with the full programs
def test_the_readmes_script_and_notebook_run_unchanged(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    own = {MASTER: cluster.url, PYTHON: sys.executable, "/shared": str(tmp_path)}
    with as_written("readme-standalone", own, tmp_path, settings=settings, home=spark_home) as running:
        outcome(running)
    assert Path(last_line(running.log.read_text(errors="replace"))["model"]).is_relative_to(tmp_path)
    cells = nbformat.read(tmp_path / "done.ipynb", 4)["cells"]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_a_program_gets_the_cores_that_it_asks_for(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    own = {"spark://HOST:7077": cluster.url, "program.py": str(PROGRAMS / "count_cores.py")}
    here = {"PYSPARK_PYTHON": sys.executable}
    with as_written("clusters-cores", own, tmp_path, settings=settings, environment=here, home=spark_home) as running:
        outcome(running)
    assert printed(running.log.read_text(errors="replace")) == {"slots": 4}  # on two workers with three cores each


HOW_MANY = f"exec(open({str(PROGRAMS / 'count_cores.py')!r}).read())"


@pytest.mark.slow
def test_a_kernel_can_make_its_session_itself(cluster: Standalone, settings: dict[str, str], tmp_path: Path) -> None:
    for name in ("spark.master", "spark.executor.cores", "spark.cores.max"):
        del settings[name]
    own = {MASTER: cluster.url}
    here = {"PYSPARK_PYTHON": sys.executable}
    with as_written("standalone-session", own, tmp_path, settings=settings, environment=here, then=HOW_MANY) as running:
        outcome(running)
    assert printed(running.log.read_text(errors="replace")) == {"slots": 4}


APPLIED = """
import json, pyarrow
def doubled(batches):
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"id": [2 * number for number in batch["id"].to_pylist()]})
found = [row.id for row in spark.range(4).mapInArrow(doubled, "id long").collect()]
print(json.dumps({"outcome": {"rows": sorted(found), "session": type(spark).__module__}}))
"""


@connect_client
@pytest.mark.slow
def test_a_spark_connect_server_runs_on_the_cluster_and_a_client_connects_to_it(
    cluster: Standalone, settings: dict[str, str], tmp_path: Path
) -> None:
    (port,) = daemons.free_ports(1)
    bound = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
    own = {MASTER: cluster.url, PYTHON: sys.executable}
    places = {"SPARK_LOG_DIR": str(tmp_path / "logs"), "SPARK_PID_DIR": str(tmp_path / "server")}
    ended_with_the_test = {"SPARK_NO_DAEMONIZE": "1"}
    with as_written(
        "connect-server",
        own,
        tmp_path / "server",
        settings={**settings, **bound},
        environment={**places, **ended_with_the_test},
    ) as server:
        server.told(r"(Spark Connect server started at)")
        own = {"sc://spark.example.org:15002": f"sc://127.0.0.1:{port}"}
        with as_written("connect-session", own, tmp_path / "client", then=APPLIED) as client:
            outcome(client)
    found = printed(client.log.read_text(errors="replace"))
    assert found == {"rows": [0, 2, 4, 6], "session": "pyspark.sql.connect.session"}


def test_a_script_runs_in_cluster_mode_with_its_driver_on_a_worker(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    """Spark refuses Python files in this mode, so the script is an argument of Spark's Java class."""
    own = {
        MASTER: cluster.url,
        PYTHON: sys.executable,
        "/shared/train.py": str(PROGRAMS / "train_on_shared.py"),
        "ARGUMENTS OF train.py": str(tmp_path / "shared"),
    }
    with as_written("standalone-cluster-mode", own, tmp_path, settings=settings, home=spark_home) as running:
        outcome(running)
    (output,) = cluster.work.glob("driver-*/stdout")
    said = output.read_text(errors="replace")
    assert '{"outcome"' in said, said[-4000:]
    found = printed(said)
    assert found["losses"][-1] < found["losses"][0]
    assert sorted(chain(*(node["parquet"] for node in found["read"].values()))) == list(range(600))


@pytest.mark.slow
def test_an_environment_is_shipped_to_hosts_without_one(
    cluster: Standalone, settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    own = {
        "pip install .": f"pip install {CHECKOUT}",
        "program.py": f"{PROGRAMS / 'where_it_runs.py'} {tmp_path / 'models'}",
    }
    del settings["spark.executorEnv.PYTHONPATH"]
    with as_written(
        "clusters-environment", own, tmp_path, settings=settings, environment={"PYTHONPATH": ""}, home=spark_home
    ) as running:
        outcome(running, SECONDS_TO_PACK)
    runs_in_what_was_shipped(printed(running.log.read_text(errors="replace")))


def test_a_node_leaves_the_executor_of_a_worker_that_is_decommissioned(
    settings: dict[str, str], spark_home: Path, tmp_path: Path
) -> None:
    enabled = {"spark.decommission.enabled": "true"}
    steps = tmp_path / "steps"
    steps.mkdir()
    args = {"fits": [{"epochs": 3}], "pause_step": 0.05, "steps": str(steps)}
    training = {"program": "several_fits", "args": args, "checkpoint_every": 1}
    with standalone_cluster(spark_home, tmp_path, workers=2, cores=3, conf=enabled) as own:
        conf = {**settings, **enabled, "spark.master": own.url, "spark.executor.cores": "3", "spark.cores.max": "6"}
        program = [str(PROGRAMS / "lose_a_host.py"), str(tmp_path), "3", json.dumps(training)]
        here = {"PYSPARK_PYTHON": sys.executable}
        with submitted([*as_options(conf), *program], here, tmp_path, spark_home) as running:
            saved = "models/checkpoints/*/fit/*/place.json"
            assert until(lambda: running.ended or any(tmp_path.glob(saved)), 120), running.tail
            os.kill(own.workers[1].process.pid, signal.SIGPWR)
            outcome(running)
    found = printed(running.log.read_text(errors="replace"))
    assert found["restarts_left"] == 2, "its end was announced"
    for result in found["results"].values():
        assert result["generation"] == 2
        assert result["after"][0][:2] == [3, 3], "each row once an epoch"
    assert steps_done_again(steps) == 0


def test_no_process_of_an_application_is_left_after_its_end(cluster: Standalone) -> None:
    def at_work() -> list[str]:
        return [process.name() for process in daemons.processes_in(cluster.work)]

    assert until(lambda: not at_work(), 60, every=0.5), at_work()
