"""Sample records of a few files, to infer their schema or to check a declared one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import PlanError, near
from tfos_nb.runtime.tfrecord.fields import DIRECTORIES, FLOAT, INT, STRINGS, Field, Kind, RecordError, RecordType
from tfos_nb.runtime.tfrecord.files import DataFile, Opener, plain
from tfos_nb.runtime.tfrecord.framing import HEAD
from tfos_nb.runtime.tfrecord.parse import Lists, Nested, Parsed, parse
from tfos_nb.runtime.tfrecord.reading import Block, blocks

__all__ = ["Look", "Seen", "look", "partition_types"]

_FILES = 10
_BLOCK = 64 * 1024
_WHOLE = {"int": re.compile(r"-?\d+"), "double": re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")}
_INT32 = 2**31


@dataclass
class Seen:
    """One column as the sampled records show it.

    Attributes
    ----------
    kinds : dict of Kind to str
        Each kind of values, with the file and byte where it was first found.
    nested : set of bool
        True for a feature list, False for a feature of the context; both if the records differ.
    one_each : bool
        Whether every feature has exactly one value.
    text : bool
        Whether all bytes are UTF-8.
    """

    kinds: dict[Kind, str]
    nested: set[bool]
    one_each: bool = True
    text: bool = True

    @property
    def depth(self) -> int:
        """Depth of the column: 0 one value, 1 array, 2 array of arrays."""
        return 2 if True in self.nested else int(not self.one_each)


class Look:
    """Columns of the sampled records.

    Attributes
    ----------
    columns : dict of str to Seen
        By name.
    records, files : int
        Number of sampled records and files.
    """

    def __init__(self) -> None:
        self.columns: dict[str, Seen] = {}
        self.records = self.files = 0

    def add(self, file: DataFile, block: Block, parsed: Parsed, heads: Any) -> None:
        """Add the records of a block. ``heads`` has the position of each in the file, in bytes."""
        self.records += parsed.rows

        def place(row: int) -> str:
            return f"{plain(file.url)}, byte {int(heads[row])}"

        for name, lists in parsed.features.items():
            for one in lists:
                self._see(name, one, place(int(one.rows[0])), nested=False)
        for name, nested in parsed.lists.items():
            self._see_nested(name, nested, place)

    def _see(self, name: str, lists: Lists, place: str, *, nested: bool) -> None:
        seen = self.columns.setdefault(name, Seen({}, set()))
        seen.kinds.setdefault(lists.kind, place)
        seen.nested.add(nested)
        seen.one_each &= bool((lists.counts == 1).all())
        if lists.kind is Kind.BYTES:
            seen.text &= _is_text(lists.values)

    def _see_nested(self, name: str, nested: Nested, place: Any) -> None:
        self.columns.setdefault(name, Seen({}, set())).nested.add(True)
        owners = np.repeat(nested.rows, nested.counts)
        for one in nested.inner:
            self._see(name, one, place(int(owners[one.rows[0]])), nested=True)

    def infer(self, binary: Iterable[str] = ()) -> tuple[Field, ...]:
        """Return the fields of the records, sorted by name.

        Parameters
        ----------
        binary : iterable of str
            Columns of bytes that become ``binary``, even if the sampled ones are UTF-8.

        Raises
        ------
        PlanError
            If a column has values of several kinds; all such columns are named. Also if a column in ``binary`` does
            not exist, or does not have bytes.
        """
        binary = set(binary)
        for name in sorted(binary - set(self.columns)):
            raise PlanError(f"binary: no record has a feature {name!r}{near(name, list(self.columns))}. {self.has()}")
        problems = [problem for name in sorted(self.columns) if (problem := _conflict(name, self.columns[name]))]
        if problems:
            raise PlanError(
                "the records disagree, so no schema fits them all. " + ". ".join(problems) + ". Declare a schema "
                "without these columns, or write the files again with one type each"
            )
        return tuple(self._field(name, seen, name in binary) for name, seen in sorted(self.columns.items()))

    def _field(self, name: str, seen: Seen, binary: bool) -> Field:
        kind = next(iter(seen.kinds), Kind.BYTES)
        if binary and kind is not Kind.BYTES:
            raise PlanError(f"binary: column {name!r} has {kind.told} values, not bytes")
        text = STRINGS if seen.text and not binary else "binary"
        return Field(name, {Kind.FLOAT: FLOAT, Kind.INT: INT, Kind.BYTES: text}[kind], seen.depth)

    def check(self, fields: Sequence[Field]) -> None:
        """Check that the records have the declared columns with the declared types.

        Raises
        ------
        PlanError
            Naming every column that is missing or has another type.
        """
        problems = [problem for field in fields if (problem := self._misfit(field))]
        if problems:
            raise PlanError(". ".join(problems) + f". {self.has()}")

    def _misfit(self, field: Field) -> str:
        seen = self.columns.get(field.name)
        if seen is None:
            return (
                f"column {field.name!r} is in none of the first records of {_count(self.files, 'file')} "
                f"({self.records} were read){near(field.name, list(self.columns))}; sample=0 skips this check, and "
                "a missing column is null"
            )
        told = "" if not seen.kinds else " or ".join(_told(name, seen) for name in seen.kinds)
        wrong = [kind for kind in seen.kinds if kind is not field.kind]
        fits = (field.depth == 2) == (True in seen.nested) and (field.depth > 0 or seen.depth == 0)
        if (not wrong and (fits or not seen.kinds)) or not told:
            return ""
        return f"column {field.name!r} is declared {field.told}, but is {told} in {next(iter(seen.kinds.values()))}"

    def has(self) -> str:
        """Return a sentence that lists the columns of the records and their types."""
        told = [
            f"{name} ({' or '.join(_told(kind, seen) for kind in seen.kinds) or 'empty'})"
            for name, seen in sorted(self.columns.items())
        ]
        return f"The records have {', '.join(told) or 'no features at all'}"


def _told(kind: Kind, seen: Seen) -> str:
    element = {Kind.FLOAT: FLOAT, Kind.INT: INT, Kind.BYTES: STRINGS if seen.text else "binary"}[kind]
    return "array<" * seen.depth + element + ">" * seen.depth


def _conflict(name: str, seen: Seen) -> str:
    if len(seen.kinds) > 1:
        return f"Column {name!r} is " + ", and ".join(f"{kind.told} in {place}" for kind, place in seen.kinds.items())
    if len(seen.nested) > 1:
        return f"Column {name!r} is both in the context and a feature list"
    return ""


def _is_text(values: pa.Array) -> bool:
    try:
        values.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def look(
    files: Sequence[DataFile], opener: Opener, record_type: RecordType, sample: int, *, skip: bool = False
) -> Look:
    """Sample about ``sample`` records from the beginnings of at most ten files, evenly spaced among all.

    Raises
    ------
    PlanError
        For a damaged record, unless ``skip`` is True. The message has the file and the byte.
    """
    result = Look()
    chosen = [files[number] for number in sorted(set(np.linspace(0, len(files) - 1, _FILES).astype(int).tolist()))]
    each = -(-sample // len(chosen))
    for file in chosen:
        result.files += 1
        with opener(file.url) as stream:
            try:
                _look_into(result, file, stream, record_type, (each, skip))
            except RecordError as error:
                raise PlanError(str(error)) from None
    return result


def _look_into(result: Look, file: DataFile, stream: Any, record_type: RecordType, how: tuple[int, bool]) -> None:
    left, skip = how
    for block in blocks(stream, _BLOCK):
        starts, ends, good = block.scan.starts[:left], block.scan.ends[:left], block.scan.good[:left]
        parsed = parse(block.data, starts[good], ends[good], record_type)
        heads = block.offset + starts - HEAD
        damage = [(int(place), "the checksum of the record is wrong") for place in heads[~good]]
        damage += [(int(heads[good][row]), why) for row, why in parsed.bad.items()]
        left -= len(starts)
        if block.broken and left > 0:
            place = block.offset + block.scan.consumed
            of_records = place or "length" not in block.broken
            damage.append((place, block.broken if of_records else "it is not a TFRecord file"))
        if damage and not skip:
            place, why = min(damage)
            raise RecordError(f"{plain(file.url)}, byte {place}: {why}; mode='skip' skips such records")
        result.add(file, block, parsed, heads[good])
        if left <= 0:
            return


def partition_types(files: Sequence[DataFile], declared: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the partition columns of files with their types: the declared one, or int, bigint, double or string.

    Raises
    ------
    PlanError
        If the files do not all have the same partition columns, or a value is not of the declared type.
    """
    layouts = {tuple(name for name, _ in file.partition): file for file in files}
    if len(layouts) > 1:
        places = ", ".join(f"{'/'.join(names) or 'none'} ({plain(file.url)})" for names, file in layouts.items())
        raise PlanError(
            f"the files must have the same partition columns, got {places}; read the files of each kind apart"
        )
    found = []
    for number, name in enumerate(next(iter(layouts), ())):
        values = {value for file in files if (value := file.partition[number][1]) is not None}
        kind = declared.get(name) or _type_of(values)
        for value in values:
            if not _is_of(kind, value):
                raise PlanError(
                    f"partition column {name!r} is declared {kind}, but a directory is {name}={value}; declare it "
                    "string, or rename the directory"
                )
        found.append((name, kind))
    return tuple(found)


def _type_of(values: set[str]) -> str:
    if values and all(_WHOLE["int"].fullmatch(value) for value in values):
        largest = max(abs(int(value)) for value in values)
        return "int" if largest < _INT32 else "bigint" if largest < _INT32**2 * 2 else "string"
    if values and all(_WHOLE["double"].fullmatch(value) for value in values):
        return "double"
    return STRINGS


def _is_of(kind: str, value: str) -> bool:
    try:
        pa.array([value]).cast(DIRECTORIES[kind])
    except (KeyError, pa.ArrowException):
        return False
    return True
