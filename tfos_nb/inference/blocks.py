"""TensorFlow functions over blocks of a DataFrame's rows: new columns, other rows, reductions, by key or of all.

TensorFrames called these ``map_blocks``, ``map_blocks_trimmed``, ``reduce_blocks`` and ``aggregate``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructField, StructType

from tfos_nb.driver.prewarm import functions_with_tensorflow
from tfos_nb.errors import FeedFailed, PlanError, absent_column, check_count, near
from tfos_nb.inference.column_matching import column_type, depth_of
from tfos_nb.inference.frames import check_fill, check_frame, check_nulls
from tfos_nb.inference.model_library import is_keras_model
from tfos_nb.inference.model_task import applied
from tfos_nb.runtime.code.custom_objects import ModelCode, pack
from tfos_nb.runtime.models.blocks import Function, MapTask, ReduceTask
from tfos_nb.runtime.models.inputs import Feed
from tfos_nb.runtime.models.scoring import ScoreTask
from tfos_nb.runtime.models.signature import Signature, Tensor
from tfos_nb.spark.session import usable_session

__all__ = ["map_batches", "reduce_batches"]

_TENSOR_TYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "string",
}


@dataclass(frozen=True)
class _Block:
    """Parameters of both functions apart from a DataFrame and a function."""

    batch_size: int
    nulls: str
    fill: Any

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, 1)
        check_nulls(self.nulls)

    def feeds(self, columns: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Feed, ...]:
        """Return where each tensor's values come from."""
        if self.nulls == "fill":
            check_fill(self.fill, [tensor.name for tensor in tensors])
        return tuple(Feed(t, (columns.index(t.name),), (t.name,), self._fill(t)) for t in tensors)

    def _fill(self, tensor: Tensor) -> Any:
        if self.nulls != "fill":
            return None
        default: Any = "" if tensor.dtype == "string" else 0
        given = self.fill.get(tensor.name) if isinstance(self.fill, dict) else self.fill
        return default if given is None else given


def map_batches(
    df: DataFrame,
    fn: Callable[..., Any],
    schema: StructType | str,
    *,
    keep: bool = True,
    batch_size: int = 1024,
    compiled: bool = True,
    nulls: str = "fail",
    fill: Any = None,
) -> DataFrame:
    """Apply a TensorFlow function to blocks of rows.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows; a streaming DataFrame too.
    fn : callable
        Takes columns as tensors, whose first axis is the rows. Its parameters must have the names of the columns. A
        single parameter with another name gets a dictionary of all columns that are numbers, text, or arrays of these.
        A last parameter with another name keeps its default. The function returns a tensor for each column of
        ``schema``: a dictionary, or several in the schema's order. Floats are not converted to integers automatically.
    schema : StructType or str
        The columns that it returns, as ``"y float, words array<string>"``.
    keep : bool
        Whether the columns of ``df`` stay, with each row's results next to them. False: the function's results are the
        rows, in any number.
    batch_size : int
        Rows that it gets at once; the last block of a partition may have fewer.
    compiled : bool
        Whether it becomes a ``tf.function``. False: it runs as Python code, and may use NumPy.
    nulls, fill
        As for :func:`tfos_nb.predict`.

    Returns
    -------
    DataFrame
        Lazy: computed when its rows are used.

    Raises
    ------
    PlanError
        If the function needs a column that does not exist, or cannot be sent to the executors.

    Examples
    --------
    >>> import tensorflow as tf  # doctest: +SKIP
    >>> map_batches(df, lambda x: x - tf.reduce_mean(x), "centred float")  # doctest: +SKIP
    """
    check_frame(df)
    block = _Block(batch_size, nulls, fill)
    usable_session(df.sparkSession)
    outputs, fields = _declared(schema)
    known = _spelling(df)
    _refuse_twice([known(field.name) for field in fields])
    inputs, as_dict = _taken(df, fn)
    source = _function(fn, Signature(inputs, outputs), as_dict, compiled)
    if not keep:
        needed = _places(df, [tensor.name for tensor in inputs])
        feeds = block.feeds([tensor.name for tensor in inputs], inputs)
        return _mapped(needed, MapTask(source, feeds, batch_size, nulls == "skip"), fields)
    taken = {known(name) for name in df.columns}
    twice = [field.name for field in fields if known(field.name) in taken]
    if twice:
        raise PlanError(
            f"the DataFrame has a column {twice[0]!r} already: use another name in the schema, or drop the column"
        )
    task = ScoreTask(source, source.signature, block.feeds(df.columns, inputs), batch_size, nulls == "skip")
    return applied(df, task, fields, range(len(df.columns)))


