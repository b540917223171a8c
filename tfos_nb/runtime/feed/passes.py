"""The rows of a pass on one worker, and how they are divided into the steps that all workers do together.

:class:`Pass` and :class:`Shares` say what comes: the rows, and how many each worker has. :class:`Cut` and
:class:`Division` say what is asked: by the program, and by its strategy. :mod:`tfos_nb.runtime.datasets.batching` cuts
the one by the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tfos_nb.runtime.feed.messages import PassPosition
from tfos_nb.runtime.feed.pass_record import PassRecord

__all__ = ["Cut", "Division", "Pass", "Readers", "Shares"]


@dataclass(frozen=True)
class Shares:
    """Numbers of rows that the workers have in a pass.

    Parameters
    ----------
    own : int
        Rows of this worker.
    total : int
        Rows of all workers.
    most : int
        Rows of the worker that has the most.
    """

    own: int
    total: int
    most: int


class Pass(Iterator[pa.RecordBatch]):
    """Iterator over the rows of one pass, as they come.

    Parameters
    ----------
    batches : iterator of pyarrow.RecordBatch
        The rows.
    shares : callable
        Returns the workers' :class:`Shares`, or None while they are not known; called again at the end of the rows.
    record : PassRecord, optional
        Where the order of the rows, and their batches, are recorded.
    number : int, optional
        Number of the pass over all generations, from 1. 0 if it is not known.
    position : PassPosition, optional
        Where an earlier generation has left it.
    gone : int, optional
        How many of the rows before that position do not come.
    """

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        shares: Callable[[], Shares | None],
        record: PassRecord | None = None,
        number: int = 0,
        *,
        position: PassPosition | None = None,
        gone: int = 0,
    ) -> None:
        self.number = number
        self.position = position
        self.gone = gone
        self._batches = batches
        self.shares = shares
        self.record = record or PassRecord()

    def shares_before(self) -> Shares | None:
        """Return the workers' shares as they were known when the pass began first: its batches depend on it."""
        shares = None if self.position is not None and self.position.streamed else self.shares()
        self.record.streamed = shares is None
        return shares

    def seed(self, draw: Callable[[], int]) -> int:
        """Return the seed of the order: that with which the pass began first, else one that is drawn now."""
        known = self.position.seed if self.position is not None else None
        self.record.seed = chosen = known if known is not None else draw()
        return chosen

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        """Leave the pass: none of its remaining rows are wanted."""
        if isinstance(self._batches, Generator):
            self._batches.close()


class Readers:
    """The iterators over a dataset that are alive.

    An iterator reads ahead. With ``repeat()`` it asks for the next pass as soon as the last one has ended, and waits
    for it in a thread of TensorFlow's. When the iterator is gone, that thread must not take the next pass, since its
    rows are for the next reader. And it must end, since TensorFlow waits for it when it frees the iterator.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # see closed()
        self._alive = 0
        self._waiting: list[Callable[[], object]] = []

    def opened(self) -> None:
        """Count a new iterator."""
        with self._lock:
            self._alive += 1

    def closed(self) -> None:
        """Count an iterator no more; if it was the last one, release its threads.

        It does not wait for them: a garbage collection may call it in a thread that holds the rows' lock.
        """
        with self._lock:
            self._alive -= 1
            release = list(self._waiting) if not self._alive else []
        for one in release:
            one()

    @contextlib.contextmanager
    def waiting(self, release: Callable[[], object]) -> Iterator[Callable[[], bool]]:
        """Wait within the block for rows: ``release`` is called when the last iterator is gone.

        The block gets a function that says whether it was the last one. It never was if there was none before: what
        TensorFlow reads without an iterator in Python is not known.
        """
        with self._lock:
            had_some = self._alive > 0
            self._waiting.append(release)
        try:
            yield lambda: had_some and not self._alive
        finally:
            with self._lock:
                self._waiting.remove(release)


@dataclass(frozen=True)
class Division:
    """Division of a step's rows among replicas.

    Parameters
    ----------
    batch : int
        Rows of a step, of all workers together.
    worker, workers : int
        This worker's number, and how many there are.
    replicas : int
        Replicas of each worker, such as its GPUs.
    """

    batch: int
    worker: int = 0
    workers: int = 1
    replicas: int = 1

    def own(self, step: int) -> int:
        """Return this worker's rows of a step of full size, counted from 0; at least 1.

        If the batch cannot be divided evenly, the workers take turns with the extra row. They receive equally many
        rows, so they finish them after the same number of steps.

        Examples
        --------
        >>> [Division(3, worker=0, workers=2).own(step) for step in range(4)]
        [1, 2, 1, 2]
        """
        turn = (self.worker + step) % self.workers
        return max(1, self.batch * (turn + 1) // self.workers - self.batch * turn // self.workers)

    @property
    def most(self) -> int:
        """The most rows that a worker has of a step of full size."""
        return max(1, -(-self.batch // self.workers))


@dataclass
class Cut:
    """Division of a dataset's passes into batches: as its program asked, unless a synchronous strategy divides them.

    Parameters
    ----------
    batch : int
        The dataset's ``batch_size``.
    whole : bool
        Its ``drop_remainder``.
    division : Division or None
        How the strategy divides it. Takes effect at the next iteration.
    passes : int
        Passes that have begun.
    place : tuple of PassRecord and int
        The record of the pass that began last, None before the first one; and how many batches the passes before it
        had, since :meth:`count_from_here`.
    readers : Readers
        The iterators over the dataset.
    """

    batch: int
    whole: bool = False
    division: Division | None = None
    passes: int = 0
    place: tuple[PassRecord | None, int] = (None, 0)  # one value: another thread begins passes
    readers: Readers = field(default_factory=Readers)

    def divide(self, division: Division) -> None:
        """Take the division that a strategy asks for; it takes effect at the next iteration."""
        self.division = division

    def count_from_here(self) -> None:
        """Count batches from the next pass on."""
        self.place = None, 0

    def begin_pass(self, record: PassRecord) -> None:
        """Count a pass that begins, after all batches of the last one."""
        self.passes += 1
        record.replicas = self.division.replicas if self.division is not None else 1
        last, before = self.place
        self.place = record, before + (last.batches if last is not None else 0)
