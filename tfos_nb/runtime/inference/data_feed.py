"""Give ``main`` rows as lists, and rows for inference: ``ctx.get_data_feed`` and ``ctx.requests``.

::

    train():      RowQueue ── passes, one after another ──▶ DataFeed.next_batch(n) ──▶ main
    inference():  RequestQueue ── rows of one partition ──▶ DataFeed.next_batch(n) ──▶ main ──▶ DataFeed.batch_results
                                └────────────────────────▶ ctx.requests() ──▶ Request ──▶ main ──▶ Request.reply

Rows arrive in Arrow blocks. They are sliced as Arrow data, and then converted to Python values by column.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import check_queue
from tfos_nb.runtime.feed.row_queues import RowQueues
from tfos_nb.runtime.inference.requests import Piece, RequestQueue
from tfos_nb.runtime.inference.serving import RequestExchange
from tfos_nb.runtime.rows.batches import joined
from tfos_nb.runtime.rows.columns import Column, arrays_of, columns_of
from tfos_nb.runtime.rows.row_lists import RowMaker, columns_by_mapping

__all__ = ["DataFeed", "Request", "RowLists"]


class _Source(Protocol):
    """Source of a feed's blocks."""

    def take(self, count: int) -> list[pa.RecordBatch] | None:
        """Return blocks of at most ``count`` rows in all; None at the end."""

    def answer(self, results: Any) -> None:
        """Return results for the rows that were taken first."""

    def end(self) -> None:
        """End the feed, so that no more rows are sent."""


class _Passes:
    """Rows that ``train`` feeds to a queue. The passes are concatenated."""

    def __init__(self, queues: RowQueues, queue: str) -> None:
        self._queues, self._queue = queues, queue
        self._blocks: Iterator[pa.RecordBatch] | None = None
        self._block: pa.RecordBatch | None = None
        self._at = 0

    def take(self, count: int) -> list[pa.RecordBatch] | None:
        taken: list[pa.RecordBatch] = []
        while count and self._advance():
            assert self._block is not None, "there was one"
            part = self._block.slice(self._at, count)
            self._at += part.num_rows
            count -= part.num_rows
            taken.append(part)
        return taken or None

    def _advance(self) -> bool:
        """Wait until there is a next row; return False at the end of the feed."""
        while self._block is None or self._at >= self._block.num_rows:
            self._block = None  # free the memory of the block before waiting for the next one
            if self._blocks is None:
                self._blocks = self._queues.of(self._queue).next_pass()
                if self._blocks is None:
                    return False
            self._block, self._at = next(self._blocks, None), 0
            if self._block is None:
                self._blocks = None
        return True

    def answer(self, results: Any) -> None:
        raise FeedFailed(
            "batch_results: this feed is of train(), whose rows need no results. For inference use "
            "ctx.get_data_feed(train_mode=False)"
        )

    def end(self) -> None:
        blocks, self._blocks, self._block = self._blocks, None, None
        self._queues.terminate(self._queue)
        if blocks is not None:
            blocks.close()  # type: ignore[attr-defined]  # a generator: when closed, it reports that its pass was left


class _Requests:
    """Rows that ``inference`` sends to a queue."""

    def __init__(self, queue: RequestQueue, across: bool) -> None:
        self._queue, self._across = queue, across
        self._owner = threading.get_ident()

    def take(self, count: int) -> list[pa.RecordBatch] | None:
        # A thread of tf.data prefetches, so it takes rows before main has answered the previous ones.
        ahead = self._across or threading.get_ident() != self._owner
        pieces = self._queue.take(count, across=self._across, strict=False, ahead=ahead)
        return None if pieces is None else [piece.rows for piece in pieces]

    def answer(self, results: Any) -> None:
        self._queue.answer(results)

    def end(self) -> None:
        self._queue.stop("main has ended its feed by terminate()")