def reduce_batches(
    df: DataFrame,
    fn: Callable[..., Any],
    *,
    by: str | Sequence[str] | None = (),
    batch_size: int = 1024,
    compiled: bool = True,
    nulls: str = "fail",
    fill: Any = None,
) -> Any:
    """Reduce all rows, or the rows of each key, to one row with a TensorFlow function.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows.
    fn : callable
        Takes columns as in :func:`map_batches`, and returns one value for each of them, without the axis of rows. It is
        applied to blocks of rows, and again to pairs of its own results. So its result must not depend on the grouping,
        as with sums, products, extremes and concatenated statistics.
    by : str or list of str
        The columns of the key.
    batch_size, compiled, nulls, fill
        As for :func:`map_batches`.

    Returns
    -------
    dict or DataFrame
        Without ``by``, NumPy values by column; with it, a lazy DataFrame of the keys and the values.

    Raises
    ------
    PlanError
        If a column does not exist, or the function cannot be sent to the executors.
    FeedFailed
        If the DataFrame has no rows.

    Examples
    --------
    >>> reduce_batches(df.select("x"), lambda x: tf.reduce_sum(x, 0))  # doctest: +SKIP
    >>> reduce_batches(df, lambda x: tf.reduce_max(x, 0), by="label").show()  # doctest: +SKIP
    """
    check_frame(df)
    if df.isStreaming:
        raise PlanError(
            "reduce_batches cannot use a stream, which has no end: reduce each batch, "
            "stream.writeStream.foreachBatch(…)"
        )
    block = _Block(batch_size, nulls, fill)
    usable_session(df.sparkSession)
    keys = [by] if isinstance(by, str) else list(by or ())
    _check_keys(df, keys)
    inputs, as_dict = _taken(df, fn, without=keys)
    source = _function(fn, Signature(inputs, inputs), as_dict, compiled, rows=False)
    names = [*keys, *(tensor.name for tensor in inputs)]
    kept = _places(df, names)
    if keys:
        kept = kept.select(
            *(_as_key(kept, field) for field in kept.schema.fields[: len(keys)]), *kept.columns[len(keys) :]
        )
    columns = [*(df.schema.fields[df.columns.index(key)] for key in keys), *_fields(inputs)]
    feeds = block.feeds(names, inputs)
    task = ReduceTask(source, feeds, batch_size, tuple(range(len(keys))), nulls == "skip")
    if keys:
        sorted_by = kept.columns[: len(keys)]
        return _mapped(kept.repartition(*sorted_by).sortWithinPartitions(*sorted_by), task, columns)
    places = [StructField(f"c{index}", field.dataType) for index, field in enumerate(columns)]
    parts = _mapped(kept, task, places).repartition(1)
    row = _mapped(parts, ReduceTask(source, feeds, batch_size), places).first()
    if row is None:
        raise FeedFailed(
            f"the DataFrame has no rows, so it cannot be reduced: check its query, and nulls={nulls!r}, where 'skip' "
            "leaves out rows with a null"
        )
    return {tensor.name: _value(row[index], tensor) for index, tensor in enumerate(inputs)}


def _mapped(frame: DataFrame, task: Any, fields: Sequence[StructField]) -> DataFrame:
    with functions_with_tensorflow(frame.sparkSession):
        return frame.mapInArrow(task, StructType(list(fields)))


