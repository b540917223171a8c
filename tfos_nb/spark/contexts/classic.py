"""Context for a Spark whose driver is this process: its SparkContext, and Scala's SparkContext behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

from py4j.clientserver import ClientServer
from pyspark import InheritableThread, SparkContext

from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts.base import Context
from tfos_nb.spark.contexts.pending_slots import Busy
from tfos_nb.spark.contexts.pods import Missing, explain, pods_of, refusals, why_ended

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.resource import ResourceProfile

__all__ = ["Classic"]

_environment_lock = RLock()
_REASON = 500  # characters of an executor's reason that are shown


class Classic(Context):
    """Context of a classic Spark session.

    Parameters
    ----------
    sc : pyspark.SparkContext
        The session's SparkContext.
    """

    def __init__(self, sc: SparkContext) -> None:
        self.sc = sc

    @property
    def _scala(self) -> JavaObject:
        """Scala's SparkContext, for what Python's SparkContext does not offer."""
        if self.sc._jsc is None:
            raise PlanError("the Spark session was stopped: start a new one, or leave spark=None")
        return self.sc._jsc.sc()

    @property
    def key(self) -> Hashable:
        return str(self.sc.applicationId)

    @property
    def stopped(self) -> bool:
        return self.sc._jsc is None

    @property
    def name(self) -> str:
        return str(self.sc.appName)

    @property
    def ui(self) -> str:
        return self.sc.uiWebUrl or ""

    @property
    def master(self) -> str:
        return str(self.sc.master)

    def settings(self) -> dict[str, str]:
        return dict(self.sc.getConf().getAll())

    def setting(self, name: str, default: str = "") -> str:
        return str(self.sc.getConf().get(name, default))

    @property
    def python(self) -> str:
        return str(self.sc.pythonExec) if self.master.startswith("local") else ""

    def cores(self) -> int:
        return int(self.sc.defaultParallelism)

    @property
    def has_pods(self) -> bool:
        return self.master.startswith("k8s://")

    @property
    def sees_tasks(self) -> bool:
        return True

    def executors(self) -> int:
        return int(self._scala.getExecutorMemoryStatus().size()) - 1  # the driver is one of them

    def places(self, profile: ResourceProfile | None) -> int:
        manager = self._scala.resourceProfileManager()
        java = manager.defaultResourceProfile() if profile is None else profile._java_resource_profile
        return int(self._scala.maxNumConcurrentTasks(java))

    def busy(self) -> tuple[Busy, ...]:
        # Read from the scheduler itself: the data of Spark's UI and of its status tracker may be ten seconds old.
        profiles = self._scala.resourceProfileManager()
        busy = []
        for task_set, tasks, ends in self._running():
            requests = profiles.resourceProfileFromId(task_set.resourceProfileId()).taskResources()
            cpus, gpus = (requests.apply(n).amount() if requests.contains(n) else 0 for n in ("cpus", "gpu"))
            cpus = int(cpus or self.setting("spark.task.cpus", "1"))
            busy.append(
                Busy(self._description(task_set), tasks, tasks * cpus, tasks * gpus, ends, int(task_set.stageId()))
            )
        return tuple(busy)

    def _running(self) -> Iterator[tuple[JavaObject, int, bool]]:
        """Walk the task sets of which tasks run: with how many, and whether they are being killed."""
        for manager in _task_sets(self._scala.taskScheduler().rootPool()):
            if tasks := int(manager.runningTasks()):
                yield manager.taskSet(), tasks, bool(manager.isZombie())

    def _description(self, task_set: JavaObject) -> str:
        """Return the description of these tasks' job; without one, Spark's name for it, the line that started it."""
        described = task_set.properties().getProperty("spark.job.description")
        if described is None:
            stage = self.sc.statusTracker().getStageInfo(task_set.stageId())
            described = "a job without a name" if stage is None else stage.name
        return str(described)

    def running(self, tag: str) -> int:
        return sum(tasks for task_set, tasks, _ in self._running() if tag in _tags(task_set))

    def ending(self, executors: Iterable[str]) -> frozenset[str]:
        scheduler = self._scala.taskScheduler()
        return frozenset(one for one in executors if scheduler.getExecutorDecommissionState(one).isDefined())

    @contextmanager
    def executors_to_come(self) -> Iterator[Callable[[], Missing]]:
        with ExitStack() as opened:
            listening = partial(opened.enter_context, refusals(self.sc))
            newest = self.in_time(listening) if self.has_pods else None
            yield partial(self._why_missing, newest)

    def _why_missing(self, refusal: Callable[[], str] | None) -> Missing:
        if refusal is None:
            return Missing()
        return self.in_time(lambda: explain(pods_of(self.sc), refusal())) or Missing()

    def why_lost(self, executor: str) -> str | None:
        if not self.master.startswith(("k8s://", "yarn")):
            return None
        said = self.in_time(lambda: why_ended(pods_of(self.sc), executor)) if self.has_pods else ""
        return said or self.in_time(partial(self._why_removed, executor)) or ""

    def _why_removed(self, executor: str) -> str:
        """Return the reason with which Spark has removed an executor, if it has one."""
        executors = self._scala.statusStore().executorList(False)
        for one in map(executors.apply, range(executors.size())):
            removed = one.removeReason()
            if one.id() == executor and removed.isDefined():
                reason = " ".join(str(removed.get()).split())[:_REASON]
                return "" if reason.startswith("Executor decommission") else reason
        return ""

    def know(self, profile: ResourceProfile) -> None:
        self._scala.resourceProfileManager().addResourceProfile(profile._java_resource_profile)

    def check_threads(self) -> None:
        if not isinstance(SparkContext._gateway, ClientServer):
            raise PlanError("PYSPARK_PIN_THREAD=false: jobs of several threads would get each other's tags: unset it")

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        # It inherits the calling thread's settings in Spark, such as the scheduler pool, and has its own JVM thread.
        return InheritableThread(target=target, name=name, daemon=True)

    def mark(self, tags: tuple[str, ...], description: str) -> None:
        for tag in tags:
            self.sc.addJobTag(tag)
        self.sc.setJobDescription(description)
        # The call site is sparkmonitor's name of the job, of which it shows only one word.
        self.sc._jsc.setCallSite(description.replace(" ", "_"))

    @contextmanager
    def functions_with(self, variables: Mapping[str, str]) -> Iterator[None]:
        with _environment_lock:
            before = dict(self.sc.environment)
            self.sc.environment.update(variables)
            try:
                yield
            finally:
                self.sc.environment.clear()
                self.sc.environment.update(before)

    def cancel(self, tag: str) -> None:
        self.sc.cancelJobsWithTag(tag)

    def cancel_stage(self, stage: int, reason: str) -> None:
        self._scala.cancelStage(stage, reason)

    def partitions(self, description: str) -> int:
        tracker, store = self.sc.statusTracker(), self._scala.statusStore()
        for number in sorted(tracker.getActiveJobsIds(), reverse=True):
            info, described = tracker.getJobInfo(number), store.job(number).description()
            if info is not None and described.isDefined() and described.get() == description:
                stage = tracker.getStageInfo(max(info.stageIds))
                return int(stage.numTasks) if stage is not None else 0
        return 0

    def action(self, frame: Any) -> Callable[[], object]:
        # Not ``collect``: PySpark would name the job after the line in which it is called.
        count: Callable[[], int] = frame._jdf.toJavaRDD().count
        return count

    def shared(self, content: bytes) -> Any:
        return self.sc.broadcast(content)

    def _address(self) -> tuple[str, str]:
        host = self.setting("spark.driver.host") or "127.0.0.1"
        return host, self.setting("spark.driver.bindAddress") or host


def _task_sets(schedulable: JavaObject) -> Iterator[JavaObject]:
    """Yield the task sets in a scheduler pool, recursively. Task sets are the leaves, which have no queue."""
    queue = schedulable.schedulableQueue()
    if queue is None:
        yield schedulable
        return
    for one in queue.toArray():
        yield from _task_sets(one)


def _tags(task_set: JavaObject) -> list[str]:
    return str(task_set.properties().getProperty("spark.job.tags", "")).split(",")
