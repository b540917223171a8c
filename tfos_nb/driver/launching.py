"""Turn a plan into Spark tasks: preflight, the door's address, and the nodes' tasks.

Preflight takes seconds and runs before any node starts. Each refusal says what to change.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfos_nb.driver.ended_doors import ended_doors
from tfos_nb.driver.relaying import RelayedDoor, check_relay, needs_relay, stated_relay
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import SPARK_ENDED, FeedFailed, PlanError, TfosError
from tfos_nb.ports import allowed_ports
from tfos_nb.runtime.control.admission import make_room
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorHandler
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import python_path
from tfos_nb.runtime.host.gpu_claims import GPU_COUNT_SCHEMA, GpuCount
from tfos_nb.runtime.keras.versions import advice, installed_keras, is_tested, uses_tf_keras
from tfos_nb.runtime.node.spark_task import NodeTask
from tfos_nb.runtime.program.keras_check import CHECK_SCHEMA, KerasProbe
from tfos_nb.runtime.program.strategies import PROTOCOL_SCHEMA, PROTOCOL_VARIABLE, ProtocolProbe
from tfos_nb.runtime.storage.resumable import RESUME_SCHEMA, Resumable, ResumeProbe
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import (
    check_dynamic_allocation,
    check_local_python,
    check_slots,
    gives_gpus,
    most_slots,
    resource_profile,
    slots_total,
)

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

__all__ = [
    "Launching",
    "NodeTasks",
    "check_descriptors",
    "check_door_variables",
    "check_host_gpus",
    "check_keras",
    "error_of_job",
    "find_earlier",
    "open_door",
    "survey",
]


_MOST_FEEDING = 10_000  # tasks that feed at a time, for which files are allowed


@dataclass(frozen=True)
class Launching:
    """Result of preflight: the profile of each kind of node, and whether a node's task holds its slot.

    ``here`` are the nodes that run on the driver's host, outside Spark. ``claim`` means that Spark assigns no GPUs to
    tasks, so the nodes claim their host's GPUs themselves.
    """

    groups: tuple[tuple[tuple[str, ...], ResourceProfile | None], ...]
    hold: bool
    here: tuple[str, ...] = ()
    claim: bool = False


def survey(spark: SparkSession, plan: ClusterPlan, nodes: Collection[str] | None = None) -> Launching:
    """Check whether Spark can run the plan or, for a running cluster, these additional nodes.

    Raises
    ------
    PlanError
        If it cannot: with the numbers, and what to change.
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
        # Tasks that feed run on Spark's default executors, and take no slot of those that nodes have for themselves.
        beside = feeding and not (context_of(spark).grows and profile is not None)
        hold &= _one_is_left(spark, len(names), beside, cpus=plan.cpus, gpus=gpus, profile=profile)
        groups.append((tuple(names), profile))
    if plan.protocol != "grpc":
        _check_protocol(spark, plan.protocol)
    check_descriptors(spark, len(plan.nodes))
    return Launching(tuple(groups), hold, tuple(str(node) for node in plan.driver_nodes), claim)


def check_descriptors(spark: SparkSession, nodes: int) -> None:
    """Raise this process's limit of open files for so many nodes and the tasks that feed them, or refuse the nodes.

    Raises
    ------
    PlanError
        If the hard limit is too low for the nodes alone.
    """
    if needs_relay(spark):  # the nodes connect to the relay's process instead
        return
    feeding = min(most_slots(spark), _MOST_FEEDING)
    if (most := make_room(nodes + feeding)) < nodes:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PlanError(
            f"{nodes} nodes need {nodes} connections, and this process can take {most}. Its limit of open files "
            f"(ulimit -Hn) must be {hard + 2 * (nodes - most)} or more, got {hard}: start it with that limit, or ask "
            "for fewer nodes"
        )


