"""Match columns with a model's inputs, and name the columns of its outputs.

Columns that the user does not name are found by names and shapes. A column that does not fit is refused before any row
is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

from tfos_nb.errors import PlanError, absent_column, near
from tfos_nb.runtime.models.inputs import Feed
from tfos_nb.runtime.models.outputs import SPARK_TYPES
from tfos_nb.runtime.models.signature import Tensor

__all__ = ["LINE", "PREDICT", "Inputs", "Outputs", "Words", "column_type", "depth_of", "feeds_of", "fields_added"]

Inputs = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
Outputs = str | Mapping[str, str]


@dataclass(frozen=True)
class Words:
    """Names of the user's parameters, for messages; the defaults are those of :func:`tfos_nb.predict`.

    Parameters
    ----------
    inputs, keep, output : str
        The names of three parameters: the input columns, the columns that stay, and the column of the results.
    outputs : str
        How the columns of named results are set; ``{}`` is replaced by the result's name.
    by_column : bool
        Whether the inputs are given as ``{column: input}``, not as ``{input: column}``.
    several : bool
        Whether several columns can be given for one input.
    by_line : bool
        Whether they are options of a magic's line, in which columns are separated by commas.
    """

    inputs: str = "inputs"
    keep: str = "keep"
    output: str = "output"
    outputs: str = "output"
    by_column: bool = False
    several: bool = True
    by_line: bool = False

    def example(self, tensors: Sequence[Tensor]) -> str:
        """Show how to give the columns of inputs."""
        if self.by_line:
            columns = f"{self.inputs} {','.join(['COLUMN'] * len(tensors))}"
            return columns if len(tensors) == 1 else f"{columns}, in the order of the inputs"
        if self.by_column:
            return f"{self.inputs}={{{', '.join(f'…: {tensor.name!r}' for tensor in tensors)}}}"
        if len(tensors) == 1:
            return f"{self.inputs}='COLUMN'"
        return f"{self.inputs}={{{', '.join(f'{tensor.name!r}: …' for tensor in tensors)}}}"

    def side_by_side(self, tensor: Tensor) -> str:
        """Show how to give several columns for one input; empty if they cannot be given."""
        if len(tensor.shape) != 1 or not self.several:
            return ""
        if self.by_line:
            return f", or several numeric ones, side by side: {self.inputs} a,b,…"
        listed = f"{{'a': {tensor.name!r}, 'b': {tensor.name!r}, …}}" if self.by_column else "['a', 'b', …]"
        return f", or several numeric ones, side by side: {self.inputs}={listed}"


PREDICT = Words()
LINE = Words("--inputs", "--keep", "--output", "--output", by_line=True)


def feeds_of(
    tensors: Sequence[Tensor],
    fields: Sequence[StructField],
    inputs: Inputs,
    decode: Sequence[str] = (),
    words: Words = PREDICT,
) -> tuple[Feed, ...]:
    """Return where each input's values come from.

    Parameters
    ----------
    tensors : sequence of Tensor
        The model's inputs.
    fields : sequence of StructField
        The DataFrame's columns.
    inputs : str, list, dict or None
        The argument of :func:`tfos_nb.predict`.
    decode : sequence of str
        The columns of encoded images.
    words : Words
        The user's names of the parameters.

    Raises
    ------
    PlanError
        If a column does not exist, does not fit, or is ambiguous.
    """
    names = [column.name for column in fields]
    for name in decode:
        _refuse_absent(name, names, "decode")
    wanted = _wanted(tensors, fields, inputs, decode, words)
    pairs = zip(tensors, wanted, strict=True)
    return tuple(_feed(tensor, columns, fields, decode, words.inputs) for tensor, columns in pairs)


def _wanted(
    tensors: Sequence[Tensor], fields: Sequence[StructField], inputs: Inputs, decode: Sequence[str], words: Words
) -> list[list[str]]:
    """Return the names of the columns of each input."""
    what = words.inputs
    if inputs is None:
        return _wanted_by_name(tensors, fields, decode, words)
    if isinstance(inputs, Mapping):
        names = [tensor.name for tensor in tensors]
        for key in inputs:
            if key not in names:
                raise PlanError(f"{what}: the model has no input {key!r}{near(key, names)}. {_takes(tensors)}")
        missing = [name for name in names if name not in inputs]
        if missing:
            raise PlanError(f"{what} names no column for {', '.join(missing)}. {_takes(tensors)}")
        return [_listed(inputs[name], what) for name in names]
    columns = _listed(inputs, what)
    if len(tensors) == 1 and columns:
        return [columns]
    if len(columns) != len(tensors):
        count = f"{len(columns)} column" + "s" * (len(columns) != 1)
        raise PlanError(f"{what} names {count}, and must name one for each input. {_takes(tensors)}")
    return [[column] for column in columns]


def _listed(columns: Any, what: str) -> list[str]:
    listed = [columns] if isinstance(columns, str) else columns
    if not isinstance(listed, Sequence) or not all(isinstance(column, str) for column in listed):
        raise PlanError(f"{what} must be the name of a column or a list of names, got {columns!r}")
    return list(listed)


def _wanted_by_name(
    tensors: Sequence[Tensor], fields: Sequence[StructField], decode: Sequence[str], words: Words
) -> list[list[str]]:
    """Find the columns by the inputs' names, and for the other inputs the only columns that fit."""
    names = [column.name for column in fields]
    wanted = {tensor.name: tensor.name for tensor in tensors if tensor.name in names}
    left = [tensor for tensor in tensors if tensor.name not in wanted]
    fitting = {
        tensor.name: [
            column.name
            for column in fields
            if column.name not in wanted.values() and _why_unfit(column, tensor, column.name in decode) is None
        ]
        for tensor in left
    }
    while True:
        sure = next((name for name, columns in fitting.items() if len(columns) == 1), None)
        if sure is None:
            break
        (wanted[sure],) = fitting.pop(sure)
        taken = wanted[sure]
        fitting = {name: [column for column in columns if column != taken] for name, columns in fitting.items()}
    if not fitting:
        return [[wanted[tensor.name]] for tensor in tensors]
    raise PlanError(_unsure(tensors, fields, fitting, words))


