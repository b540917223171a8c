"""Inference through a running cluster, from the driver: rows go to the nodes, and results come back to Spark.

::

    cluster.inference(df, "prediction double") ─▶ df.mapInArrow(InferTask): lazy
    the rows are used ─▶ Spark tasks ◀── Arrow Flight ──▶ nodes

The driver carries no row. It tells the tasks where the nodes are (:mod:`tfos_nb.runtime.control.placement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError, with_article
from tfos_nb.runtime.inference.serving import InferTask
from tfos_nb.spark.feedable import refuse_without_columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["answered"]


def answered(task: InferTask, data: Any, schema: Any, columns: Sequence[str] | None, keep: bool) -> Any:
    """Return the results of a DataFrame's or an RDD's rows, lazy: see :meth:`tfos_nb.Cluster.inference`."""
    if hasattr(data, "mapInArrow"):
        return _of_frame(task, data, schema, columns, keep)
    return _of_rdd(task, data, schema, columns)


def _of_rdd(task: InferTask, data: Any, schema: Any, columns: Any) -> Any:
    from pyspark import RDD

    if not isinstance(data, RDD):
        raise PlanError(
            f"data must be a Spark DataFrame or an RDD, got {with_article(type(data).__name__)}; make one with "
            "spark.createDataFrame(…)"
        )
    if schema is not None or columns is not None:
        raise PlanError(
            "schema and columns need a DataFrame, got an RDD; leave them out, and make a DataFrame of the results with "
            "spark.createDataFrame(cluster.inference(rdd), schema)"
        )
    return data.mapPartitions(replace(task, rows=True), preservesPartitioning=True)


def _of_frame(task: InferTask, frame: Any, schema: Any, columns: Sequence[str] | None, keep: bool) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    added = _struct(schema)
    sent = _places(frame, columns)
    if not keep:
        frame, sent = frame.select(*(frame.columns[place] for place in sent)), tuple(range(len(sent)))
    names = tuple(frame.columns)
    clash = [name for name in added.names if keep and name in names]
    if clash:
        raise PlanError(
            f"schema: the DataFrame has a column {clash[0]!r} already: name the result otherwise, or keep=False"
        )
    task = replace(task, schema=to_arrow_schema(added).serialize().to_pybytes(), names=names, sent=sent, keep=keep)
    whole = StructType([*frame.schema.fields, *added.fields]) if keep else added
    try:
        # By position: Spark's own look-up by name fails for a dot in a name, and for two columns of one name.
        return frame.toDF(*(f"c{place}" for place in range(len(names)))).mapInArrow(task, whole)
    except PySparkException as error:
        told = str(error).splitlines()[0]
        raise PlanError(f"Spark cannot hand these columns to Python: {told}. Leave them out with df.drop(…)") from error


def _struct(schema: Any) -> StructType:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType, _parse_datatype_string

    if schema is None:
        raise PlanError(
            "inference of a DataFrame needs the columns of the results, such as schema='prediction double', got "
            "schema=None"
        )
    if isinstance(schema, str):
        try:
            schema = _parse_datatype_string(schema)
        except PySparkException as error:
            raise PlanError(
                f"schema must be a text such as 'prediction double', got {schema!r}: "
                f"{str(error).strip().splitlines()[0]}"
            ) from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise PlanError(f"schema must be a StructType, or a text such as 'prediction double', got {schema!r}")
    return schema


def _places(frame: Any, columns: Sequence[str] | None) -> tuple[int, ...]:
    refuse_without_columns(frame)
    if columns is None:
        return tuple(range(len(frame.columns)))
    if isinstance(columns, str) or not columns:
        raise PlanError(f"columns must be a list of columns' names, such as ['x', 'y'], got {columns!r}")
    for name in columns:
        if frame.columns.count(name) != 1:
            raise PlanError(
                f"columns must each name one column of the DataFrame, {name!r} matches {frame.columns.count(name)} of "
                f"{frame.columns}; correct the name, or rename the column"
            )
    return tuple(frame.columns.index(name) for name in columns)
