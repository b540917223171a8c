"""The steps that a coordinator gives out to the workers, each over a dataset of the worker's own."""

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

_ELSEWHERE = 0.1  # seconds between two looks at a step that another worker has to do
_REST = 0.05  # seconds that workers without rows rest for between them, while others still have some
_IN_FLIGHT = 4  # steps given out for each worker before one's result is waited for


class CoordinatedDataset:
    """A dataset that every worker has its own of, and the steps over it that a coordinator gives out.

    Made by ``ctx.coordinator_dataset``. It is a dataset function too: tf_keras takes it as
    ``DatasetCreator(ctx.coordinator_dataset(…, repeat=True))``.

    Parameters
    ----------
    coordinator : tf.distribute.coordinator.ClusterCoordinator
        The chief's.
    function : callable
        Returns a ``tf.data.Dataset``; it is traced here and run on each worker.
    take_in : callable, optional
        Has the coordinator give steps to workers that have come late; returns their numbers.
    turns : iterator of int, optional
        Numbers the passes over rows that Spark feeds, of all such datasets of the coordinator.
    through : callable, optional
        Is told each worker's number and that of the pass that it has been through.

    Raises
    ------
    PlanError
        If the function does not make its dataset itself: one that was made on the chief cannot travel to the workers.
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
        self._made_for = 0  # so many workers
        self._turns = turns
        self._through = through
        self._turn = 0  # the number of the pass that was begun last; 0 if Spark feeds none
        self._datasets: Any = None
        self._element_spec = _element_spec(function)

    def __call__(self, input_context: Any = None) -> tf.data.Dataset:
        """Build one worker's dataset."""
        return self._function()

    def __iter__(self) -> Any:
        """Return the workers' iterators, as one value for ``coordinator.schedule``: each begins a pass.

        Workers that were added to the cluster take part from now on.
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
        """Have rows that are fed from now on shared with workers that have come late."""
        if not late or self._through is None:
            return
        for worker in late:  # as if it had been through all before, in which it had no share
            self._through(worker, max(0, self._turn - 1))
        if self._turns is not None:
            for worker in range(self._workers - len(late)):
                cut(worker)

    @property
    def _workers(self) -> int:
        return len(self._coordinator._cluster.workers)

    def steps(self, step: Callable[..., Any]) -> Iterator[Any]:
        """Have the workers go through a pass, each through its own rows, and give each step's result when it is done.

        The pass is over when every worker has come to its end: all rows of all workers have been through ``step`` then,
        each once. A worker that is done before others takes no more steps.

        Parameters
        ----------
        step : callable
            Takes an element (a tuple as its parts) and returns tensors, or None. It is made a ``tf.function`` and runs
            on the workers.

        Raises
        ------
        FeedFailed
            If a worker cannot make tensors of a row; the message names the column.

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
        except GeneratorExit:  # the caller has seen enough; what has been given out is still done
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
    """The steps that have been given out, and their results in the order in which they come.

    Each step is waited for in a thread of its own: that of a worker which stands still keeps nobody from the others'.
    """

    def __init__(self, most: int) -> None:
        self.steps = 0
        self._most = most
        self._over = threading.Event()
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        for number in range(most):  # which no exit waits for: who stands still may do so for long
            threading.Thread(target=self._fetch, name=f"tfos_nb step {number}", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether another one may be given out."""
        return self.steps < self._most

    def add(self, step: Any) -> None:
        """Wait for a step that has been given out."""
        self.steps += 1
        self._given.put(step)

    def next_done(self) -> Any:
        """Return the result of whichever step is done next; raise its error."""
        result, error = self._done.get()
        self.steps -= 1
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Wait for no more steps than those that are under way."""
        self._over.set()
        for _ in range(self._most):
            self._given.put(None)

    def _fetch(self) -> None:
        while (step := self._given.get()) is not None:
            try:
                self._done.put((_result_of(step, self._over), None))
            except Exception as error:  # noqa: BLE001 - it is raised where the result is wanted
                self._done.put((None, error))


def _result_of(step: Any, over: threading.Event) -> Any:
    """Fetch a step's result, wherever the step is done; raise what kept it from that when nobody wants it any more.

    A worker that is lost between a step and the copy of its result fails the copy, which TensorFlow makes here if
    somebody waits for it; and then gives the step to another worker, whose result takes the place of the lost one.
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
    """Whether a result was where nobody is any more, or somebody else is, who does not know of it."""
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
            "coordinator_dataset: the function takes a tf.data.Dataset from outside it, which stays on the chief. Make "
            "the dataset inside the function: it runs on each worker"
        )
    return found[0]


def _rest(workers: int) -> Any:
    """Return for how long each of so many workers rests, which have no rows: together they ask no more often."""
    import tensorflow as tf

    return tf.constant(_REST * workers, tf.float32)


def _parts(element: Any) -> tuple[Any, ...]:
    return element if isinstance(element, tuple) else (element,)


@dataclass(frozen=True)
class _Empty:
    """What a step gives for which there are no rows: zeros of the same kind, after a moment's rest."""

    outcome: Any

    def __call__(self, rest: Any) -> Any:
        import tensorflow as tf

        with tf.control_dependencies(idle(rest)):
            return self.filled(tf.nest.map_structure(_zeros, self.outcome) if self.outcome is not None else None)

    @staticmethod
    def filled(result: Any) -> Any:
        """Give a result that can be a branch's: nothing becomes a zero."""
        import tensorflow as tf

        return tf.constant(0) if result is None else result


def _zeros(tensor: Any) -> Any:
    import tensorflow as tf

    return tf.zeros([size or 0 for size in tensor.shape], tensor.dtype)


def _cause(error: Exception) -> Exception:
    """Find our own error in one of TensorFlow's, which holds it as text."""
    found = re.search(r"FeedFailed: (.+)", str(error))
    return FeedFailed(found[1]) if found else error
