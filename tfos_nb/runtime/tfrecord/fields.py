"""Types of a record's columns: the list of a Feature that stores the values, and the types in Arrow and Spark."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

__all__ = [
    "DIRECTORIES",
    "ELEMENTS",
    "FLOAT",
    "INT",
    "STRINGS",
    "Field",
    "Kind",
    "RecordError",
    "RecordType",
    "arrow_schema",
]


class Kind(enum.IntEnum):
    """List of a Feature. Each value is the list's field number in ``feature.proto``."""

    BYTES = 1
    FLOAT = 2
    INT = 3

    @property
    def told(self) -> str:
        """Name of the type in messages."""
        return {Kind.BYTES: "bytes", Kind.FLOAT: "float", Kind.INT: "int64"}[self]


class RecordType(str, enum.Enum):
    """Protobuf message in which a record is encoded."""

    EXAMPLE = "Example"
    SEQUENCE_EXAMPLE = "SequenceExample"


class RecordError(Exception):
    """A record cannot be read or written.

    Attributes
    ----------
    row : int or None
        Index of the record in its batch, if it is known.
    corrupt : bool
        Whether the record is damaged, so that it can be skipped. False: it does not fit the schema.
    """

    def __init__(self, message: str, row: int | None = None, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.row = row
        self.corrupt = corrupt

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (str(self), self.row, self.corrupt)


def _revive(message: str, row: int | None, corrupt: bool) -> RecordError:
    return RecordError(message, row, corrupt=corrupt)


ELEMENTS: dict[str, tuple[Kind, pa.DataType]] = {
    "float": (Kind.FLOAT, pa.float32()),
    "double": (Kind.FLOAT, pa.float64()),
    "boolean": (Kind.INT, pa.bool_()),
    "tinyint": (Kind.INT, pa.int8()),
    "smallint": (Kind.INT, pa.int16()),
    "int": (Kind.INT, pa.int32()),
    "bigint": (Kind.INT, pa.int64()),
    "string": (Kind.BYTES, pa.string()),
    "binary": (Kind.BYTES, pa.binary()),
}
"""List and Arrow type for each type that a record can store, by the type's name in Spark SQL."""

DIRECTORIES: dict[str, pa.DataType] = {**{name: kind for name, (_, kind) in ELEMENTS.items()}, "date": pa.date32()}
"""Arrow type for each type that a partition column can have, by the type's name in Spark SQL."""

FLOAT, INT, STRINGS = "float", "bigint", "string"


@dataclass(frozen=True)
class Field:
    """Column of a DataFrame that is stored as a feature.

    Parameters
    ----------
    name : str
        Name of the column and of the feature.
    element : str
        Type of one value, a key of :data:`ELEMENTS`.
    depth : int
        0: one value per row. 1: an array. 2: an array of arrays, which only a SequenceExample can store.
    length : int or None
        Length that each innermost array must have. None: any.
    """

    name: str
    element: str
    depth: int = 0
    length: int | None = None

    @property
    def kind(self) -> Kind:
        """List of the Feature that stores the values."""
        return ELEMENTS[self.element][0]

    @property
    def arrow(self) -> pa.DataType:
        """Arrow type of the column."""
        kind = ELEMENTS[self.element][1]
        for _ in range(self.depth):
            kind = pa.list_(kind)
        return kind

    @property
    def told(self) -> str:
        """Type of the column as written in Spark SQL, as in ``array<float>``."""
        return "array<" * self.depth + self.element + ">" * self.depth


def arrow_schema(fields: tuple[Field, ...]) -> pa.Schema:
    """Return the Arrow schema of columns."""
    return pa.schema([pa.field(field.name, field.arrow) for field in fields])
