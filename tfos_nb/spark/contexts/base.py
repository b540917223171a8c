"""Common interface to Spark, for a SparkContext and for Spark Connect."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from tfos_nb.spark.pending_slots import Busy

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

__all__ = ["Context", "is_connect"]

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


def is_connect(value: object) -> bool:
    """Whether a session, or a DataFrame, is of Spark Connect."""
    return "connect" in type(value).__module__.split(".")


class Context(ABC):
    """One Spark application.

    An implementation that cannot know a value returns a substitute; none of these methods raises for that.
    """

    # --- what it is ---

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What tells this application from another one."""

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Whether it was stopped."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called."""

    @property
    @abstractmethod
    def ui(self) -> str:
        """The address of its UI; empty where there is none, or none is told."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Return its whole configuration."""

    @abstractmethod
    def setting(self, name: str, default: str = "") -> str:
        """Return one value of its configuration."""

    @property
    @abstractmethod
    def python(self) -> str:
        """The Python that its executors start, where that can be looked at from here; else empty."""

    @property
    def master(self) -> str:
        """The master's address."""
        return self.setting("spark.master")

    @property
    def is_local(self) -> bool:
        """Whether tasks are threads of the driver's JVM, without executors."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def local_cluster(self) -> tuple[int, int] | None:
        """Executors and cores of each, if the master is ``local-cluster[executors,cores,memory]``."""
        match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", self.master)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def has_dynamic_allocation(self) -> bool:
        """Whether Spark starts and ends executors by itself."""
        enabled = self.setting("spark.dynamicAllocation.enabled", "false").lower() == "true"
        return enabled and not self.is_local  # there Spark ignores it

    @property
    def gpus(self) -> int:
        """GPUs of an executor that Spark shares out."""
        return int(self.setting("spark.executor.resource.gpu.amount", "0"))

    @property
    def executor_cores(self) -> int | None:
        """Cores of an executor; None where Spark gives it all that a machine has."""
        if self.is_local:
            return self.cores()
        stated = int(self.setting("spark.executor.cores", "0"))
        cluster = self.local_cluster
        return stated or (cluster[1] if cluster else None)

    # --- who runs what ---

    @abstractmethod
    def cores(self) -> int:
        """Count the cores of the executors that are there."""

    @abstractmethod
    def executors(self) -> int:
        """Count the executors that are there."""

    @abstractmethod
    def places(self, profile: ResourceProfile | None) -> int:
        """Count the tasks of a profile that can run at once, busy or not."""

    @abstractmethod
    def busy(self) -> tuple[Busy, ...]:
        """List the stages that run tasks now, with their jobs' descriptions."""

    @abstractmethod
    def running(self, tag: str) -> int:
        """Count the tasks that run now of jobs with a tag; 0 where Spark does not tell."""

    @abstractmethod
    def know(self, profile: ResourceProfile) -> None:
        """Tell Spark of a profile: it counts places only of those that it knows."""

    def in_time(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Ask this Spark something; None if it cannot be asked, or its answer does not come soon."""
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - one of py4j's many errors: Spark may have ended, and the caller learns why
            logger.info("Spark did not answer: %s", error)
            return None

    # --- jobs ---

    @abstractmethod
    def check_threads(self) -> None:
        """Refuse a PySpark whose jobs of several threads would get each other's tags."""

    @abstractmethod
    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Make a daemon thread that runs actions as the caller's would."""

    @abstractmethod
    def mark(self, tags: tuple[str, ...], description: str) -> None:
        """Have this thread's actions carry tags, and a description for people."""

    @abstractmethod
    def cancel(self, tag: str) -> None:
        """Cancel the actions that run with a tag. One that has not been submitted yet is not known to Spark."""

    def cancel_stage(self, stage: int, reason: str) -> None:  # noqa: B027 - Spark Connect has no such thing
        """Cancel a stage of anybody's job, where Spark can: the job's action fails with this reason."""

    @abstractmethod
    def partitions(self, description: str) -> int:
        """Count the tasks of the last stage of the job with a description; 0 while Spark does not tell."""

    @abstractmethod
    def action(self, frame: Any) -> Callable[[], object]:
        """Return an action that computes a DataFrame to its end, for what its tasks do."""

    def functions_with(self, variables: Mapping[str, str]) -> AbstractContextManager[None]:
        """Have the Python functions that are made meanwhile carry environment variables, where Spark can do that."""
        return nullcontext()

    @abstractmethod
    def shared(self, content: bytes) -> Any:
        """Return an object for tasks to carry; its ``value`` is the content.

        Raises
        ------
        PlanError
            If it is too large for the way.
        """

    # --- where this process is ---

    def address(self) -> tuple[str, str]:
        """Return by which name the executors reach this process, and at which address it listens."""
        own = os.environ.get("TFOS_SERVER_HOST", "")
        return (own, own) if own else self._address()

    @abstractmethod
    def _address(self) -> tuple[str, str]:
        """Return both where the user has named none."""
