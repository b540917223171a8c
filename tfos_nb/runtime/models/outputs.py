"""Convert a model's outputs to Arrow columns of Spark's types: values, lists, or lists of lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.models.signature import Tensor
from tfos_nb.runtime.rows.ragged import Output, Ragged

__all__ = ["SPARK_TYPES", "arrow_type", "column_of"]

Array = np.ndarray[Any, Any]

SPARK_TYPES = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "uint8": "short",
    "uint16": "integer",
    "uint32": "long",
    "uint64": "decimal(20,0)",
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
    "string": "string",
}
"""Spark's type for each TensorFlow type, as named in Spark's JSON schemas. It can hold all values of that type."""

_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal(20,0)": pa.decimal128(20, 0),
    "string": pa.string(),
}


def arrow_type(tensor: Tensor) -> pa.DataType:
    """Return the Arrow type of an output's column: a list for each axis, except for shape (1,)."""
    kind = _ARROW_TYPES[SPARK_TYPES[tensor.dtype]]
    for _ in _axes(tensor):
        kind = pa.list_(kind)
    return kind


def _axes(tensor: Tensor) -> tuple[int | None, ...]:
    return () if tensor.shape == (1,) else tensor.shape


def column_of(output: Output, tensor: Tensor, rows: int) -> pa.Array:
    """Return an output as a column of type :func:`arrow_type`. A ragged output becomes lists of different lengths.

    Raises
    ------
    FeedFailed
        If the output does not have ``rows`` values of the declared number of axes, or has bytes that are not UTF-8.
    """
    if output.ndim != len(tensor.shape) + 1 or len(output) != rows:
        shape = "x".join(map(str, output.shape)) or "one value"
        raise FeedFailed(
            f"output {tensor.name!r} must have one value of the declared shape for each row, got {shape} for {rows} "
            "rows: change the model, or the function, so that each row has its own value"
        )
    if isinstance(output, Ragged):
        column = _listed(output.values, output.values.shape[1:], tensor)
        for splits in reversed(output.splits):
            column = pa.ListArray.from_arrays(pa.array(splits).cast(pa.int32()), column)
        return column
    return _listed(output, () if tensor.shape == (1,) else output.shape[1:], tensor)


def _listed(array: Array, sizes: tuple[int, ...], tensor: Tensor) -> pa.Array:
    """Return the entries of an array's first axis as lists nested once for each of ``sizes``."""
    column = _flat_column(array.reshape(-1), tensor)
    for level in reversed(range(len(sizes))):
        lists = len(array) * math.prod(sizes[:level])
        offsets = pa.array(np.arange(lists + 1, dtype=np.int64) * sizes[level]).cast(pa.int32())
        column = pa.ListArray.from_arrays(offsets, column)
    return column


def _flat_column(flat: Array, tensor: Tensor) -> pa.Array:
    kind = _ARROW_TYPES[SPARK_TYPES[tensor.dtype]]
    if tensor.dtype == "string":
        try:
            return pa.array(flat, pa.binary()).cast(kind)
        except pa.ArrowInvalid:
            raise FeedFailed(
                f"output {tensor.name!r} has bytes that are not UTF-8 text: let the model encode them, for example "
                "with tf.io.encode_base64"
            ) from None
    if tensor.dtype in ("float16", "bfloat16"):
        flat = flat.astype(np.float32)
    return pa.array(flat).cast(kind)
