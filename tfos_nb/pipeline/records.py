"""The rows of a fit as TFRecords, for the nodes to read, for as long as the fit lasts."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame

from tfos_nb import tfrecord
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.inference.column_matching import depth_of
from tfos_nb.pipeline.fitting import Rows
from tfos_nb.runtime.tfrecord.files import NoFileSystem, absolute, file_system

__all__ = ["written"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def written(rows: Rows, directory: str, args: Any) -> Iterator[None]:
    """Write the rows beneath a directory, and remove them after the block.

    ``args.tfrecord_dir`` and ``args.validation_dir`` say where they are.

    Raises
    ------
    PlanError
        If a column has no place in a record.
    FeedFailed
        If there are no rows, or they cannot be written.
    """
    home = f"{absolute(directory).rstrip('/')}/fit-{uuid.uuid4().hex[:8]}"
    args.tfrecord_dir, args.validation_dir = f"{home}/training", None
    try:
        if not tfrecord.write(_flat(rows.training), args.tfrecord_dir).rows:
            raise FeedFailed("the data have no rows: check the query, as with df.count()")
        if rows.validation is not None:
            args.validation_dir = f"{home}/validation"
            tfrecord.write(_flat(rows.validation), args.validation_dir)
        yield
    finally:
        try:
            system, path = file_system(home)
            system.rm(path, recursive=True)
        except NoFileSystem as error:
            logger.warning("temporary records in %s were not removed: %s", home, error)
        except FileNotFoundError:
            pass  # nothing was written


def _flat(df: DataFrame) -> DataFrame:
    """Convert ML vectors to arrays, because records cannot store vectors.

    Raises
    ------
    PlanError
        For arrays of arrays, which would come back as one list.
    """
    for field in df.schema.fields:
        if depth_of(field.dataType)[1] > 1:
            raise PlanError(
                f"input_mapping: {field.name!r} is {field.dataType.simpleString()}, and a record keeps no arrays of "
                "arrays: flatten(…) it in Spark, or leave input_mode='spark', which feeds them as they are"
            )
    frame = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    columns = []
    for index, field in enumerate(df.schema.fields):
        column = frame[f"c{index}"]
        columns.append(vector_to_array(column) if type(field.dataType).__name__ == "VectorUDT" else column)
    return frame.select(*columns).toDF(*df.columns)
