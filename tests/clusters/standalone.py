"""A Spark standalone cluster for a test: its own master and worker daemons, from PySpark's package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clusters import daemons
from tests.conftest import ENVIRONMENT
from tfos_nb.java import find_java


@dataclass(frozen=True)
class Standalone:
    """A cluster that runs: its master's URL, its workers, and where they keep what drivers in the cluster write."""

    url: str
    workers: tuple[daemons.Daemon, ...]
    work: Path


@contextmanager
def standalone_cluster(
    home: Path, folder: Path, *, workers: int, cores: int, memory: str = "2g", conf: Mapping[str, str] | None = None
) -> Iterator[Standalone]:
    """Start a master and workers on loopback; all are gone afterwards, with what they started.

    ``home`` is SPARK_HOME; ``conf`` are the workers' settings, such as ``spark.worker.resource.gpu.amount``.
    """
    properties = folder / "worker.conf"
    properties.write_text("".join(f"{name} {value}\n" for name, value in (conf or {}).items()))
    work = folder / "work"
    with ExitStack() as started:
        started.callback(daemons.end_all_in, work)
        master = _start(started, home, folder, "master.Master", "master")
        url = master.told(r"Starting Spark master at (spark://\S+)")
        size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(work))
        running = []
        for number in range(workers):
            options = (*size, "--properties-file", str(properties), url)
            running.append(_start(started, home, folder, "worker.Worker", f"worker-{number}", *options))
        for worker in running:
            worker.told(r"Successfully registered with master (\S+)")
        yield Standalone(url, tuple(running), work)


def _start(started: ExitStack, home: Path, folder: Path, kind: str, name: str, *options: str) -> daemons.Daemon:
    environment = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    address = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *address, *options]
    daemon = daemons.start(name, command, environment, folder)
    started.callback(daemon.stop)
    return daemon
