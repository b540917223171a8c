"""Apply a user's TensorFlow function to blocks of rows, in Spark's tasks.

::

    Function     the function as a source of a model, loaded and traced once per process
    ScoreTask    add the function's outputs to the rows as columns (tfos_nb.runtime.models.scoring)
    MapTask      replace the rows by the function's rows
    ReduceTask   return one row per partition, or per key: fn(block), then fn(two stacked results)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.code import custom_objects
from tfos_nb.runtime.models.inputs import Feed, Where, incomplete_rows
from tfos_nb.runtime.models.model import WHOLE, Model, Traced, Use, constant
from tfos_nb.runtime.models.model_cache import Reader
from tfos_nb.runtime.models.outputs import column_of
from tfos_nb.runtime.models.scoring import partition_id, take_model
from tfos_nb.runtime.models.signature import Signature, Tensor
from tfos_nb.runtime.rows.batches import rebatched
from tfos_nb.runtime.rows.ragged import Output, Ragged, dense_or_ragged, fetched

__all__ = ["Function", "MapTask", "ReduceTask"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Function:
    """User function that is loaded and cached like a model (a ``model_cache.Source``).

    Parameters
    ----------
    name : str
        Name in error messages.
    code : bytes
        The pickled function, from :func:`tfos_nb.runtime.code.custom_objects.pack`.
    signature : Signature
        Columns that it takes, in the order of its parameters, and columns that it returns.
    as_dict : bool
        Whether it takes one dictionary of columns, rather than one parameter per column.
    compiled : bool
        Whether it is traced as a ``tf.function``.
    rows : bool
        Whether its results have a first axis of rows. The results of a reduction have none.
    """

    name: str
    code: bytes = field(repr=False)
    signature: Signature
    as_dict: bool
    compiled: bool = True
    rows: bool = True

    @property
    def use(self) -> Use:
        """The default: a function has no signatures or layers to choose from."""
        return WHOLE

    def version(self) -> str:
        """Return a SHA-256 of the code and of the other parameters, except the name."""
        rest = repr((self.signature, self.as_dict, self.compiled, self.rows)).encode()
        return hashlib.sha256(self.code + rest).hexdigest()

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Yield an empty path, because a function is not stored in a file."""
        yield ""

    def reader(self, path: str) -> Reader:
        """Return a function that unpickles and compiles the user's function. ``path`` is not used."""
        del path
        return functools.partial(_as_model, self)


def _as_model(source: Function) -> Model:
    import tensorflow as tf

    function = custom_objects.unpack(source.code).function
    assert function is not None
    inputs, outputs = source.signature.inputs, source.signature.outputs

    def call(*tensors: Any) -> list[Any]:
        named = {t.name: tensor for t, tensor in zip(inputs, tensors, strict=True)}
        return _in_order(function(named) if source.as_dict else function(*tensors), source)

    run: Callable[..., list[Any]] = call
    if source.compiled:
        specs = [tf.TensorSpec((None, *tensor.shape), tensor.dtype) for tensor in inputs]
        run = Traced(call, specs)

    def apply(arrays: Sequence[Array]) -> list[Output]:
        results = run(*(constant(array, t) for array, t in zip(arrays, inputs, strict=True)))
        return [_shaped(fetched(r), t, source) for r, t in zip(results, outputs, strict=True)]

    return Model(source.signature, apply)


def _in_order(result: Any, source: Function) -> list[Any]:
    """Return a function's results as tensors, in the order and with the types of its schema.

    Raises
    ------
    FeedFailed
        If a result is missing, is no tensor, or has a type that cannot be cast without loss.
    """
    import tensorflow as tf

    names = [tensor.name for tensor in source.signature.outputs]
    if isinstance(result, Mapping):
        if set(result) != set(names):
            raise FeedFailed(f"{source.name} must return its schema's {', '.join(names)}, got {', '.join(result)}")
        given = [result[name] for name in names]
    else:
        given = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(given) != len(names):
        raise FeedFailed(f"{source.name} must return its schema's {', '.join(names)}, got {len(given)} tensors")
    tensors = []
    for value, wanted in zip(given, source.signature.outputs, strict=True):
        if value is None:
            raise FeedFailed(f"{source.name} must return a tensor for {wanted.name!r}, got None")
        tensor = _tensor(value, wanted, source)
        kind = tf.as_dtype(wanted.dtype)
        # tf.cast truncates floats to integers silently.
        cut = (tensor.dtype.is_floating or tensor.dtype.is_complex) and not kind.is_floating
        if cut or (tensor.dtype == tf.string) != (kind == tf.string):
            raise FeedFailed(
                f"{source.name} must return {wanted.dtype} for {wanted.name!r}, got {tensor.dtype.name}: cast it in "
                "the function, or declare another type"
            )
        tensors.append(tensor if tensor.dtype.name == wanted.dtype else tf.cast(tensor, wanted.dtype))
    return tensors


