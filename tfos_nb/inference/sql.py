"""A model as a function in SQL."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

from tfos_nb.driver.prewarm import functions_with_tensorflow
from tfos_nb.errors import PlanError
from tfos_nb.inference.column_matching import column_type
from tfos_nb.inference.frames import Asked
from tfos_nb.inference.model_library import find
from tfos_nb.inference.model_task import has_arrow_udfs
from tfos_nb.runtime.models.model import Use
from tfos_nb.runtime.models.scoring import ScoreTask
from tfos_nb.spark.session import usable_session

__all__ = ["register_udf"]


def register_udf(
    spark: SparkSession,
    name: str,
    model: Any,
    *,
    outputs: Sequence[str] = (),
    batch_size: int = 1024,
    nulls: str = "skip",
    fill: Any = None,
    signature: str | None = None,
    tags: Sequence[str] = (),
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Make a model a function that SQL can call: ``SELECT name(column) FROM table``.

    Its arguments are the model's inputs, in order. A model with one input also takes several numbers, side by side. The
    function returns a value, an array, or for several outputs a struct with their names.

    Parameters
    ----------
    spark : SparkSession
        Where it is called.
    name : str
        The function's name; an existing function is replaced.
    model : str, path or keras.Model
        As for :func:`tfos_nb.predict`; so are ``signature``, ``tags`` and ``custom_objects``.
    outputs : list of str
        The outputs that are wanted. Default: those of the signature.
    batch_size : int
        Rows that the model takes at once.
    nulls : str
        Handling of a null: ``"skip"`` returns null, ``"fail"`` raises an error that names the row, ``"fill"`` replaces
        it with ``fill``.
    fill : number or text, optional
        Default: 0, and for text the empty one.

    Returns
    -------
    function
        The same for the DataFrame API: ``df.select(function("column"))``.

    Raises
    ------
    PlanError
        If the model cannot be loaded on an executor.

    Examples
    --------
    >>> register_udf(spark, "digit", "mnist.keras")  # doctest: +SKIP
    >>> spark.sql("SELECT id, digit(pixels) FROM letters").show()  # doctest: +SKIP
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
        raise PlanError(f"name must have only letters, digits and _, and not begin with a digit, got {name!r}")
    Asked(batch_size=batch_size, nulls=nulls)
    session = usable_session(spark)
    if not has_arrow_udfs():
        raise PlanError(
            f"register_udf needs Spark 4.1 or newer, got PySpark {pyspark.__version__}: call tfos_nb.predict(df, model)"
        )
    use = Use(signature=signature, tags=tuple(tags), outputs=tuple(outputs))
    known = find(model, session, use, custom_objects=custom_objects)
    given = known.signature.outputs
    fields = [StructField(tensor.name, column_type(tensor)) for tensor in given]
    task = ScoreTask(
        known.source,
        known.signature,
        None,
        batch_size,
        skip=nulls == "skip",
        single=len(given) == 1,
        fill=(0 if fill is None else fill) if nulls == "fill" else None,
        names=tuple(tensor.name for tensor in given),
    )
    kind = fields[0].dataType if len(fields) == 1 else StructType(fields)
    udf = importlib.import_module("pyspark.sql.functions").arrow_udf(task.outputs, kind)
    with functions_with_tensorflow(session):
        return session.udf.register(name, udf)
