"""Select the columns and rows of a DataFrame that an Estimator feeds; refuse missing ones before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import ArrayType, BooleanType, DataType, IntegralType, NumericType, StringType

from tfos_nb.errors import PlanError, absent_column
from tfos_nb.inference.column_matching import depth_of
from tfos_nb.inference.frames import check_fill

__all__ = ["check_column", "feedable", "filled", "parted", "selected", "without_nulls"]

_FED = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary")


def check_column(df: DataFrame, name: str, what: str) -> str:
    """Return the name of a column.

    Raises
    ------
    PlanError
        If it is not there, or there are several, or TensorFlow has no tensor for it.
    """
    if df.columns.count(name) != 1:
        if name in df.columns:
            raise PlanError(f"{what}: the DataFrame has {df.columns.count(name)} columns {name!r}: rename one")
        raise absent_column(what, name, df.columns)
    if name not in feedable(df):
        kind = df.schema[name].dataType.simpleString()
        raise PlanError(
            f"{what}: column {name!r} is {kind}, for which TensorFlow has no tensor: cast it, or leave it out"
        )
    return name


def feedable(df: DataFrame) -> list[str]:
    """Return the columns that can become tensors: numbers, text, bytes, arrays of these, and vectors."""
    found = []
    for column in df.schema.fields:
        kind, _ = depth_of(column.dataType)
        if type(kind).__name__ == "VectorUDT" or kind.simpleString() in _FED:
            found.append(column.name)
    return found


def parted(df: DataFrame, indicator: str | None, held_out: DataFrame | None) -> tuple[DataFrame, DataFrame | None]:
    """Return the rows to train on and those to validate on.

    Raises
    ------
    PlanError
        If both ways to say it are used, or the indicator is no boolean column.
    """
    if indicator is None:
        return df, held_out
    if held_out is not None:
        raise PlanError("validationIndicatorCol and a validation DataFrame exclude each other: give only one of them")
    check_column(df, indicator, "validationIndicatorCol")
    if not isinstance(df.schema[indicator].dataType, BooleanType):
        kind = df.schema[indicator].dataType.simpleString()
        raise PlanError(f"validationIndicatorCol: column {indicator!r} is {kind}, not boolean: true is for validation")
    place = f"c{df.columns.index(indicator)}"
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    names = [name for name in df.columns if name != indicator]
    chosen = F.coalesce(frame[place], F.lit(False))
    parts = (frame.where(~chosen).drop(place), frame.where(chosen).drop(place))
    return parts[0].toDF(*names), parts[1].toDF(*names)


def selected(df: DataFrame, mapping: Mapping[str, str], also: Sequence[str] = ()) -> DataFrame:
    """Return the columns of a mapping under the tensors' names, and others under their own.

    Several columns for one tensor, numbers all of them, become one array.

    Raises
    ------
    PlanError
        If a column is not there, or cannot be fed.
    """
    by_tensor: dict[str, list[str]] = {}
    for column, tensor in mapping.items():
        by_tensor.setdefault(tensor, []).append(check_column(df, column, "input_mapping"))
    for column in also:
        if column in by_tensor and by_tensor[column] != [column]:
            raise PlanError(f"input_mapping: the tensor {column!r} has the name of another column; rename the tensor")
        by_tensor[column] = [check_column(df, column, "weightCol")]  # a label has been looked at before
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    return frame.select(*(_one(df, frame, columns).alias(tensor) for tensor, columns in by_tensor.items()))


def _one(df: DataFrame, frame: DataFrame, columns: Sequence[str]) -> Column:
    places = [frame[f"c{df.columns.index(name)}"] for name in columns]
    if len(columns) == 1:
        return places[0]
    for name in columns:
        if not isinstance(df.schema[name].dataType, (NumericType, BooleanType)):
            kind = df.schema[name].dataType.simpleString()
            raise PlanError(
                f"input_mapping: {', '.join(columns)} become one tensor, so they must be numbers; {name!r} is {kind}"
            )
    return F.array(*(place.cast("double") for place in places))


def without_nulls(df: DataFrame) -> DataFrame:
    """Return the rows that have no null in any column, nor in its arrays."""
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    for index, field in enumerate(df.schema.fields):
        frame = frame.where(~_has_null(frame[f"c{index}"], field.dataType))
    return frame.toDF(*df.columns)


def _has_null(column: Column, kind: DataType) -> Column:
    if not isinstance(kind, ArrayType):
        return column.isNull()
    element = kind.elementType
    return column.isNull() | F.exists(column, lambda value: _has_null(value, element))


def filled(df: DataFrame, names: Sequence[str], fill: object) -> DataFrame:
    """Return the rows with a value in place of each null in some columns, and inside their arrays.

    Raises
    ------
    PlanError
        If the filling is no value, or of another type than the column.
    """
    check_fill(fill, names)
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    columns = []
    for index, field in enumerate(df.schema.fields):
        value = fill.get(field.name) if isinstance(fill, Mapping) else fill
        column = frame[f"c{index}"]
        columns.append(_filled(column, field.dataType, value, field.name) if field.name in names else column)
    return frame.select(*columns).toDF(*df.columns)


def _filled(column: Column, kind: DataType, value: object, name: str) -> Column:
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.transform(column, lambda inside: _filled(inside, element, value, name))
    if not isinstance(kind, (NumericType, BooleanType, StringType)):
        return column  # of a vector nobody knows how long it should be
    text = isinstance(kind, StringType)
    if value is None:
        value = "" if text else 0
    if isinstance(value, str) != text or (isinstance(kind, IntegralType) and value != value // 1):  # type: ignore[operator]
        raise PlanError(f"fill: {value!r} does not fit column {name!r}, which is {kind.simpleString()}")
    return F.coalesce(column, F.lit(value).cast(kind))