def check_host_gpus(spark: SparkSession, nodes: int, *, cpus: int, gpus: int) -> None:
    """Refuse more GPUs than the executors' hosts have, where Spark does not manage GPUs.

    Runs one short task for each slot; Spark assigns these to one executor after the other. An executor without a free
    slot is not asked, and its GPUs are not counted.
    """
    tasks = max(slots_total(spark), 1)
    found = spark.range(0, tasks, 1, tasks).mapInArrow(GpuCount(), GPU_COUNT_SCHEMA).distinct().collect()
    by_host = {row.host: row.gpus for row in found}
    if not any(by_host.values()):
        resource_profile(spark, cpus, gpus)  # its error says how to give Spark GPUs
    if sum(count // gpus for count in by_host.values()) < nodes:
        has = ", ".join(f"{host} has {count}" for host, count in sorted(by_host.items()))
        raise PlanError(
            f"gpus={gpus} for each of {nodes} nodes is more than the executors' hosts have: {has}. Ask for fewer GPUs "
            "or nodes, or start Spark with executors on more hosts that have GPUs"
        )


def _check_protocol(spark: SparkSession, protocol: str) -> None:
    """Ask an executor's TensorFlow whether it was built with a protocol; the driver's may be another build."""
    probe = ProtocolProbe(protocol, python_path())
    refused = spark.range(0, 1, 1, 1).mapInArrow(probe, PROTOCOL_SCHEMA).collect()[0].refused
    if refused:
        raise PlanError(refused)


_alike: dict[str, str] = {}  # by application: what is wrong with its executors' Keras, or ''


def check_keras(spark: SparkSession, plan: ClusterPlan, env: Mapping[str, str]) -> None:
    """Let an executor's Keras train a small model on two devices and on one, if its version is not a tested one.

    Runs once for an application. ``TFOS_KERAS_CHECK=0`` in the driver's environment skips it; the nodes then refuse
    ``fit`` and the like, if they must.

    Raises
    ------
    PlanError
        If the numbers differ: with the versions for which they do not.
    """
    replicas = sum(max(1, plan.gpus_of(node)) for node in plan.training_nodes)
    keras_3 = not uses_tf_keras({**os.environ, **env})
    wanted = os.environ.get("TFOS_KERAS_CHECK", "1") != "0" and keras_3 and not plan.ps and replicas > 1
    if not wanted or is_tested(installed_keras()):
        return
    application = str(context_of(spark).key)
    if application not in _alike:
        probe = KerasProbe(python_path())
        row = spark.range(0, 1, 1, 1).mapInArrow(probe, CHECK_SCHEMA).collect()[0]
        _alike[application] = advice(row.version, row.unlike) if row.unlike else ""
    if _alike[application]:
        raise PlanError(f"{_alike[application]}. TFOS_KERAS_CHECK=0 skips this check and launches")


def find_earlier(spark: SparkSession, settings: Settings, name: str, running: Collection[str]) -> Resumable:
    """Look on an executor for the run whose training ``resume=`` continues; ``running`` are those that still run.

    Raises
    ------
    PlanError
        If there is none, or its cluster still runs.
    """
    probe = ResumeProbe(settings.model_dir_for(name), settings.resumed_run)
    found = probe.read(spark.range(0, 1, 1, 1).mapInArrow(probe, RESUME_SCHEMA).collect()[0].found)
    if found.refused:
        raise PlanError(f"resume=: {found.refused}. Launch without resume= to train from the beginning")
    if found.run in running:
        raise PlanError(
            f"resume=: the cluster of run {found.run} still runs on this host. Wait for its end, or stop it first"
        )
    return found


def _one_is_left(
    spark: SparkSession, need: int, feeding: bool, *, cpus: int, gpus: int, profile: ResourceProfile | None
) -> bool:
    """Whether the nodes can hold their slots; if that leaves no slot for feeding, they leave them instead."""
    relayed = needs_relay(spark)
    if relayed:
        check_relay(spark)
    try:
        check_slots(spark, need, feeding, cpus=cpus, gpus=gpus, profile=profile, exchanging=relayed)
    except PlanError:
        # With dynamic allocation Spark would remove the executor of a node that has left its slot: it seems idle.
        if not feeding or relayed or context_of(spark).has_dynamic_allocation:
            raise
        check_slots(spark, need, False, cpus=cpus, gpus=gpus, profile=profile)
        return False
    return True


def check_door_variables() -> None:
    """Refuse an environment in which :func:`open_door` would fail, before Spark is started for it.

    Raises
    ------
    PlanError
        If ``TFOS_SERVER_PORT`` or ``TFOS_SERVER_RELAY`` has no valid value.
    """
    allowed_ports("TFOS_SERVER_PORT")
    stated_relay()


def open_door(spark: SparkSession, handler: DoorHandler) -> tuple[Door, DoorAddress]:
    """Open the driver's port.

    The address is ``TFOS_SERVER_HOST``, or Spark's ``spark.driver.host``. For a Spark Connect client it is the address
    as its server sees it. The port is ``TFOS_SERVER_PORT`` (one, or ``a-b``), or any free one. Where the executors
    cannot reach a client, the address is that of a relay on one of them.
    """
    if needs_relay(spark):
        relayed = RelayedDoor(handler, spark)
        return relayed, relayed.open()
    host, bind = context_of(spark).address()
    ports = allowed_ports("TFOS_SERVER_PORT")
    door = Door(handler, host=host, bind=bind, ports=ports)
    try:
        return door, door.open()
    except TfosError:  # the doors of ended clusters may have the ports
        if not ended_doors.close_all():
            raise
    door = Door(handler, host=host, bind=bind, ports=ports)
    return door, door.open()


@dataclass(frozen=True)
class NodeTasks:
    """Make the Spark task for some of a cluster's nodes."""

    plan: ClusterPlan
    settings: Settings
    door: DoorAddress
    hold: bool
    payload: bytes = field(repr=False)
    claim: bool = False
    run: str = ""
    first_generation: int = 1
    warm_token: str = field(default="", repr=False)

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
                "first_generation": self.first_generation,
                "input_mode": InputMode(self.plan.input_mode).value,
            },
            env={**self.settings.env, PROTOCOL_VARIABLE: self.plan.protocol},
            python_path=python_path(),
            payload=self.payload,
            claims=frozenset(str(node) for node in self.plan.nodes if self.claim and self.plan.gpus_of(node)),
            gpus=self.plan.gpus,
            warm_token=self.warm_token,
        )


