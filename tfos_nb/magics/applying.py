"""Implement ``%tfos_inference``: apply a model like :func:`tfos_nb.predict`, with the magic's options in errors."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from tfos_nb.inference.column_matching import LINE
from tfos_nb.inference.frames import Asked, check_frame, score
from tfos_nb.inference.model_library import find
from tfos_nb.spark.session import usable_session

__all__ = ["predict"]


def predict(df: DataFrame, model: str, *, inputs: Sequence[str] | None, output: str, batch_size: int) -> DataFrame:
    """Apply a model to the rows of a DataFrame.

    Raises
    ------
    PlanError
        As in :func:`tfos_nb.predict`, but the message names the options of the magic's line.
    """
    check_frame(df)
    asked = Asked(inputs, output, batch_size, words=LINE)
    return score(df, find(model, usable_session(df.sparkSession)), asked)
