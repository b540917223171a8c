"""Schedule a coordinator's steps on the workers, each over the worker's own dataset."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.program.coordinator import cut, idle, take_step
from tfos_nb.runtime.program.peers import ASKED_AGAIN, unread

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["CoordinatedDataset"]

_ELSEWHERE = 0.1  # seconds between two checks of a step that another worker must do
_REST = 0.05  # seconds that all workers without rows rest together, while others still have some
_IN_FLIGHT = 4  # steps scheduled for each worker before waiting for a result


class CoordinatedDataset:
    """Per-worker datasets, and the steps over them that a coordinator schedules.

    Made by ``ctx.coordinator_dataset``. It is also a dataset function: pass it to tf_keras as
    ``DatasetCreator(ctx.coordinator_dataset(…, repeat=True))``.

    Parameters
    ----------
    coordinator : tf.distribute.coordinator.ClusterCoordinator
        The chief's coordinator.
    function : callable
        Returns a ``tf.data.Dataset``. It is traced here and run on each worker.
    take_in : callable, optional
        Admits workers that joined late to the coordinator; returns their numbers.
    turns : iterator of int, optional
        Numbers for the passes over rows that Spark feeds, shared by all such datasets of the coordinator.
    through : callable, optional
        Called when a worker has finished a pass, with the numbers of the worker and of the pass.

    Raises
    ------
    PlanError
        If the function does not make its dataset itself: a dataset made on the chief cannot be sent to the workers.
    """

    def __init__(
        self,
        coordinator: Any,
        function: Callable[..., Any],
        take_in: Callable[[], list[int]] | None = None,
        turns: Iterator[int] | None = None,
        through: Callable[[int, int], object] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._function = function
        self._take_in = take_in
        self._made_for = 0  # number of workers
        self._turns = turns
        self._through = through
        self._turn = 0  # the number of the pass that was begun last; 0 if Spark feeds none
        self._datasets: Any = None
        self._element_spec = _element_spec(function)

    def __call__(self, input_context: Any = None) -> tf.data.Dataset:
        """Build one worker's dataset."""
        return self._function()

    def __iter__(self) -> Any:
        """Begin a pass: return the workers' iterators, as one value for ``coordinator.schedule``.

        Workers that were added to the cluster join from now on.
        """
        late = self._take_in() if self._take_in is not None else []
        if self._made_for != self._workers:
            self._datasets = self._coordinator.create_per_worker_dataset(self._function)
            self._made_for = self._workers
        if self._turns is not None:
            self._turn = next(self._turns)
        self._share_with(late)
        return iter(self._datasets)

    def _share_with(self, late: list[int]) -> None:
        """Share rows that are fed from now on with workers that joined late."""
        if not late or self._through is None:
            return
        for worker in late:  # it counts as finished with all earlier passes, in which it had no share
            self._through(worker, max(0, self._turn - 1))
        if self._turns is not None:
            for worker in range(self._workers - len(late)):
                cut(worker)

    @property
    def _workers(self) -> int:
        return len(self._coordinator._cluster.workers)

    def steps(self, step: Callable[..., Any]) -> Iterator[Any]:
        """Run one pass, each worker over its own rows, and yield each step's result when it is done.

        The pass is over when every worker has finished its rows. Then ``step`` has used every row of every worker once.
        A worker that finishes before the others takes no more steps.

        Parameters
        ----------
        step : callable
            Takes an element, or the parts of an element that is a tuple, and returns tensors or None. It is made a
            ``tf.function`` and runs on the workers.

        Yields
        ------
        object
            The result of one step.

        Raises
        ------
        FeedFailed
            If a worker cannot convert a row to tensors. The message names the column.

        Examples
        --------
        >>> for epoch in range(3):  # doctest: +SKIP
        ...     losses = [float(loss) for loss in rows.steps(train_step)]
        """
        import tensorflow as tf

        once = self._once(step)
        iterators = iter(self)
        turn = tf.constant(self._turn, tf.int64)
        ended: set[int] = set()
        workers, rest = self._workers, _rest(1)
        flight = _Flight(_IN_FLIGHT * workers)
        try:
            while len(ended) < workers or flight.steps:
                while len(ended) < workers and flight.has_room:
                    flight.add(self._coordinator.schedule(once, args=(iterators, turn, rest)))
                more, task, result = flight.next_done()
                if more:
                    yield result
                else:
                    self._note_end(int(task), ended)
                    rest = _rest(len(ended))
        except GeneratorExit:  # the caller has stopped iterating; scheduled steps are still completed
            self._coordinator.join()
            raise
        except Exception as error:
            raise _cause(error) from error
        finally:
            flight.end()

    def _note_end(self, task: int, ended: set[int]) -> None:
        if task not in ended and self._turn and self._through is not None:
            self._through(task, self._turn)
        ended.add(task)

    def _once(self, step: Callable[..., Any]) -> Any:
        import tensorflow as tf

        traced = step if hasattr(step, "get_concrete_function") else tf.function(step)
        with self._coordinator.strategy.scope():
            outcome = traced.get_concrete_function(*_parts(self._element_spec)).structured_outputs
        empty = _Empty(outcome)

        def once(iterator: Any, turn: Any, rest: Any) -> Any:
            task = take_step(turn)
            with tf.control_dependencies([task]):
                element = iterator.get_next_as_optional()
            more = element.has_value()
            result = tf.cond(more, lambda: empty.filled(traced(*_parts(element.get_value()))), lambda: empty(rest))
            return more, task, result

        return tf.function(once)


