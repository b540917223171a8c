"""TensorFlow's own cluster on this node: strategies, servers, the coordinator and its datasets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import Role
from tfos_nb.runtime.program.peers import each_alone
from tfos_nb.runtime.program.strategies import ClusterTask, mesh

if TYPE_CHECKING:
    from tfos_nb.runtime.feed.row_queue import RowQueue
    from tfos_nb.runtime.program.coordinator_steps import CoordinatedDataset

__all__ = ["CoordinatorCalls", "TensorFlowCluster"]


@dataclass(frozen=True)
class CoordinatorCalls:
    """Callbacks of a program that serves or coordinates into its node's process.

    Attributes
    ----------
    coordinating : callable
        Called before TensorFlow waits for the other nodes' servers. The driver knows whether they will start.
    coordinated : callable
        Called with the coordinator. Returns a callback for finished passes, which takes the numbers of a worker and of
        a pass.
    late : callable
        Admits the workers that joined since the last call, and returns their numbers.
    serving : callable
        Called when this node's server runs.
    """

    coordinating: Callable[[], object]
    coordinated: Callable[[Any], Callable[[int, int], object]]
    late: Callable[[], list[int]]
    serving: Callable[[], object]


class TensorFlowCluster:
    """TensorFlow's objects for ``ctx``, configured for this cluster.

    Parameters
    ----------
    task : ClusterTask
        This node's place.
    rows : RowQueue
        Its rows, which a worker reads for the coordinator.
    stopping : threading.Event
        Set when the user has asked the cluster to stop.
    calls : CoordinatorCalls
        Callbacks into the node's process.
    """

    def __init__(self, task: ClusterTask, rows: RowQueue, stopping: threading.Event, calls: CoordinatorCalls) -> None:
        self.task = task
        self._rows = rows
        self._stopping = stopping
        self._calls = calls
        self._coordinator: Any = None
        self._through: Callable[[int, int], object] | None = None  # the coordinator's callback for finished passes
        self._turns = itertools.count(1)  # numbers of passes over rows that Spark feeds, for all its datasets

    def strategy(self, kind: str, options: Mapping[str, Any]) -> Any:
        """Return the strategy of a kind. Each call with ``async`` returns the same one, the coordinator's."""
        meant = self.task.kind_of(kind)
        if meant == "async":
            return self.coordinator(options).strategy
        return self.task.strategy(meant, options)

    def coordinator(self, options: Mapping[str, Any]) -> Any:
        """Return TensorFlow's coordinator. The first call creates it."""
        self.task.kind_of("async")
        if self._coordinator is None:
            self._coordinator = self._coordinate(options)
        return self._coordinator

    def _coordinate(self, options: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        self._calls.coordinating()  # TensorFlow would wait forever for a missing server; the driver would not
        each_alone()
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self.task.strategy("async", options))
        self._through = self._calls.coordinated(coordinator)
        return coordinator

    def coordinator_dataset(
        self, batch_size: int | Callable[[], Any], repeat: bool, options: Mapping[str, Any]
    ) -> CoordinatedDataset:
        """Return a dataset of the workers' rows, or of those that a user's function makes on each worker."""
        from tfos_nb.runtime.datasets.dataset import DatasetOptions
        from tfos_nb.runtime.program.coordinator import FedDataset, fed_columns
        from tfos_nb.runtime.program.coordinator_steps import CoordinatedDataset

        coordinator = self.coordinator({})
        if callable(batch_size):
            if options or repeat:
                raise PlanError(
                    f"{', '.join(options) or 'repeat'} applies only to rows from Spark: do it in the dataset function"
                )
            return CoordinatedDataset(coordinator, batch_size, self._calls.late, None, self._through)
        unknown = [name for name in ("class_weight", "sparse") if options.get(name)]
        if unknown:
            raise PlanError(f"coordinator_dataset does not support {', '.join(unknown)}: apply it in the step function")
        chosen = DatasetOptions(batch_size, **options)
        self._rows.ask()  # on behalf of the workers, which do not know the restored state
        function = FedDataset(chosen, fed_columns(chosen, self._stopping), repeat)
        return CoordinatedDataset(coordinator, function, self._calls.late, self._turns, self._through)

    def serve(self, protocol: str) -> None:
        """Run TensorFlow's server for the other nodes, and do not return."""
        from tfos_nb.runtime.program.coordinator import LocalFeed

        node = self.task.node
        rows = LocalFeed(self._rows, node.index, self._stopping)  # TensorFlow has only a weak reference to it
        if node.role is Role.WORKER:
            rows.register()
        server = self.task.server(protocol)
        self._calls.serving()
        server.join()

    def connect(self, protocol: str) -> list[str]:
        """Make the devices of the serving nodes usable by name here; return the names of all devices."""
        self._calls.coordinating()
        return self.task.connect(protocol)

    def mesh(self, device_type: str | None, dimensions: dict[str, int]) -> Any:
        """Return a DTensor mesh over the devices of all nodes that train."""
        return mesh(self.task, dimensions, device_type or ("GPU" if self.task.gpus else "CPU"))