class DataFeed:
    """Rows of a node as lists, returned by ``ctx.get_data_feed``. The interface is TensorFlowOnSpark's ``DataFeed``.

    Attributes
    ----------
    done_feeding : bool
        Whether the feed has ended.

    Examples
    --------
    >>> feed = ctx.get_data_feed(train_mode=False)  # doctest: +SKIP
    >>> while not feed.should_stop():  # doctest: +SKIP
    ...     rows = feed.next_batch(64)
    ...     feed.batch_results([predict(row) for row in rows])
    """

    def __init__(self, source: _Source, input_mapping: Mapping[str, str] | None, arrays: bool) -> None:
        self.done_feeding = False
        self._source = source
        self._mapping = dict(input_mapping) if input_mapping else None
        self._arrays = arrays
        self._makers: dict[bytes, RowMaker] = {}

    def next_batch(self, batch_size: int) -> Any:
        """Wait for rows and return them.

        Parameters
        ----------
        batch_size : int
            Maximum number of rows. There may be fewer at the end of the feed, and in inference at the end of a
            partition.

        Returns
        -------
        list or dict
            A list of rows, or with ``input_mapping`` a dictionary with a list for each tensor. The lists are empty at
            the end of the feed.

        Raises
        ------
        FeedFailed
            In inference, if earlier rows of a partition have no results and the partition has ended.
        """
        batch_size = _checked_size("next_batch", batch_size)
        blocks = None if self.done_feeding else self._source.take(batch_size)
        self.done_feeding = blocks is None
        if self._mapping is not None:
            found: dict[str, list[Any]] = {self._mapping[column]: [] for column in sorted(self._mapping)}
            for block in blocks or ():
                for tensor, values in columns_by_mapping(block, self._mapping, self._arrays).items():
                    found[tensor] += values
            return found
        rows: list[Any] = []
        for block in blocks or ():
            rows += self._maker(block.schema).rows(block)
        return rows

    def _maker(self, schema: pa.Schema) -> RowMaker:
        key = bytes(schema.serialize())
        if key not in self._makers:
            self._makers[key] = RowMaker(schema, self._arrays)
        return self._makers[key]

    def should_stop(self) -> bool:
        """Return whether the feed has ended, so that there will be no more rows."""
        return self.done_feeding

    def batch_results(self, results: Any) -> None:
        """Return results to Spark: one for each row, in the order in which the rows were taken.

        The results belong to the rows that were taken first and have no results yet.

        Parameters
        ----------
        results : list, array or dict
            A list of values, tuples, dictionaries or Rows; or an array or tensor whose first axis is the rows; or
            ``{column: array}``. They must fit the schema of :meth:`tfos_nb.Cluster.inference`, if it has one.

        Raises
        ------
        FeedFailed
            If there are more results than rows, or they do not fit the schema.
        """
        self._source.answer(results)

    def terminate(self) -> None:
        """End the feed at once. Spark does not read the remaining rows."""
        self.done_feeding = True
        self._source.end()


def _checked_size(call: str, size: Any) -> int:
    """Return a batch size as an int. NumPy integers are accepted.

    Raises
    ------
    FeedFailed
        If it is not a whole number, 1 or more.
    """
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
        raise FeedFailed(f"{call}: the rows of a batch must be a whole number, 1 or more, got {size!r}")
    return int(size)


class Request(Mapping[str, "np.ndarray[Any, Any]"]):
    """Batch of rows for inference: a mapping from columns to arrays whose first axis is the rows.

    Attributes
    ----------
    partition : int
        Partition of the first row.
    rows : int
        Number of rows.

    Examples
    --------
    >>> for request in ctx.requests(64):  # doctest: +SKIP
    ...     request.reply({"score": model(request["features"])})
    """

    def __init__(
        self, queue: RequestQueue, pieces: Sequence[Piece], names: Sequence[str] | None, fill: Mapping[str, Any]
    ) -> None:
        self._queue = queue
        self._block = joined([piece.rows for piece in pieces])
        self.partition = pieces[0].stream.partition
        self.rows = self._block.num_rows
        kept = self._block.schema.names if names is None else names
        missing = [name for name in kept if name not in self._block.schema.names]
        if missing:
            raise FeedFailed(f"no column {missing[0]!r} in the rows: they have {', '.join(self._block.schema.names)}")
        fields = pa.schema([self._block.schema.field(name) for name in kept])
        self._columns: dict[str, Column] = columns_of(fields, pieces[0].stream.lengths)
        self._fill = fill

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return arrays_of(self._block, [self._columns[name]], self._fill)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def reply(self, results: Any) -> None:
        """Return the results of all rows of this request to Spark.

        Parameters
        ----------
        results : dict, array or list
            As for :meth:`DataFeed.batch_results`.
        """
        self._queue.answer(results)


@dataclass(frozen=True)
class RowLists:
    """Part of ``ctx`` that makes :class:`DataFeed` and :class:`Request` objects.

    Parameters
    ----------
    queues : RowQueues
        Queues of the rows that ``train`` feeds.
    exchange : RequestExchange
        Queues of the rows that ``inference`` sends.
    """

    queues: RowQueues
    exchange: RequestExchange
    _sources: dict[tuple[str, bool, bool], _Source] = field(default_factory=dict)

    def data_feed(
        self,
        train_mode: bool,
        qname_in: str,
        qname_out: str,
        input_mapping: Mapping[str, str] | None,
        *,
        across: bool,
        arrays: bool,
    ) -> DataFeed:
        """Return a feed of rows as lists. A second feed of the same queue continues where the first one is."""
        if not isinstance(qname_out, str):
            raise FeedFailed(f"qname_out must be the name of a queue, got {qname_out!r}")
        return DataFeed(self._source(qname_in, bool(train_mode), across), input_mapping, arrays)

    def _source(self, name: str, train: bool, across: bool) -> _Source:
        check_queue(name, self.queues.names)
        key = (name, train, across)
        if key not in self._sources:
            self._sources[key] = _Passes(self.queues, name) if train else _Requests(self.exchange.of(name), across)
        return self._sources[key]

    def requests(
        self, size: int, qname: str, across: bool, names: Sequence[str] | None, fill: Mapping[str, Any] | None
    ) -> Iterator[Request]:
        """Return an iterator over the rows of ``cluster.inference`` in batches. Each batch needs a reply."""
        size = _checked_size("requests", size)
        check_queue(qname, self.queues.names)
        return _requests(self.exchange.of(qname), size, across, names, dict(fill or {}))


def _requests(
    queue: RequestQueue, size: int, across: bool, names: Sequence[str] | None, fill: Mapping[str, Any]
) -> Iterator[Request]:
    while (pieces := queue.take(size, across=across)) is not None:
        yield Request(queue, pieces, names, fill)
