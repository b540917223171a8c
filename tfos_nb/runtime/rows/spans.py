"""Compute with sets of a partition's rows, as spans.

Spans are intervals ``(first row, row after the last)`` in ascending order that neither overlap nor touch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

__all__ = ["Spans", "end_of_span", "from_row", "merged", "next_span", "row_behind", "rows_within", "without"]

Spans = tuple[tuple[int, int], ...]


def merged(intervals: Iterable[tuple[int, int]]) -> Spans:
    """Return intervals as spans: sorted, and joined if they overlap or touch. Empty intervals are left out.

    Examples
    --------
    >>> merged([(64, 70), (0, 64), (128, 130), (5, 5)])
    ((0, 70), (128, 130))
    """
    spans: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        elif start < end:
            spans.append((start, end))
    return tuple(spans)


def rows_within(spans: Spans, start: int, end: int) -> int:
    """Return the number of rows from ``start`` to ``end`` (excluded) that are in the spans.

    Examples
    --------
    >>> rows_within(((0, 70), (128, 130)), 60, 129)
    11
    """
    place = max(0, bisect.bisect_right(spans, start, key=_first) - 1)
    count = 0
    for first, last in itertools.islice(spans, place, None):
        if first >= end:
            break
        count += max(0, min(end, last) - max(start, first))
    return count


def row_behind(spans: Spans, start: int, count: int) -> int:
    """Return the row after the first ``count`` rows from ``start`` on that are not in the spans.

    Examples
    --------
    >>> row_behind(((0, 70), (128, 130)), 60, 5), row_behind(((0, 70), (128, 130)), 60, 60), row_behind((), 3, 4)
    (75, 132, 7)
    """
    row = end_of_span(spans, start)
    while count and (begins := next_span(spans, row)) is not None and begins - row < count:
        count -= begins - row
        row = end_of_span(spans, begins)
    return row + count


def from_row(spans: Spans, row: int, end: int | None = None) -> Spans:
    """Return the part of the spans from ``row`` on to ``end`` (excluded; None: without limit).

    Examples
    --------
    >>> from_row(((0, 70), (128, 130)), 64), from_row(((0, 70),), 70), from_row(((0, 70), (128, 130)), 64, 129)
    (((64, 70), (128, 130)), (), ((64, 70), (128, 129)))
    """
    first = bisect.bisect_right(spans, row, key=_last)
    behind = len(spans) if end is None else bisect.bisect_left(spans, end, key=_first)
    return tuple((max(start, row), last if end is None else min(last, end)) for start, last in spans[first:behind])


def without(spans: Spans, others: Spans) -> Spans:
    """Return the rows of ``spans`` that are not in ``others``.

    Examples
    --------
    >>> without(((0, 70), (128, 130)), ((10, 20), (60, 129)))
    ((0, 10), (20, 60), (129, 130))
    """
    left: list[tuple[int, int]] = []
    for first, last in spans:
        row = end_of_span(others, first)
        while row < last:
            ends = next_span(others, row) or last
            left.append((row, min(ends, last)))
            row = end_of_span(others, ends)
    return tuple(left)


def end_of_span(spans: Spans, row: int) -> int:
    """Return the end of the span that contains a row; the row itself if no span does.

    Examples
    --------
    >>> end_of_span(((0, 70),), 3), end_of_span(((0, 70),), 70)
    (70, 70)
    """
    place = bisect.bisect_right(spans, row, key=_first)
    return max(row, spans[place - 1][1]) if place else row


def next_span(spans: Spans, row: int) -> int | None:
    """Return the start of the first span that begins after a row; None if there is none.

    Examples
    --------
    >>> next_span(((0, 70), (128, 130)), 70), next_span(((0, 70),), 70)
    (128, None)
    """
    place = bisect.bisect_right(spans, row, key=_first)
    return spans[place][0] if place < len(spans) else None


def _first(span: tuple[int, int]) -> int:
    return span[0]


def _last(span: tuple[int, int]) -> int:
    return span[1]
