"""A Spark standalone cluster for a test: its own master and worker daemons, from PySpark's package."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ENVIRONMENT
from tests.waiting import until
from tfos_nb.java import find_java

PATIENCE = 60.0


@contextmanager
def standalone_spark(
    home: Path, folder: Path, *, cores: int, memory: str = "2g", conf: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a master and one worker on loopback, and give the master's URL; both are gone afterwards.

    ``home`` is SPARK_HOME; ``conf`` are the worker's settings, such as ``spark.worker.resource.gpu.amount``.
    """
    properties = folder / "worker.conf"
    properties.write_text("".join(f"{name} {value}\n" for name, value in (conf or {}).items()))
    address = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with _daemon(home, folder, "master.Master", *address) as log:
        url = _told(log, r"Starting Spark master at (spark://\S+)")
        size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(folder / "work"))
        with _daemon(home, folder, "worker.Worker", *address, *size, "--properties-file", str(properties), url) as log:
            _told(log, r"Successfully registered with master (\S+)")
            yield url


@contextmanager
def _daemon(home: Path, folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    log = folder / f"{name}.log"
    environment = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=PATIENCE)


def _told(log: Path, pattern: str) -> str:
    """Wait until a daemon has logged something, and return it."""
    assert until(lambda: re.search(pattern, log.read_text()), PATIENCE), f"{log.name}: {log.read_text()[-2000:]}"
    found = re.search(pattern, log.read_text())
    assert found
    return found[1]
