"""A Spark standalone cluster: programs and a notebook are submitted to its daemons, in both deploy modes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.clusters import daemons
from tests.clusters.standalone import Standalone, standalone_cluster
from tests.clusters.submit import PROGRAMS, as_options, outcome, printed, submitted
from tests.conftest import PYTHONPATH
from tests.waiting import until

pytestmark = pytest.mark.standalone

EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"
HERE = {"PYSPARK_PYTHON": sys.executable}


@pytest.fixture(scope="module")
def cluster(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("standalone")
    with standalone_cluster(spark_home, folder, workers=2, cores=3, memory="2g") as running:
        yield running


def arguments(cluster: Standalone, mode: str, *given: str) -> list[str]:
    settings = {
        "spark.executor.cores": "2",
        "spark.executor.memory": "640m",
        "spark.driver.memory": "640m",
        "spark.cores.max": "4",
        "spark.executorEnv.PYTHONPATH": PYTHONPATH,
        "spark.ui.enabled": "false",
    }
    return ["--master", cluster.url, "--deploy-mode", mode, *as_options(settings), *given]


def test_a_script_is_submitted_in_client_mode(cluster: Standalone, spark_home: Path, tmp_path: Path) -> None:
    script = [
        str(EXAMPLES / "mnist.py"),
        "--epochs",
        "2",
        "--width",
        "4",
        "--batch-size",
        "128",
        "--model-dir",
        str(tmp_path / "model"),
    ]
    with submitted(arguments(cluster, "client", *script), HERE, tmp_path, spark_home) as running:
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


def test_a_notebook_is_submitted_and_its_kernel_gets_that_spark(
    cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    notebook, done = tmp_path / "line.ipynb", tmp_path / "done.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in CELLS]), notebook)
    script = [str(EXAMPLES / "run_notebook.py"), str(notebook), str(done)]
    with submitted(arguments(cluster, "client", *script), HERE, tmp_path, spark_home) as running:
        outcome(running)
    text = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in nbformat.read(done, 4)["cells"]]
    assert cluster.url in text[1]
    assert text[-1].strip() == "{'worker:0': 2, 'worker:1': 2}"


def test_a_script_runs_in_cluster_mode_its_driver_on_a_worker(
    cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """Spark refuses Python here by the file's name, and runs it as what it is to Spark: an argument of a Java class."""
    (jar,) = (spark_home / "jars").glob("spark-core_*.jar")
    waiting = ["--conf", "spark.standalone.submit.waitAppCompletion=true"]
    python = ["--conf", f"spark.pyspark.python={sys.executable}"]
    opened = "--add-opens=java.base/java.nio=ALL-UNNAMED --add-opens=java.base/sun.nio.ch=ALL-UNNAMED"
    java = ["--conf", f"spark.driver.extraJavaOptions={opened} -Dio.netty.tryReflectionSetAccessible=true"]
    runner = [*waiting, *python, *java, "--class", "org.apache.spark.deploy.PythonRunner"]
    script = [str(PROGRAMS / "train_on_shared.py"), "", str(tmp_path / "shared")]
    given = arguments(cluster, "cluster", *runner, str(jar), *script)
    with submitted(given, HERE, tmp_path, spark_home) as running:
        outcome(running)
    (output,) = cluster.work.glob("driver-*/stdout")
    said = output.read_text(errors="replace")
    assert '{"outcome"' in said, said[-4000:]
    found = printed(said)
    assert found["losses"][-1] < found["losses"][0]
    assert sorted(chain(*(node["parquet"] for node in found["read"].values()))) == list(range(600))


def test_nothing_of_an_application_is_left_when_it_is_over(cluster: Standalone) -> None:
    def at_work() -> list[str]:
        return [process.name() for process in daemons.processes_in(cluster.work)]

    assert until(lambda: not at_work(), 60, every=0.5), at_work()
