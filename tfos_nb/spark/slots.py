"""Checks of preflight: the resources of a task, the number of tasks that run at once, and the users of busy slots.

:mod:`tfos_nb.spark.session` exports these names too. :mod:`tfos_nb.spark.contexts` gets the facts from Spark; this
module interprets them.
"""

from __future__ import annotations

import inspect
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyspark
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)
from pyspark.sql import DataFrame

from tfos_nb.errors import PlanError, counted
from tfos_nb.spark.contexts import Context, context_of
from tfos_nb.spark.contexts.pending_slots import Busy, are_nodes, still_ending, still_pending
from tfos_nb.spark.contexts.pods import Missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "LOOK_SECONDS",
    "Busy",
    "ExecutorsToCome",
    "SlotCounts",
    "Slots",
    "await_executors",
    "check_dynamic_allocation",
    "check_local_python",
    "check_slots",
    "gives_gpus",
    "most_slots",
    "places_beside_exchanges",
    "resource_profile",
    "room_for",
    "slots_busy",
    "slots_total",
]

logger = logging.getLogger(__name__)

_REGISTER_SECONDS = 30.0
_NODE_NEEDS = ("tfos_nb", "tensorflow", "keras", "pyarrow", "grpc", "pandas")
_WHAT_IT_HAS = (
    "import sys, importlib.util as u; "
    "print('%d.%d' % sys.version_info[:2], *(name for name in sys.argv[1:] if not u.find_spec(name)))"
)
_SET_PYTHON = f"Stop the session, set PYSPARK_PYTHON to this one, {sys.executable}, and start Spark again"
_POLL_SECONDS = 0.2
LOOK_SECONDS = 5.0
"""Between two questions to Kubernetes."""
_AGAIN_AFTER = 5.0  # seconds in which a wait in vain is not repeated: preflight counts the slots several times
_REFUSAL_SECONDS = 5.0  # more than that for a last question to Kubernetes, which may say why they have not come
_GPU = "spark.executor.resource.gpu"
_GPU_SCRIPT = f"{_GPU}.discoveryScript"
_HOPELESS_LOOKS = 3  # so often it must say that a pod cannot start before that is believed: a registry may be slow


def gives_gpus(spark: SparkSession) -> bool:
    """Return whether this Spark assigns GPUs to tasks itself."""
    context = context_of(spark)
    return context.gpus > 0 or _starts_with_gpus(context)


def _starts_with_gpus(context: Context) -> bool:
    """Return whether Spark can start executors with GPUs for nodes that ask for them, beside others without."""
    return context.grows and bool(context.setting(_GPU_SCRIPT))


def resource_profile(spark: SparkSession, cpus: int = 1, gpus: int = 0) -> ResourceProfile | None:
    """Return the resource profile with which a task has the resources of one node.

    With dynamic allocation Spark starts executors of their own for a profile. A node's have as many GPUs as the node,
    and else the size of all others. They stay for the next cluster, until Spark finds them idle for too long.

    Returns
    -------
    ResourceProfile or None
        The profile for ``mapInArrow(…, profile=…)`` and ``RDD.withResources``; None if Spark's default task already has
        these resources.

    Raises
    ------
    PlanError
        If this Spark cannot give a task ``cpus`` and ``gpus``. The message says what to set.
    """
    context = context_of(spark)
    task_cpus = int(context.setting("spark.task.cpus", "1"))
    task_gpus = float(context.setting("spark.task.resource.gpu.amount", "0"))
    _check_executor(context, cpus, gpus)
    if (cpus, gpus) == (task_cpus, task_gpus):
        return None
    wanted = f"cpus={cpus}, gpus={gpus}: a task of this Spark has {task_cpus} and {task_gpus:g}, and "
    change = f"start Spark with spark.task.cpus={cpus}"
    change += f" and spark.task.resource.gpu.amount={gpus}" if gpus else ""
    if context.is_local:
        raise PlanError(wanted + f"{context.master} cannot give another to some of them: {change}")
    if context.has_dynamic_allocation and not context.grows:
        raise PlanError(wanted + f"over Spark Connect dynamic allocation starts no other executors for them: {change}")
    if "profile" not in inspect.signature(DataFrame.mapInArrow).parameters:
        raise PlanError(wanted + f"PySpark {pyspark.__version__} has no stage-level scheduling of DataFrames: {change}")
    with _profiles_lock:
        if (profile := _profiles.get((context.key, cpus, gpus))) is None:
            profile = _profiles[context.key, cpus, gpus] = _new_profile(context, cpus, gpus)
    return profile


