"""Types of a column in a record: the list of a Feature that contains it, and its types in Arrow and Spark."""

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
    """Which list of a Feature is set; the value is its number in ``feature.proto``."""

    BYTES = 1
    FLOAT = 2
    INT = 3

    @property
    def told(self) -> str:
        """What a person calls it."""
        return {Kind.BYTES: "bytes", Kind.FLOAT: "float", Kind.INT: "int64"}[self]


class RecordType(str, enum.Enum):
    """The message that a record holds."""

    EXAMPLE = "Example"
    SEQUENCE_EXAMPLE = "SequenceExample"


class RecordError(Exception):
    """A record that cannot be read or written.

    Attributes
    ----------
    row : int or None
        Which of the rows in hand it is.
    corrupt : bool
        Whether the bytes are at fault: such a record can be skipped. Otherwise the schema does not fit them.
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
"""Spark's name of each type that a record can hold: the list that holds it, and Arrow's type."""

DIRECTORIES: dict[str, pa.DataType] = {**{name: kind for name, (_, kind) in ELEMENTS.items()}, "date": pa.date32()}
"""Spark's name of each type that the value in a directory's name can be read as, and Arrow's."""

FLOAT, INT, STRINGS = "float", "bigint", "string"


@dataclass(frozen=True)
class Field:
    """One column.

    Parameters
    ----------
    name : str
        Its name, and the feature's.
    element : str
        Spark's name of the type of one value; a key of :data:`ELEMENTS`.
    depth : int
        0: one value a row; 1: an array; 2: an array of arrays, which only a SequenceExample holds.
    length : int or None
        How many values each array has to have, if that is asked.
    """

    name: str
    element: str
    depth: int = 0
    length: int | None = None

    @property
    def kind(self) -> Kind:
        """The list of the Feature that holds it."""
        return ELEMENTS[self.element][0]

    @property
    def arrow(self) -> pa.DataType:
        """Arrow's type of the column."""
        kind = ELEMENTS[self.element][1]
        for _ in range(self.depth):
            kind = pa.list_(kind)
        return kind

    @property
    def told(self) -> str:
        """Spark's name of the column's type."""
        return "array<" * self.depth + self.element + ">" * self.depth


def arrow_schema(fields: tuple[Field, ...]) -> pa.Schema:
    """Return the Arrow schema of some columns."""
    return pa.schema([pa.field(field.name, field.arrow) for field in fields])
