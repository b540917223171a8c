"""Know which rows of a pass are in its first batches, also if the rows were shuffled.

::

    rows as they come ──came()──▶ a window that is shuffled ──given_out()──▶ rows in order ──cut()──▶ batches
    positions 0, 1, 2 …                                                                       rows_after(), first()

A position counts the rows of a node's pass in the order in which they come. Without ``shuffle=``, the first rows that
are given out are those at the first positions. With it, some rows at earlier positions still wait, or are in a later
batch, when a batch has been trained on. A state that is saved at that moment includes all positions but these.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from tfos_nb.runtime.feed.messages import PassPosition

__all__ = ["PassRecord", "Positions"]

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


class PassRecord:
    """Record of one pass of a node.

    TensorFlow's thread, which cuts batches ahead, and the program's thread, which saves states, call it.

    Attributes
    ----------
    steps : int or None
        How many steps the pass has, once this is known.
    batches : int
        How many batches were cut so far.
    replicas : int
        How many batches a step takes.
    streamed : bool
        Whether the pass began before the number of its rows was known, on which its batches depend.
    seed : int or None
        Seed of its order, if the rows are shuffled.
    is_cut_short : bool
        Whether rows of the pass were dropped, as the user stops the cluster: its last batch is not the end of the pass.

    Parameters
    ----------
    skipped : int, optional
        How many of its first batches are in the restored state. They are cut, and not given out. Steps, batches and
        rows count from there.
    are_gone : bool, optional
        Whether the rows of these batches do not come.

    Examples
    --------
    >>> record = PassRecord()
    >>> record.shuffle()
    >>> record.came(6)
    >>> record.given_out(np.array([4, 0, 3, 1, 2, 5]), 3)
    >>> _ = record.cut([2, 1])
    >>> rows = record.rows_after(1)
    >>> rows, record.first(rows)  # the rows at 4 and 0: all before 5, but 1, 2 and 3
    (2, (5, array([1, 2, 3])))
    """

    def __init__(self, skipped: int = 0, are_gone: bool = False) -> None:
        self._lock = threading.Lock()
        self._skipped = self._to_skip = skipped
        self._are_gone = are_gone
        self._skipped_rows = 0  # those of them that have come, and were cut so far
        self._asked = 0  # batches of which rows_after() has told the rows
        self._sizes: deque[int] = deque()  # of the batches after the first `_batches`
        self._batches = self._rows = 0
        self._came = 0
        self._order: deque[Positions] | None = None  # given out, after the first `_given` rows
        self._given = 0
        self._window = _none()
        self.steps: int | None = None
        self.batches = 0
        self.replicas = 1
        self.streamed = False
        self.seed: int | None = None
        self.is_cut_short = False

    def shuffle(self) -> None:
        """Expect rows in another order than that in which they come."""
        self._order = deque()

    def came(self, rows: int) -> None:
        """Add the next rows to the window that is shuffled."""
        with self._lock:
            first, self._came = self._came, self._came + rows
            self._window = np.concatenate([self._window, np.arange(first, self._came)])

    def given_out(self, order: Positions, rows: int) -> None:
        """Record that the window was put in this order, and its first rows were given out."""
        with self._lock:
            assert self._order is not None, "the rows are shuffled"
            window = self._window[order]
            self._order.append(window[:rows])
            self._window = window[rows:]

    def cut(self, sizes: Sequence[int], steps: int | None = None) -> tuple[int, int]:
        """Record the sizes of the next batches, and the pass's number of steps once it is known.

        Return how many of these batches are in the restored state, and how many of their rows have come.
        """
        with self._lock:
            skipped = min(self._to_skip, len(sizes))
            self._to_skip -= skipped
            rows = 0 if self._are_gone else sum(sizes[:skipped])
            self._skipped_rows += rows
            self._sizes.extend(sizes[skipped:])
            self.batches += len(sizes) - skipped
            self.steps = None if steps is None or self.is_cut_short else max(0, steps - self._skipped // self.replicas)
            return skipped, rows

    def rows_after(self, batches: int) -> int:
        """Return how many rows the first batches have. The number must not go back.

        If there are fewer batches, all rows: this worker has none in the last steps.
        """
        with self._lock:
            self._asked = max(self._asked, batches)
            while self._batches < batches and self._sizes:
                self._rows += self._sizes.popleft()
                self._batches += 1
            return self._rows

    @property
    def counted(self) -> int:
        """How many batches were counted by :meth:`rows_after`."""
        with self._lock:
            return self._batches

    def position(self, rows: int) -> PassPosition | None:
        """Return how to begin this pass once more behind its first ``rows`` rows.

        None if they are not those of the batches that :meth:`rows_after` was asked for last.
        """
        with self._lock:
            if rows != self._rows or not self._asked or self._to_skip:
                return None
            done = self._skipped + self._asked
            return PassPosition(done, self._skipped_rows + rows, self.streamed, self.seed)

    def end(self) -> None:
        """Record that all batches were cut: this worker may have had none in the last steps."""
        with self._lock:
            self._to_skip = 0

    @property
    def has_more(self) -> bool:
        """Whether batches were cut behind those of :meth:`rows_after`."""
        with self._lock:
            return bool(self._sizes)

    def first(self, rows: int) -> tuple[int, Positions]:
        """Return the positions of the first ``rows`` rows: all below a number, except the listed ones.

        Raises
        ------
        ValueError
            If the rows are shuffled, and fewer were given out, or ``rows`` is less than before; or if not all rows of
            the restored state are skipped yet.
        """
        with self._lock:
            if self._to_skip:
                raise ValueError("the rows of the restored state come first: save after the first step")
            rows += self._skipped_rows
            if self._order is None:
                return rows, _none()
            self._forget(rows)
            others = np.sort(np.concatenate([*self._order, self._window]))
            within = np.flatnonzero(others != np.arange(self._came - len(others), self._came))
            behind = len(others) - (int(within[-1]) + 1 if len(within) else 0)  # all rows from there on are others
            end = self._came - behind
            return end, others[: len(others) - behind]

    def _forget(self, rows: int) -> None:
        assert self._order is not None, "the rows are shuffled"
        delivered = self._given + sum(map(len, self._order))
        if not self._given <= rows <= delivered:
            raise ValueError(
                f"rows must be between {self._given} (in the last state) and {delivered} (delivered in this pass), "
                f"got {rows}"
            )
        while self._given < rows:
            part = self._order.popleft()
            if len(part) > rows - self._given:
                self._order.appendleft(part[rows - self._given :])
                part = part[: rows - self._given]
            self._given += len(part)


def _none() -> Positions:
    return np.empty(0, np.int64)
