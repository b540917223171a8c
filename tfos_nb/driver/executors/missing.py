"""Thread that learns from Kubernetes why executors do not come for which nodes wait.

Spark asks for pods when nodes' tasks wait (dynamic allocation), and after an executor was lost. Whatever keeps such a
pod from running, Spark goes on waiting without a word::

    Kubernetes: Unschedulable, ErrImagePull, a quota ──every 5 s while nodes are missing──▶ log, error of the rendezvous
"""

from __future__ import annotations

import threading
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

    If what keeps all of them has to be mended by somebody, the first rendezvous ends at once. A cluster that recovers
    waits for them as it would without this reason: others may be enough.

    Parameters
    ----------
    spark : SparkSession
        The session whose executors they are.
    controller : ClusterController
        Knows the missing nodes.
    outcome : ClusterOutcome
        Ends the wait.
    """

    def __init__(self, spark: SparkSession, controller: ClusterController, outcome: ClusterOutcome) -> None:
        self._context = context_of(spark)
        self._controller, self._outcome = controller, outcome
        self._why = ""

    def start(self) -> None:
        """Watch from now on, if executors are pods."""
        if self._context.has_pods:
            threading.Thread(target=self._run, name="tfos_nb missing executors", daemon=True).start()

    def why(self) -> str:
        """Return what Kubernetes says of the executors that are missing; empty if none is, or it says nothing."""
        return self._why if self._controller.missing else ""

    def _run(self) -> None:
        while not self._outcome.over.wait(LOOK_SECONDS):
            if self._controller.missing:
                self._until_they_come()

    def _until_they_come(self) -> None:
        with self._context.executors_to_come() as ask:
            executors, self._why = ExecutorsToCome(ask), ""
            while self._controller.missing and not self._outcome.over.wait(LOOK_SECONDS):
                self._why = executors.look().text
                if executors.in_vain and self._controller.rendezvous == 1:
                    missing = self._controller.missing
                    self._outcome.abort(RendezvousTimeout(f"{', '.join(missing)} cannot start. {self._why}", missing))
                    return
