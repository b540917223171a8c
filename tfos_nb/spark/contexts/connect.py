"""Context for Spark Connect: this process is a client, and Spark's driver is on the server.

The protocol returns the server's settings, runs actions, and cancels them by tag. It does not list the running stages
or the executors. So the number of slots is taken from the number of partitions that Spark would give a range. The plan
of the range shows it without being run. Only the nodes of this process's own clusters count as busy, since jobs of
other clients are not visible.

References
----------
Spark's ``SparkConnectService`` (``spark/connect/base.proto``): AnalyzePlan, ExecutePlan, Config, Interrupt.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.processes import address_towards
from tfos_nb.runtime.models.model_cache import Inline
from tfos_nb.spark.contexts.base import Context
from tfos_nb.spark.contexts.pending_slots import Busy, held

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

__all__ = ["Connect", "default_session"]

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_ANSWER_SECONDS = 4.0
_ROWS = 1 << 40  # more rows than any Spark has cores: a range of fewer rows may get fewer partitions
_PARTITIONS = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")
_MAX_MODEL_BYTES = 100 << 20
"""Bytes that a task may carry: the server accepts messages up to 128 MiB
(``spark.connect.grpc.maxInboundMessageSize``).
"""


def default_session() -> SparkSession | None:
    """Return this process's Spark Connect session, whichever thread made it; None if there is none."""
    from pyspark.sql.connect.session import SparkSession as Session

    session = Session.getActiveSession() or Session._get_default_session()
    return session if session is not None and not session.is_stopped else None  # type: ignore[return-value]


class Connect(Context):
    """Context of a Spark Connect session.

    Parameters
    ----------
    spark : pyspark.sql.connect.session.SparkSession
        The session.
    """

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self._asking: Thread | None = None

    @property
    def key(self) -> Hashable:
        return self.setting("spark.app.id")

    @property
    def stopped(self) -> bool:
        return bool(self.spark.is_stopped)

    @property
    def name(self) -> str:
        return self.setting("spark.app.name")

    @property
    def ui(self) -> str:
        return ""

    def settings(self) -> dict[str, str]:
        settings: Any = self.spark.conf.getAll  # a property in Spark 4, a method in 3.5
        return dict(settings() if callable(settings) else settings)

    @cached_property
    def _told(self) -> dict[str, str]:
        """The configuration, fetched once, because each request for a setting would be a call to the server."""
        return self.settings()

    def setting(self, name: str, default: str = "") -> str:
        return self._told.get(name, default)

    @property
    def python(self) -> str:
        return ""

    def cores(self) -> int:
        stated = self._stated_cores()
        if stated:
            return stated
        plan = self.spark.range(_ROWS)._explain_string()
        match = re.search(r"\bRange \(.*?splits=(\d+)\)", plan)
        if match is None:
            raise PlanError(
                f"the number of cores of Spark Connect's server cannot be read from its plan of a range, got {plan}; "
                "set spark.default.parallelism, spark.executor.instances and spark.executor.cores for the server"
            )
        return int(match[1])

    def _stated_cores(self) -> int:
        """Return the cores by the settings, if a setting fixes the number of a range's partitions; else 0."""
        if not any(self.setting(name) for name in _PARTITIONS):
            return 0
        cluster = self.local_cluster
        if cluster:
            return cluster[0] * cluster[1]
        instances, each = (int(self.setting(f"spark.executor.{name}", "0")) for name in ("instances", "cores"))
        return instances * each or int(self.setting("spark.cores.max", "0"))

    def executors(self) -> int:
        each = self.executor_cores
        return max(self.cores() // each, 1) if each else 1

    def places(self, profile: ResourceProfile | None) -> int:
        cpus, gpus = self._task(profile)
        cores = self.cores()
        each = self.executor_cores or cores
        at_once = each // cpus
        if gpus:
            at_once = min(at_once, int(self.gpus / gpus))
        return max(cores // each, 1) * at_once

    def _task(self, profile: ResourceProfile | None) -> tuple[int, float]:
        """Return the CPUs and GPUs of one task."""
        if profile is None:
            return int(self.setting("spark.task.cpus", "1")), float(self.setting("spark.task.resource.gpu.amount", "0"))
        wanted = profile.taskResources
        cpus, gpus = (wanted[name].amount if name in wanted else 0 for name in ("cpus", "gpu"))
        return max(int(cpus), 1), float(gpus)

    def busy(self) -> tuple[Busy, ...]:
        return held()

    def running(self, tag: str) -> int:
        return 0

    def in_time(self, ask: Callable[[], _Answer]) -> _Answer | None:
        # A client retries a lost server for ten minutes: do not send another query while one is still being retried.
        if self._asking is not None and self._asking.is_alive():
            return None
        answers: list[_Answer] = []
        self._asking = Thread(target=_answer, args=(ask, answers), name="tfos_nb question", daemon=True)
        self._asking.start()
        self._asking.join(_ANSWER_SECONDS)
        return answers[0] if answers else None

    def know(self, profile: ResourceProfile) -> None:
        self._activate()
        assert profile.id is not None, "asking for it has the server make it"

    def _activate(self) -> None:
        """Make the session the active one of this thread, where PySpark looks for it."""
        type(self.spark)._set_default_and_active_session(self.spark)

    def check_threads(self) -> None:
        """Do nothing: a Spark Connect client keeps the tags of each thread separate."""

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return Thread(target=target, name=name, daemon=True)

    def mark(self, tags: tuple[str, ...], description: str) -> None:
        self._activate()
        for tag in tags:
            self.spark.addTag(tag)

    def cancel(self, tag: str) -> None:
        # A client retries a lost server for ten minutes; the end of a cluster does not wait so long.
        asking = Thread(target=self._interrupt, args=(tag,), name=f"tfos_nb interrupt {tag}", daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)

    def _interrupt(self, tag: str) -> None:
        try:
            self.spark.interruptTag(tag)
        except Exception as error:  # noqa: BLE001 - the caller checks whether the job ends
            logger.info("Spark Connect did not interrupt %s: %s", tag, error)

    def partitions(self, description: str) -> int:
        return 0

    def action(self, frame: Any) -> Callable[[], object]:
        collect: Callable[[], object] = frame.collect
        return collect

    def shared(self, content: bytes) -> Any:
        if len(content) > _MAX_MODEL_BYTES:
            raise PlanError(
                f"this model is {len(content) / (1 << 20):.0f} MiB, and over Spark Connect a task carries at most "
                f"{_MAX_MODEL_BYTES >> 20} MiB: save it where the executors can read it, and give its path or URL"
            )
        return Inline(content)

    def _address(self) -> tuple[str, str]:
        host = address_towards(self.spark.client.host, 1)
        if _is_loopback(host):  # the server is on this machine: executors reach this process as they reach the server
            host = self.setting("spark.driver.host") or host
        return host, host


def _answer(ask: Callable[[], _Answer], answers: list[_Answer]) -> None:
    try:
        answers.append(ask())
    except Exception as error:  # noqa: BLE001 - the caller continues without an answer
        logger.info("Spark Connect did not answer: %s", error)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
