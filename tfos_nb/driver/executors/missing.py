"""Why executors do not come for which nodes wait.

Spark asks for executors when nodes' tasks wait (dynamic allocation), and after an executor was lost. Whatever keeps
them from coming, Spark goes on waiting without a word. Of Kubernetes a thread learns the reason::

    Kubernetes: Unschedulable, ErrImagePull, a quota ──every 5 s while nodes are missing──▶ log, error of the rendezvous
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfos_nb.errors import RendezvousTimeout
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.slots import LOOK_SECONDS, ExecutorsToCome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tfos_nb.driver.cluster_controller import ClusterController
    from tfos_nb.driver.outcome import ClusterOutcome

__all__ = ["MissingExecutors"]


class MissingExecutors:
    """Watch one cluster's nodes that have not come, until it is over.

    If what keeps them has to be mended by somebody, the first rendezvous ends at once. A cluster that recovers waits
    for them as it would without this reason: others may be enough. So does one whose nodes all have slots: it is
    another cluster whose executors do not come.

    Parameters
    ----------
    spark : SparkSession
        The session whose executors they are.
    controller : ClusterController
        Knows the missing nodes.
    outcome : ClusterOutcome
        Ends the wait.
    without_slot : callable
        Returns the number of missing nodes whose tasks Spark has not started.
    """

    def __init__(
        self,
        spark: SparkSession,
        controller: ClusterController,
        outcome: ClusterOutcome,
        without_slot: Callable[[], int],
    ) -> None:
        self._context = context_of(spark)
        self._controller, self._outcome, self._without_slot = controller, outcome, without_slot
        self._why = ""

    def start(self) -> None:
        """Watch from now on, if executors are pods."""
        if self._context.has_pods:
            threading.Thread(target=self._run, name="tfos_nb missing executors", daemon=True).start()

    def why(self) -> str:
        """Return what Kubernetes or else Spark says of the executors that are missing; empty if they say nothing."""
        if not self._controller.missing:
            return ""
        return self._why or self._why_none_is_free()

    def _why_none_is_free(self) -> str:
        if not (waiting := self._without_slot()):
            return ""
        tasks = f"Spark has not started {waiting} of their tasks" if waiting > 1 else "Spark has not started its task"
        if self._context.grows:
            return (
                f"{tasks}: dynamic allocation has asked for an executor, and none came. See in the cluster manager "
                "why, and in Spark's UI what uses the session's other executors"
            )
        return (
            f"{tasks}: no slot is free. See in Spark's UI what uses the session's executors, and whether one was lost"
        )

    def _run(self) -> None:
        while not self._outcome.over.wait(LOOK_SECONDS):
            if self._controller.missing:
                self._until_they_come()

    def _until_they_come(self) -> None:
        with self._context.executors_to_come() as ask:
            executors, self._why = ExecutorsToCome(ask), ""
            while self._controller.missing and not self._outcome.over.wait(LOOK_SECONDS):
                self._why = executors.look().text
                if executors.in_vain and self._controller.rendezvous == 1 and self._without_slot():
                    missing = self._controller.missing
                    self._outcome.abort(RendezvousTimeout(f"{', '.join(missing)} cannot start. {self._why}", missing))
                    return
            self._why = ""
