"""A Spark standalone cluster for a test, with master and worker daemons from PySpark's package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster_managers import daemons
from tests.cluster_managers.hosts import Network
from tests.conftest import ENVIRONMENT
from tfos_nb.spark.java import find_java


@dataclass(frozen=True)
class Standalone:
    """A running cluster: its master's URL, its workers, and the folder for the output of drivers in the cluster."""

    url: str
    workers: tuple[daemons.Daemon, ...]
    work: Path


@contextmanager
def standalone_cluster(
    home: Path,
    folder: Path,
    *,
    workers: int,
    cores: int,
    memory: str = "2g",
    conf: Mapping[str, str] | None = None,
    network: Network | None = None,
) -> Iterator[Standalone]:
    """Start a master and workers on loopback, or on a network's hosts; end all afterwards, with their processes.

    ``home`` is SPARK_HOME; ``conf`` are the workers' settings, such as ``spark.worker.resource.gpu.amount``.
    """
    here = _Place(network.address if network else "127.0.0.1")
    places = [_Place(host.address, host.command()) for host in network.hosts] if network else [here] * workers
    properties = folder / "worker.conf"
    properties.write_text("".join(f"{name} {value}\n" for name, value in (conf or {}).items()))
    work = folder / "work"
    with ExitStack() as started:
        started.callback(daemons.end_all_in, work)
        master = _start(started, home, folder, here, "master.Master", "master")
        url = master.told(r"Starting Spark master at (spark://\S+)")
        size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(work))
        running = []
        for number, place in enumerate(places):
            options = (*size, "--properties-file", str(properties), url)
            running.append(_start(started, home, folder, place, "worker.Worker", f"worker-{number}", *options))
        for worker in running:
            worker.told(r"Successfully registered with master (\S+)")
        yield Standalone(url, tuple(running), work)


@dataclass(frozen=True)
class _Place:
    """An address of a daemon, and the command that runs another command at that address."""

    address: str
    within: tuple[str, ...] = ()


def _start(
    started: ExitStack, home: Path, folder: Path, place: _Place, kind: str, name: str, *options: str
) -> daemons.Daemon:
    environment = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": place.address,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    address = ("--host", place.address, "--port", "0", "--webui-port", "0")
    command = [*place.within, str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *address, *options]
    daemon = daemons.start(name, command, environment, folder)
    started.callback(daemon.stop)
    return daemon