def _unsure(
    tensors: Sequence[Tensor], fields: Sequence[StructField], fitting: Mapping[str, Sequence[str]], words: Words
) -> str:
    has = f"{_takes(tensors)}. The DataFrame has {', '.join(_described(column) for column in fields)}"
    if len(tensors) > 1:
        return f"not every input has a column of its name. {has}. Say which: {words.example(tensors)}"
    (columns,) = fitting.values()
    which = f"{len(columns)} columns fit ({', '.join(columns)})" if columns else "no column fits"
    return f"{which}. {has}. Say which: {words.example(tensors)}{words.side_by_side(tensors[0])}"


def _feed(tensor: Tensor, columns: list[str], fields: Sequence[StructField], decode: Sequence[str], what: str) -> Feed:
    names = [column.name for column in fields]
    for name in columns:
        _refuse_absent(name, names, what)
        if names.count(name) > 1:
            raise PlanError(f"{what}: the DataFrame has {names.count(name)} columns {name!r}: rename one")
    positions = tuple(names.index(name) for name in columns)
    pictures = len(columns) == 1 and columns[0] in decode
    if len(columns) == 1:
        _refuse_unfit(fields[positions[0]], tensor, pictures)
    elif len(tensor.shape) != 1 or tensor.shape[0] not in (None, len(columns)):
        raise PlanError(f"{what} names {len(columns)} columns for one input. {_takes([tensor])}")
    else:
        one = Tensor(tensor.name, tensor.dtype, ())
        for position in positions:
            _refuse_unfit(fields[position], one, False)
    return Feed(tensor, positions, tuple(columns), decode=pictures)


def _refuse_absent(name: str, names: Sequence[str], where: str) -> None:
    if name not in names:
        raise absent_column(where, name, names)


def _refuse_unfit(column: StructField, tensor: Tensor, pictures: bool) -> None:
    unfit = _why_unfit(column, tensor, pictures)
    if unfit is not None:
        raise PlanError(f"column {_described(column)} does not fit {_tensor_text(tensor)}: {unfit}")


def depth_of(kind: DataType) -> tuple[DataType, int]:
    """Return the type of the values in an array type, and how deep they are; an ML vector is one deep."""
    depth = 0
    while isinstance(kind, ArrayType):
        kind, depth = kind.elementType, depth + 1
    return kind, depth + (type(kind).__name__ == "VectorUDT")


