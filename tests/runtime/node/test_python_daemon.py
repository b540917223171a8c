"""PySpark's daemon, forked from the application's warm process: started as Spark does, and in Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyspark
import pytest
import termcolor

from tests.conftest import ENVIRONMENT, RunScript
from tests.end_to_end.test_failures import is_alive
from tests.runtime.node.test_warm_process import servers
from tests.waiting import until
from tfos_nb.runtime.node import python_daemon
from tfos_nb.runtime.node.python_daemon import VARIABLE, wanted

Start = Callable[..., "Daemon"]

OF_SPARK = ("-m", "tfos_nb.runtime.node.python_daemon", "pyspark.worker")
WARM = wanted("0123456789abcdef", 60)


class Daemon:
    """A daemon as Spark's JVM sees it: the process, its pipes, and the port that it reports."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        env = {**ENVIRONMENT, "PYTHON_WORKER_FACTORY_SECRET": "secret", **environment}
        command = [sys.executable, *(arguments or OF_SPARK)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._connections: list[socket.socket] = []
        (self.port,) = struct.unpack("!i", self.stdout.read(4))

    def worker(self) -> psutil.Process:
        """Let the daemon fork a worker."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        self._connections.append(connection)
        (pid,) = struct.unpack("!i", connection.recv(4))
        return psutil.Process(pid)

    def hang_up(self) -> None:
        """End the workers' connections, as Spark's JVM does when it ends."""
        for connection in self._connections:
            connection.close()

    def close(self) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait(30)
        self.stdin.close()
        self.stdout.close()


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A temporary directory for these tests, which share one warm process; its name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp") as directory:
        yield Path(directory)
        for server in servers(Path(directory)):
            server.kill()


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    daemons: list[Daemon] = []

    def run(*arguments: str, **environment: str) -> Daemon:
        daemons.append(Daemon(*arguments, TMPDIR=str(root), **environment))
        return daemons[-1]

    yield run
    for daemon in daemons:
        daemon.close()


def is_forked(worker: psutil.Process) -> bool:
    return worker.name() == "pyspark.daemon"


@pytest.mark.parametrize("how", ["terminate", "close", "kill"])
def test_the_daemon_and_its_workers_end_with_the_process_that_spark_started(start: Start, how: str) -> None:
    """Spark terminates the process or closes its input; it may also be killed."""
    daemon = start(**WARM)
    worker = daemon.worker()
    assert is_forked(worker)
    manager = worker.parent()
    assert manager is not None
    assert manager.pid != daemon.process.pid
    {"terminate": daemon.process.terminate, "close": daemon.stdin.close, "kill": daemon.process.kill}[how]()
    daemon.process.wait(30)
    daemon.hang_up()
    assert until(lambda: not is_alive(worker) and not is_alive(manager))


def test_the_daemon_ends_some_time_after_its_last_worker(start: Start) -> None:
    daemon = start(**wanted("0123456789abcdef", 2))
    worker = daemon.worker()
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(5)
    assert is_alive(worker)
    daemon.hang_up()
    daemon.process.wait(30)


def test_the_daemon_kills_a_worker_when_spark_asks_for_it(start: Start) -> None:
    daemon = start(**WARM)
    worker, other = daemon.worker(), daemon.worker()
    assert is_forked(worker)
    daemon.stdin.write(struct.pack("!i", worker.pid))
    daemon.stdin.flush()
    assert until(lambda: not is_alive(worker))
    assert is_alive(other)
    assert daemon.process.poll() is None


WITHOUT_ONE = """
from tfos_nb.runtime.node import python_daemon, warm_process

def refuse(*arguments, **options):
    raise PermissionError("the directory is another user's")

warm_process.WarmProcess.of_the_application = refuse
python_daemon.run()
"""


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (OF_SPARK, {}),
        (OF_SPARK, {VARIABLE: "of another version"}),
        (OF_SPARK, {**WARM, "PYSPARK_EXECUTOR_MEMORY_MB": "2048"}),
        (("-c", WITHOUT_ONE, "pyspark.worker"), WARM),
    ],
    ids=["not-wanted", "not-understood", "limited", "no-warm-process"],
)
def test_pysparks_own_daemon_is_used_instead_and_the_reason_is_printed(
    start: Start, command: tuple[str, ...], environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start(*command, **environment).worker()
    assert not is_forked(worker)
    assert VARIABLE in worker.environ() or not environment, "it was there"
    told = capfd.readouterr().err
    assert ("Spark's Python workers import TensorFlow themselves: " in told) == bool(environment)
    why = ("is not understood", "PermissionError: the directory is another user's", "spark.executor.pyspark.memory")
    assert not environment or any(one in told for one in why)
    assert "0123456789abcdef" not in told


@pytest.mark.parametrize(
    ("command", "environment", "are_there"),
    [
        (OF_SPARK, {}, True),
        (OF_SPARK, {"PYSPARK_EXECUTOR_MEMORY_MB": "2048"}, False),
        (("-m", "pyspark.daemon", "pyspark.worker"), {}, False),
    ],
    ids=["ours", "limited", "pysparks"],
)
def test_workers_share_the_modules_of_a_clusters_tasks(
    start: Start, command: tuple[str, ...], environment: dict[str, str], are_there: bool
) -> None:
    """A limit of a worker's addresses would also count those of the libraries."""
    worker = start(*command, **environment).worker()
    libraries = {Path(one.path).name for one in worker.memory_maps()}
    assert any(name.startswith("libarrow_flight.") for name in libraries) == are_there
    assert any(name.startswith("libtensorflow") for name in libraries) is False


WHERE_FROM = """
import sys
from tfos_nb.runtime.node import python_daemon

module = python_daemon._pyspark_daemon()
import pyspark, pyspark.worker
print(module.__file__, pyspark.worker.__file__, pyspark.__version__, *sys.path, sep="\\n")
"""


@pytest.mark.parametrize("layout", ["of PyPI", "of a distribution", "a zip file alone"])
def test_pyspark_is_not_imported_from_its_zip_file_if_it_is_beside_it(layout: str, tmp_path: Path) -> None:
    """From there, each daemon would compile it anew."""
    package = Path(pyspark.__file__).parent
    (home := tmp_path / "spark").mkdir()
    if layout == "of PyPI":
        zipped, wanted_from = package / "python" / "lib" / "pyspark.zip", package
    else:
        zipped, wanted_from = home / "python" / "lib" / "pyspark.zip", home / "python" / "pyspark"
        zipped.parent.mkdir(parents=True)
        shutil.copy(package / "python" / "lib" / "pyspark.zip", zipped)
    if layout == "of a distribution":
        wanted_from.symlink_to(package)
    if layout == "a zip file alone":
        wanted_from = zipped / "pyspark"
    py4j = next((package / "python" / "lib").glob("py4j-*.zip"))
    path = os.pathsep.join([str(zipped), str(py4j), ENVIRONMENT.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", WHERE_FROM]
    ended = subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    daemon, worker, version, *places = ended.stdout.splitlines()
    assert Path(daemon).parent == Path(worker).parent == wanted_from
    assert version == pyspark.__version__
    assert str(zipped) in places, "the path is as Spark has made it"
    assert str(package.parent) not in places[: places.index(str(py4j))]


WITHOUT_TASKS = """
from tfos_nb.runtime.node import python_daemon

python_daemon._TASKS = ("tfos_nb.no_such_module",)
python_daemon.run()
"""


def test_without_a_tasks_modules_the_daemon_forks_workers_nevertheless(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    assert is_alive(start("-c", WITHOUT_TASKS, "pyspark.worker").worker())
    assert "import the tasks' modules themselves: ModuleNotFoundError: No module named" in capfd.readouterr().err


def test_a_daemon_that_never_had_a_worker_ends_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    there = False
    monkeypatch.setattr("os.kill", lambda *what: ended.append(what))
    monkeypatch.setattr(python_daemon, "_has_children", lambda pid: there)
    monkeypatch.setattr(python_daemon, "_lacks_memory", lambda: False)
    watch = python_daemon._IdleWatch(600)
    for _ in range(9):
        watch._look()
    assert not ended
    watch._look()
    assert ended == [(os.getpid(), signal.SIGTERM)]
    there = True
    watch._look()
    there = False
    for _ in range(199):
        watch._look()
    assert len(ended) == 1
    watch._look()
    assert len(ended) == 2


def test_only_workers_that_apply_models_have_tensorflow_preloaded(run_script: RunScript, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    shutil.copytree(Path(str(termcolor.__file__)).parent, packages / "termcolor")
    with (packages / "termcolor" / "__init__.py").open("a") as file:
        file.write("\nVERSION = 1\n")
    ended = run_script(
        """
        import json
        import keras
        import pyarrow as pa
        import tfos_nb
        from tfos_nb.driver.prewarm import functions_with_tensorflow, warm_token

        def look(batches):
            import os
            import sys
            there = "tensorflow" in sys.modules
            import numpy as np
            for batch in batches:
                pass
            names = sorted(name for name in os.environ if name.startswith(("TFOS_NB_PYTHON", "TFOS_NB_PARENT")))
            import signal
            alarm = signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
            import termcolor  # TensorFlow imports it
            found = [there, names, os.environ["SPARK_REUSE_WORKER"], alarm, termcolor.VERSION]
            told = json.dumps([found, os.getpid(), float(np.random.rand())])
            import time
            time.sleep(1)  # so that each task has a worker of its own
            yield pa.RecordBatch.from_pydict({"told": [told]})

        def looked(spark):
            rows = spark.range(0, 2, 1, 2).mapInArrow(look, "told string").collect()
            return [json.loads(row.told) for row in rows]

        def looked_with_tensorflow(spark):
            with functions_with_tensorflow(spark):
                rows = spark.range(0, 2, 1, 2).mapInArrow(look, "told string")
            return [json.loads(row.told) for row in rows.collect()]

        spark = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
        without = looked(spark)
        beside = looked_with_tensorflow(spark)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        given = tfos_nb.predict(spark.range(3).selectExpr("CAST(id AS FLOAT) x"), model).collect()
        after = looked(spark)
        token = warm_token(spark)
        spark.stop()
        spark = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
        again = looked_with_tensorflow(spark)
        shared = warm_token(spark) == token
        import termcolor
        with open(termcolor.__file__, "a") as file:
            file.write("VERSION = 2")
        changed = looked_with_tensorflow(spark)
        print("told", json.dumps([without, beside, [list(row) for row in given], after, again, changed, shared]))
        spark.stop()
        """,
        TFOS_NB_PREWARM=None,
        TMPDIR=str(tmp_path),
        PYTHONPATH=os.pathsep.join([str(packages), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]),
    )
    told = next(line for line in ended.stdout.splitlines() if line.startswith("told "))
    without, beside, given, after, again, changed, shared = json.loads(told.removeprefix("told "))
    assert [found[0] for found, *_ in without + after] == [False] * 4
    assert [found for found, *_ in beside + again] == [[True, [], "1", True, 1]] * 4
    assert shared, "both sessions have the same warm process"
    assert [found for found, *_ in changed] == [[True, [], "1", True, 2]] * 2, "they have read the changed file"
    assert len({pid for _, pid, _ in beside}) == 2
    for each in (without, beside):
        assert len({drawn for *_, drawn in each}) == 2, "two workers draw the same numbers"
    assert given == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
