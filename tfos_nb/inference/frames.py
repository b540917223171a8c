"""Apply a saved model to a Spark DataFrame's rows, on the executors.

::

    predict(df, model)
        model_library.find    the model's bytes or its place; one task reads its inputs and outputs
        column_matching       match columns with inputs; name the output columns
        model_task.applied    ScoreTask, with the columns that stay: lazy

The driver does not load TensorFlow, and no row is read before the user uses the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType

from tfos_nb.errors import PlanError, absent_column, check_count, either, near
from tfos_nb.inference.column_matching import PREDICT, Inputs, Outputs, Words, feeds_of, fields_added
from tfos_nb.inference.model_library import Known, find
from tfos_nb.inference.model_task import applied
from tfos_nb.runtime.models.inputs import Feed
from tfos_nb.runtime.models.model import Use
from tfos_nb.runtime.models.scoring import ScoreTask
from tfos_nb.spark.feedable import refuse_without_columns
from tfos_nb.spark.session import usable_session

__all__ = ["Asked", "predict", "score"]

NULLS = ("fail", "skip", "fill")


@dataclass(frozen=True)
class Asked:
    """Arguments of :func:`predict`, which documents them."""

    inputs: Inputs = None
    output: Outputs = "prediction"
    batch_size: int = 1024
    keep: Sequence[str] | None = None
    nulls: str = "fail"
    fill: Any = None
    decode: bool | str | Sequence[str] = False
    words: Words = PREDICT

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, 1)
        if not self.output or not isinstance(self.output, (str, Mapping)):
            raise PlanError(f"output must be the name of a column, got {self.output!r}")
        check_nulls(self.nulls)
        if isinstance(self.keep, str):
            raise PlanError(f"keep must be a list of columns, got {self.keep!r}; give [{self.keep!r}]")


def predict(
    df: DataFrame,
    model: Any,
    *,
    inputs: Inputs = None,
    output: Outputs = "prediction",
    batch_size: int = 1024,
    keep: Sequence[str] | None = None,
    nulls: str = "fail",
    fill: Any = None,
    decode: bool | str | Sequence[str] = False,
    signature: str | None = None,
    tags: Sequence[str] = (),
    custom_objects: Mapping[str, Any] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Apply a model to the rows of a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows; a streaming DataFrame too.
    model : str, path or keras.Model
        A ``.keras`` or ``.h5`` file, or the directory of a SavedModel or of checkpoints with a ``.keras`` file in it.
        On the driver's disk: its bytes go to the executors. A URL that fsspec knows, or a path that only the executors
        see: they read it.
    inputs : str, list or dict, optional
        The columns for the model's inputs: one for each input, in order; for a single input also several numeric
        columns, side by side; or ``{input: column}``. Default: the columns with the inputs' names; for any other input,
        the only column that fits. An array or an ML vector also fits an input of several axes, row by row.
    output : str or dict
        The column of the model's output. Several outputs get the columns ``{output}_{name}``. Or ``{name: column}`` to
        choose: names of the model's outputs, for a Keras model also of its layers, for a SavedModel also of the tensors
        of its graph.
    batch_size : int
        Rows that the model takes at once.
    keep : list of str, optional
        The columns of ``df`` that stay. Default: all.
    nulls : str
        For a row with a null in an input: ``"fail"`` names the column and the row, ``"skip"`` leaves the row out,
        ``"fill"`` puts ``fill`` in its place.
    fill : number, text or dict, optional
        For ``nulls="fill"``; by column if they differ. Default: 0, and for text the empty one.
    decode : bool or list of str
        Binary columns of encoded images (PNG, JPEG, GIF, BMP): they are decoded, and resized to the model's input.
        True: every binary column that the model takes as numbers.
    signature : str, optional
        The signature of a SavedModel. Default: the serving one, or the only one.
    tags : sequence of str
        The tags of a SavedModel's graph. Default: ``serve``, or the only one.
    custom_objects : dict, optional
        Your own classes and functions that a Keras file has by name only. They are sent to the executors by value.
        Those of a Keras model object are sent automatically.
    spark : SparkSession, optional
        Default: the DataFrame's.

    Returns
    -------
    DataFrame
        The columns of ``df`` and the model's outputs, computed when the rows are used. An output is a number if the
        model returns one for each row, else an array. The order of rows and partitions is kept.

    Raises
    ------
    PlanError
        If the model cannot be loaded on an executor, or the columns do not fit it; before any row is read.

    Examples
    --------
    >>> scored = predict(df, "mnist.keras", inputs="pixels")  # doctest: +SKIP
    >>> scored.select("id", "prediction").write.parquet("scored")  # doctest: +SKIP
    """
    asked = Asked(inputs, output, batch_size, keep, nulls, fill, decode)
    check_frame(df)
    session = usable_session(df.sparkSession if spark is None else spark)
    use = Use(signature=signature, tags=tuple(tags), outputs=tuple(output) if isinstance(output, Mapping) else ())
    return score(df, find(model, session, use, custom_objects=custom_objects), asked)


