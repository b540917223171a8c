"""Apply a saved model to a Spark DataFrame's rows, on the executors.

::

    predict(df, model)
        the model's bytes (broadcast) or its place ─▶ one task looks: what does it take and give?
        which column is which input; which columns come out ─▶ df.mapInArrow(ScoreTask, schema): lazy

The driver loads no TensorFlow, and no row is read before the user asks for some.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import math
import os
import re
import socket
import tempfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, BinaryType, BooleanType, NumericType, StringType, StructField, StructType

from tfos_nb.errors import PlanError
from tfos_nb.launching import error_of_job
from tfos_nb.runtime import wire
from tfos_nb.runtime.models import ModelUnusable, Signature, Tensor, check_directory, check_file
from tfos_nb.runtime.scoring import LOOK_SCHEMA, SPARK_TYPES, Feed, Looked, LookTask, ScoreTask
from tfos_nb.runtime.shelf import Parcel, Place
from tfos_nb.session import SparkJobs, slots_busy, usable_session

__all__ = ["predict"]

_LOOK_SECONDS = 600.0
"""How long the look at a model may take: a slot has to be free, and a large model to be loaded."""

Inputs = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None


def predict(
    df: DataFrame,
    model: Any,
    *,
    inputs: Inputs = None,
    output: str = "prediction",
    batch_size: int = 1024,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Apply a model to the rows of a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows; a streaming DataFrame too.
    model : str, path or keras.Model
        A ``.keras`` or ``.h5`` file or the directory of a SavedModel. On the driver's disk: its bytes go to the
        executors. A URL that fsspec knows, or a path that only the executors see: they read it.
    inputs : str, list or dict, optional
        The columns that the model takes: one for each of its inputs, in order; for a single input also several
        numeric ones, side by side; or ``{input: column}``. Default: the columns that are called like the inputs, or
        the only column that fits a single input. An array or an ML vector also fits an input of several axes, row by
        row.
    output : str
        The column of what the model gives. If it gives several things they are called ``{output}_{name}``.
    batch_size : int
        Rows that the model takes at once.
    spark : SparkSession, optional
        Default: the DataFrame's.

    Returns
    -------
    DataFrame
        All columns of ``df`` and the model's outputs, computed when somebody asks for rows: a number where the model
        gives one for each row, else an array. The order of rows and partitions is kept.

    Raises
    ------
    PlanError
        If the model cannot be loaded on an executor, or the columns do not fit it; before any row is read.

    Examples
    --------
    >>> scored = predict(df, "mnist.keras", inputs="pixels")  # doctest: +SKIP
    >>> scored.select("id", "prediction").write.parquet("scored")  # doctest: +SKIP
    """
    _check_arguments(df, output, batch_size)
    session = usable_session(df.sparkSession if spark is None else spark)
    source, name = _source_of(model, session)
    signature = _look(session, source, name)
    fields = list(df.schema.fields)
    feeds = _feeds(signature.inputs, fields, inputs)
    case = session.conf.get("spark.sql.caseSensitive", "false") == "true"
    added = _added(signature.outputs, output, df.columns, case)
    return _mapped(df, ScoreTask(source, signature, feeds, batch_size), StructType([*fields, *added]))


def _check_arguments(df: Any, output: Any, batch_size: Any) -> None:
    if not hasattr(df, "mapInArrow"):
        raise PlanError(f"a {type(df).__name__} is no DataFrame: give one, such as spark.createDataFrame(…)")
    if not df.columns:
        raise PlanError("the DataFrame has no columns")
    if type(batch_size) is not int or batch_size < 1:
        raise PlanError(f"batch_size={batch_size!r}: it is a whole number, 1 or more")
    if not isinstance(output, str) or not output:
        raise PlanError(f"output={output!r}: it is the name of a column")


def _mapped(df: DataFrame, task: ScoreTask, schema: StructType) -> DataFrame:
    # By position: Spark's own look-up by name fails for a dot in a name, and for two columns of one name.
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    try:
        return frame.mapInArrow(task, schema)
    except PySparkException as error:
        for place, column in zip(frame.columns, df.schema.fields, strict=True):
            try:
                frame.select(place).mapInArrow(task, StructType([column]))
            except PySparkException:
                raise PlanError(
                    f"column {column.name!r} is {column.dataType.simpleString()}, which Spark cannot hand to Python: "
                    "leave it out, or cast it to a string"
                ) from error
        raise


# --- the model ----------------------------------------------------------------------------------------------------


def _source_of(model: Any, spark: SparkSession) -> tuple[Parcel | Place, str]:
    """Return how executors get the model, and what a person calls it."""
    if any(cls.__module__.partition(".")[0] in ("keras", "tf_keras") for cls in type(model).__mro__):
        return _parcel(spark, ".keras", _bytes_of(model)), f"this {type(model).__name__}"
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise PlanError(f"model={model!r}: it is a path, a URL or a Keras model, not a {type(model).__name__}")
    name = os.fspath(model)
    if re.match(r"\w[\w+.-]+:/", name):
        return Place(re.sub(r"^([^:/]+):/(?!/)", r"\1:///", name)), _shown(name)
    path = os.path.expanduser(name)
    if not os.path.exists(path):
        return Place(path), name
    try:
        return _parcel(spark, *_packed(path)), name
    except ModelUnusable as error:
        raise PlanError(f"{name}: {error}") from None