def error_of_job(error: BaseException, what: str) -> TfosError:
    """Return an error that says in one sentence why a Spark job failed."""
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
            "held it has ended. Start a session, with %tfos_spark or spark_session(), and launch the cluster again"
        )
    if python:
        return FeedFailed(f"{what}: {python[1]}{_traceback_in(text)}")
    return FeedFailed(f"{what}: {_first_line(text) or type(error).__name__}")


def _is_of_spark_s_end(error: BaseException, text: str) -> bool:
    """Whether a job failed because Spark ended: the error says so, or Spark's Java process does not answer."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    if isinstance(error, ConnectionError | Py4JNetworkError):
        return True
    # An error of Java comes with its stack trace. When Java is gone, py4j's own line is all there is.
    return "SparkContext was shut down" in text or (
        isinstance(error, Py4JError) and len(text.strip().splitlines()) == 1
    )


def _traceback_in(text: str) -> str:
    """Return the user's own frames of a Python task's traceback, such as those of a function that makes the rows."""
    frames = re.findall(r'^ *(File "[^"]+", line \d+, in .+\n(?: {4,}\S.*\n)?)', text, re.MULTILINE)
    others = re.compile(r"pyspark(\.zip)?/|site-packages/|lib/python3|tfos_nb/runtime/")
    own = [frame for frame in frames if not others.search(frame)]
    shown = "".join(f"  {frame}" for frame in own).rstrip()
    return f"\nTraceback (most recent call last), on an executor:\n{shown}" if own else ""


def _first_line(text: str) -> str:
    """Return the first line of an error, without the line that py4j puts before an error of Java."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling "):
        return re.sub(r"^:\s*(?:[\w$]+\.)*", "", lines[1]).strip()  # the exception's name without its package
    return lines[0] if lines else ""
