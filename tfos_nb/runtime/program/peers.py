"""Let a coordinator continue with a worker that returns at another address, and admit a worker that joins late.

TensorFlow's ``ClusterCoordinator`` readmits a worker that returns at its old address. One of its threads sends the
cluster's definition again to all nodes, and waits until all have answered. Here that thread first waits until the
driver has sent the lost worker's new address, and writes it into the definition.

A worker that the driver starts while others train is added to the definition too, between two passes. The coordinator
gets a thread that gives it steps. Per-worker objects (datasets, iterators) are then made again for all workers.

A worker that hangs, or whose host is silent, must not block the coordinator's work with the others
(:func:`each_alone`).

While one worker is replaced, another one may answer that it cannot read a request (:func:`unread`). It is alive, so the
request is repeated; TensorFlow alone would give up the whole cluster.

The threads and the definition are private to TensorFlow (``WorkerPreemptionHandler`` and ``Worker``, the same in 2.16
to 2.21). If a TensorFlow differs, a lost worker causes a new generation, as a lost chief does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.control.lifecycle import Moved
from tfos_nb.runtime.control.plan import Node, Role
from tfos_nb.runtime.control.processes import greets

__all__ = ["ASKED_AGAIN", "Peers", "each_alone", "unread"]

logger = logging.getLogger(__name__)

ASKED_AGAIN = 3  # repeats of a request that a worker cannot read; after that the connection is not the cause
_LOOKED_FOR_EVERY = 2.0  # seconds
_NO_ANSWER = 30.0  # seconds after which an answer that normally takes less than one will not come


class Peers:
    """Addresses of this node's peers that have changed since it was started."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moved: dict[int, str] = {}
        self._coordinator: Any = None
        self._definition: Any = None

    def moved(self, message: Moved) -> None:
        """Record a worker's new address."""
        with self._changed:
            self._moved[Node.parse(message.node).index] = message.address
            self._changed.notify_all()

    def followed_by(self, coordinator: Any) -> bool:
        """Let a ``ClusterCoordinator`` continue with workers that move; return whether that is possible."""
        from tensorflow.python.eager import context

        try:
            handler = coordinator._cluster.failure_handler
            definition = handler._server_def
            current = context.context()
            current.update_server_def = _Update(self, _workers_of(definition.cluster.job), current.update_server_def)
            handler.wait_on_failure = _AskedAgain(handler.wait_on_failure)
            self._coordinator, self._definition = coordinator, definition
        except (AttributeError, StopIteration) as error:
            logger.warning(
                "a lost worker will end this generation: this TensorFlow's coordinator is not supported (%r)", error
            )
            return False
        return True

    def take_in(self) -> list[int]:
        """Admit workers that joined late to the coordinator; return their numbers.

        If some have joined, it first waits until no step is running.
        """
        if self._coordinator is None:
            return []
        workers = _workers_of(self._definition.cluster.job)
        late: dict[int, str] = {}
        with self._changed:
            while (address := self._moved.get(len(workers) + len(late), "")) and greets(address):
                late[len(workers) + len(late)] = address
        if late:
            self._coordinator.join()
            self._connect(late)
        return list(late)

    def _connect(self, late: Mapping[int, str]) -> None:
        from tensorflow.python.distribute.coordinator.cluster_coordinator import Worker
        from tensorflow.python.eager import context

        cluster, strategy = self._coordinator._cluster, self._coordinator.strategy
        _workers_of(self._definition.cluster.job).update(late)
        filters = _workers_of(self._definition.cluster_device_filters.jobs)
        for index in late:
            filters[index].CopyFrom(filters[0])
        with cluster.failure_handler._cluster_update_lock:
            context.context().update_server_def(self._definition)
        for counts in (strategy, strategy.extended, cluster):
            counts._num_workers += len(late)
        cluster.workers += [Worker(index, f"/job:worker/replica:0/task:{index}", cluster) for index in late]
        for index, address in late.items():
            logger.info("worker:%d has joined, at %s", index, address)

    def find(self, workers: Any) -> None:
        """Wait until every worker answers, at its old or its new address, and record the new addresses.

        A worker whose network failed answers at its old address. Another worker may be lost during the wait, so all are
        checked again.
        """
        while silent := [index for index in sorted(workers) if not greets(workers[index])]:
            for index, address in self._new_places(silent, workers).items():
                workers[index] = address
                logger.info("worker:%d is at %s now", index, address)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch TensorFlow's update of the cluster's definition; end this process if it waits for a lost worker.

        TensorFlow's request to the workers has no time limit and cannot be cancelled. If a worker is lost during it,
        the driver reports its new address after a while. The end of this process then starts a new generation.
        """
        over = threading.Event()
        with self._changed:
            before = dict(self._moved)
        threading.Thread(target=self._watch, args=(before, over), name="tfos_nb peers", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            with self._changed:
                self._changed.notify_all()

    def _watch(self, before: Mapping[int, str], over: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: over.is_set() or self._moved != before)
        if not over.wait(_NO_ANSWER):
            logger.error("TensorFlow waits for a worker that was lost while it was asked: a new generation begins")
            os.kill(os.getpid(), signal.SIGKILL)

    def _new_places(self, silent: list[int], workers: Any) -> dict[int, str]:
        """Wait a short time until one of these workers has moved; return the new addresses."""

        def moved() -> dict[int, str]:
            known = self._moved
            return {index: known[index] for index in silent if known.get(index, workers[index]) != workers[index]}

        with self._changed:
            return self._changed.wait_for(moved, _LOOKED_FOR_EVERY)


def _workers_of(jobs: Any) -> Any:
    """Return the workers' entries, by number, from a list of all jobs."""
    return next(job.tasks for job in jobs if job.name == Role.WORKER.value)


