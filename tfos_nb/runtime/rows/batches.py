"""Cut and join record batches, copying as few rows as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import pyarrow as pa

__all__ = ["joined", "rebatched", "take_rows"]


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches; a single batch is returned without a copy."""
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def take_rows(batches: deque[pa.RecordBatch], count: int) -> pa.RecordBatch:
    """Remove the first ``count`` rows from a queue of batches, which must have as many, and return them as one.

    Examples
    --------
    >>> queue = deque([pa.record_batch({"x": [1, 2]}), pa.record_batch({"x": [3, 4]})])
    >>> take_rows(queue, 3)["x"].to_pylist(), queue[0]["x"].to_pylist()
    ([1, 2, 3], [4])
    """
    taken: list[pa.RecordBatch] = []
    while count or not taken:
        batch = batches.popleft()
        if batch.num_rows > count:
            batches.appendleft(batch.slice(count))
            batch = batch.slice(0, count)
        taken.append(batch)
        count -= batch.num_rows
    return joined(taken)


def rebatched(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of ``size`` rows; the last may be smaller. Only batches made of several given ones are copied."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        start = 0
        while rows + batch.num_rows - start >= size:
            taken = size - rows
            yield joined([*waiting, batch.slice(start, taken)])
            start, waiting, rows = start + taken, [], 0
        if start < batch.num_rows:
            waiting.append(batch.slice(start))
            rows += batch.num_rows - start
    if rows:
        yield joined(waiting)
