"""How a coordinator goes on with a worker that comes back at another address, and takes in one that comes late.

TensorFlow's ``ClusterCoordinator`` takes a worker back that comes again at its old address: a thread of its own sends
the cluster's definition once more to all, and waits until all have answered. Here that thread waits first, until the
driver has said where the lost worker is now, and writes that into the definition.

A worker that the driver starts while others train is written into the definition too, and gets a thread of the
coordinator's that gives it steps, between two passes: what each worker has of its own (datasets, iterators) is made for
all of them then.

A worker that stands still, or whose host has fallen silent, must not keep the coordinator from the others
(:func:`each_alone`).

While one worker is replaced another may answer that it cannot read what it was asked (:func:`unread`). It lives, and is
asked again; TensorFlow by itself would give up the whole cluster.

The threads and the definition are private to TensorFlow (``WorkerPreemptionHandler`` and ``Worker``, the same in 2.16
to 2.21). Where they are otherwise, a lost worker means a new generation, as a lost chief does.
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

ASKED_AGAIN = 3  # times in a row that a worker is asked what it cannot read; then it is not the connection's fault
_LOOKED_FOR_EVERY = 2.0  # seconds
_STANDS_STILL = 30.0  # seconds after which an answer that takes less than one does not come any more


class Peers:
    """Where this node's peers are, as far as that has changed since it was started."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moved: dict[int, str] = {}
        self._coordinator: Any = None
        self._definition: Any = None

    def moved(self, message: Moved) -> None:
        """Learn where a worker is now."""
        with self._changed:
            self._moved[Node.parse(message.node).index] = message.address
            self._changed.notify_all()

    def followed_by(self, coordinator: Any) -> bool:
        """Have a ``ClusterCoordinator`` go on with workers that move; whether that is possible."""
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
                "a lost worker will end this generation: TensorFlow's coordinator is another one (%r)", error
            )
            return False
        return True

    def take_in(self) -> list[int]:
        """Have the coordinator give steps to workers that have come late, too; return their numbers.

        Where some have come it waits first until no step is under way.
        """
        if self._coordinator is None:
            return []
        workers = _workers_of(self._definition.cluster.job)
        late: dict[int, str] = {}
        with self._changed:
            while (address := self._moved.get(len(workers) + len(late), "")) and _is_there(address):
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
            logger.info("worker:%d has come, and is at %s", index, address)

    def find(self, workers: Any) -> None:
        """Wait until every worker answers, where it was or where it has moved to, and put the new addresses in place.

        One whose network was gone answers where it was. While one is waited for another may go: all are asked again.
        """
        while silent := [index for index in sorted(workers) if not _is_there(workers[index])]:
            for index, address in self._new_places(silent, workers).items():
                workers[index] = address
                logger.info("worker:%d is at %s now", index, address)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have TensorFlow ask the workers for the cluster's definition; end this process if it waits for who is gone.

        TensorFlow asks without a limit, and its question cannot be taken back. A worker that goes while it is asked
        is known to be somewhere else after a while; from a process that is ended a new generation begins.
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
        if not over.wait(_STANDS_STILL):
            logger.error("TensorFlow waits for a worker that was lost while it was asked: a new generation begins")
            os.kill(os.getpid(), signal.SIGKILL)

    def _new_places(self, silent: list[int], workers: Any) -> dict[int, str]:
        """Wait, not for long, until one of these workers has moved; return where those are that have."""

        def moved() -> dict[int, str]:
            known = self._moved
            return {index: known[index] for index in silent if known.get(index, workers[index]) != workers[index]}

        with self._changed:
            return self._changed.wait_for(moved, _LOOKED_FOR_EVERY)


def _workers_of(jobs: Any) -> Any:
    """Return what is said of the workers, by number, in a list of all jobs."""
    return next(job.tasks for job in jobs if job.name == Role.WORKER.value)


def _is_there(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return greets(host.strip("[]"), int(port))


def each_alone() -> None:
    """Have each of a coordinator's threads, one a worker, wait for its own worker alone.

    TensorFlow has them share the default executor between their steps. There lie what is asked of a worker that
    does not answer, if only that it drop a result; and who leaves ``context.executor_scope`` waits for all of it.
    """
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.eager import context, executor

    try:
        worker = cluster_coordinator.Worker
        process = worker._process_queue
    except AttributeError as error:
        logger.warning(
            "a worker that stands still may halt the others: TensorFlow's coordinator is another (%r)", error
        )
        return
    if hasattr(process, "each_alone"):
        return

    @functools.wraps(process)
    def process_alone(self: Any) -> None:
        context.context().executor = own = executor.new_executor(enable_async=False)  # of this thread
        process(self)
        del own  # until here: TensorFlow holds no reference to it

    process_alone.each_alone = True  # type: ignore[attr-defined]
    worker._process_queue = process_alone


@dataclass(frozen=True)
class _Update:
    """TensorFlow's ``update_server_def``, which first finds those that have moved."""

    peers: Peers
    workers: Any
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.peers.find(self.workers)
        with self.peers.watched():
            return self.original(*args, **kwargs)


def unread(error: Exception) -> bool:
    """Whether a worker that lives says that it could not read a request.

    So gRPC's server answers a call that ends without a message, or with one that it cannot make out: INTERNAL, which
    TensorFlow takes for a mistake of the program's.
    """
    import tensorflow as tf

    said = str(error)
    about = "Unable to parse request" in said and "remote target /job:worker" in said
    return isinstance(error, tf.errors.InternalError) and about and "remote target /job:ps" not in said


class _AskedAgain:
    """TensorFlow's ``wait_on_failure``, which has a worker do again what it could not read.

    Nothing of the worker's is made anew, as it would be after a loss: it has its rows still.
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
                logger.warning("%s could not read what it was asked, and is asked again: %s", where, error)
                again()
