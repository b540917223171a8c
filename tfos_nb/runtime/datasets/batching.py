"""Cut a worker's rows into batches, so that all workers do the same number of steps in a pass.

Workers of a synchronous strategy compute each step together. A worker that runs out of rows before the others would
join their steps with empty batches. So the workers agree on the number of steps, and each cuts its rows into that many
batches of nearly equal size.

They need no message to agree: the number follows from the workers' row counts in the pass (:class:`Shares`), which all
of them receive. When the rows of a pass are fed for the first time, the counts are known only at the end of the feed.
Until then each worker cuts batches of full size, and holds back the rows of two batches. At the end it computes how
many batches the others may have cut, and cuts the held rows into the remaining batches.
"""

from __future__ import annotations

from collections import deque

from tfos_nb.runtime.feed.passes import Cut, Division, Shares

__all__ = ["Batches", "Cutter", "cutter_of", "parts_of", "steps_of_pass"]

_HELD = 2  # batches, until the end of the pass is known


def cutter_of(cut: Cut, shares: Shares | None) -> Cutter | Batches:
    """Return the cutter of a pass; ``shares`` is None if the row counts are not known before it begins."""
    if cut.division is None:
        return Batches(cut.batch, cut.whole)
    return Cutter(cut.division, shares, cut.whole)


def parts_of(rows: int, parts: int) -> list[int]:
    """Divide rows into parts and return their sizes. These differ by at most one; empty parts are left out.

    Examples
    --------
    >>> parts_of(10, 4), parts_of(2, 3)
    ([2, 3, 2, 3], [1, 1])
    """
    sizes = [rows * (part + 1) // parts - rows * part // parts for part in range(parts)]
    return [size for size in sizes if size]


def steps_of_pass(shares: Shares, division: Division, *, streamed: bool, whole: bool = False) -> int:
    """Return how many steps all workers do in a pass.

    A pure function: all workers call it with the same values.

    Parameters
    ----------
    shares : Shares
        The rows of the pass.
    division : Division
        Any worker's: its own number makes no difference.
    streamed : bool
        Whether workers may have begun to cut before they knew ``shares``.
    whole : bool, optional
        Whether only steps of full size are done, and the rows beyond are left out.

    Examples
    --------
    >>> steps_of_pass(Shares(19, 37, 19), Division(37, workers=2), streamed=False)
    1
    >>> steps_of_pass(Shares(50, 100, 50), Division(32, workers=2), streamed=True)
    4
    """
    steps = shares.total // division.batch if whole else -(-shares.total // division.batch)
    if not streamed or whole:
        return steps
    # n steps in turn take n * batch / workers rows of a worker, rounded down or up.
    batch, held = max(division.batch, division.workers), _HELD * division.most
    cut = max(0, ((shares.most - held + 1) * division.workers - 1) // batch)  # before a worker knew the end of its rows
    left = shares.most - cut * batch // division.workers
    return max(steps, cut + -(-left // (2 * division.most)))


class Cutter:
    """Cut one pass of a worker.

    Parameters
    ----------
    division : Division
        How the rows of a step are divided.
    shares : Shares or None
        The rows of the pass, if they are known before it begins.
    whole : bool, optional
        Whether rows beyond the last step of full size are left out.

    Attributes
    ----------
    steps : int or None
        How many steps the pass has for all workers, once this is known.

    Examples
    --------
    >>> cutter = Cutter(Division(4, worker=0, workers=2), None)
    >>> cutter.more(7), cutter.more(2)
    ([2], [2])
    >>> cutter.end(Shares(9, 18, 9))
    [1, 2, 2]
    """

    def __init__(self, division: Division, shares: Shares | None, whole: bool = False) -> None:
        self._division = division
        self._whole = whole
        self._rows = 0  # rows that came and are not in a batch yet
        self._cut = 0  # steps that were cut
        self.steps: int | None = None
        self._planned: deque[int] | None = None
        if shares is not None:
            self._plan(shares.own, steps_of_pass(shares, division, streamed=False, whole=whole))

    def more(self, rows: int) -> list[int]:
        """Return the sizes of the batches to cut now that so many more rows have come."""
        self._rows += rows
        if self._planned is not None:
            return self._planned_by_now(self._planned)
        return self._each_replica(self._full_steps(_HELD * self._division.most))

    def end(self, shares: Shares | None) -> list[int]:
        """Return the sizes of the last batches; ``shares`` is None if the other workers' row counts are unknown."""
        if self._planned is None and shares is None:
            full = self._full_steps(0) + [self._rows] * (self._rows > 0 and not self._whole)
            return self._each_replica(full)
        if self._planned is None and shares is not None:
            self._plan(self._rows, steps_of_pass(shares, self._division, streamed=True, whole=self._whole))
        return self._planned_by_now(self._planned or deque())

    def _full_steps(self, kept: int) -> list[int]:
        """Cut steps of full size while at least ``kept`` rows are left."""
        sizes = []
        while self._rows - (own := self._division.own(self._cut)) >= kept:
            sizes.append(own)
            self._rows -= own
            self._cut += 1
        return sizes

    def _plan(self, rows: int, steps: int) -> None:
        self.steps = steps
        left = max(0, steps - self._cut)
        if self._whole:
            rows = min(rows, sum(map(self._division.own, range(self._cut, self._cut + left))))
        self._planned = deque(self._each_replica(parts_of(rows, left)) if left else ())

    def _planned_by_now(self, planned: deque[int]) -> list[int]:
        sizes = []
        while planned and planned[0] <= self._rows:
            sizes.append(planned.popleft())
            self._rows -= sizes[-1]
        return sizes

    def _each_replica(self, steps: list[int]) -> list[int]:
        if self._division.replicas == 1:
            return steps
        return [size for rows in steps for size in parts_of(rows, self._division.replicas)]


class Batches:
    """Cut one pass as the program asked: batches of one size, and a smaller one at the end."""

    def __init__(self, batch: int, whole: bool = False) -> None:
        self._batch = batch
        self._whole = whole
        self._rows = self._cut = 0
        self.steps: int | None = None

    def more(self, rows: int) -> list[int]:
        """Return the sizes of the batches to cut now that so many more rows have come."""
        count, self._rows = divmod(self._rows + rows, self._batch)
        self._cut += count
        return [self._batch] * count

    def end(self, shares: Shares | None) -> list[int]:
        """Return the size of the last batch, if there is one."""
        last = [self._rows] if self._rows and not self._whole else []
        self.steps = self._cut + len(last)
        return last
