"""Make a ``tf.data.Dataset`` from record batches.

Whole blocks of rows enter TensorFlow, which cuts them into batches. :mod:`tfos_nb.runtime.datasets.batching` computes
the sizes of the batches, block by block, in Python.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed, near
from tfos_nb.runtime.datasets.batching import Batches, Cutter, cutter_of
from tfos_nb.runtime.datasets.class_weights import weights_of
from tfos_nb.runtime.datasets.tuning import as_fed
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.pass_record import PassRecord
from tfos_nb.runtime.feed.passes import Cut, Pass, Readers
from tfos_nb.runtime.keras.distributed_datasets import divisible, of_size, tracked
from tfos_nb.runtime.keras.inputs import named
from tfos_nb.runtime.rows.columns import Column, arrays_of, columns_of, sparse_of

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["NO_ROWS", "Blocks", "DatasetOptions", "Names", "Pairs", "Source", "build_dataset", "chosen_columns"]

Names = str | Sequence[str] | None

NO_ROWS = (
    "no rows will come: the cluster was not given any. Feed it with --data VAR, or cluster.train(df), before "
    "cluster.wait() or the end of its with block. A detached cluster takes a function that reads the rows instead"
)
"""Error of a dataset whose cluster ends without a feed."""

_WEIGHT = "tfos_nb weight"  # key in an element: weights from class_weight
_SIZES = "tfos_nb sizes"  # key in a block's element: sizes of the batches in the block


class Source(Protocol):
    """Source of a dataset's rows: Spark's feed, its validation rows, or files."""

    def schema(self) -> FeedSchema | None:
        """Return the schema of the rows; None if there will be no rows."""
        ...

    def next_pass(self, readers: Readers | None = None) -> Iterator[pa.RecordBatch] | None:
        """Return the rows of this node's share for the next pass; None if there are no more passes.

        While it waits for rows, the ``readers`` of the dataset may have gone. Then it returns None, too.
        """
        ...


@dataclass(frozen=True)
class DatasetOptions:
    """Arguments of :meth:`NodeContext.dataset`, which documents them.

    Raises
    ------
    ValueError
        If an argument is wrong.
    """

    batch_size: int
    x: Names = None
    y: Names = None
    sample_weight: str | None = None
    columns: Sequence[str] | None = None
    fill: Mapping[str, Any] = field(default_factory=dict)
    shuffle: int = 0
    seed: int | None = None
    drop_remainder: bool = False
    prefetch: int = 2
    class_weight: Mapping[Any, float] | None = None
    sparse: Sequence[str] = ()

    def __post_init__(self) -> None:
        if str(self.batch_size) == "validation":
            raise ValueError(
                "ctx.dataset('validation'): the rows of train(df, validation=df2) are ctx.validation(64, …), with the "
                "same options; 64 is the rows of a batch"
            )
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number, 1 or more, got {self.batch_size!r}")
        if (self.y is not None or self.sample_weight is not None) and self.x is None:
            raise ValueError(
                "y and sample_weight need x, as in ctx.dataset(64, x='features', y='label'), got "
                f"y={self.y!r}, sample_weight={self.sample_weight!r} and no x"
            )
        if self.columns is not None and self.x is not None:
            raise ValueError(
                "give either columns (elements are dictionaries) or x and y (elements are tuples), got "
                f"columns={self.columns!r} and x={self.x!r}"
            )
        if self.class_weight is not None and not isinstance(self.y, str):
            raise ValueError(
                "class_weight needs one column of classes as y, as in ctx.dataset(64, x='x', y='label', …), got "
                f"y={self.y!r}"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        for name in ("sparse", "columns"):
            if isinstance(getattr(self, name), str):
                raise ValueError(
                    f"{name} must be a list of columns, got {getattr(self, name)!r}; give [{getattr(self, name)!r}]"
                )
        for name in ("shuffle", "prefetch"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} must be a whole number, 0 or more, got {getattr(self, name)!r}")
        for name in ("fill", "class_weight"):
            if not isinstance(getattr(self, name), (Mapping, type(None))):
                raise ValueError(f"{name} must be a dictionary, as in {name}={{'age': 0}}, got {getattr(self, name)!r}")

    def wanted(self) -> list[str] | None:
        """Return the names of the columns to read; None for all."""
        if self.x is None:
            return list(self.columns) if self.columns is not None else None
        return [*_listed(self.x), *_listed(self.y), *_listed(self.sample_weight)]


def _listed(names: Names) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class Blocks:
    """Function that returns a generator over the blocks of one pass, as arrays by column.

    Parameters
    ----------
    source : Source
        The rows.
    columns : tuple of Column
        Columns of the elements.
    fill : mapping
        Value that replaces a null, by column.
    failed : callable
        Called with an error in a row, because TensorFlow replaces an exception by an error of its own.
    sparse : frozenset of str
        Columns that become sparse tensors.
    weigh : tuple, optional
        Column of the classes, and the weights by class.
    """

    source: Source
    columns: tuple[Column, ...]
    fill: Mapping[str, Any]
    failed: Callable[[FeedFailed], object]
    sparse: frozenset[str] = frozenset()
    weigh: tuple[str, Mapping[Any, float]] | None = None

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the blocks of the next pass, as arrays by column."""
        try:
            for block in self.source.next_pass() or ():
                yield self.element(block)
        except FeedFailed as error:
            self.failed(error)
            raise

    def element(self, block: pa.RecordBatch) -> dict[str, Any]:
        """Return a block's rows as arrays by column."""
        self._check(block)
        element: dict[str, Any] = arrays_of(block, [c for c in self.columns if c.name not in self.sparse], self.fill)
        for column in self.columns:
            if column.name in self.sparse:
                import tensorflow as tf

                element[column.name] = tf.SparseTensor(*sparse_of(block, column, self.fill.get(column.name)))
        if self.weigh is not None:
            column_name, table = self.weigh
            element[_WEIGHT] = weights_of(element[column_name], table, column_name)
        return element

    def _check(self, block: pa.RecordBatch) -> None:
        for column in self.columns:
            index = block.schema.get_field_index(column.name)
            if index < 0:
                raise FeedFailed(
                    f"this feed has no column {column.name!r}; it has {', '.join(block.schema.names)}: feed rows with "
                    "the columns of the first feed"
                )


