"""Thread that learns from Spark which executors are about to end while nodes run on them, and why they have ended.

::

    Spark: a worker, a pod or an executor is decommissioned ──▶ its scheduler ──once a second──▶ ExecutorsLeave

Spark decommissions executors where ``spark.decommission.enabled`` is set: at the signal ``PWR`` to a standalone worker
or an executor, when Kubernetes ends a pod, and when YARN decommissions a host. It reports none of them to Python.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tfos_nb.spark.contexts import context_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DecommissionWatch", "Executors"]

logger = logging.getLogger(__name__)

_EVERY = 1.0  # seconds between two questions
_SECONDS_AN_EXECUTOR = 0.02  # with many, one asks less often: each is a question of its own


class Executors(Protocol):
    """Watched nodes; :class:`tfos_nb.driver.cluster_controller.ClusterController` implements it."""

    def executors(self) -> frozenset[str]:
        """Return Spark's names of the executors on which nodes are."""

    def executors_leave(self, executors: frozenset[str]) -> None:
        """Have the nodes on these executors leave them."""


class DecommissionWatch:
    """Watch the executors of one cluster until it is over.

    Parameters
    ----------
    spark : SparkSession
        The session whose executors they are.
    executors : Executors
        The cluster's.
    over : threading.Event
        Set when the cluster has ended.
    """

    def __init__(self, spark: SparkSession, executors: Executors, over: threading.Event) -> None:
        self._context = context_of(spark)
        self._executors, self._over = executors, over
        self._known: frozenset[str] = frozenset()
        self._reasons: dict[str, str] = {}

    def start(self) -> None:
        """Watch from now on, if Spark announces the ends of executors."""
        if self._context.announces_ends:
            threading.Thread(target=self._run, name="tfos_nb decommissioning", daemon=True).start()

    def why_lost(self, executor: str) -> str | None:
        """Return why an executor has ended, as :meth:`tfos_nb.spark.contexts.base.Context.why_lost`."""
        # A pod that Kubernetes has announced to end may be gone by now, and its reason with it.
        return self._reasons.get(executor) or self._context.why_lost(executor)

    def _run(self) -> None:
        pause = _EVERY
        while not self._over.wait(pause):
            names = self._executors.executors() - self._known
            pause = max(_EVERY, _SECONDS_AN_EXECUTOR * len(names))
            ending = self._context.in_time(partial(self._context.ending, names))
            if ending:
                for name in sorted(ending):
                    reason = self._reasons[name] = self._context.why_lost(name) or ""
                    logger.warning("Spark decommissions executor %s%s", name, f": {reason}" if reason else "")
                self._known |= ending
                self._executors.executors_leave(ending)
