"""From a plan to what Spark is asked for: preflight, the door's address, and the nodes' tasks.

What is refused here is refused in seconds, before any node starts, and says what to change.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfos_nb.contexts import context_of
from tfos_nb.errors import SPARK_ENDED, FeedFailed, PlanError, TfosError
from tfos_nb.ports import allowed_ports
from tfos_nb.relaying import RelayedDoor, check_relay, needs_relay
from tfos_nb.runtime.door import Desk, Door, DoorAddress
from tfos_nb.runtime.gpu_claims import GPU_COUNT_SCHEMA, GpuCount
from tfos_nb.runtime.incoming import make_room
from tfos_nb.runtime.node import NodeTask
from tfos_nb.runtime.plan import ClusterPlan, InputMode
from tfos_nb.runtime.remote import Unreachable, refuse_unknown
from tfos_nb.runtime.strategies import PROTOCOL_SCHEMA, PROTOCOL_VARIABLE, ProtocolProbe
from tfos_nb.session import (
    check_dynamic_allocation,
    check_local_python,
    check_slots,
    gives_gpus,
    resource_profile,
    slots_total,
)

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

__all__ = [
    "Launching",
    "NodeTasks",
    "Settings",
    "check_descriptors",
    "check_host_gpus",
    "checked_env",
    "error_of_job",
    "open_door",
    "survey",
]


@dataclass(frozen=True)
class Settings:
    """What :func:`tfos_nb.launch` takes beside the plan; it documents the fields. Times are in seconds."""

    model_dir: str | os.PathLike[str] | None = None
    tensorboard: bool = False
    log_dir: str | os.PathLike[str] | None = None
    autolog: bool = True
    env: dict[str, str] = field(default_factory=dict)
    rendezvous_timeout: float = 120.0
    feed_timeout: float = 600.0
    grace: float = 30.0
    buffer_bytes: int = 256 << 20
    spill_bytes: int = 1 << 50
    queues: tuple[str, ...] = ("input",)
    restarts: int = 0
    heartbeat_timeout: float = 15.0
    min_workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("rendezvous_timeout", "feed_timeout", "heartbeat_timeout", "buffer_bytes"):
            if not isinstance(getattr(self, name), (int, float)) or not getattr(self, name) > 0:
                raise PlanError(f"{name}={getattr(self, name)!r}: it is a number above 0")
        for name in ("rendezvous_timeout", "feed_timeout", "heartbeat_timeout", "grace"):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or not 0 <= seconds <= threading.TIMEOUT_MAX:
                raise PlanError(f"{name}={seconds!r}: it is a number of seconds, at most {threading.TIMEOUT_MAX:.0f}")
        if type(self.spill_bytes) is not int or self.spill_bytes < 0:
            raise PlanError(f"spill_bytes={self.spill_bytes!r}: it is a whole number of bytes; 0 keeps none")
        if type(self.restarts) is not int or self.restarts < 0:
            raise PlanError(f"restarts={self.restarts!r}: it is a whole number, 0 or more")
        least = self.min_workers
        if least is not None and (type(least) is not int or least < 1):
            raise PlanError(f"min_workers={least!r}: it is a whole number, 1 or more")
        if least is not None and not self.restarts:
            raise PlanError("min_workers= needs restarts=: without them the first loss ends the cluster")
        self._check_kinds()
        self._check_names()

    def _check_kinds(self) -> None:
        for name in ("model_dir", "log_dir"):
            if not isinstance(getattr(self, name), (str, os.PathLike, type(None))):
                raise PlanError(f"{name}={getattr(self, name)!r}: it is a path, or a URL")
            if str(getattr(self, name)).startswith("memory:"):
                raise PlanError(
                    f"{name}={getattr(self, name)!r}: each process has a memory: of its own, which goes with it; "
                    "give a path, or a URL that the nodes share"
                )
            try:
                refuse_unknown(os.fspath(getattr(self, name) or ""))
            except Unreachable as error:
                raise PlanError(f"{name}: {error}") from None
        for name in ("tensorboard", "autolog"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r}: it is True or False")

    def _check_names(self) -> None:
        if not self.queues or any(type(name) is not str or name == "" for name in self.queues):
            raise PlanError(f"queues={list(self.queues)!r}: they are names, such as queues=['input', 'valid']")
        if self.restarts and len(self.queues) > 1:
            raise PlanError("restarts= needs a single queue: a state knows how far it has come in one alone")
        if any(not isinstance(part, str) for pair in self.env.items() for part in pair):
            raise PlanError("env: names and values are text, as in env={'TF_USE_LEGACY_KERAS': '1'}")

    def check(self, plan: ClusterPlan) -> None:
        """Refuse what does not go with a plan."""
        least = self.min_workers
        if least is None:
            return
        if plan.ps or plan.evaluator:
            raise PlanError(
                "min_workers= is for workers that train together, without parameter servers or an evaluator"
            )
        if least > plan.workers:
            raise PlanError(f"min_workers={least}: the cluster has {plan.workers} workers at the most")

    def model_dir_for(self, name: str) -> str:
        """Return where ``ctx.save`` writes; a relative path is meant from where the driver is, not the nodes."""
        place = os.fspath(self.model_dir or os.path.join("tfos_models", name))
        return place if "://" in place else os.path.abspath(place)

    def log_dir_for(self, name: str) -> str:
        """Return what TensorBoard shows; empty if there is to be none."""
        if self.log_dir:
            place = os.fspath(self.log_dir)
            return place if "://" in place else os.path.abspath(place)
        return f"{self.model_dir_for(name).rstrip('/')}/logs" if self.tensorboard else ""

    def for_nodes(self, name: str) -> dict[str, object]:
        """Return what the nodes need to know of them."""
        return {
            "model_dir": self.model_dir_for(name),
            "place_given": self.model_dir is not None,
            "log_dir": self.log_dir_for(name),
            "autolog": self.autolog,
            "buffer_bytes": self.buffer_bytes,
            "spill_bytes": self.spill_bytes,
            "queues": list(self.queues),
            "restarts": self.restarts,
            "heartbeat_timeout": self.heartbeat_timeout,
        }


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that a user gives, if they are some."""
    if not isinstance(env, (Mapping, type(None))):
        raise PlanError(f"env={env!r}: it is a dictionary, as in env={{'TF_USE_LEGACY_KERAS': '1'}}")
    return dict(env or {})


