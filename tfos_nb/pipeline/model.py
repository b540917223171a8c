"""A saved model as a Transformer of Spark ML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml import Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql import DataFrame

from tfos_nb.inference.column_matching import Words
from tfos_nb.inference.frames import Asked, check_frame, score
from tfos_nb.pipeline.params import (
    HasBatchSize,
    HasExportDir,
    HasInputMapping,
    HasModelDir,
    HasOutputMapping,
    HasSignatureDefKey,
    HasTagSet,
)
from tfos_nb.pipeline.scorer import Scorer, one_place
from tfos_nb.runtime.models.model import Use
from tfos_nb.spark.session import usable_session

__all__ = ["TFModel"]

_WORDS = Words("input_mapping", "keep_columns", "prediction_col", "output_mapping", by_column=True)


class TFModel(
    HasInputMapping,
    HasOutputMapping,
    HasModelDir,
    HasExportDir,
    HasBatchSize,
    HasSignatureDefKey,
    HasTagSet,
    Scorer,
    Model,
):
    """Applies a trained model to the rows of a DataFrame: ``transform(df)``.

    The model is the directory of a SavedModel or a Keras file (``export_dir``), the newest checkpoint of a directory
    (``model_dir``), or a Keras model object (``model``). Parameters that are not given are inferred: the signature, the
    input columns, and the types of the output columns.

    ::

        signature          signature_def_key, or the only one; the mappings have its names
        tensors            without signature_def_key the mappings may name any tensor of a SavedModel's graph
                           ("dense/Relu:0"), or a Keras model's layers
        checkpoint         of TensorFlow 1 with its graph: tensors by name; otherwise of the model that model_fn
                           builds, or of the .keras file next to it

    Parameters
    ----------
    tf_args : dict, Namespace or list, optional
        Arguments that ``model_fn`` gets, with the Params laid over them.
    model : keras.Model, optional
        A model object; its layers' own classes travel with it.
    model_fn : callable, optional
        Builds the Keras model whose weights a checkpoint has.
    custom_objects : dict, optional
        Your own classes and functions that a Keras file has by name only.
    **params
        Params by their names: ``input_mapping``, ``output_mapping``, ``export_dir``, ``model_dir``, ``batch_size``,
        ``signature_def_key``, ``tag_set``, ``keep_columns``, ``null_policy``, ``fill``, ``decode``, ``prediction_col``.
        ``explainParams()`` tells about each.

    Examples
    --------
    >>> model = TFModel(export_dir="mnist", input_mapping={"pixels": "x"})  # doctest: +SKIP
    >>> model.setOutputMapping({"output_0": "digit"}).transform(df)  # doctest: +SKIP
    """

    prediction_col: Param[str] = Param(
        Params._dummy(),
        "prediction_col",
        "the column of the model's output, if output_mapping is empty",
        TypeConverters.toString,
    )

    def __init__(
        self,
        tf_args: Any = None,
        *,
        model: Any = None,
        model_fn: Callable[..., Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        self._bring(tf_args, model, model_fn, custom_objects)
        self._setDefault(prediction_col="prediction")
        self._set_all(params)

    def setPredictionCol(self, value: str) -> TFModel:
        """Set the column of the model's output."""
        return self._set(prediction_col=value)

    def getPredictionCol(self) -> str:
        """Return the column of the model's output."""
        return self.getOrDefault(self.prediction_col)

    def _place(self) -> Any:
        return one_place(model=self.model, export_dir=self.getExportDir(), model_dir=self.getModelDir())

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset)
        asked = self._asked()
        tags = tuple(filter(None, (self.getTagSet() or "").split(",")))
        use = Use(self.getSignatureDefKey(), tags, tuple(asked.inputs or ()), tuple(self.getOutputMapping()))
        return score(dataset, self._find(usable_session(dataset.sparkSession), use), asked)

    def _asked(self) -> Asked:
        inputs: dict[str, list[str]] = {}
        for column, tensor in self.getInputMapping().items():
            inputs.setdefault(tensor, []).append(column)
        return Asked(
            inputs=inputs or None,
            output=self.getOutputMapping() or self.getPredictionCol(),
            batch_size=self.getBatchSize(),
            keep=self.getKeepColumns(),
            nulls=self.getNullPolicy(),
            fill=self.getFill(),
            decode=self.getDecode(),
            words=_WORDS,
        )