def _why_unfit(column: StructField, tensor: Tensor, pictures: bool) -> str | None:
    """Say why a column cannot become an input, as far as its type tells; None if it can."""
    kind, depth = depth_of(column.dataType)
    if pictures:
        if not isinstance(kind, BinaryType) or depth:
            return "only a binary column holds encoded pictures"
        return None if len(tensor.shape) == 3 else "pictures have three axes: height, width, channels"
    unfit = _why_of_other_type(kind, tensor)
    if unfit is not None:
        return unfit
    vector = type(kind).__name__ == "VectorUDT"
    if vector and depth > 1:
        return "its rows are lists of vectors"
    length = column.metadata.get("ml_attr", {}).get("num_attrs") if vector else None
    known = [size for size in tensor.shape if size is not None]
    values = math.prod(known)
    if depth == len(tensor.shape) or (depth == 1 and len(known) == len(tensor.shape) > 1):
        exact = len(known) == len(tensor.shape)
        return f"its vectors have {length} values" if exact and length not in (None, values) else None
    if depth == 0:
        return None if values == 1 else "a row of it is one value; name as many columns as it takes, or an array"
    if depth > 1:
        one = "; flatten(…) in Spark makes one list of each" if tensor.shape else ""
        return f"its rows are lists, {depth} deep{one}"
    return "its rows are lists"


def _why_of_other_type(kind: DataType, tensor: Tensor) -> str | None:
    numeric = isinstance(kind, (NumericType, BooleanType)) or type(kind).__name__ == "VectorUDT"
    if tensor.dtype == "string":
        return None if isinstance(kind, (StringType, BinaryType)) else "cast it to string"
    if numeric:
        return None
    if isinstance(kind, BinaryType) and len(tensor.shape) == 3:
        return "it is binary; if these are encoded pictures, name it in decode"
    return "it is not numeric; cast it, for example to double, or let the model's first layer take strings"


def _described(column: StructField) -> str:
    kind = "vector" if type(column.dataType).__name__ == "VectorUDT" else column.dataType.simpleString()
    return f"{column.name} ({kind if len(kind) <= 60 else kind[:60] + '…'})"


def _tensor_text(tensor: Tensor) -> str:
    sizes = "x".join("any" if size is None else str(size) for size in tensor.shape)
    a_row = f"{sizes} values a row" if math.prod(size or 2 for size in tensor.shape) != 1 else "one value a row"
    return f"{tensor.name} ({tensor.dtype}, {a_row})"


def _takes(tensors: Sequence[Tensor]) -> str:
    return f"The model takes {', '.join(map(_tensor_text, tensors))}"


# --- outputs become columns ---------------------------------------------------------------------------------------


def fields_added(
    tensors: Sequence[Tensor], output: Outputs, kept: Sequence[str], case: bool = False, words: Words = PREDICT
) -> list[StructField]:
    """Return the columns of the outputs.

    Parameters
    ----------
    tensors : sequence of Tensor
        The outputs that are wanted.
    output : str or dict
        Their column's name (with several outputs ``{output}_{name}``), or ``{output: column}``.
    kept : sequence of str
        The DataFrame's columns that stay.
    case : bool
        Whether Spark distinguishes upper and lower case.
    words : Words
        The user's names of the parameters.

    Raises
    ------
    PlanError
        If a name is used already.
    """
    if isinstance(output, str):
        names = [output] if len(tensors) == 1 else [f"{output}_{tensor.name}" for tensor in tensors]
    else:
        names = [output[tensor.name] for tensor in tensors]
    there = {name if case else name.lower() for name in kept}
    for name, tensor in zip(names, tensors, strict=True):
        if (name if case else name.lower()) in there:
            param = words.output if isinstance(output, str) else words.outputs.format(tensor.name)
            how = f"take another name with {param}{' ' if words.by_line else '='}…, or drop it"
            raise PlanError(f"the DataFrame has a column {name!r} already: {how}")
        there.add(name if case else name.lower())
    return [StructField(name, column_type(tensor)) for name, tensor in zip(names, tensors, strict=True)]


def column_type(tensor: Tensor) -> DataType:
    """Return the type of an output's column: of a value a row a number, otherwise (nested) arrays."""
    kind: Any = SPARK_TYPES[tensor.dtype]
    for _ in () if tensor.shape == (1,) else tensor.shape:
        kind = {"type": "array", "elementType": kind, "containsNull": True}
    field = {"name": tensor.name, "type": kind, "nullable": True, "metadata": {}}
    return StructType.fromJson({"type": "struct", "fields": [field]}).fields[0].dataType
