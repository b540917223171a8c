"""Check the options of a read, and plan how existing files are read with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import PlanError, near
from tfos_nb.runtime.tfrecord.fields import Field, RecordType
from tfos_nb.runtime.tfrecord.files import DataFile, Opener
from tfos_nb.runtime.tfrecord.inspection import look, partition_types
from tfos_nb.runtime.tfrecord.reading import Reading
from tfos_nb.runtime.tfrecord.schema import fields_of, record_type_of, type_name, with_lengths

__all__ = ["SAMPLE", "Asked", "Planned", "ask", "plan"]

SAMPLE = 1000
"""Default number of records that are sampled to infer or check a schema."""

_JSON = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}
_MODES = ("fail", "skip")


@dataclass(frozen=True)
class Asked:
    """Parameters of a read, each checked by itself. ``schema`` is ``df.schema.jsonValue()``."""

    schema: dict[str, Any] | None
    record_type: RecordType
    skip: bool
    bad_column: str
    binary: tuple[str, ...]
    lengths: dict[str, int] | None
    sample: int


@dataclass(frozen=True)
class Planned:
    """Plan for reading files, and the schema of the DataFrame, as ``df.schema.jsonValue()``."""

    reading: Reading
    schema: dict[str, Any]


def ask(
    *,
    schema: dict[str, Any] | None,
    record_type: Any,
    mode: Any,
    bad_column: Any,
    binary: Any,
    lengths: Any,
    sample: Any,
) -> Asked:
    """Check the parameters of a read, without access to the files.

    Raises
    ------
    PlanError
        If a parameter is wrong, or two contradict each other.
    """
    if mode not in _MODES:
        raise PlanError(f"mode must be 'fail' or 'skip', got {mode!r}{near(str(mode), _MODES)}")
    if type(sample) is not int or sample < 0:
        raise PlanError(f"sample must be a number of records, or 0, got {sample!r}")
    if schema is None and not sample:
        raise PlanError("sample=0 reads no record, so the schema must be declared: schema='column type, …'")
    if bad_column and mode != "skip":
        raise PlanError(f"bad_column={bad_column!r} needs mode='skip': with 'fail' no damaged row is returned")
    binary = (binary,) if isinstance(binary, str) else tuple(binary)
    if binary and schema is not None:
        raise PlanError("binary is for a schema that is inferred: declare these columns as binary in yours")
    return Asked(schema, record_type_of(record_type), mode == "skip", bad_column, binary, lengths, sample)


def plan(asked: Asked, files: Sequence[DataFile], opener: Opener, *, tally: Any = None) -> Planned:
    """Sample the files and return how they are read.

    Parameters
    ----------
    asked : Asked
        Parameters of the read.
    files : sequence of DataFile
        The files.
    opener : callable
        Opens a file by its URL.
    tally : Tally, optional
        Receives the records that are skipped.

    Raises
    ------
    PlanError
        If a schema must be inferred and there are no records, or if the sampled records do not fit the schema.
    """
    if not files and asked.schema is None:
        raise PlanError("this path has no records to infer a schema from: declare one with schema=…")
    declared = {} if asked.schema is None else {c["name"]: type_name(c["type"]) for c in asked.schema["fields"]}
    partition = partition_types(files, declared)
    names = [name for name, _ in partition]
    fields = _fields(asked, files, opener, names)
    order = list(declared) or [field.name for field in fields]
    order += [name for name in [*names, asked.bad_column] if name and name not in order]
    reading = Reading(fields, asked.record_type, tuple(order), partition, asked.skip, asked.bad_column, tally)
    return Planned(reading, _schema(reading, asked.schema))


def _fields(asked: Asked, files: Sequence[DataFile], opener: Opener, partition: Sequence[str]) -> tuple[Field, ...]:
    seen = None
    if asked.sample and files:
        seen = look(files, opener, asked.record_type, asked.sample, skip=asked.skip)
        if not seen.records and asked.schema is None:
            raise PlanError("the files at this path have no records to infer a schema from: declare one")
    if asked.schema is None:
        assert seen is not None
        inferred = tuple(field for field in seen.infer(asked.binary) if field.name not in partition)
        return with_lengths(inferred, asked.lengths)
    leave = [*partition, asked.bad_column]
    fields = fields_of(asked.schema, asked.record_type, leave, lengths=asked.lengths)
    if seen is not None and seen.records:
        seen.check(fields)
    return fields


def _schema(reading: Reading, declared: dict[str, Any] | None) -> dict[str, Any]:
    """Return the DataFrame's schema: as declared, but with all columns nullable, as for Spark's own file formats."""
    known = {} if declared is None else {column["name"]: column for column in declared["fields"]}
    kinds: dict[str, Any] = {field.name: _json(field.element, field.depth) for field in reading.fields}
    kinds.update({name: _json(kind, 0) for name, kind in reading.partition})
    if reading.bad_column:
        kinds[reading.bad_column] = "string"
    columns = [
        {"name": name, "type": kinds[name], "metadata": {}, **known.get(name, {}), "nullable": True}
        for name in reading.order
    ]
    return {"type": "struct", "fields": columns}


def _json(element: str, depth: int) -> Any:
    kind: Any = _JSON.get(element, element)
    for _ in range(depth):
        kind = {"type": "array", "elementType": kind, "containsNull": True}
    return kind
