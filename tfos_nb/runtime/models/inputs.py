"""Convert Arrow columns to arrays of the shape and type that a model's inputs have.

Nulls are refused, filled, or their rows left out. An error about a row names its column, its number and its value.
Only the decoding of pictures loops over rows in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.models.signature import Tensor, described
from tfos_nb.runtime.rows.columns import is_list
from tfos_nb.runtime.rows.vectors import dense_rows, sizes_of

__all__ = ["Feed", "Fill", "Where", "incomplete_rows", "pictures_of"]

Array = np.ndarray[Any, Any]
Fill = bool | int | float | str | bytes | None

_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Where:
    """Position of a batch in a DataFrame, for error messages.

    Parameters
    ----------
    partition : int
        Number of the partition, from 0.
    start : int
        Number of the batch's first row in the partition, from 0.
    kept : array of int or None
        Indices of the batch's rows that were not left out. None: all.
    """

    partition: int = 0
    start: int = 0
    kept: Array | None = None

    def row(self, index: int) -> str:
        """Return the text "row N of partition P" for an index into the kept rows."""
        there = index if self.kept is None else int(self.kept[index])
        return f"row {self.start + there} of partition {self.partition}"


class _Unfit(Exception):
    """A row does not fit the input. ``has`` describes its value, and ``advice`` is the end of the message."""

    def __init__(self, row: int, has: str, advice: str) -> None:
        super().__init__(has)
        self.row, self.has, self.advice = row, has, advice


@dataclass(frozen=True)
class Feed:
    """Columns of one input: one column, or several numeric columns that are stacked along the second axis.

    Parameters
    ----------
    tensor : Tensor
        The input.
    positions : tuple of int
        Positions of the columns in a batch.
    names : tuple of str
        Names of the columns in error messages.
    fill : number, text or None
        Value that replaces a null. None: a null is an error.
    decode : bool
        Whether the column has encoded pictures (PNG, JPEG, GIF, BMP).
    """

    tensor: Tensor
    positions: tuple[int, ...]
    names: tuple[str, ...]
    fill: Fill = None
    decode: bool = False

    def array(self, columns: Sequence[pa.Array], where: Where | None = None) -> Array:
        """Return the input's array for the rows of a batch.

        Parameters
        ----------
        columns : sequence of pyarrow.Array
            All columns of the batch.
        where : Where, optional
            Position of the batch, for error messages.

        Returns
        -------
        array
            Shape ``(rows, *tensor.shape)``. Texts are bytes in an array of objects.

        Raises
        ------
        FeedFailed
            For a null, a list of a wrong length, or a value that does not fit the input's type. The message names the
            column, the row and the value.
        """
        where = where or Where()
        parts = [
            self._part(columns[position], name, where)
            for position, name in zip(self.positions, self.names, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)

    def _part(self, values: pa.Array, name: str, where: Where) -> Array:
        shape = self.tensor.shape if len(self.positions) == 1 else ()
        try:
            if self.decode:
                return _pictures(values, self.tensor)
            _refuse_other_type(values.type, shape, self.tensor, name)
            return _as_type(_values(values, shape, self.fill), self.tensor)
        except _Unfit as unfit:
            advice = unfit.advice.format(name=repr(name))
            raise FeedFailed(f"column {name!r} has {unfit.has} ({where.row(unfit.row)}){advice}") from None


def incomplete_rows(columns: Sequence[pa.Array]) -> Array | None:
    """Return a boolean array, True for each row with a null in a column or in one of its lists; None if none has."""
    found: Array | None = None
    for column in columns:
        mask = _with_null(column)
        if mask is not None:
            found = mask if found is None else found | mask
    return found


def _with_null(values: pa.Array) -> Array | None:
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    if is_list(values.type) and len(values):
        inner = _with_null(values.flatten())
        if inner is not None:
            parents = np.repeat(np.arange(len(values)), _lengths(values))
            below = np.zeros(len(values), bool)
            below[parents[inner]] = True
            mask = below if mask is None else mask | below
    return mask


# --- values -------------------------------------------------------------------------------------------------------


def _values(values: pa.Array, shape: tuple[int | None, ...], fill: Fill) -> Array:
    """Return a column as an array of shape ``(rows, *shape)``. Flat lists are reshaped to several axes."""
    rows, depth = len(values), _depth(values.type)
    flat = depth != len(shape)  # a number for an input of shape (1,), or a flat list for several axes
    lengths: tuple[int | None, ...] = shape
    if flat:
        lengths = (math.prod(size or 1 for size in shape),) if depth else ()
    array = _dense(values, lengths, fill, "")
    return array.reshape((rows, *(size or 1 for size in shape))) if flat else array


def _refuse_other_type(kind: pa.DataType, shape: Sequence[int | None], tensor: Tensor, name: str) -> None:
    # The driver has checked the types of a DataFrame's columns. It does not know those of the arguments of a SQL
    # function, so they are checked here.
    depth, leaf, types = _depth(kind), kind, pa.types
    while is_list(leaf):
        leaf = leaf.value_type
    text = any(test(leaf) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))
    number = types.is_boolean(leaf) or types.is_integer(leaf) or types.is_floating(leaf) or types.is_decimal(leaf)
    vector = types.is_struct(kind) and kind.num_fields == 4
    fits = text if tensor.dtype == "string" else number or vector
    flat = depth == 1 or (depth == 0 and math.prod(size or 1 for size in shape) == 1)
    if not fits or (depth != len(shape) and not flat) or (depth > 0 and not shape):
        raise FeedFailed(f"column {name!r} is {kind}, and does not fit {described([tensor])}: cast it in Spark")


def _depth(kind: pa.DataType) -> int:
    depth = int(pa.types.is_struct(kind))  # an ML vector: Spark stores it as a struct
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _lengths(values: pa.Array) -> Array:
    """Return the length of each list; 0 for a null."""
    if pa.types.is_fixed_size_list(values.type):
        return np.where(values.is_valid().to_numpy(zero_copy_only=False), values.type.list_size, 0)
    array: Array = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return array


def _dense(values: pa.Array, lengths: tuple[int | None, ...], fill: Fill, inside: str) -> Array:
    if values.null_count:
        return _dense_with_nulls(values, lengths, fill, inside)
    if pa.types.is_struct(values.type):
        return _vectors(values, lengths[0])
    if not lengths:
        return _numbers(values)
    size = _same_length(values, _lengths(values), lengths[0])
    try:
        flat = _dense(values.flatten(), lengths[1:], fill, " in its lists")
    except _Unfit as unfit:
        unfit.row //= max(1, size)
        raise
    return flat.reshape((len(values), size, *flat.shape[1:]))


def _dense_with_nulls(values: pa.Array, lengths: tuple[int | None, ...], fill: Fill, inside: str) -> Array:
    missing = values.is_null().to_numpy(zero_copy_only=False)
    if fill is None:
        raise _Unfit(
            int(np.argmax(missing)),
            f"a null{inside}",
            ", and a tensor has none: fill it, for example with df.fillna or coalesce, or drop such rows with "
            "df.dropna(subset=[{name}])",
        )
    there = np.flatnonzero(~missing)
    try:
        present = _dense(values.drop_null(), lengths, fill, inside)
    except _Unfit as unfit:
        unfit.row = int(there[unfit.row])
        raise
    shape = present.shape[1:] if len(there) else tuple(size or 0 for size in lengths)
    array = np.empty((len(values), *shape), present.dtype)
    array[missing] = _filling(fill, present.dtype, int(np.argmax(missing)))
    array[there] = present
    return array


def _filling(fill: Fill, dtype: np.dtype[Any], row: int) -> Any:
    if isinstance(fill, (str, bytes)) != dtype.hasobject or not _is_held(fill, dtype):
        raise _Unfit(row, f"a null, and {fill!r} to fill it is not a {'text' if dtype.hasobject else dtype}", "")
    return fill.encode() if isinstance(fill, str) else fill


def _is_held(fill: Fill, dtype: np.dtype[Any]) -> bool:
    """Return whether a type can hold a value exactly. Only integer types are checked; others return True."""
    if dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    # NaN is refused: comparisons with it are False.
    return isinstance(fill, (int, float, np.number)) and limits.min <= fill <= limits.max and int(fill) == fill


def _numbers(values: pa.Array) -> Array:
    kind = values.type
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = values.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    array: Array = values.to_numpy(zero_copy_only=False)
    return array


def _vectors(values: pa.Array, wanted: int | None) -> Array:
    """Return ML vectors as a dense array of shape (rows, size)."""
    size = _same_length(values, sizes_of(values), wanted)
    return dense_rows(values, size, "")


def _same_length(values: pa.Array, lengths: Array, wanted: int | None) -> int:
    """Return the length that all lists have: ``wanted``, or if it is None the length of the first.

    Raises
    ------
    _Unfit
        If a list has another length.
    """
    size = wanted if wanted is not None else int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != size)
    if len(wrong):
        row = int(wrong[0])
        expected = f"the model takes {size}" if wanted is not None else f"another row of its batch has {size}"
        raise _Unfit(
            row,
            f"a list of {int(lengths[row])} values, {_value(values, row)}, where {expected}",
            ": pad or cut it in Spark, or leave such rows out",
        )
    return size


def _value(values: pa.Array, row: int) -> str:
    value = values[row].as_py()
    if isinstance(value, dict):  # an ML vector
        value = value["values"] if value["type"] == 1 else dict(zip(value["indices"], value["values"], strict=True))
    text = repr(value[:20]) if isinstance(value, list) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _as_type(array: Array, tensor: Tensor) -> Array:
    """Cast an array to its input's type.

    A cast to an integer type must keep each value exactly. A cast to a float type may round, but not overflow.

    Raises
    ------
    _Unfit
        If a value does not fit.
    """
    if tensor.dtype == "string":
        return array
    wanted = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(invalid="ignore", over="ignore" if wanted.kind in "iub" else "raise"):
        try:
            cast = array.astype(wanted)
        except FloatingPointError:  # search for the value only after an overflow, so that a good batch costs nothing
            sizes = np.abs(array.astype("float64"))
            wrong = np.isfinite(sizes) & (sizes > np.finfo(wanted).max)
            _refuse_values(array, wrong, tensor, "scale or filter it in Spark")
            raise
    if wanted.kind in "iub" and not np.can_cast(array.dtype, wanted):
        _refuse_values(array, cast != array, tensor, "round or filter it in Spark")
    return cast


def _refuse_values(array: Array, wrong: Array, tensor: Tensor, advice: str) -> None:
    """Raise _Unfit for the first value for which ``wrong`` is True, if there is one."""
    if wrong.any():
        place = int(np.argmax(wrong))
        raise _Unfit(
            place // max(1, array[0].size),
            f"the value {array.flat[place]}",
            f", which input {tensor.name!r}, {tensor.dtype}, cannot hold: {advice}",
        )


# --- pictures -----------------------------------------------------------------------------------------------------


def pictures_of(contents: Sequence[bytes], tensor: Tensor, name: str) -> Array:
    """Decode the pictures of a training batch, as :class:`Feed` decodes those of a column in inference.

    Parameters
    ----------
    contents : sequence of bytes
        Encoded pictures, one per row.
    tensor : Tensor
        The model's input, with a shape of (height, width, channels).
    name : str
        Name of the column in error messages.

    Raises
    ------
    FeedFailed
        If a content is no picture, or the pictures have different sizes and the input does not fix one. The message
        names the column and the row.
    """
    try:
        return _pictures(pa.array(contents, pa.binary()), tensor)
    except _Unfit as unfit:
        advice = unfit.advice.format(name=repr(name))
        raise FeedFailed(f"column {name!r} has {unfit.has} (row {unfit.row} of a batch){advice}") from None


def _pictures(values: pa.Array, tensor: Tensor) -> Array:
    """Decode pictures and resize them to the input's height and width. Values remain between 0 and 255.

    Sizes that the input leaves open must be equal within the batch.
    """
    import tensorflow as tf

    height, width, channels = tensor.shape
    pictures = []
    for row, content in enumerate(values):
        data = content.as_py()
        if data is None:
            raise _Unfit(row, "a null", ", and the model needs images: leave such rows out")
        try:
            picture = tf.io.decode_image(data, channels=channels or 0, expand_animations=False)
        except tf.errors.InvalidArgumentError as error:
            told = str(error.message).splitlines()[0].rpartition("} ")[2][:120]
            raise _Unfit(row, f"{len(data)} bytes that are no image and begin with {data[:8]!r}", f": {told}") from None
        if height and width and picture.shape[:2] != (height, width):
            picture = tf.image.resize(picture, (height, width), antialias=True)
        pictures.append(picture.numpy())
    sizes = {picture.shape for picture in pictures}
    if len(sizes) > 1:
        row = next(row for row, picture in enumerate(pictures) if picture.shape != pictures[0].shape)
        told = f"a picture of {'x'.join(map(str, pictures[row].shape))} where the first has another size"
        raise _Unfit(row, told, ": resize them, or let the model's first layer do it")
    stacked = np.stack(pictures) if pictures else np.empty((0, *(size or 1 for size in tensor.shape)), np.uint8)
    wanted = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    return np.rint(stacked).astype(wanted) if wanted.kind in "iu" else stacked.astype(wanted)
