"""Apply a model's task to a DataFrame: the columns that stay, and the outputs next to them.

If Spark has Arrow UDFs (4.1), it sends only the inputs to the executors' Python, and unused columns are not computed.
Otherwise all columns go through ``mapInArrow``. Both are lazy, and both take a streaming DataFrame.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import DataType, StructField, StructType

from tfos_nb.driver.prewarm import functions_with_tensorflow
from tfos_nb.errors import PlanError
from tfos_nb.runtime.models.scoring import ScoreTask

__all__ = ["applied", "has_arrow_udfs", "output_column"]


def _functions() -> Any:
    return importlib.import_module("pyspark.sql.functions")  # whose stubs do not know all of it


def has_arrow_udfs() -> bool:
    """Whether this PySpark has Arrow UDFs."""
    return hasattr(_functions(), "arrow_udf")


def applied(df: DataFrame, task: ScoreTask, added: Sequence[StructField], keep: Sequence[int]) -> DataFrame:
    """Return the columns at the places ``keep`` and the task's outputs, one for each of ``added``.

    Raises
    ------
    PlanError
        If Spark cannot hand a column to Python.
    """
    # By position: Spark's own look-up by name fails for a dot in a name, and for two columns of one name.
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    fields = [*(df.schema.fields[index] for index in keep), *added]
    lay = _by_udf if has_arrow_udfs() else _by_map
    with functions_with_tensorflow(df.sparkSession):
        return lay(frame, df.schema.fields, task, added, keep).toDF(*(column.name for column in fields))


def output_column(task: ScoreTask, added: Sequence[StructField], columns: Sequence[Column]) -> Column:
    """Return the outputs for some input columns as one column: the only output itself, or a struct."""
    kind: DataType = StructType([StructField(f"f{index}", column.dataType) for index, column in enumerate(added)])
    udf = _functions().arrow_udf(task.outputs, added[0].dataType if task.single else kind)
    # Otherwise Spark would compute it again for each filter or column that uses it.
    column: Column = udf.asNondeterministic()(*columns)
    return column


def _by_udf(
    frame: DataFrame, fields: Sequence[StructField], task: ScoreTask, added: Sequence[StructField], keep: Sequence[int]
) -> DataFrame:
    needed = sorted({position for feed in task.feeds or () for position in feed.positions})
    feeds = tuple(
        dataclasses.replace(feed, positions=tuple(map(needed.index, feed.positions))) for feed in task.feeds or ()
    )
    single = len(added) == 1 and not task.skip
    task = dataclasses.replace(task, feeds=feeds, single=single)
    kept = [frame[f"c{index}"] for index in keep]
    outputs = output_column(task, added, [frame[f"c{position}"] for position in needed]).alias("outputs")
    scored = frame.select(*kept, outputs)
    if task.skip:
        scored = scored.where(scored["outputs"].isNotNull())
    if single:
        return scored
    return scored.select(
        *(scored[f"c{index}"] for index in keep), *(scored["outputs"][f"f{index}"] for index in range(len(added)))
    )


def _by_map(
    frame: DataFrame, fields: Sequence[StructField], task: ScoreTask, added: Sequence[StructField], keep: Sequence[int]
) -> DataFrame:
    sent = sorted({*keep, *(position for feed in task.feeds or () for position in feed.positions)})
    feeds = tuple(
        dataclasses.replace(feed, positions=tuple(map(sent.index, feed.positions))) for feed in task.feeds or ()
    )
    task = dataclasses.replace(task, feeds=feeds)
    places = [StructField(f"c{index}", fields[index].dataType, True, fields[index].metadata) for index in sent]
    outputs = [StructField(f"out{index}", column.dataType) for index, column in enumerate(added)]
    try:
        mapped = frame.select(*(f"c{index}" for index in sent)).mapInArrow(task, StructType([*places, *outputs]))
    except PySparkException as error:
        for index in sent:
            _refuse_unsendable(frame, index, fields[index], task, error)
        raise
    return mapped.select(*(f"c{index}" for index in keep), *(column.name for column in outputs))


def _refuse_unsendable(frame: DataFrame, index: int, field: StructField, task: ScoreTask, error: Exception) -> None:
    try:
        frame.select(f"c{index}").mapInArrow(task, StructType([field]))
    except PySparkException:
        raise PlanError(
            f"column {field.name!r} is {field.dataType.simpleString()}, which Spark cannot pass to Python: leave it "
            "out, or cast it to a string"
        ) from error