def _tensor(value: Any, wanted: Tensor, source: Function) -> Any:
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        return value
    try:
        return tf.convert_to_tensor(dense_or_ragged(value))
    except (TypeError, ValueError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FeedFailed(
            f"{source.name} must return a tensor for {wanted.name!r}, got a {type(value).__name__} ({told}): "
            "return a tensor, an array, or lists of one length; lists of different lengths as tf.ragged.constant(…)"
        ) from error


def _shaped(output: Output, tensor: Tensor, source: Function) -> Output:
    axes = len(tensor.shape) + source.rows
    if isinstance(output, Ragged):
        _check_ragged(output, tensor, source, axes)
        return output
    if output.ndim == axes + 1 and output.shape[-1] == 1:
        one: Array = output[..., 0]  # shape (rows, 1), as a Dense(1) layer returns it, for a schema of one value
        return one
    if output.ndim != axes:
        shape = "x".join(map(str, output.shape)) or "one value"
        without = "" if source.rows else "; the result of a reduction has no axis of rows"
        raise FeedFailed(
            f"{source.name} must return {axes} axes for {tensor.name!r}, as declared in its schema, got "
            f"{shape}{without}"
        )
    return output


def _check_ragged(output: Ragged, tensor: Tensor, source: Function, axes: int) -> None:
    if not source.rows:
        raise FeedFailed(
            f"{source.name} is a reduction and must return a dense tensor for {tensor.name!r}, got a ragged one: pad "
            "it with to_tensor()"
        )
    if output.ndim != axes:
        raise FeedFailed(
            f"{source.name} must return {axes} axes for {tensor.name!r}, as declared in its schema, got a ragged "
            f"tensor of {output.ndim}: declare an array for each axis besides that of the rows, as in "
            "'words array<string>'"
        )


@dataclass(frozen=True)
class MapTask:
    """Spark task that replaces a partition's rows by the rows that a function returns for them.

    Parameters
    ----------
    source : Function
        The function.
    feeds : tuple of Feed
        One for each column that it takes.
    batch_size : int
        Maximum number of rows per call.
    skip : bool
        Whether rows with a null in one of the feeds are left out.
    """

    source: Function
    feeds: tuple[Feed, ...]
    batch_size: int
    skip: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the function's rows for the batches of a partition, one output batch per call."""
        outputs = self.source.signature.outputs
        for arrays, _ in _blocks(batches, self.feeds, self.batch_size, self.skip):
            given = take_model(self.source, self.source.signature).apply(arrays)
            columns = [column_of(array, t, len(given[0])) for array, t in zip(given, outputs, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=[tensor.name for tensor in outputs])


@dataclass(frozen=True)
class ReduceTask:
    """Spark task that reduces a partition, or each run of rows with the same key, to one row.

    The function is applied to each block, and then to each pair of results, stacked as a block of two rows. A partition
    without rows returns no row.

    Parameters
    ----------
    source : Function
        The function.
    feeds : tuple of Feed
        One for each column that it takes. It returns the same columns.
    batch_size : int
        Maximum number of rows per call.
    keys : tuple of int
        Positions of the key's columns. The rows must be sorted by them.
    skip : bool
        Whether rows with a null in one of the feeds are left out.
    """

    source: Function
    feeds: tuple[Feed, ...]
    batch_size: int
    keys: tuple[int, ...] = ()
    skip: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return one row per key, with columns ``key 0``, …, and then those of the function."""
        key: list[pa.Array] = []
        result: list[Any] | None = None
        for arrays, batch in _blocks(batches, self.feeds, self.batch_size, self.skip):
            for start, stop in _runs([batch.column(position) for position in self.keys], batch.num_rows):
                here = [batch.column(position).slice(start, 1) for position in self.keys]
                if result is not None and _text(here) != _text(key):
                    yield self._row(key, result)
                    result = None
                key = here
                given = self._applied([array[start:stop] for array in arrays])
                result = (
                    given if result is None else self._applied(list(map(np.stack, zip(result, given, strict=True))))
                )
        if result is not None:
            yield self._row(key, result)

    def _applied(self, arrays: list[Any]) -> list[Any]:
        return take_model(self.source, self.source.signature).apply(arrays)

    def _row(self, key: Sequence[pa.Array], result: Sequence[Any]) -> pa.RecordBatch:
        outputs = self.source.signature.outputs
        columns = [column_of(array[np.newaxis], t, 1) for array, t in zip(result, outputs, strict=True)]
        names = [f"key {index}" for index in range(len(key))] + [tensor.name for tensor in outputs]
        return pa.RecordBatch.from_arrays([*key, *columns], names=names)


def _blocks(
    batches: Iterator[pa.RecordBatch], feeds: Sequence[Feed], size: int, skip: bool
) -> Iterator[tuple[list[Array], pa.RecordBatch]]:
    """Yield blocks of at most ``size`` rows: the feeds' arrays, and the batch of the same rows."""
    partition, start = partition_id(), 0
    for batch in rebatched(batches, size):
        here, there = batch, None
        if skip:
            missing = incomplete_rows([batch.column(position) for feed in feeds for position in feed.positions])
            there = None if missing is None else np.flatnonzero(~missing)
            here = batch if there is None else batch.take(pa.array(there))
        if here.num_rows:
            yield [feed.array(here.columns, Where(partition, start, there)) for feed in feeds], here
        start += batch.num_rows


def _text(key: Sequence[pa.Array]) -> str:
    return repr([column.to_pylist() for column in key])  # as text, because NaN != NaN


def _runs(keys: Sequence[pa.Array], rows: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of equal keys. Nulls are equal to each other, and so are NaNs."""
    changes = np.zeros(rows, bool)
    for key in keys:
        codes = key.dictionary_encode("encode").indices.to_numpy(zero_copy_only=False)
        changes[1:] |= codes[1:] != codes[:-1]
    starts = np.concatenate([[0], np.flatnonzero(changes), [rows]])
    yield from zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
