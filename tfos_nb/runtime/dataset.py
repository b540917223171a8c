"""The rows of a node as a ``tf.data.Dataset``: whole blocks enter TensorFlow, and batches are cut there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.columns import Column, arrays_of, columns_of
from tfos_nb.runtime.ledger import FeedSchema
from tfos_nb.runtime.passes import Passes
from tfos_nb.runtime.strategy import disable_auto_shard

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["DatasetOptions", "build_dataset"]

Names = str | Sequence[str] | None


@dataclass(frozen=True)
class DatasetOptions:
    """What :meth:`NodeContext.dataset` was asked for; it documents the fields."""

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

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r}: it is a whole number, 1 or more")
        if (self.y is not None or self.sample_weight is not None) and self.x is None:
            raise ValueError("y and sample_weight need x: ctx.dataset(64, x='features', y='label')")
        if self.columns is not None and self.x is not None:
            raise ValueError("give either columns (elements are dictionaries) or x and y (elements are tuples)")

    def wanted(self) -> list[str] | None:
        """Return the columns to read; None for all."""
        if self.x is None:
            return list(self.columns) if self.columns is not None else None
        return [*_listed(self.x), *_listed(self.y), *_listed(self.sample_weight)]


def _listed(names: Names) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class _Blocks:
    """The generator that TensorFlow calls at the start of each iteration: one call, one pass."""

    passes: Passes
    columns: tuple[Column, ...]
    fill: Mapping[str, Any]
    failed: Callable[[FeedFailed], object]

    def __call__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        blocks = self.passes.next_pass()
        try:
            for block in blocks or ():
                self._check(block)
                yield arrays_of(block, self.columns, self.fill)
        except FeedFailed as error:
            self.failed(error)
            raise

    def _check(self, block: pa.RecordBatch) -> None:
        for column in self.columns:
            index = block.schema.get_field_index(column.name)
            if index < 0:
                raise FeedFailed(f"this feed has no column {column.name!r}; it has {', '.join(block.schema.names)}")


def build_dataset(passes: Passes, options: DatasetOptions, failed: Callable[[FeedFailed], object]) -> tf.data.Dataset:
    """Build the dataset; waits for the first row anywhere in the cluster, since its shape is needed.

    Raises
    ------
    FeedFailed
        For a column that is not there or has no tensor, naming it.
    """
    import tensorflow as tf

    schema = passes.schema()
    if schema is None:
        raise FeedFailed(
            "no rows will come: the cluster was not given any. Feed it with --data VAR, or cluster.train(df), before "
            "cluster.wait() or the end of its with block"
        )
    columns = _choose(schema, options)
    signature = {
        column.name: tf.TensorSpec((None, *column.shape), tf.string if column.dtype.hasobject else column.dtype)
        for column in columns
    }
    blocks = _Blocks(passes, columns, dict(options.fill), failed)
    dataset = tf.data.Dataset.from_generator(blocks, output_signature=signature)
    if options.shuffle:
        dataset = (
            dataset.unbatch()
            .shuffle(options.shuffle, seed=options.seed)
            .batch(options.batch_size, drop_remainder=options.drop_remainder)
        )
    else:
        dataset = dataset.rebatch(options.batch_size, drop_remainder=options.drop_remainder)
    if options.x is not None:
        dataset = dataset.map(_Pairs(options.x, options.y, options.sample_weight))
    # The rows of a node are its share already.
    return disable_auto_shard(dataset.prefetch(options.prefetch))


def _choose(schema: FeedSchema, options: DatasetOptions) -> tuple[Column, ...]:
    fields = pa.ipc.read_schema(pa.py_buffer(schema.schema))
    wanted = options.wanted()
    names = list(fields.names) if wanted is None else list(dict.fromkeys(wanted))
    for name in (*names, *options.fill):
        if name not in fields.names:
            near = difflib.get_close_matches(name, fields.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise FeedFailed(f"no column {name!r} in the rows that are fed: they have {', '.join(fields.names)}{hint}")
    chosen = pa.schema([fields.field(name) for name in names])
    return tuple(columns_of(chosen, schema.lengths).values())


@dataclass(frozen=True)
class _Pairs:
    """Turn {column: tensor} into what Keras' fit takes: (x, y) or (x, y, sample_weight)."""

    x: Names
    y: Names
    sample_weight: str | None

    def __call__(self, element: dict[str, Any]) -> Any:
        parts = [_picked(element, self.x)]
        if self.y is not None or self.sample_weight is not None:
            parts.append(_picked(element, self.y))
        if self.sample_weight is not None:
            parts.append(element[self.sample_weight])
        return tuple(parts) if len(parts) > 1 else parts[0]


def _picked(element: dict[str, Any], names: Names) -> Any:
    if names is None or isinstance(names, str):
        return element[names] if names is not None else None
    return {name: element[name] for name in names}