@dataclass(frozen=True)
class Launching:
    """What preflight found: the profile of each kind of node, and whether a node's task holds its slot.

    ``here`` are the nodes that run on the driver's host, beside Spark. ``claim``: Spark gives its tasks no GPUs, so the
    nodes take their host's by themselves.
    """

    groups: tuple[tuple[tuple[str, ...], ResourceProfile | None], ...]
    hold: bool
    here: tuple[str, ...] = ()
    claim: bool = False


def survey(spark: SparkSession, plan: ClusterPlan, nodes: Collection[str] | None = None) -> Launching:
    """Ask Spark whether it can take the plan; or, of a cluster that runs, these nodes more.

    Raises
    ------
    PlanError
        With the numbers and what to change.
    """
    check_local_python(spark)
    feeding = plan.input_mode is InputMode.SPARK
    check_dynamic_allocation(spark, len(plan.spark_nodes) + int(feeding))
    wanted = [node for node in plan.spark_nodes if nodes is None or str(node) in nodes]
    by_gpus: dict[int, list[str]] = {}
    for node in wanted:
        by_gpus.setdefault(plan.gpus_of(node), []).append(str(node))
    groups, hold = [], True
    claim = any(by_gpus) and not gives_gpus(spark)
    if claim:
        with_gpus = sum(plan.gpus_of(node) > 0 for node in wanted)
        check_host_gpus(spark, with_gpus, cpus=plan.cpus, gpus=plan.gpus)
        by_gpus = {0: [name for names in by_gpus.values() for name in names]}
    for gpus, names in by_gpus.items():
        profile = resource_profile(spark, plan.cpus, gpus)
        hold &= _one_is_left(spark, len(names), feeding, cpus=plan.cpus, gpus=gpus, profile=profile)
        groups.append((tuple(names), profile))
    if plan.protocol != "grpc":
        _check_protocol(spark, plan.protocol)
    check_descriptors(spark, len(plan.nodes))
    return Launching(tuple(groups), hold, tuple(str(node) for node in plan.driver_nodes), claim)


