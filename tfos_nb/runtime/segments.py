"""Where a partition is cut: by the numbers of its rows alone, so that every attempt at it is cut alike.

The first segments are small, so that few rows are shared out evenly, and later ones larger, so that many cost few
questions: each is an eighth of what came before it, or less. None is larger than what a node takes in one piece, by the
size of a feed's first rows. A task sends one segment after the other, and where nodes train in step, one that is full
may wait for another whose segment comes next: it would wait for ever if its own did not fit in. (Where later rows are
so much larger that it does not, the driver has the node make room.)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PIECE_BYTES", "Segments"]

PIECE_BYTES = (16 << 20) - (64 << 10)
_FIRST, _LARGEST = 64, 8192
_ALIKE = 16  # segments of one size, before the size doubles


@dataclass(frozen=True)
class Segments:
    """A way of cutting partitions.

    Parameters
    ----------
    largest : int
        The most rows of a segment, a power of two.

    Examples
    --------
    >>> cut = Segments()
    >>> cut.end(0), cut.end(63), cut.end(64), cut.end(1024)
    (64, 64, 128, 1152)
    >>> cut.start(63), cut.start(64), cut.start(1151)
    (0, 64, 1024)
    >>> Segments(16).end(0), Segments(16).end(5000)
    (16, 5008)
    """

    largest: int = _LARGEST

    def __post_init__(self) -> None:
        if not 1 <= self.largest <= _LARGEST or self.largest.bit_count() != 1:
            raise ValueError(f"segments of {self.largest} rows at most: there are none")

    @classmethod
    def of_rows(cls, row_bytes: int) -> Segments:
        """Return the way to cut rows of about so many bytes; 0 if that is not known.

        Examples
        --------
        >>> Segments.of_rows(3144).largest, Segments.of_rows(602_112).largest, Segments.of_rows(8).largest
        (4096, 16, 8192)
        """
        fitting = max(1, PIECE_BYTES // max(1, row_bytes))
        return cls(min(_LARGEST, 1 << fitting.bit_length() - 1))

    def end(self, row: int) -> int:
        """Return the first row after the segment that holds ``row``."""
        base, size = self._grid(row)
        return base + ((row - base) // size + 1) * size

    def start(self, row: int) -> int:
        """Return the first row of the segment that holds ``row``."""
        base, size = self._grid(row)
        return base + (row - base) // size * size

    def _grid(self, row: int) -> tuple[int, int]:
        """Return where the segments begin that are of one size with that of a row, and this size."""
        first = min(_FIRST, self.largest)
        doublings = min((row // (first * _ALIKE) + 1).bit_length() - 1, (self.largest // first).bit_length() - 1)
        return first * _ALIKE * ((1 << doublings) - 1), first << doublings