class _Flight:
    """Scheduled steps, and their results in the order in which they come.

    A separate thread waits for each step, so a worker that hangs does not delay the results of the others.
    """

    def __init__(self, most: int) -> None:
        self.steps = 0
        self._most = most
        self._over = threading.Event()
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        for number in range(most):  # daemon threads, which the exit does not wait for: a worker may hang for long
            threading.Thread(target=self._fetch, name=f"tfos_nb step {number}", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether another step may be scheduled."""
        return self.steps < self._most

    def add(self, step: Any) -> None:
        """Add a scheduled step to wait for."""
        self.steps += 1
        self._given.put(step)

    def next_done(self) -> Any:
        """Return the result of the next step that is done, or raise its error."""
        result, error = self._done.get()
        self.steps -= 1
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Let the threads end after the scheduled steps."""
        self._over.set()
        for _ in range(self._most):
            self._given.put(None)

    def _fetch(self) -> None:
        while (step := self._given.get()) is not None:
            try:
                self._done.put((_result_of(step, self._over), None))
            except Exception as error:  # noqa: BLE001 - it is raised where the result is used
                self._done.put((None, error))


def _result_of(step: Any, over: threading.Event) -> Any:
    """Fetch a step's result, after a loss from another worker; raise any other error at once.

    TensorFlow copies a result in the waiting thread. If the worker is lost after the step but before the copy, the copy
    fails. TensorFlow then gives the step to another worker, whose result replaces the lost one. The loss itself is
    raised only once the caller needs no more results.
    """
    import tensorflow as tf

    asked_again = 0
    while True:
        try:
            return step.fetch()
        except tf.errors.OpError as error:
            asked_again += unread(error)
            done_again = _went_with_its_worker(error) or unread(error)
            if not done_again or asked_again > ASKED_AGAIN or over.wait(_ELSEWHERE):
                raise


def _went_with_its_worker(error: Any) -> bool:
    """Return whether a result was lost with its worker, or the worker's replacement does not have it."""
    import tensorflow as tf

    said = str(error)
    gone = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
    replaced = isinstance(error, tf.errors.InvalidArgumentError) and "Unable to find the relevant tensor" in said
    return (gone or replaced) and "/job:worker" in said and "/job:ps" not in said


def _element_spec(function: Callable[..., Any]) -> Any:
    import tensorflow as tf

    found: list[Any] = []

    def look() -> Any:
        dataset = function()
        found.append(dataset.element_spec)
        return tf.data.experimental.to_variant(dataset)

    traced = tf.function(look).get_concrete_function()
    if any(tensor.dtype is tf.variant for tensor in traced.captured_inputs):
        raise PlanError(
            "coordinator_dataset: the function uses a tf.data.Dataset from outside it, which stays on the chief. Make "
            "the dataset inside the function, which runs on each worker"
        )
    return found[0]


def _rest(workers: int) -> Any:
    """Return how long each of ``workers`` workers without rows rests, so that all together ask at a fixed rate."""
    import tensorflow as tf

    return tf.constant(_REST * workers, tf.float32)


def _parts(element: Any) -> tuple[Any, ...]:
    return element if isinstance(element, tuple) else (element,)


@dataclass(frozen=True)
class _Empty:
    """Result of a step without rows: zeros of the same structure, after a short rest."""

    outcome: Any

    def __call__(self, rest: Any) -> Any:
        import tensorflow as tf

        with tf.control_dependencies(idle(rest)):
            return self.filled(tf.nest.map_structure(_zeros, self.outcome) if self.outcome is not None else None)

    @staticmethod
    def filled(result: Any) -> Any:
        """Return a result that can be the value of a ``tf.cond`` branch: None becomes a zero."""
        import tensorflow as tf

        return tf.constant(0) if result is None else result


def _zeros(tensor: Any) -> Any:
    import tensorflow as tf

    return tf.zeros([size or 0 for size in tensor.shape], tensor.dtype)


def _cause(error: Exception) -> Exception:
    """Return our own error from TensorFlow's, which contains it as text."""
    found = re.search(r"FeedFailed: (.+)", str(error))
    return FeedFailed(found[1]) if found else error