def each_alone() -> None:
    """Let each thread of a coordinator, one for each worker, wait only for its own worker.

    In TensorFlow the threads share the default executor between their steps. Requests to a worker that does not answer
    stay in that executor, even a request to delete a result. A thread that leaves ``context.executor_scope`` waits for
    all of them.
    """
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.eager import context, executor

    try:
        worker = cluster_coordinator.Worker
        process = worker._process_queue
    except AttributeError as error:
        logger.warning(
            "a worker that hangs may block the others: this TensorFlow's coordinator is not supported (%r)", error
        )
        return
    if hasattr(process, "each_alone"):
        return

    @functools.wraps(process)
    def process_alone(self: Any) -> None:
        context.context().executor = own = executor.new_executor(enable_async=False)  # of this thread
        process(self)
        del own  # kept until here, because TensorFlow holds no reference to it

    process_alone.each_alone = True  # type: ignore[attr-defined]
    worker._process_queue = process_alone


@dataclass(frozen=True)
class _Update:
    """TensorFlow's ``update_server_def``, which first finds the workers that have moved."""

    peers: Peers
    workers: Any
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.peers.find(self.workers)
        with self.peers.watched():
            return self.original(*args, **kwargs)


def unread(error: Exception) -> bool:
    """Return whether a living worker answered that it could not read a request.

    gRPC's server answers INTERNAL to a call that ends without a message, or with one that it cannot parse. TensorFlow
    treats this as an error of the program.
    """
    import tensorflow as tf

    said = str(error)
    about = "Unable to parse request" in said and "remote target /job:worker" in said
    return isinstance(error, tf.errors.InternalError) and about and "remote target /job:ps" not in said


class _AskedAgain:
    """TensorFlow's ``wait_on_failure``, which repeats a request that a worker could not read.

    Unlike after a loss, the worker's objects are not made again, because it still has its rows.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._in_a_row: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(
        self, *args: Any, worker_device_name: str, on_transient_failure_fn: Any = None, **kwargs: Any
    ) -> Iterator[None]:
        again, where = on_transient_failure_fn, worker_device_name
        with self._original(*args, worker_device_name=where, on_transient_failure_fn=again, **kwargs):
            try:
                yield
                self._in_a_row[where] = 0
            except Exception as error:
                if again is None or not unread(error) or self._in_a_row[where] >= ASKED_AGAIN:
                    raise
                self._in_a_row[where] += 1
                logger.warning("%s could not read a request, which is repeated: %s", where, error)
                again()
