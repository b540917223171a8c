"""Input from strangers is never unpickled, and secrets are kept out of texts and files. See docs/security.md."""

from __future__ import annotations

import ast
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.conftest import RunScript
from tests.local_cluster import environment
from tests.waiting import until
from tfos_nb import launch
from tfos_nb.runtime.control.processes import private_directory
from tfos_nb.runtime.node.tensorboard import TensorBoard

ROOT = Path(__file__).parents[2] / "tfos_nb"
# They unpickle what Spark's own closure, or a pipe from the kernel, brought, in the process that it was meant for.
UNPICKLES = {"detached/process.py", "runtime/code/payload.py", "runtime/code/custom_objects.py"}
LOADERS = {"loads", "load", "Unpickler", "read_pickle"}


def calls_of_pickle(file: Path) -> list[int]:
    """Return the lines of a module that unpickle, or that could unpickle or run code."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
            if node.func.attr in LOADERS and "pickle" in str(owner):
                found.append(node.lineno)
            allowed = [k for k in node.keywords if k.arg == "allow_pickle" and getattr(k.value, "value", True)]
            found += [node.lineno for _ in allowed]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("eval", "exec"):
            found.append(node.lineno)
    return found


def test_only_three_modules_unpickle() -> None:
    files = {str(file.relative_to(ROOT)): calls_of_pickle(file) for file in ROOT.rglob("*.py")}
    found = {name for name, lines in files.items() if lines}
    assert found - UNPICKLES <= {"magics/cell.py"}, found  # it runs the user's own cell, in the user's kernel
    assert found >= UNPICKLES, "the search finds what is there"


def telling(args: Any, ctx: Any) -> None:
    print("env", sorted(os.environ.items()))
    print("argv", Path("/proc/self/cmdline").read_text())
    ctx.report(step=1)
    while not ctx.should_stop:
        threading.Event().wait(0.1)


def test_logs_states_and_command_lines_hold_no_secrets_of_the_cluster(spark: SparkSession) -> None:
    cluster = launch(telling, workers=1, spark=spark)
    try:
        secrets = [cluster._address.token, cluster._address.certificate.decode().splitlines()[1]]
        assert all(len(secret) >= 32 for secret in secrets)
        assert until(lambda: "argv" in cluster.logs("worker:0"))
        descriptions = " ".join(str(job.description) for job in cluster._jobs.running())
        told = [cluster.logs("worker:0"), repr(cluster), repr(cluster.snapshot()), repr(vars(cluster)), descriptions]
        assert not [text for text in told for secret in secrets if secret in text]
    finally:
        cluster.close()


ENCRYPTED = """
    from pathlib import Path
    from tests.local_cluster import builder
    from tfos_nb import launch

    def main(args, ctx):
        return sum(int(batch["id"].shape[0]) for batch in ctx.dataset(64))

    if __name__ == "__main__":
        events = Path(__file__).with_name("events")
        events.mkdir()
        settings = {
            "spark.authenticate": "true", "spark.authenticate.secret": "s3cret",
            "spark.network.crypto.enabled": "true", "spark.io.encryption.enabled": "true",
            "spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
        }
        spark = builder(executors=2, cores=2).config(map=settings).getOrCreate()
        with launch(main, workers=2, spark=spark) as cluster:
            cluster.train(spark.range(1000))
            secret = cluster._address.token
        print(sum(cluster.results().values()))
        spark.stop()
        logs = [path.read_bytes() for path in events.rglob("*") if path.is_file()]
        print(sum(map(len, logs)) > 10_000, any(secret.encode() in log for log in logs))
"""


@pytest.mark.slow
def test_an_encrypting_spark_feeds_rows_and_logs_no_token(spark_home: Path, run_script: RunScript) -> None:
    """docs/security.md recommends encryption: without it, a cluster's token is sent to the executors in clear text."""
    assert run_script(ENCRYPTED, **environment(spark_home)).stdout.split() == ["1000", "True", "False"]


def test_tensorboard_listens_only_on_a_private_socket(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.start()
    try:
        path = board.wait(60)
        assert path is not None, board.said
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        process = board._process
        assert process is not None
        assert listening_ports(process.pid) == []
        assert str(tmp_path) not in " ".join(psutil.Process(process.pid).cmdline()), "a URL may hold a password"
    finally:
        board.stop()
    assert not os.path.exists(os.path.dirname(path))


def listening_ports(pid: int) -> list[Any]:
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return [one.laddr for process in family for one in process.net_connections("inet") if one.status == "LISTEN"]


def test_directories_of_sockets_are_private() -> None:
    path = private_directory("test")
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    finally:
        os.rmdir(path)


@pytest.mark.parametrize("folder", ["notebooks", "docs"])
def test_no_saved_file_holds_a_token(folder: str) -> None:
    long_secret = re.compile(r"(?:token|pass|key)[\"'=: ]+[A-Za-z0-9_\-]{32,}")
    files = [file for file in (ROOT.parent / folder).rglob("*") if file.suffix in (".ipynb", ".md", ".py")]
    assert files
    assert not [file.name for file in files if long_secret.search(file.read_text())]
