"""How a coordinator goes on with a worker that was lost and comes back at another address.

TensorFlow's ``ClusterCoordinator`` takes a worker back that comes again at its old address: a thread of its own sends
the cluster's definition once more to all, and waits until all have answered. Here that thread waits first, until the
driver has said where the lost worker is now, and writes that into the definition.

The thread and its definition are private to TensorFlow (``WorkerPreemptionHandler``, the same in 2.16 to 2.21). Where
they are otherwise, a lost worker means a new generation, as a lost chief does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.lifecycle import Moved
from tfos_nb.runtime.plan import Node, Role
from tfos_nb.runtime.process import answers

__all__ = ["Peers"]

logger = logging.getLogger(__name__)


class Peers:
    """Where this node's peers are, as far as that has changed since it was started."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moved: dict[int, str] = {}

    def moved(self, message: Moved) -> None:
        """Learn where a worker is now."""
        with self._changed:
            self._moved[Node.parse(message.node).index] = message.address
            self._changed.notify_all()

    def followed_by(self, coordinator: Any) -> bool:
        """Have a ``ClusterCoordinator`` go on with workers that move; whether that is possible."""
        from tensorflow.python.eager import context

        try:
            definition = coordinator._cluster.failure_handler._server_def
            current = context.context()
            workers = next(job.tasks for job in definition.cluster.job if job.name == Role.WORKER.value)
            current.update_server_def = _Update(self, workers, current.update_server_def)
        except (AttributeError, StopIteration) as error:
            logger.warning(
                "a lost worker will end this generation: TensorFlow's coordinator is another one (%r)", error
            )
            return False
        return True

    def find(self, workers: Any) -> None:
        """Wait until every worker that does not answer has moved, and put its new address in its place."""
        for index in sorted(workers):
            old = workers[index]
            host, _, port = old.rpartition(":")
            if answers(host.strip("[]"), int(port)):
                continue
            with self._changed:
                self._changed.wait_for(lambda at=index, was=old: self._moved.get(at, was) != was)  # type: ignore[misc]
                workers[index] = self._moved[index]
            logger.info("worker:%d is at %s now", index, workers[index])


@dataclass(frozen=True)
class _Update:
    """TensorFlow's ``update_server_def``, which first finds those that have moved."""

    peers: Peers
    workers: Any
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.peers.find(self.workers)
        return self.original(*args, **kwargs)
