"""Fixtures of all tests: a Spark whose executors are processes, and scripts in separate processes.

A Python process can hold one SparkContext, and this one holds ``local-cluster``. A test of ``local[N]``, of another
configuration, or of a fresh interpreter runs a script with ``run_script``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from tests import local_cluster
from tests.local_cluster import PYTHONPATH, QUICK_JAVA

pytest_plugins = ["tests.saved_models"]
# No example has a deadline: a busy machine is no fault of the code.
settings.register_profile("tfos_nb", deadline=None)
settings.load_profile("tfos_nb")
SCRIPT_SECONDS = 180
os.environ.update(QUICK_JAVA)
# Most sessions of the tests start no node or few nodes; tests of prewarming undo this (test_prewarm.py).
os.environ.setdefault("TFOS_NB_PREWARM", "0")
# Import paths of other processes: this checkout, and the test modules by the names that pytest gives them.
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}

_PROCESS_BYTES = 7 << 30  # memory of a test process with Spark, its executors, and the nodes of a cluster

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes: one per core, if memory suffices."""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().total // _PROCESS_BYTES))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """Escape what UTF-8 cannot encode in a report, such as half of a surrogate pair: execnet would end the run."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_encodable(key): _encodable(value) for key, value in data.items()}
    return type(data)(map(_encodable, data)) if type(data) in (list, tuple) else data


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="fork no node from a warm process: launch(..., warm=False)")


@pytest.fixture(scope="session", autouse=True)
def cold(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make launch start no warm processes, if the command line says so."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("cold"):
            from tfos_nb import launch

            patch.setitem(launch.__kwdefaults__, "warm", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the records of the tests' runs out of the checkout; return the directory above them."""
    from tfos_nb import launch

    place = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launch.__kwdefaults__, "record", str(place))
        yield place


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PySpark's home with links, so that executors write their ``work`` folders here and not in site-packages."""
    home = tmp_path_factory.mktemp("spark")
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "work":
            (home / part.name).symlink_to(part)
    yield home
    shutil.rmtree(home / "work", ignore_errors=True)


@pytest.fixture(scope="session")
def spark(spark_home: Path) -> Iterator[SparkSession]:
    """A session with two executors of two cores, in separate processes."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in local_cluster.environment(spark_home).items():
            environment.setenv(name, value)
        session = (
            local_cluster.builder(executors=2, cores=2)
            .appName("tests")
            .config("spark.sql.execution.arrow.pyspark.enabled", "true")
            .config("spark.python.daemon.module", "tests.warm_daemon")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    """Run a Python script in a separate process, in the environment in which the tests were started.

    ``environment`` sets variables of it; None removes a variable.
    """

    def run(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        changed = {**ENVIRONMENT, **environment}
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        ended = subprocess.run(
            [sys.executable, str(file)],
            env={name: value for name, value in changed.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=SCRIPT_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended

    return run
