"""Check whether data can be fed before a row is read, and compare the types of a feed's rows."""

from __future__ import annotations

from typing import Any

from tfos_nb.errors import PlanError

__all__ = ["check_alike", "check_table", "feedable", "read_schema", "refuse_ended", "unlike_schemas"]


def refuse_ended(data: Any) -> None:
    """Refuse rows of a Spark session that was stopped: a session that was started later cannot read them.

    Raises
    ------
    PlanError
        If ``data`` belongs to a stopped session.
    """
    session = getattr(data, "sparkSession", None)
    context = getattr(data, "ctx", None) if session is None else getattr(session, "_sc", None)  # Connect has none
    stopped = context is not None and getattr(context, "_jsc", context) is None
    if stopped or (context is None and getattr(session, "is_stopped", False)):
        raise PlanError(
            f"this {type(data).__name__} is of a Spark session that was stopped: make it again with the current session"
        )


def check_table(data: Any, validation: Any = None) -> None:
    """Refuse the tables that ``train`` would refuse, without starting anything.

    An RDD is not checked, since its columns are known only when its rows are read.

    Raises
    ------
    PlanError
        If a table belongs to a stopped session, has a column that cannot become a tensor, or the columns of the two
        tables do not match.
    """
    for table in (data, validation):
        refuse_ended(table)
        if hasattr(table, "schema"):
            feedable(table)
    if validation is not None:
        check_alike(data, validation)


_NO_TENSOR = {
    "DateType": "cast it to a number: F.unix_date({column})",
    "TimestampType": "cast it: {column}.cast('double')",
    "TimestampNTZType": "cast it: {column}.cast('double')",
    "DecimalType": "cast it: {column}.cast('double')",
    "StructType": "select its fields",
    "MapType": "take what you need out of it",
    "VariantType": "take what you need out of it",
    "TimeType": "make a number of it, such as F.hour({column})",
    "DayTimeIntervalType": "make a number of it: subtract the times as numbers, F.col('t').cast('double')",
    "YearMonthIntervalType": "make a number of it, such as F.months_between of the two dates",
    "CalendarIntervalType": "make a number of it",
    "GeographyType": "make numbers of it, such as its coordinates",
    "GeometryType": "make numbers of it, such as its coordinates",
    "NullType": "it holds nothing; cast it to what it should be, {column}.cast('double')",
}
_OWN_TYPE = "it is a type of its own; make a number or an array of it"


def check_alike(data: Any, validation: Any) -> None:
    """Check that the validation rows have all columns of the training rows, with the same types.

    The columns of an RDD are known only when its rows are read. Its first rows are compared then.

    Raises
    ------
    PlanError
        If a column is missing or has another type. The message names the column. Nothing has been read then.
    """
    if not (hasattr(data, "schema") and hasattr(validation, "schema")):
        return
    kinds = {field.name: field.dataType.simpleString() for field in validation.schema.fields}
    for column in data.schema.fields:
        ours, theirs = column.dataType.simpleString(), kinds.get(column.name)
        if theirs is None:
            raise PlanError(
                f"the validation rows have no column {column.name!r}; they have {', '.join(kinds)}. Add it, or leave "
                f"it out of the training rows with df.drop({column.name!r})"
            )
        if ours != theirs:
            raise PlanError(
                f"column {column.name!r} is {theirs} in the validation rows and {ours} in the training rows: cast one, "
                f"for example validation.withColumn({column.name!r}, validation[{column.name!r}].cast({ours!r}))"
            )


def feedable(frame: Any) -> Any:
    """Return a DataFrame whose columns can all become tensors.

    ML vectors are not converted, so sparse ones stay small. Before Spark 4 they are converted to arrays.

    Raises
    ------
    PlanError
        If a column cannot become a tensor. The message names it and says what to do. Nothing has been read then.
    """
    import pyspark

    _check_names(frame)
    vectors = [column.name for column in frame.schema.fields if type(column.dataType).__name__ == "VectorUDT"]
    if vectors and int(pyspark.__version__.partition(".")[0]) < 4:
        from pyspark.ml.functions import vector_to_array

        frame = frame.withColumns({name: vector_to_array(frame[name]) for name in vectors})
    for column in frame.schema.fields:
        advice = _advice(column.dataType)
        if advice is not None:
            what = advice.format(column=f"df[{column.name!r}]")
            raise PlanError(
                f"column {column.name!r} is {column.dataType.simpleString()}, which cannot become a tensor: {what}"
                f", or leave it out with df.drop({column.name!r})"
            )
    return frame


def refuse_without_columns(frame: Any) -> None:
    """Raise PlanError if a DataFrame has no columns."""
    if not frame.columns:
        raise PlanError("the DataFrame has no columns: select at least one, as in df.select('x')")


def _check_names(frame: Any) -> None:
    """Refuse column names by which Spark's ``mapInArrow`` does not find the columns."""
    refuse_without_columns(frame)
    known: set[str] = set()
    for name in frame.columns:
        if name in known:
            raise PlanError(f"two columns are called {name!r}: rename one, or leave it out")
        known.add(name)
        renamed = name.replace(".", "_").replace("`", "_")
        if renamed != name:
            raise PlanError(
                f"column {name!r} has a dot or a backtick in its name, so Spark cannot find it by name: rename it, "
                f"df.withColumnRenamed({name!r}, {renamed!r})"
            )
    _check_cases(frame)


def _check_cases(frame: Any) -> None:
    alike: dict[str, str] = {}
    for name in frame.columns:
        other = alike.setdefault(name.lower(), name)
        if other != name and frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") != "true":
            raise PlanError(
                f"columns {other!r} and {name!r} are the same to Spark, which ignores upper and lower case: rename "
                "one, or leave it out"
            )


def _advice(kind: Any) -> str | None:
    """Return what to do with a type that cannot become a tensor; None if it can."""
    from pyspark.sql.types import ArrayType, UserDefinedType

    while isinstance(kind, ArrayType):
        kind = kind.elementType
    name = type(kind).__name__
    own = isinstance(kind, UserDefinedType) and name != "VectorUDT"
    return _NO_TENSOR.get(name, _OWN_TYPE if own else None)


def unlike_schemas(first: bytes, other: bytes, common: bool = False) -> str:
    """Return a text about the columns whose types differ between two partitions; empty if none do.

    With ``common`` only the columns that both have are compared.
    """
    ours, theirs = read_schema(first), read_schema(other)
    kinds = [dict(zip(schema.names, schema.types, strict=True)) for schema in (ours, theirs)]
    every = dict.fromkeys([*ours.names, *theirs.names])
    if common:
        every = {name: None for name in ours.names if name in kinds[1]}
    names = [name for name in every if kinds[0].get(name) != kinds[1].get(name)]
    return "; ".join(
        f"{name!r} is {kinds[1].get(name, 'missing')}, not {kinds[0].get(name, 'there')}" for name in names
    )


def read_schema(schema: bytes) -> Any:
    """Return the schema from its Arrow encoding; raise pyarrow's error if it is not valid."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(schema))