_profiles: dict[tuple[Hashable, int, int], ResourceProfile] = {}
"""By application, CPUs and GPUs. An executor of dynamic allocation runs tasks of one profile, and no equal one's."""
_profiles_lock = threading.Lock()


def _new_profile(context: Context, cpus: int, gpus: int) -> ResourceProfile:
    tasks = TaskResourceRequests().cpus(cpus)
    if gpus:
        tasks = tasks.resource("gpu", gpus)
    builder = ResourceProfileBuilder().require(tasks)
    if context.grows:
        executors = ExecutorResourceRequests().cores(context.executor_cores or cpus)
        if gpus:
            script, vendor = context.setting(_GPU_SCRIPT), context.setting(f"{_GPU}.vendor")
            executors = executors.resource("gpu", gpus, script, vendor)
        builder = builder.require(executors)
    profile = builder.build
    context.know(profile)
    return profile


def _check_executor(context: Context, cpus: int, gpus: int) -> None:
    cores = context.executor_cores
    if cores is not None and cpus > cores:
        name = "the N of local[N]" if context.is_local else "spark.executor.cores"
        raise PlanError(f"cpus={cpus}: an executor has {cores} cores. Ask for fewer, or raise {name}")
    held = context.gpus
    if gpus and _starts_with_gpus(context):
        if context.master.startswith("k8s://") and not context.setting(f"{_GPU}.vendor"):
            raise PlanError(f"gpus={gpus}: start Spark with {_GPU}.vendor=nvidia.com, by which Kubernetes knows GPUs")
    elif gpus > held:
        where = f"{context.master} gives its tasks no GPUs" if context.is_local else f"an executor has {held}"
        raise PlanError(
            f"gpus={gpus}: {where}. Start Spark, on a cluster, with spark.executor.resource.gpu.amount={gpus} and "
            f"spark.task.resource.gpu.amount={gpus}, or ask for gpus={held}"
            + (
                f". Or set {_GPU}.amount=0 and {_GPU_SCRIPT}: it then starts executors with GPUs for such nodes alone"
                if context.grows
                else ""
            )
        )


@dataclass(frozen=True)
class Slots:
    """Slots for nodes: how many this Spark has, how many of them are busy, and the stages that use them."""

    total: int
    busy: int
    stages: tuple[Busy, ...] = ()

    @property
    def free(self) -> int:
        """Number of slots that new nodes could take now."""
        return max(self.total - self.busy, 0)


def slots_total(
    spark: SparkSession,
    profile: ResourceProfile | None = None,
    *,
    at_least: int | None = None,
    timeout: float = _REGISTER_SECONDS,
) -> int:
    """Return the number of tasks of a profile that this Spark can run at the same time, including running ones.

    If requested executors are still registering, it waits for them: at most ``timeout`` seconds, and only until Spark
    has ``at_least`` slots. A wait in vain is not repeated at once.
    """
    context = context_of(spark)
    _Registration(context, profile, at_least).wait(timeout, timeout)
    return context.places(profile)