@dataclass(frozen=True)
class CutBlocks:
    """Function for ``tf.data.Dataset.from_generator`` that yields blocks together with the sizes of their batches.

    TensorFlow calls it at the start of each iteration of the dataset: one call, one pass.

    Parameters
    ----------
    blocks : Blocks
        The rows.
    cut : Cut
        Size of the batches; it also counts the passes.
    shuffle : int
        Size in rows of the window within which rows are shuffled. 0: no shuffling.
    seed : int or None
        Seed of the order. None: a new one for each pass, from NumPy's global generator.
    """

    blocks: Blocks
    cut: Cut
    shuffle: int = 0
    seed: int | None = None

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the blocks of the next pass. Each contains only whole batches."""
        try:
            rows = self.blocks.source.next_pass(self.cut.readers)
            if rows is None:
                return
            one = rows if isinstance(rows, Pass) else Pass(rows, _unknown)
            self.cut.begin_pass(one.record)
            cutter, waiting = cutter_of(self.cut, one.shares_before()), _Waiting(one.record)
            yield from self._cut(waiting, cutter.more(one.gone), cutter)
            for block in self._shuffled(one):
                waiting.add(block)
                yield from self._cut(waiting, cutter.more(block.num_rows), cutter)
            yield from self._cut(waiting, cutter.end(one.shares()), cutter)
            one.record.end()
        except FeedFailed as error:
            self.blocks.failed(error)
            raise

    def _cut(self, waiting: _Waiting, sizes: list[int], cutter: Cutter | Batches) -> Iterator[dict[str, Any]]:
        done, rows = waiting.record.cut(sizes, cutter.steps)  # they are in the restored state
        waiting.drop(rows)
        for part, of_part in waiting.take(sizes[done:]):
            yield {**self.blocks.element(part), _SIZES: np.array(of_part, np.int64)}

    def _shuffled(self, rows: Pass) -> Iterator[pa.RecordBatch]:
        if not self.shuffle:
            yield from rows
            return
        seed = rows.seed(self._draw)
        # After a loss the passes are counted on, so that each of them has another order.
        chance = np.random.default_rng((seed, rows.number or self.cut.passes))
        record = rows.record
        record.shuffle()
        window: list[pa.RecordBatch] = []
        count = 0  # rows in the window
        for block in rows:
            window.append(block)
            record.came(block.num_rows)
            count += block.num_rows
            if (beyond := count - self.shuffle) > 0:
                order = chance.permutation(count)
                mixed = _in_order(window, order)
                record.given_out(order, beyond)
                yield mixed.slice(0, beyond)
                window, count = [mixed.slice(beyond)], self.shuffle
        if window:
            order = chance.permutation(count)
            record.given_out(order, count)
            yield _in_order(window, order)

    def _draw(self) -> int:
        # NumPy's global generator, so that keras.utils.set_random_seed makes the order reproducible.
        return self.seed if self.seed is not None else int(np.random.randint(1 << 31))


def _unknown() -> None:
    """Return None: the numbers of rows of the other workers are not known."""


def _in_order(window: list[pa.RecordBatch], order: np.ndarray[Any, Any]) -> pa.RecordBatch:
    return pa.concat_batches(window).take(pa.array(order))


class _Waiting:
    """Queue of rows that are not in a batch yet."""

    def __init__(self, record: PassRecord) -> None:
        self.record = record
        self._blocks: deque[pa.RecordBatch] = deque()

    def add(self, block: pa.RecordBatch) -> None:
        """Append a block of rows."""
        if block.num_rows:
            self._blocks.append(block)

    def take(self, sizes: list[int]) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
        """Yield the rows of the next batches, and the batches' sizes.

        Batches that lie in one block are yielded together, as a slice of it. Only a batch across blocks is copied.
        """
        sizes = list(reversed(sizes))
        while sizes:
            head, run = self._blocks[0], []
            there = head.num_rows
            while sizes and sizes[-1] <= there:
                run.append(sizes.pop())
                there -= run[-1]
            if run:
                yield self._head(sum(run)), run
            else:
                size = sizes.pop()
                yield self._across(size), [size]

    def drop(self, rows: int) -> None:
        """Leave out the next rows."""
        while rows:
            rows -= self._head(min(rows, self._blocks[0].num_rows)).num_rows

    def _head(self, rows: int) -> pa.RecordBatch:
        block = self._blocks.popleft()
        if rows < block.num_rows:
            self._blocks.appendleft(block.slice(rows))
        return block.slice(0, rows)

    def _across(self, rows: int) -> pa.RecordBatch:
        parts: list[pa.RecordBatch] = []
        while rows:
            parts.append(self._head(min(rows, self._blocks[0].num_rows)))
            rows -= parts[-1].num_rows
        return pa.concat_batches(parts)


def build_dataset(
    source: Source,
    options: DatasetOptions,
    failed: Callable[[FeedFailed], object],
    decode: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    alone: bool = True,
) -> tf.data.Dataset:
    """Build a dataset. It waits for the first row anywhere in the cluster, because it needs the row's shape.

    Parameters
    ----------
    source : Source
        The rows.
    options : DatasetOptions
        What the elements are.
    failed : callable
        Called with an error in a row.
    decode : callable, optional
        Converts the columns of a batch to other columns, before ``x`` and ``y`` are selected from them.
    alone : bool
        Whether no other node trains on rows of this source.

    Raises
    ------
    FeedFailed
        If no rows will come, or a column does not exist or cannot be a tensor.
    """
    import tensorflow as tf

    schema = source.schema()
    if schema is None:
        raise FeedFailed(NO_ROWS)
    columns = chosen_columns(schema, options, decode is None)
    weigh = (str(options.y), options.class_weight) if options.class_weight is not None else None
    early = weigh if decode is None else None
    blocks = Blocks(source, columns, dict(options.fill), failed, frozenset(options.sparse), early)
    cut = Cut(options.batch_size, options.drop_remainder)
    as_it_is = tf.autograph.experimental.do_not_convert  # AutoGraph would take half a second for these functions
    dataset = _batches(CutBlocks(blocks, cut, options.shuffle, options.seed), alone)
    if decode is not None:
        dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        _check_decoded(dataset.element_spec, options)
    if weigh is not None and decode is not None:
        dataset = dataset.map(as_it_is(_Weigh(*weigh).__call__))
    if options.x is not None:
        pairs = Pairs(options.x, options.y, options.sample_weight, weigh is not None)
        dataset = dataset.map(as_it_is(pairs.__call__))
    # No sharding: these rows are already this node's share.
    return named(as_fed(dataset.prefetch(options.prefetch)), options.x, options.y)


def _batches(generator: CutBlocks, alone: bool) -> tf.data.Dataset:
    import tensorflow as tf

    blocks = generator.blocks
    signature = {column.name: _spec(column, column.name in blocks.sparse) for column in blocks.columns}
    if blocks.weigh is not None:
        signature[_WEIGHT] = tf.TensorSpec((None,), tf.float32)
    signature[_SIZES] = tf.TensorSpec((None,), tf.int64)
    dataset = tf.data.Dataset.from_generator(generator, output_signature=signature)
    dataset = tracked(dataset.flat_map(tf.autograph.experimental.do_not_convert(_in_batches)), generator.cut)
    # All batches have one size and no other worker has rows, so TensorFlow divides them correctly and knows the shape.
    if generator.cut.whole and alone:
        return dataset.map(functools.partial(of_size, generator.cut.batch))
    return divisible(dataset, generator.cut)


def _in_batches(block: dict[str, Any]) -> tf.data.Dataset:
    """Cut a block into batches of the sizes that it contains."""
    import tensorflow as tf

    rows = {name: _own(value) for name, value in block.items() if name != _SIZES}
    return tf.data.Dataset.from_tensors(rows).rebatch(block[_SIZES])


def _own(value: Any) -> Any:
    """Return a copy of a tensor whose memory belongs to Arrow.

    TensorFlow may write its results into the memory of a batch to which nothing else refers. That would change rows
    that are read again, and fail for rows in a mapped file, which is read-only.
    """
    import tensorflow as tf

    shared = isinstance(value, tf.Tensor) and value.dtype != tf.string
    return tf.raw_ops.DeepCopy(x=value) if shared else value


def _spec(column: Column, sparse: bool) -> Any:
    import tensorflow as tf

    if sparse and not column.vector:
        raise FeedFailed(
            f"sparse=[{column.name!r}]: the column must have vectors of Spark ML, got {column.dtype} of shape "
            f"{column.shape}"
        )
    if sparse:
        return tf.SparseTensorSpec((None, *column.shape), column.dtype)
    return tf.TensorSpec((None, *column.shape), tf.string if column.dtype.hasobject else column.dtype)


def chosen_columns(schema: FeedSchema, options: DatasetOptions, by_name: bool = True) -> tuple[Column, ...]:
    """Return the columns that the options name, or all of them if not ``by_name``.

    Raises
    ------
    FeedFailed
        If a column does not exist or cannot be a tensor. The message names it.
    """
    fields = pa.ipc.read_schema(pa.py_buffer(schema.schema))
    wanted = options.wanted() if by_name else None
    names = list(fields.names) if wanted is None else list(dict.fromkeys(wanted))
    _check_names((*names, *options.fill, *options.sparse), fields.names)
    chosen = pa.schema([fields.field(name) for name in names])
    return tuple(columns_of(chosen, schema.lengths).values())


def _check_names(wanted: Sequence[str], known: Sequence[str]) -> None:
    for name in wanted:
        if name not in known:
            there = ", ".join(known)
            raise FeedFailed(f"no column {name!r} in the rows that are fed: they have {there}{near(name, known)}")


def _check_decoded(spec: Any, options: DatasetOptions) -> None:
    _check_names(options.wanted() or (), list(spec))


@dataclass(frozen=True)
class _Weigh:
    """Function for ``tf.data.Dataset.map`` that adds class weights to a batch, after decoding has made the labels."""

    column: str
    table: Mapping[Any, float]

    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        weights = tf.numpy_function(self._weights, [element[self.column]], tf.float32)
        return {**element, _WEIGHT: tf.ensure_shape(weights, (None,))}

    def _weights(self, labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return weights_of(labels, self.table, self.column)


@dataclass(frozen=True)
class Pairs:
    """Function for ``tf.data.Dataset.map`` from {column: tensor} to what Keras' ``fit`` takes.

    Parameters
    ----------
    x, y, sample_weight : str, sequence of str, or None
        Columns. Several columns become a dictionary.
    weighed : bool
        Whether the element has class weights. They are multiplied by those of ``sample_weight``, if given.
    """

    x: Names
    y: Names
    sample_weight: str | None
    weighed: bool = False

    def __call__(self, element: dict[str, Any]) -> Any:
        """Return ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` from an element."""
        parts = [_picked(element, self.x)]
        if self.y is not None or self.sample_weight is not None:
            parts.append(_picked(element, self.y))
        weights = self._weights(element)
        if weights is not None:
            parts.append(weights)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def _weights(self, element: dict[str, Any]) -> Any:
        import tensorflow as tf

        own = element[self.sample_weight] if self.sample_weight is not None else None
        if not self.weighed:
            return own
        by_class = element[_WEIGHT]
        return by_class if own is None else by_class * tf.cast(own, by_class.dtype)


def _picked(element: dict[str, Any], names: Names) -> Any:
    if names is None or isinstance(names, str):
        return element[names] if names is not None else None
    return {name: element[name] for name in names}