def check_frame(df: Any) -> None:
    """Raise PlanError if ``df`` is not a DataFrame, or has no columns."""
    if not hasattr(df, "mapInArrow"):
        raise PlanError(f"df must be a Spark DataFrame, such as spark.createDataFrame(…), got a {type(df).__name__}")
    refuse_without_columns(df)


def score(df: DataFrame, known: Known, asked: Asked) -> DataFrame:
    """Apply a model that was found.

    Raises
    ------
    PlanError
        If the columns do not fit it.
    """
    fields = list(df.schema.fields)
    feeds = feeds_of(known.signature.inputs, fields, asked.inputs, _pictures(df, asked), asked.words)
    if asked.nulls == "fill":
        check_fill(asked.fill, [name for feed in feeds for name in feed.names])
    feeds = tuple(dataclasses.replace(feed, fill=_fill(feed, asked)) for feed in feeds)
    keep = _kept(df.columns, asked.keep, asked.words.keep)
    case = df.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true"
    stay = [df.columns[index] for index in keep]
    added = fields_added(known.signature.outputs, asked.output, stay, case, asked.words)
    task = ScoreTask(known.source, known.signature, feeds, asked.batch_size, asked.nulls == "skip")
    return applied(df, task, added, keep)


def _pictures(df: DataFrame, asked: Asked) -> list[str]:
    if isinstance(asked.decode, bool):
        return [f.name for f in df.schema.fields if isinstance(f.dataType, BinaryType)] if asked.decode else []
    return [asked.decode] if isinstance(asked.decode, str) else list(asked.decode)


def check_nulls(nulls: str) -> None:
    """Raise PlanError if ``nulls`` is not one of the policies."""
    if nulls not in NULLS:
        raise PlanError(f"nulls must be {either(NULLS)}, got {nulls!r}")


def check_fill(fill: Any, columns: Sequence[str]) -> None:
    """Raise PlanError if a fill value is not a number or text, or names a column that is not an input."""
    fillings = fill if isinstance(fill, Mapping) else {} if fill is None else {None: fill}
    for name, value in fillings.items():
        if name is not None and name not in columns:
            raise PlanError(
                f"fill must name columns of the model's inputs ({', '.join(columns)}), got {name!r}"
                f"{near(name, columns)}"
            )
        if not isinstance(value, (bool, int, float, str, bytes, np.generic)):
            raise PlanError(f"fill must be a number or a text, or a dictionary of these by column, got {value!r}")


def _fill(feed: Feed, asked: Asked) -> Any:
    if asked.nulls != "fill":
        return None
    default: Any = "" if feed.tensor.dtype == "string" else 0
    if isinstance(asked.fill, Mapping):
        return next((asked.fill[name] for name in feed.names if name in asked.fill), default)
    return default if asked.fill is None else asked.fill


def _kept(columns: Sequence[str], keep: Sequence[str] | None, what: str) -> list[int]:
    if keep is None:
        return list(range(len(columns)))
    for name in keep:
        if name not in columns:
            raise absent_column(what, name, columns)
    return [index for index, name in enumerate(columns) if name in keep]
