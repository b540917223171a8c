"""More workers, or fewer, while a cluster runs: :meth:`tfos_nb.Cluster.scale`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tfos_nb.cluster_view import ClusterView
from tfos_nb.driver.launching import survey
from tfos_nb.driver.node_jobs import NodeJobs
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError
from tfos_nb.interrupts import interruptible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Scaling"]


class Scaling(ClusterView):
    """The part of :class:`tfos_nb.Cluster` that changes how many workers there are."""

    _spark: SparkSession
    _settings: Settings
    _nodes: NodeJobs

    def scale(self, *, workers: int) -> None:
        """Have more workers, or fewer. Returns when Spark was asked for them; the cluster trains on meanwhile.

        A coordinator (:meth:`~tfos_nb.runtime.program.context.NodeContext.coordinator_dataset`) gives a new worker
        steps from its next pass on, and nothing else stops; what is left of a :meth:`train` is shared out anew. In any
        other cluster, and where there are to be fewer workers, the nodes are gathered anew when a state has been saved
        from which all can go on: Keras' ``fit`` keeps one after each epoch, a loop of one's own by ``ctx.checkpoint``.
        The workers with the highest numbers go.

        Parameters
        ----------
        workers : int
            How many there are to be.

        Raises
        ------
        PlanError
            If there can be no such cluster, Spark has too few free slots, or no restart is left: the cluster needs
            ``restarts=1`` or more for its nodes to be gathered anew.
        ClusterClosed
            If the cluster has ended.

        Examples
        --------
        >>> cluster = launch(main, workers=2, restarts=1)  # doctest: +SKIP
        >>> cluster.scale(workers=3)  # doctest: +SKIP
        """
        self._refuse_if_over("scale")
        plan = replace(self.plan, workers=workers)
        self._settings.check(plan)
        if self._roster.restarts_left <= 0:
            left = "none is left" if self._settings.restarts else "launch the cluster with restarts=1 or more"
            raise PlanError(f"scale(workers={workers}): nodes are gathered anew, which takes restarts; {left}")
        with interruptible():
            found = survey(self._spark, plan, more) if (more := self._roster.lacking(plan)) else None
        self._roster.scale(plan)
        if found is not None:
            self._nodes.submit_more(plan, found)