def check_descriptors(spark: SparkSession, nodes: int) -> None:
    """Have this process take the connections of so many nodes and of Spark's tasks that feed them, or refuse the nodes.

    Raises
    ------
    PlanError
        If it may not have enough descriptors for the nodes alone.
    """
    if needs_relay(spark):  # they connect to a process of its own
        return
    if (most := make_room(nodes + slots_total(spark))) < nodes:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PlanError(
            f"{nodes} nodes, and this process can take {most} connections: it may have {hard} descriptors (ulimit "
            f"-Hn), half of them for Spark and files. Start it with {hard + 2 * (nodes - most)}, or ask for fewer nodes"
        )


def check_host_gpus(spark: SparkSession, nodes: int, *, cpus: int, gpus: int) -> None:
    """Refuse GPUs that the executors' hosts have not, where Spark knows nothing of them.

    One short task for each slot, which Spark deals out one executor after the other: an executor without a free slot
    now is not seen, and what it has is not counted.
    """
    tasks = max(slots_total(spark), 1)
    found = spark.range(0, tasks, 1, tasks).mapInArrow(GpuCount(), GPU_COUNT_SCHEMA).distinct().collect()
    by_host = {row.host: row.gpus for row in found}
    if not any(by_host.values()):
        resource_profile(spark, cpus, gpus)  # says how Spark is given some
    if sum(count // gpus for count in by_host.values()) < nodes:
        has = ", ".join(f"{host} has {count}" for host, count in sorted(by_host.items()))
        raise PlanError(
            f"gpus={gpus} for each of {nodes} nodes: {has}. Ask for fewer GPUs or nodes, or start Spark with "
            "executors on more hosts that have GPUs"
        )


def _check_protocol(spark: SparkSession, protocol: str) -> None:
    """Have an executor's TensorFlow say whether it was built with a protocol; the driver's may be another."""
    probe = ProtocolProbe(protocol, tuple(entry or os.getcwd() for entry in sys.path))
    refused = spark.range(0, 1, 1, 1).mapInArrow(probe, PROTOCOL_SCHEMA).collect()[0].refused
    if refused:
        raise PlanError(refused)


def _one_is_left(
    spark: SparkSession, need: int, feeding: bool, *, cpus: int, gpus: int, profile: ResourceProfile | None
) -> bool:
    """Whether the nodes can hold their slots: where that leaves none for feeding, they leave them instead."""
    relayed = needs_relay(spark)
    if relayed:
        check_relay(spark)
    try:
        check_slots(spark, need, feeding, cpus=cpus, gpus=gpus, profile=profile, exchanging=relayed)
    except PlanError:
        if not feeding or relayed:
            raise
        check_slots(spark, need, False, cpus=cpus, gpus=gpus, profile=profile)
        return False
    return True


def open_door(spark: SparkSession, desk: Desk) -> tuple[Door, DoorAddress]:
    """Open the driver's port.

    The address is ``TFOS_SERVER_HOST``, or Spark's ``spark.driver.host``, or that of a Spark Connect client as its
    server sees it; the port ``TFOS_SERVER_PORT`` (one, or ``a-b``), or any that is free. Where the executors cannot
    reach a client, it is a relay's on one of them.
    """
    if needs_relay(spark):
        relayed = RelayedDoor(desk, spark)
        return relayed, relayed.open()
    host, bind = context_of(spark).address()
    door = Door(desk, host=host, bind=bind, ports=allowed_ports("TFOS_SERVER_PORT"))
    return door, door.open()


@dataclass(frozen=True)
class NodeTasks:
    """Makes the Spark task for some of a cluster's nodes."""

    plan: ClusterPlan
    settings: Settings
    door: DoorAddress
    hold: bool
    payload: bytes = field(repr=False)
    claim: bool = False
    run: str = ""

    def __call__(self, nodes: tuple[str, ...]) -> NodeTask:
        """Make it."""
        return NodeTask(
            nodes=nodes,
            cluster=self.plan.name,
            door=self.door,
            hold=self.hold,
            fed=frozenset(str(node) for node in self.plan.fed_nodes),
            settings={
                **self.settings.for_nodes(self.plan.name),
                "board": str(self.plan.chief_node),
                "chief_trains": self.plan.chief_trains,
                "run": self.run,
            },
            env={**self.settings.env, PROTOCOL_VARIABLE: self.plan.protocol},
            python_path=tuple(entry or os.getcwd() for entry in sys.path),
            payload=self.payload,
            claims=frozenset(str(node) for node in self.plan.nodes if self.claim and self.plan.gpus_of(node)),
            gpus=self.plan.gpus,
        )


def error_of_job(error: BaseException, what: str) -> TfosError:
    """Say in a sentence why a Spark job ended by an error."""
    text = str(error)
    if "PYTHON_VERSION_MISMATCH" in text:
        versions = re.findall(r"\b3\.\d+\b", text)
        seen = f" ({' and '.join(dict.fromkeys(versions))})" if versions else ""
        return PlanError(
            f"the executors' Python is not the driver's{seen}: set PYSPARK_PYTHON to the same version as here, "
            f"{sys.version_info.major}.{sys.version_info.minor}, before Spark starts"
        )
    missing = re.search(r"No module named '([\w.]+)'", text)
    if missing and missing[1].split(".")[0] in ("tfos_nb", "pyarrow", "grpc", "msgpack", "cloudpickle", "pandas"):
        return PlanError(
            f"the executors' Python has no {missing[1]}: set PYSPARK_PYTHON to an environment that has it before Spark "
            "starts, or ship one with spark.archives"
        )
    python = re.search(
        r"Traceback \(most recent call last\):\n(?:.*\n)*?(\w[\w.]*(?:Error|Exception|Failed)\b.*)", text
    )
    if not python and _is_of_spark_s_end(error, text):
        return FeedFailed(
            f"{SPARK_ENDED}, and the cluster with it: its session was stopped, or the kernel or the Java process that "
            "held it has ended. Start a session, with %tfos_spark or spark_session(), and launch the cluster anew"
        )
    if python:
        return FeedFailed(f"{what}: {python[1]}{_traceback_in(text)}")
    return FeedFailed(f"{what}: {_first_line(text) or type(error).__name__}")


def _is_of_spark_s_end(error: BaseException, text: str) -> bool:
    """Whether a job ended since Spark did: it says so, or its Java does not answer any more."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    if isinstance(error, ConnectionError | Py4JNetworkError):
        return True
    # What Java raised comes from Java with its trace; without Java there is py4j's own line alone.
    return "SparkContext was shut down" in text or (
        isinstance(error, Py4JError) and len(text.strip().splitlines()) == 1
    )


def _traceback_in(text: str) -> str:
    """Return the user's own frames of the traceback of a task's Python: those of a function that makes the rows."""
    frames = re.findall(r'^ *(File "[^"]+", line \d+, in .+\n(?: {4,}\S.*\n)?)', text, re.MULTILINE)
    others = re.compile(r"pyspark(\.zip)?/|site-packages/|lib/python3|tfos_nb/runtime/")
    own = [frame for frame in frames if not others.search(frame)]
    shown = "".join(f"  {frame}" for frame in own).rstrip()
    return f"\nTraceback (most recent call last), on an executor:\n{shown}" if own else ""


def _first_line(text: str) -> str:
    """Return what an error says, without the line that py4j puts before each of Java's."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling "):
        return re.sub(r"^:\s*(?:[\w$]+\.)*", "", lines[1]).strip()  # the exception's name without its package
    return lines[0] if lines else ""
