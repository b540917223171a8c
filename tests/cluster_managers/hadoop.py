"""HDFS and YARN for a test: Hadoop's daemons on loopback, with the jars that ``make test-yarn`` fetches.

::

    NameNode, DataNode            hdfs://127.0.0.1:PORT
    ResourceManager
    NodeManager on 127.0.0.1, NodeManager on 127.0.0.2: two hosts for YARN and Spark

Everything is in one folder: configuration, logs, blocks, and the folders of the containers, by which their
processes are found and ended.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster_managers import daemons
from tests.waiting import until
from tfos_nb.spark.java import find_java

JARS = Path(os.environ.get("TFOS_NB_HADOOP", Path(__file__).parents[2] / ".venv" / "hadoop"))
PATIENCE = 180.0
# By the pmem check a node's TensorFlow uses about 0.7 GiB. A container here has 2 GiB.
NODE_MEMORY, NODE_CORES = 5120, 8
_OPENED = ("java.base/java.lang", "java.base/java.util", "java.base/java.net")
_LOG4J = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{HH:mm:ss,SSS} %p %c{1}: %m%n
"""


@dataclass
class Hadoop:
    """The daemons, and their addresses."""

    folder: Path
    ports: dict[str, int]
    running: dict[str, daemons.Daemon] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """HDFS's root."""
        return f"hdfs://{self.at('namenode')}"

    @property
    def conf(self) -> Path:
        """HADOOP_CONF_DIR."""
        return self.folder / "conf"

    def at(self, name: str) -> str:
        """Return a daemon's address."""
        return f"127.0.0.1:{self.ports[name]}"

    def asked(self, path: str) -> Any:
        """Ask the ResourceManager's REST interface, ``/ws/v1/cluster``."""
        url = f"http://{self.at('resourcemanager.webapp')}/ws/v1/cluster/{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def nodes(self, state: str = "RUNNING") -> int:
        """Count the NodeManagers in a state. Their names are what the machine's resolver returns for the address."""
        return len((self.asked(f"nodes?states={state}")["nodes"] or {}).get("node", []))

    def node_folder(self, host: str) -> Path:
        """Return the folder in which a NodeManager keeps its containers."""
        return self.folder / f"node-{host}"

    def start_node(self, host: str) -> None:
        """Start a NodeManager, and wait until YARN counts it."""
        place = self.node_folder(host)
        settings = {
            "yarn.nodemanager.hostname": host,
            "yarn.nodemanager.address": f"{host}:0",
            "yarn.nodemanager.localizer.address": f"{host}:0",
            "yarn.nodemanager.webapp.address": f"{host}:0",
            "yarn.nodemanager.collector-service.address": f"{host}:0",
            "yarn.nodemanager.local-dirs": f"{place}/local",
            "yarn.nodemanager.log-dirs": f"{place}/logs",
        }
        others = sum(name.startswith("nodemanager-") for name in self.running)
        self._start(f"nodemanager-{host}", "yarn.server.nodemanager.NodeManager", settings)
        self._wait(lambda: self.nodes() > others, f"nodemanager-{host}")

    def lose_node(self, host: str) -> None:
        """Kill a NodeManager and all processes in its containers at once, as when a host dies."""
        self.running.pop(f"nodemanager-{host}").stop(signal.SIGKILL)
        daemons.end_all_in(self.node_folder(host))

    def decommission(self, host: str) -> None:
        """Have YARN give a host no more containers, and end those that it has after a while."""
        self._exclude(host, "-g", "120", "-server")

    def recommission(self) -> None:
        """Take all hosts into use again."""
        self._exclude("")
        self._wait(lambda: self.nodes() == 2, "resourcemanager")

    def _exclude(self, host: str, *options: str) -> None:
        (self.folder / "exclude").write_text(host)
        command = self._command("yarn.client.cli.RMAdminCLI", "-refreshNodes", *options)
        asking = daemons.start("rmadmin", command, **self._process)
        assert asking.process.wait(PATIENCE) == 0, asking.tail

    def start(self) -> None:
        """Start all daemons, and wait until files can be written and containers started."""
        jars = list(JARS.glob("hadoop-yarn-server-nodemanager-*.jar"))
        assert jars, f"{JARS} has no jars of Hadoop: make test-yarn fetches them (TFOS_NB_HADOOP names another folder)"
        self._configure()
        formatting = daemons.start("format", self._command("hdfs.server.namenode.NameNode", "-format"), **self._process)
        assert formatting.process.wait(PATIENCE) == 0, formatting.tail
        self._start("namenode", "hdfs.server.namenode.NameNode")
        self._start("datanode", "hdfs.server.datanode.DataNode")
        self._start("resourcemanager", "yarn.server.resourcemanager.ResourceManager")
        self._wait(lambda: self.nodes() == 0, "resourcemanager")
        self._wait(lambda: self._datanodes() == 1, "datanode")
        for host in ("127.0.0.1", "127.0.0.2"):
            self.start_node(host)

    def stop(self) -> None:
        """Kill all daemons and all processes in containers; nobody needs their files any more."""
        for daemon in reversed(self.running.values()):
            daemon.stop(signal.SIGKILL)
        self.running.clear()
        daemons.end_all_in(self.folder)

    def _datanodes(self) -> int:
        query = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        with urllib.request.urlopen(f"http://{self.at('namenode.http')}/{query}", timeout=10) as answer:
            return sum(int(bean["NumLiveDataNodes"]) for bean in json.load(answer)["beans"])

    def _wait(self, ready: Any, name: str) -> None:
        daemon = self.running[name]

        def reached() -> bool:
            try:
                return bool(ready())
            except OSError:  # it does not listen yet
                return False

        until(lambda: daemon.ended or reached(), PATIENCE, every=0.2)
        assert reached(), f"{name} is not ready:\n{daemon.tail}"

    def _start(self, name: str, kind: str, settings: Mapping[str, object] | None = None) -> None:
        conf = self.conf
        if settings:
            conf = self.folder / f"conf-{name}"
            conf.mkdir(exist_ok=True)
            _write(conf / "yarn-site.xml", {**self._yarn(), **settings})
        self.running[name] = daemons.start(name, self._command(kind, conf=conf), **self._process)

    def _command(self, kind: str, *arguments: str, conf: Path | None = None) -> list[str]:
        opened = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
        path = os.pathsep.join([str(conf or self.conf), str(self.conf), f"{JARS}/*"])
        java = [str(find_java().home / "bin" / "java"), "-Xmx256m", "-XX:+UseSerialGC", *opened]
        logs = f"-Dhadoop.log.dir={self.folder}/logs"
        return [*java, logs, "-cp", path, f"org.apache.hadoop.{kind}", *arguments]

    @property
    def _process(self) -> dict[str, Any]:
        environment = {**os.environ, "HADOOP_CONF_DIR": str(self.conf), "JAVA_HOME": str(find_java().home)}
        return {"environment": environment, "folder": self.folder}

    def _configure(self) -> None:
        self.conf.mkdir()
        (self.folder / "exclude").touch()
        # The jars do not contain the web pages of the daemons, but their folders must exist.
        for page in ("hdfs", "datanode"):
            (self.conf / "webapps" / page).mkdir(parents=True)
        (self.conf / "log4j.properties").write_text(_LOG4J)
        _write(self.conf / "core-site.xml", {"fs.defaultFS": self.url, "hadoop.tmp.dir": f"{self.folder}/tmp"})
        _write(self.conf / "hdfs-site.xml", self._hdfs())
        _write(self.conf / "yarn-site.xml", self._yarn())
        scheduler = {"root.queues": "default", "root.default.capacity": 100, "maximum-am-resource-percent": 0.5}
        scheduler["per-node-heartbeat.multiple-assignments-enabled"] = "false"  # containers are spread over the hosts
        names = {f"yarn.scheduler.capacity.{name}": value for name, value in scheduler.items()}
        _write(self.conf / "capacity-scheduler.xml", names)

    def _hdfs(self) -> dict[str, object]:
        return {
            "dfs.namenode.rpc-address": self.at("namenode"),
            "dfs.namenode.http-address": self.at("namenode.http"),
            "dfs.namenode.name.dir": f"file://{self.folder}/namenode",
            "dfs.datanode.data.dir": f"file://{self.folder}/datanode",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.replication": 1,
        }

    def _yarn(self) -> dict[str, object]:
        parts = ("scheduler", "resource-tracker", "admin", "webapp")
        return {
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.address": self.at("resourcemanager"),
            **{f"yarn.resourcemanager.{part}.address": self.at(f"resourcemanager.{part}") for part in parts},
            "yarn.nodemanager.resource.memory-mb": NODE_MEMORY,
            "yarn.nodemanager.resource.cpu-vcores": NODE_CORES,
            "yarn.nodemanager.pmem-check-enabled": "true",
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.env-whitelist": "JAVA_HOME",
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": 99.5,
            "yarn.scheduler.minimum-allocation-mb": 256,
            "yarn.resourcemanager.nodes.exclude-path": f"{self.folder}/exclude",
            "yarn.nm.liveness-monitor.expiry-interval-ms": 8000,
            "yarn.resourcemanager.nm.liveness-monitor.interval-ms": 1000,
            "yarn.nodemanager.sleep-delay-before-sigkill.ms": 1000,
        }


def _write(file: Path, settings: Mapping[str, object]) -> None:
    entry = "<property><name>{}</name><value>{}</value></property>\n"
    entries = "".join(entry.format(name, value) for name, value in settings.items())
    file.write_text(f"<configuration>\n{entries}</configuration>\n")


@contextmanager
def hadoop_cluster(folder: Path) -> Iterator[Hadoop]:
    """Start HDFS and YARN; only their logs in the folder are left afterwards."""
    parts = ["namenode", "namenode.http", "resourcemanager"]
    parts += [f"resourcemanager.{part}" for part in ("scheduler", "resource-tracker", "admin", "webapp")]
    hadoop = Hadoop(folder, dict(zip(parts, daemons.free_ports(len(parts)), strict=True)))
    with ExitStack() as started:
        started.callback(hadoop.stop)
        hadoop.start()
        yield hadoop
