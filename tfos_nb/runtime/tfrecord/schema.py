"""Convert a DataFrame's schema to fields of records, or say what to do with columns that a record cannot store.

Schemas are passed as the JSON of Spark's types, so this module does not need Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfos_nb.errors import PlanError, absent_column, near
from tfos_nb.runtime.tfrecord.fields import ELEMENTS, Field, RecordType

__all__ = ["fields_of", "record_type_of", "type_name", "with_lengths"]

_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
_ADVICE = {
    "decimal": "cast it to double, or to string to keep every digit",
    "date": "cast it to string, or to int with unix_date(…)",
    "timestamp": "cast it to bigint (seconds), or use unix_micros(…)",
    "timestamp_ntz": "cast it to timestamp and that to bigint (seconds), or to string",
    "struct": "select its fields: df.select('NAME.*', …)",
    "map": "use map_keys(…) and map_values(…), or to_json(…)",
    "void": "drop it, or cast it to the type it should have",
    "vector": "use pyspark.ml.functions.vector_to_array(col, 'float32')",
    "matrix": "convert it to an array with a UDF",
    "variant": "use to_json(…), or variant_get(…)",
}


def type_name(kind: Any) -> str:
    """Return the name in Spark SQL of a type from Spark's JSON."""
    if isinstance(kind, str):
        return _NAMES.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{type_name(kind['elementType'])}>"
    if kind["type"] == "udt":
        return {"VectorUDT": "vector", "MatrixUDT": "matrix"}.get(str(kind.get("class", "")).rpartition(".")[2], "udt")
    return str(kind["type"])


def fields_of(
    schema: Mapping[str, Any], record_type: RecordType, leave: Iterable[str] = (), *, lengths: Any = None
) -> tuple[Field, ...]:
    """Return the fields of a schema.

    Parameters
    ----------
    schema : mapping
        ``df.schema.jsonValue()``.
    record_type : RecordType
        Message in which they are stored.
    leave : iterable of str
        Columns to leave out, such as partition columns.
    lengths : mapping of str to int, optional
        Length that the arrays of a column must have, by column.

    Raises
    ------
    PlanError
        If a record cannot store a column. The message names all such columns and says what to do with each.
    """
    leave, problems, fields = set(leave), [], []
    names = [column["name"] for column in schema["fields"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(
            f"several columns are called {', '.join(map(repr, twice))}: rename them, features have one name"
        )
    for column in schema["fields"]:
        if column["name"] in leave:
            continue
        field = _field(column["name"], column["type"])
        if isinstance(field, str):
            problems.append(f"column {column['name']!r} is {type_name(column['type'])}: {field}")
        elif field.depth == 2 and record_type is RecordType.EXAMPLE:
            problems.append(
                f"column {field.name!r} is {field.told}, which an Example cannot store: "
                "write record_type='SequenceExample', or flatten(…) it"
            )
        else:
            fields.append(field)
    if problems:
        raise PlanError("a TFRecord cannot store some columns. " + ". ".join(problems))
    return with_lengths(tuple(fields), lengths)


def _field(name: str, kind: Any) -> Field | str:
    """Return the field of a column, or the advice for a column that a record cannot store."""
    depth = 0
    while isinstance(kind, dict) and kind["type"] == "array":
        kind, depth = kind["elementType"], depth + 1
    element = type_name(kind)
    if element.startswith(("varchar", "char", "string")):
        element = "string"
    if element not in ELEMENTS:
        advice = _ADVICE.get(element.partition("(")[0], "cast it to a number, a boolean, a string or binary")
        return advice if not depth else f"its elements are {element}; convert them with transform(…): {advice}"
    if depth > 2:
        return "arrays nest two deep at most: flatten(…) it"
    return Field(name, element, depth)


def with_lengths(fields: tuple[Field, ...], lengths: Any) -> tuple[Field, ...]:
    """Return fields with the lengths that arrays of some of them must have.

    Raises
    ------
    PlanError
        If ``lengths`` is not a mapping from the names of arrays to numbers of values.
    """
    if not lengths:
        return fields
    if not isinstance(lengths, Mapping):
        raise PlanError(f"lengths must be a mapping such as {{'pixels': 784}}, got {lengths!r}")
    by_name = {field.name: field for field in fields}
    for name, length in lengths.items():
        if name not in by_name:
            raise absent_column("lengths", name, list(by_name))
        if not by_name[name].depth:
            raise PlanError(f"lengths: column {name!r} is {by_name[name].told}, not an array")
        if type(length) is not int or length < 0:
            raise PlanError(f"lengths: the length of {name!r} must be a number of values, got {length!r}")
    return tuple(Field(field.name, field.element, field.depth, lengths.get(field.name)) for field in fields)


def record_type_of(given: Any) -> RecordType:
    """Return a record type by its name, ignoring case and underscores.

    Raises
    ------
    PlanError
        If there is no such type.
    """
    for known in RecordType:
        if str(getattr(given, "value", given)).replace("_", "").lower() == known.value.lower():
            return known
    names = [known.value for known in RecordType]
    raise PlanError(f"record_type must be {' or '.join(map(repr, names))}, got {given!r}{near(str(given), names)}")