def _check_keys(df: DataFrame, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in df.columns:
            raise absent_column("by", key, df.columns)
        kind = df.schema[key].dataType
        if isinstance(kind, (ArrayType, MapType, StructType)) or type(kind).__name__ == "VectorUDT":
            raise PlanError(
                f"by: column {key!r} is {kind.simpleString()}, and a key must be one value: name the columns of its "
                "parts, "
                "or convert it to text with to_json(…)"
            )


def _as_key(frame: DataFrame, field: StructField) -> Column:
    """Return a column as a key: to Spark's groupBy -0.0 and 0.0 are one, but not to its sort, nor to its hash."""
    column = frame[field.name]
    if isinstance(field.dataType, (FloatType, DoubleType)):
        column = column + F.lit(0.0).cast(field.dataType)
    return column.alias(field.name)


def _spelling(df: DataFrame) -> Callable[[str], str]:
    """Return the key under which Spark compares column names."""
    return str if df.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true" else str.lower


def _refuse_twice(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise PlanError(f"the schema has two columns {name!r}: rename one")


def _places(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return some columns, under other names: Spark's look-up by name fails for a dot in one."""
    places = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    return places.select(*(f"c{df.columns.index(name)}" for name in names))


def _fields(tensors: Sequence[Tensor]) -> list[StructField]:
    return [StructField(tensor.name, column_type(tensor)) for tensor in tensors]


def _value(value: Any, tensor: Tensor) -> Any:
    return value if tensor.dtype == "string" else np.asarray(value, tensor.dtype)[()]


def _function(
    fn: Callable[..., Any], signature: Signature, as_dict: bool, compiled: bool, rows: bool = True
) -> Function:
    name = f"{getattr(fn, '__name__', type(fn).__name__)}()"
    return Function(name, pack(ModelCode(function=fn)), signature, as_dict, compiled, rows)


def _declared(schema: Any) -> tuple[tuple[Tensor, ...], list[StructField]]:
    """Return a function's outputs, from the columns of the schema."""
    parse = getattr(StructType, "fromDDL", None) or getattr(types, "_parse_datatype_string")  # noqa: B009 - Spark 3.5
    try:
        parsed: Any = schema if isinstance(schema, StructType) else parse(schema)
    except Exception as error:
        told = f": {str(error).strip().splitlines()[0]}" if isinstance(schema, str) else ""
        raise PlanError(f"schema must be as in 'y float, z array<long>', got {schema!r}{told}") from error
    if not isinstance(parsed, StructType):
        raise PlanError(f"schema={schema!r} is a type without a column: name one, as in 'y {schema}'")
    tensors = []
    for column in parsed.fields:
        tensor = _tensor(column.name, column.dataType)
        if tensor is None or column_type(tensor) != _nullable(column.dataType):
            raise PlanError(
                f"schema: {column.name!r} is {column.dataType.simpleString()}; a tensor becomes a number, a boolean, a "
                "string, or (nested) arrays of these"
            )
        tensors.append(tensor)
    if not tensors:
        raise PlanError(f"schema must have at least one column, as in 'y float', got {schema!r}")
    return tuple(tensors), list(parsed.fields)


def _nullable(kind: DataType) -> DataType:
    """Return a type whose arrays may have nulls in them, as the outputs' types say."""
    inner, depth = depth_of(kind)
    tensor = Tensor("", _TENSOR_TYPES.get(inner.simpleString(), ""), (None,) * depth)
    return column_type(tensor) if tensor.dtype and inner.simpleString() != "binary" else kind


def _tensor(name: str, kind: DataType) -> Tensor | None:
    """Return the tensor that a column becomes; None if it becomes none."""
    inner, depth = depth_of(kind)
    if type(inner).__name__ == "VectorUDT" or inner.simpleString().startswith("decimal"):
        return Tensor(name, "float64", (None,) * depth)
    dtype = _TENSOR_TYPES.get(inner.simpleString())
    return Tensor(name, dtype, (None,) * depth) if dtype is not None else None


def _asked(fn: Any, columns: Container[str]) -> list[str]:
    """Return a function's parameters, without the last ones that have defaults and are no columns."""
    parameters = list(inspect.signature(fn).parameters.values())
    while (
        len(parameters) > 1
        and parameters[-1].name not in columns
        and parameters[-1].default is not inspect.Parameter.empty
    ):
        parameters.pop()
    return [parameter.name for parameter in parameters]


def _taken(df: DataFrame, fn: Any, without: Sequence[str] = ()) -> tuple[tuple[Tensor, ...], bool]:
    """Return the columns that a function takes, and whether as a dictionary."""
    if not callable(fn):
        raise PlanError(f"fn must be a function that takes columns as tensors, got a {type(fn).__name__}")
    if is_keras_model(fn):
        raise PlanError(
            f"fn is a {type(fn).__name__}: a model is applied by predict(df, model) or TFModel(model=model)"
        )
    columns = {field.name: _tensor(field.name, field.dataType) for field in df.schema.fields}
    names = _asked(fn, columns)
    unknown = [name for name in names if name not in columns]
    if unknown and len(names) > 1:
        raise PlanError(
            f"fn takes {unknown[0]!r}, which is not a column{near(unknown[0], columns)}; there are "
            f"{', '.join(columns)}. A function of one parameter may take a dictionary of all columns"
        )
    wanted = [name for name in columns if name not in without and columns[name] is not None] if unknown else names
    for name in wanted:
        if columns[name] is None:
            kind = df.schema[name].dataType.simpleString()
            raise PlanError(f"column {name!r} is {kind}, for which TensorFlow has no tensor: cast it")
    taken = tuple(tensor for name in wanted if (tensor := columns[name]) is not None)
    if not taken:
        raise PlanError(
            "fn takes no column" + (f": give it parameters, such as {next(iter(columns))}" if names else "")
        )
    return taken, bool(unknown)