def _shown(url: str) -> str:
    """Return a URL without what may be secret: the user's part, and the query."""
    return re.sub(r"//[^/@]*@", "//", url.partition("?")[0])


def _packed(path: str) -> tuple[str, bytes]:
    if not os.path.isdir(path):
        check_file(path)
        with open(path, "rb") as file:
            return os.path.splitext(path)[1].lower(), file.read()
    check_directory(path)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for folder, _, files in sorted(os.walk(path)):
            for file_name in sorted(files):
                whole = os.path.join(folder, file_name)
                # A fixed date: the same content is the same bytes, and is loaded once.
                entry = zipfile.ZipInfo(os.path.relpath(whole, path))
                with open(whole, "rb") as file, archive.open(entry, "w", force_zip64=True) as into:
                    into.write(file.read())
    return "", packed.getvalue()


def _bytes_of(model: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tfos_nb-model-") as directory:
        path = os.path.join(directory, "model.keras")
        try:
            model.save(path)
        except Exception as error:
            raise PlanError(
                f"this {type(model).__name__} cannot be saved, so it cannot travel: {error}. Export it with "
                "model.export(DIRECTORY) and give that directory"
            ) from error
        with open(path, "rb") as file:
            return file.read()


def _parcel(spark: SparkSession, suffix: str, content: bytes) -> Parcel:
    return Parcel(suffix, hashlib.sha256(content).hexdigest(), spark.sparkContext.broadcast(content))


def _look(spark: SparkSession, source: Parcel | Place, name: str) -> Signature:
    """Ask one executor what the model takes and gives."""
    jobs = SparkJobs(spark, f"tfos_nb-inference-{uuid.uuid4().hex[:8]}")
    action = spark.range(0, 1, 1, 1).mapInArrow(LookTask(source), LOOK_SCHEMA).collect
    job = jobs.run(action, f"tfos_nb: look at the model {name}")
    try:
        ended = job.done.wait(_LOOK_SECONDS)
    finally:
        if not job.done.is_set():
            job.cancel()
    if not ended:
        running = ", ".join(f"{stage.tasks} of {stage.description!r}" for stage in slots_busy(spark)) or "nothing"
        raise PlanError(f"{name}: no executor has looked at it within {_LOOK_SECONDS:g} s; running tasks: {running}")
    if job.error is not None or not job.result:
        error = job.error or PlanError("no row came back")
        raise PlanError(f"{name}: {error_of_job(error, 'the look at the model failed')}") from error
    found: Looked = wire.decode(bytes(job.result[0][0]))
    if found.signature is None:
        raise PlanError(_problem(found, source, name))
    return _checked(found.signature, name)


def _problem(found: Looked, source: Parcel | Place, name: str) -> str:
    told = found.problem
    if isinstance(source, Place):
        told = told.replace(source.url, name)
        if found.absent and "://" not in source.url:
            return (
                f"{name} is neither here ({socket.gethostname()}) nor on the executor's host ({found.host}): give the "
                "path of a model on either, or a URL that the executors can read"
            )
        told += f" (looked for on the executor's host, {found.host})" if found.absent else ""
    return f"{name}: {told}"


def _checked(signature: Signature, name: str) -> Signature:
    for role, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        for tensor in tensors:
            if tensor.dtype not in SPARK_TYPES:
                raise PlanError(f"{name}: {role} {tensor.name!r} is {tensor.dtype}, for which Spark has no type")
    return signature


# --- columns become inputs ----------------------------------------------------------------------------------------


def _feeds(tensors: Sequence[Tensor], fields: Sequence[StructField], inputs: Inputs) -> tuple[Feed, ...]:
    wanted = _wanted(tensors, fields, inputs)
    return tuple(_feed(tensor, columns, fields) for tensor, columns in zip(tensors, wanted, strict=True))


def _wanted(tensors: Sequence[Tensor], fields: Sequence[StructField], inputs: Inputs) -> list[list[str]]:
    """Return the names of the columns of each input."""
    if inputs is None:
        return _wanted_by_name(tensors, fields)
    if isinstance(inputs, Mapping):
        names = [tensor.name for tensor in tensors]
        for key in inputs:
            if key not in names:
                raise PlanError(f"inputs: the model has no input {key!r}{_near(key, names)}. {_takes(tensors)}")
        missing = [name for name in names if name not in inputs]
        if missing:
            raise PlanError(f"inputs names no column for {', '.join(missing)}. {_takes(tensors)}")
        return [_listed(inputs[name]) for name in names]
    columns = _listed(inputs)
    if len(tensors) == 1 and columns:
        return [columns]
    if len(columns) != len(tensors):
        count = f"{len(columns)} column" + "s" * (len(columns) != 1)
        raise PlanError(f"inputs names {count}: it takes one for each input. {_takes(tensors)}")
    return [[column] for column in columns]


def _listed(columns: Any) -> list[str]:
    listed = [columns] if isinstance(columns, str) else columns
    if not isinstance(listed, Sequence) or not all(isinstance(column, str) for column in listed):
        raise PlanError(f"inputs: {columns!r} is neither the name of a column nor a list of names")
    return list(listed)


def _wanted_by_name(tensors: Sequence[Tensor], fields: Sequence[StructField]) -> list[list[str]]:
    names = [column.name for column in fields]
    if all(tensor.name in names for tensor in tensors):
        return [[tensor.name] for tensor in tensors]
    has = f"{_takes(tensors)}. The DataFrame has {', '.join(_described(column) for column in fields)}"
    if len(tensors) > 1:
        example = ", ".join(f"{tensor.name!r}: …" for tensor in tensors)
        raise PlanError(f"not every input has a column of its name. {has}. Say which: inputs={{{example}}}")
    fitting = [column.name for column in fields if _why_unfit(column, tensors[0]) is None]
    if len(fitting) == 1:
        return [fitting]
    width = tensors[0].shape
    several = "" if len(width) != 1 else ", or several numeric ones, side by side: inputs=['a', 'b', …]"
    which = f"{len(fitting)} columns fit ({', '.join(fitting)})" if fitting else "no column fits"
    raise PlanError(f"{which}. {has}. Say which: inputs='COLUMN'{several}")


def _feed(tensor: Tensor, columns: list[str], fields: Sequence[StructField]) -> Feed:
    names = [column.name for column in fields]
    for name in columns:
        if name not in names:
            raise PlanError(f"inputs: no column {name!r}{_near(name, names)}; there are {', '.join(names)}")
        if names.count(name) > 1:
            raise PlanError(f"inputs: there are {names.count(name)} columns {name!r}: rename one")
    positions = tuple(names.index(name) for name in columns)
    if len(columns) == 1:
        _refuse_unfit(fields[positions[0]], tensor)
    elif len(tensor.shape) != 1 or tensor.shape[0] not in (None, len(columns)):
        raise PlanError(f"inputs names {len(columns)} columns for one input. {_takes([tensor])}")
    else:
        one = Tensor(tensor.name, tensor.dtype, ())
        for position in positions:
            _refuse_unfit(fields[position], one)
    return Feed(tensor, positions, tuple(columns))


def _refuse_unfit(column: StructField, tensor: Tensor) -> None:
    unfit = _why_unfit(column, tensor)
    if unfit is not None:
        raise PlanError(f"column {_described(column)} does not fit {_tensor_text(tensor)}: {unfit}")


def _why_unfit(column: StructField, tensor: Tensor) -> str | None:
    """Say why a column cannot become an input, as far as its type tells; None if it can."""
    kind, depth = column.dataType, 0
    length: int | None = None
    while isinstance(kind, ArrayType):
        kind, depth = kind.elementType, depth + 1
    if type(kind).__name__ == "VectorUDT" and not depth:
        depth, numeric = 1, True
        length = column.metadata.get("ml_attr", {}).get("num_attrs")
    else:
        numeric = isinstance(kind, (NumericType, BooleanType))
    if tensor.dtype == "string" and not isinstance(kind, (StringType, BinaryType)):
        return "cast it to string"
    if tensor.dtype != "string" and not numeric:
        return "it is not numeric; cast it, for example to double, or let the model's first layer take strings"
    known = [size for size in tensor.shape if size is not None]
    values = math.prod(known)
    if depth == len(tensor.shape) or (depth == 1 and len(known) == len(tensor.shape) > 1):
        exact = len(known) == len(tensor.shape)
        return f"its vectors have {length} values" if exact and length not in (None, values) else None
    if depth == 0:
        return None if values == 1 else "a row of it is one value; name as many columns as it takes, or an array"
    return f"its rows are lists, {depth} deep" if depth > 1 else "its rows are lists"


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


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


def _added(tensors: Sequence[Tensor], output: str, columns: Sequence[str], case: bool) -> list[StructField]:
    names = [output] if len(tensors) == 1 else [f"{output}_{tensor.name}" for tensor in tensors]
    there = {name if case else name.lower() for name in columns}
    for name in names:
        if (name if case else name.lower()) in there:
            raise PlanError(f"the DataFrame has a column {name!r} already: take another name with output=…, or drop it")
    kinds = [
        {"name": name, "type": _json_type(tensor), "nullable": True, "metadata": {}}
        for name, tensor in zip(names, tensors, strict=True)
    ]
    return list(StructType.fromJson({"type": "struct", "fields": kinds}).fields)


def _json_type(tensor: Tensor) -> Any:
    kind: Any = SPARK_TYPES[tensor.dtype]
    for _ in () if tensor.shape == (1,) else tensor.shape:
        kind = {"type": "array", "elementType": kind, "containsNull": True}
    return kind
