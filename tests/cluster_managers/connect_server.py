"""A Spark Connect server for a test: a process of its own, over executors that are processes too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster_managers import daemons
from tests.cluster_managers.submit import as_options
from tests.conftest import ENVIRONMENT
from tests.local_cluster import ON_LOOPBACK, environment

_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextmanager
def connect_server(home: Path, folder: Path, *, executors: int, cores: int) -> Iterator[str]:
    """Start a server on loopback; end it afterwards, with its executors. ``home`` is SPARK_HOME."""
    (port,) = daemons.free_ports(1)
    settings = {
        **ON_LOOPBACK,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
    }
    master = f"local-cluster[{executors},{cores},1024]"
    submit = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy.SparkSubmit", "--class", _SERVER]
    with ExitStack() as started:
        command = [*submit, "--master", master, *as_options(settings), "spark-internal"]
        server = daemons.start("connect", command, {**ENVIRONMENT, **environment(home)}, folder)
        started.callback(server.stop)
        server.told(r"(Spark Connect server started at)")
        yield f"sc://127.0.0.1:{port}"
