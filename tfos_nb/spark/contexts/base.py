"""Common interface to Spark, for a SparkContext and for Spark Connect."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from tfos_nb.spark.contexts.pending_slots import Busy
from tfos_nb.spark.contexts.pods import Missing

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

__all__ = ["UNLIMITED", "Context", "is_connect"]

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
UNLIMITED = 2**31 - 1
"""Spark's own default of the most executors."""


def is_connect(value: object) -> bool:
    """Return whether a session or a DataFrame belongs to Spark Connect."""
    return "connect" in type(value).__module__.split(".")


class Context(ABC):
    """One Spark application.

    An implementation that cannot know a value returns a substitute; none of these methods raises for that.
    """

    # --- identity and settings ---

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Key that identifies this application."""

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Whether the application was stopped."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the application."""

    @property
    @abstractmethod
    def ui(self) -> str:
        """Address of its UI; empty if it has none or the address is not known."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Return the whole configuration."""

    @abstractmethod
    def setting(self, name: str, default: str = "") -> str:
        """Return one value of the configuration, or ``default`` if it is not set."""

    @property
    @abstractmethod
    def python(self) -> str:
        """Path of the executors' Python if it can be checked on this machine; else empty."""

    @property
    def master(self) -> str:
        """The master's URL."""
        return self.setting("spark.master")

    @property
    def is_local(self) -> bool:
        """Whether tasks are threads of the driver's JVM, without executors."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def local_cluster(self) -> tuple[int, int] | None:
        """Number of executors and cores per executor if the master is ``local-cluster[executors,cores,memory]``."""
        match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", self.master)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def has_dynamic_allocation(self) -> bool:
        """Whether Spark starts and ends executors by itself."""
        enabled = self.setting("spark.dynamicAllocation.enabled", "false").lower() == "true"
        return enabled and not self.is_local  # a local Spark ignores the setting

    @property
    def has_pods(self) -> bool:
        """Whether the executors are pods of Kubernetes, of which :meth:`executors_to_come` says why they do not run."""
        return False

    @property
    def sees_tasks(self) -> bool:
        """Whether this process can see which tasks run."""
        return False

    @property
    def grows(self) -> bool:
        """Whether Spark starts executors for tasks that wait, and this process can see which tasks run."""
        return self.sees_tasks and self.has_dynamic_allocation

    @property
    def most_executors(self) -> int:
        """Number of executors of one profile that dynamic allocation may have."""
        return int(self.setting("spark.dynamicAllocation.maxExecutors", str(UNLIMITED)))

    @property
    def announces_ends(self) -> bool:
        """Whether Spark knows of an executor's end before it comes (``spark.decommission.enabled``)."""
        return self.setting("spark.decommission.enabled", "false").lower() == "true" and not self.is_local

    @property
    def gpus(self) -> int:
        """Number of an executor's GPUs that Spark assigns to tasks."""
        return int(self.setting("spark.executor.resource.gpu.amount", "0"))

    @property
    def executor_cores(self) -> int | None:
        """Number of cores of an executor; None if Spark gives it all cores of a machine."""
        if self.is_local:
            return self.cores()
        stated = int(self.setting("spark.executor.cores", "0"))
        cluster = self.local_cluster
        return stated or (cluster[1] if cluster else None)

    # --- executors and running tasks ---

    @abstractmethod
    def cores(self) -> int:
        """Return the number of cores of all registered executors."""

    @abstractmethod
    def executors(self) -> int:
        """Return the number of registered executors."""

    @abstractmethod
    def places(self, profile: ResourceProfile | None) -> int:
        """Return the number of tasks of a profile that can run at the same time, including running ones."""

    @abstractmethod
    def busy(self) -> tuple[Busy, ...]:
        """Return the stages that run tasks now, with their jobs' descriptions."""

    @abstractmethod
    def running(self, tag: str) -> int:
        """Return the number of running tasks of jobs with a tag; 0 if Spark does not report it."""

    @abstractmethod
    def know(self, profile: ResourceProfile) -> None:
        """Register a profile with Spark, which counts places only for registered profiles."""

    def ending(self, executors: Iterable[str]) -> frozenset[str]:
        """Return those of some executors, by their names, that Spark decommissions."""
        return frozenset()

    @contextmanager
    def executors_to_come(self) -> Iterator[Callable[[], Missing]]:
        """Return in a block a function that says why executors do not run, if the cluster manager says that."""
        yield Missing

    def why_lost(self, executor: str) -> str | None:
        """Return why the cluster manager has ended an executor, in its own words; empty if it does not say that yet.

        None is the answer of a cluster manager that never says it.
        """
        return None

    def in_time(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Call ``ask``, a query to Spark, and return its answer; None if it fails or takes too long."""
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - one of py4j's many errors: Spark may have ended, and the caller learns why
            logger.info("Spark did not answer: %s", error)
            return None

    # --- jobs ---

    @abstractmethod
    def check_threads(self) -> None:
        """Refuse a PySpark in which the jobs of several threads would get each other's tags."""

    @abstractmethod
    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Return a daemon thread that runs actions with the Spark settings of the calling thread."""

    @abstractmethod
    def mark(self, tags: tuple[str, ...], description: str) -> None:
        """Set the tags of this thread's actions, and their description in the UI."""

    @abstractmethod
    def cancel(self, tag: str) -> None:
        """Cancel the running actions with a tag. Spark does not know an action that is not submitted yet."""

    def cancel_stage(self, stage: int, reason: str) -> None:  # noqa: B027 - Spark Connect has no such thing
        """Cancel a stage of any job, if Spark supports it. The job's action fails with this reason."""

    @abstractmethod
    def partitions(self, description: str) -> int:
        """Return the number of tasks in the last stage of the job with a description; 0 if Spark does not report it."""

    @abstractmethod
    def action(self, frame: Any) -> Callable[[], object]:
        """Return an action that computes a whole DataFrame for the effects of its tasks."""

    def functions_with(self, variables: Mapping[str, str]) -> AbstractContextManager[None]:
        """Set environment variables for the Python functions that are made in the block, if Spark supports it."""
        return nullcontext()

    @abstractmethod
    def shared(self, content: bytes) -> Any:
        """Return an object that tasks can carry, whose ``value`` is ``content``.

        Raises
        ------
        PlanError
            If ``content`` is too large to be sent to the tasks.
        """

    # --- this process's address ---

    def address(self) -> tuple[str, str]:
        """Return the host name by which the executors reach this process, and the address on which it listens."""
        own = os.environ.get("TFOS_SERVER_HOST", "")
        return (own, own) if own else self._address()

    @abstractmethod
    def _address(self) -> tuple[str, str]:
        """Return the default of :meth:`address`, for a user who has set no host."""