def most_slots(
    spark: SparkSession,
    profile: ResourceProfile | None = None,
    *,
    cpus: int = 1,
    gpus: int = 0,
    at_least: int | None = None,
) -> int:
    """Return the number of tasks of a profile that can run at the same time, with all executors that Spark may start.

    Without dynamic allocation these are the executors that it has: see :func:`slots_total`. ``cpus`` and ``gpus`` are
    those of a task.
    """
    context = context_of(spark)
    if not context.grows:
        return slots_total(spark, profile, at_least=at_least)
    each = (context.executor_cores or cpus) // cpus
    if gpus:
        each = min(each, context.gpus // gpus if profile is None else 1)
    return max(context.places(profile), context.most_executors * each)


def await_executors(spark: SparkSession, need: int, timeout: float) -> None:
    """Wait for ``need`` slots while executors register, and up to ``timeout`` seconds while Kubernetes starts them.

    A pod may wait for a host that is about to be started, or for its image of gigabytes. The log says what it waits
    for. What somebody has to mend, such as a wrong name of the image, ends the wait.
    """
    context = context_of(spark)
    _Registration(context, None, need).wait(min(timeout, _REGISTER_SECONDS + _REFUSAL_SECONDS), timeout, again=True)


_in_vain: dict[Hashable, tuple[float, str]] = {}
"""When the last wait for an application's executors ended without them (monotonic), and why they had not come."""


def _why_in_vain(context: Context) -> str:
    """Return why executors did not come to the last wait, if it was just now."""
    ended, why = _in_vain.get(context.key, (-math.inf, ""))
    return why if time.monotonic() - ended < _AGAIN_AFTER else ""


class ExecutorsToCome:
    """What the cluster manager says of executors that do not come, question after question.

    Parameters
    ----------
    ask : callable
        Asks it, by :meth:`~tfos_nb.spark.contexts.base.Context.executors_to_come`.
    """

    def __init__(self, ask: Callable[[], Missing]) -> None:
        self._ask, self._told, self._hopeless = ask, Missing(), 0
        self._logged: frozenset[str] = frozenset()

    def look(self) -> Missing:
        """Ask, and log a new reason."""
        self._told = self._ask()
        self._hopeless = self._hopeless + 1 if self._told.text and not self._told.coming else 0
        if not self._told.kinds <= self._logged:
            self._logged |= self._told.kinds
            logger.warning("tfos_nb waits for Spark's executors. %s", self._told.text)
        return self._told

    @property
    def in_vain(self) -> bool:
        """Whether it has said often enough that they cannot start before somebody mends something."""
        return self._hopeless >= _HOPELESS_LOOKS


class _Registration:
    """One wait for the executors that a session has asked for."""

    def __init__(self, context: Context, profile: ResourceProfile | None, at_least: int | None) -> None:
        self._context, self._profile, self._at_least = context, profile, at_least
        self._expected = _expected_executors(context)

    def _is_complete(self) -> bool:
        if self._context.executors() >= self._expected:
            return True
        return self._at_least is not None and self._context.places(self._profile) >= self._at_least

    def wait(self, timeout: float, while_coming: float, *, again: bool = False) -> None:
        """Wait; ``again``: also if somebody has just waited in vain."""
        began = time.monotonic()
        ended, _ = _in_vain.get(self._context.key, (-math.inf, ""))
        if self._is_complete() or (began - ended < _AGAIN_AFTER and not again):
            return
        nothing = threading.Event()  # Spark has no event for an executor that registers, so poll
        with self._context.executors_to_come() as ask:
            executors, look_at, deadline = ExecutorsToCome(ask), began + LOOK_SECONDS, began + timeout
            while not self._is_complete():
                now = time.monotonic()
                if now >= min(look_at, deadline):
                    look_at, told = now + LOOK_SECONDS, executors.look()
                    deadline = began + (while_coming if told.coming else timeout)
                    if now >= deadline or executors.in_vain:
                        _in_vain[self._context.key] = now, told.text
                        return
                nothing.wait(_POLL_SECONDS)


def _expected_executors(context: Context) -> int:
    """Return the number of requested executors; 0 for a local Spark, 1 if only the number of machines limits it."""
    if context.is_local:
        return 0
    if context.has_dynamic_allocation:
        return _kept_executors(context)
    cluster = context.local_cluster
    if cluster is not None:
        return cluster[0]
    instances = int(context.setting("spark.executor.instances", "0"))
    cores, cores_max = context.executor_cores, int(context.setting("spark.cores.max", "0"))
    return instances or (cores_max // cores if cores else 0) or 1


def places_beside_exchanges(spark: SparkSession) -> int:
    """Return the number of tasks that can run beside the nodes and one exchange with a relay, at least 1.

    Only one such exchange runs at a time.
    """
    context = context_of(spark)
    held = sum(math.ceil(stage.cpus / int(context.setting("spark.task.cpus", "1"))) for stage in slots_busy(spark))
    return max(context.places(None) - held - 1, 1)


@dataclass(frozen=True)
class SlotCounts:
    """Slots for the tasks of one job: how many of its tasks run, and which stages hold the ``total`` slots.

    ``grows`` says that Spark starts executors for tasks that wait.
    """

    running: int
    total: int
    held: int
    stages: tuple[Busy, ...]
    grows: bool = False

    @property
    def free(self) -> int:
        """Number of slots in which another of its tasks could run now."""
        return max(self.total - self.held, 0)

    @property
    def is_for_nodes(self) -> bool:
        """Whether only nodes hold slots, which do not become free before their clusters end."""
        return self.total > 0 and are_nodes(self.stages)


def room_for(context: Context, description: str) -> SlotCounts:
    """Return the slots for the tasks of a job that uses the default profile."""
    stages = context.busy()
    cpus = int(context.setting("spark.task.cpus", "1"))
    gpus = float(context.setting("spark.task.resource.gpu.amount", "0"))
    held = sum(max(math.ceil(one.cpus / cpus), math.ceil(one.gpus / gpus) if gpus else 0) for one in stages)
    running = sum(one.tasks for one in stages if one.description == description)
    return SlotCounts(running, context.places(None), held, stages, context.grows)


def slots_busy(spark: SparkSession) -> tuple[Busy, ...]:
    """Return the stages that run tasks now, with their jobs' descriptions."""
    return context_of(spark).busy()


def check_slots(
    spark: SparkSession,
    need: int,
    feeding: bool,
    *,
    cpus: int = 1,
    gpus: int = 0,
    profile: ResourceProfile | None = None,
    exchanging: bool = False,
) -> Slots:
    """Refuse a cluster for which Spark has too few free slots.

    Parameters
    ----------
    need : int
        Number of nodes, each of which needs a slot.
    feeding : bool
        Whether one more slot is needed for the tasks that feed the nodes.
    exchanging : bool, optional
        Whether one more slot is needed for the tasks that fetch the nodes' messages.
    cpus, gpus, profile
        CPUs and GPUs of a node, and the profile that :func:`resource_profile` made for them.

    Returns
    -------
    Slots
        The counted slots, for the plan that the user sees.

    Raises
    ------
    PlanError
        If slots are missing. The message has the numbers, the users of the busy slots, and what to change.
    """
    context, wanted = context_of(spark), need + feeding + exchanging
    nothing = threading.Event()  # Spark has no event for a task that has ended, so poll
    while True:
        stages = context.busy()
        leave = still_ending(stages)
        stages += still_pending(stages)
        # Where Spark starts executors for each profile, nodes with GPUs and others do not take each other's.
        beside = [stage for stage in stages if bool(stage.gpus) == bool(gpus) or not context.grows]
        held = [math.ceil(stage.gpus / gpus) if gpus else math.ceil(stage.cpus / cpus) for stage in beside]
        total = most_slots(spark, profile, cpus=cpus, gpus=gpus, at_least=wanted + sum(held))
        slots = Slots(total, sum(held), stages)
        if slots.free >= wanted:
            return slots
        if not leave:
            others = [" and at least 1 for feeding"] * feeding + [", and 1 for the relay"] * exchanging
            raise PlanError(_too_few(context, slots, need, others, gpus))
        nothing.wait(_POLL_SECONDS)


def _too_few(context: Context, slots: Slots, need: int, beside: list[str], gpus: int) -> str:
    wanted = need + len(beside)
    purpose = counted(need, "node") + (f" with {counted(gpus, 'GPU')} each" if gpus else "") + "".join(beside)
    cores = context.executor_cores
    size = "at most " if context.grows else ""
    size += counted(context.most_executors if context.grows else context.executors(), "executor")
    size += f" x {cores} cores" if cores else ""
    size += f" x {counted(context.gpus, 'GPU')}" if gpus and context.gpus else ""
    has = context.master if context.is_local else f"{context.master}, {size}"
    text = [f"needs {wanted} slots ({purpose}); Spark has {slots.total} ({has}"]
    text.append(f", spark.task.cpus={context.setting('spark.task.cpus', '1')})")
    text += [f"; running: {counted(stage.tasks, 'task')} of '{stage.description}'" for stage in slots.stages]
    with context.executors_to_come() as ask:
        missing = _why_in_vain(context) or ask().text
        text.append(f". {missing}" if missing else "")
    remedies = ["stop what runs" if slots.busy and slots.total >= wanted else ""]
    fits = slots.free - len(beside)
    remedies.append(f"ask for {counted(fits, 'node')}" if fits > 0 else "")
    executors = "dynamicAllocation.maxExecutors" if context.grows else "executor.instances"
    more = f"local[{wanted + slots.busy}]" if context.is_local else f"spark.{executors} or spark.executor.cores"
    more += f" or {_GPU}.amount" if gpus and context.gpus else ""
    remedies.append("see to it that Kubernetes can run these pods" if missing else f"start Spark with more: {more}")
    return "".join(text) + ". To fix this: " + ", or ".join(filter(None, remedies))


def _kept_executors(context: Context) -> int:
    """Return the number of executors that dynamic allocation never removes."""
    return int(context.setting("spark.dynamicAllocation.minExecutors", "0"))


def check_local_python(spark: SparkSession) -> None:
    """Refuse an executors' interpreter that cannot run a node, if the executors are on this machine.

    On a cluster only the executors can check this. They do so when a node reserves.

    Raises
    ------
    PlanError
        If the interpreter does not run, has another version than this one, or lacks a module.
    """
    python = context_of(spark).python
    if python in ("", sys.executable):
        return
    command = [python, "-c", _WHAT_IT_HAS, *_NODE_NEEDS]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise PlanError(f"the executors' Python, {python}, does not run: {error}. {_SET_PYTHON}") from None
    version, missing = told[0], told[1:]
    if version != f"{sys.version_info.major}.{sys.version_info.minor}":
        raise PlanError(
            f"the executors' Python, {python}, is {version}, not "
            f"{sys.version_info.major}.{sys.version_info.minor} as here. {_SET_PYTHON}"
        )
    if missing:
        raise PlanError(f"the executors' Python, {python}, has no {', '.join(missing)}. {_SET_PYTHON}")


def check_dynamic_allocation(spark: SparkSession, need: int, *, barrier: bool = False) -> None:
    """Refuse dynamic allocation over Spark Connect, unless the executors that it always keeps have ``need`` slots.

    A client does not see which tasks run, and whether more executors may come. ``barrier`` tasks are refused anyway:
    Spark runs none under dynamic allocation (SPARK-24942).
    """
    context = context_of(spark)
    if not context.has_dynamic_allocation:
        return
    if barrier:
        raise PlanError(
            "barrier=True: Spark runs no barrier tasks under spark.dynamicAllocation.enabled=true. Start it without"
        )
    if context.grows:
        return
    per_executor = max((context.executor_cores or 1) // int(context.setting("spark.task.cpus", "1")), 1)
    executors = math.ceil(need / per_executor)
    if _kept_executors(context) < executors:
        kept = f"{_kept_executors(context)} executors for certain"
        raise PlanError(
            f"spark.dynamicAllocation.enabled=true keeps {kept}; {need} slots need {executors} of {per_executor}. "
            f"Start Spark with spark.dynamicAllocation.minExecutors={executors}, or without dynamic allocation: "
            f"spark.dynamicAllocation.enabled=false, spark.executor.instances={executors}"
        )
