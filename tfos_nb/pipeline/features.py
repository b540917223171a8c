"""Compute features from a column with a layer of a trained Keras model, for transfer learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml import Transformer
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tfos_nb.errors import PlanError
from tfos_nb.inference.column_matching import Words, column_type, depth_of
from tfos_nb.inference.frames import Asked, check_frame, score
from tfos_nb.pipeline.params import HasBatchSize, HasExportDir
from tfos_nb.pipeline.scorer import Scorer, one_place
from tfos_nb.runtime.models.model import Use
from tfos_nb.spark.session import usable_session

__all__ = ["TFFeaturizer", "featurize"]

_WORDS = Words("input_col", "keep_columns", "output_col", "output_col", several=False)


def _to_layer(value: Any) -> str | int:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError(f"the value must be a layer's name or its index, got {value!r}")


class TFFeaturizer(HasExportDir, HasBatchSize, Scorer, Transformer):
    """Appends the outputs of a Keras model's layer for a column.

    Parameters
    ----------
    model : keras.Model, optional
        A model object.
    custom_objects : dict, optional
        Your own classes and functions that a Keras file has by name only.
    **params
        Params by their names: ``export_dir`` (a Keras file), ``layer``, ``input_col``, ``output_col``, ``vector``,
        ``batch_size``, ``keep_columns``, ``null_policy``, ``fill``, ``decode``.

    Examples
    --------
    >>> features = TFFeaturizer(export_dir="resnet.keras", layer="avg_pool", input_col="image")  # doctest: +SKIP
    >>> Pipeline(stages=[features, LogisticRegression()]).fit(df)  # doctest: +SKIP
    """

    layer: Param[Any] = Param(
        Params._dummy(), "layer", "the layer, by its name or its index (-2: the last but one)", _to_layer
    )
    input_col: Param[str | None] = Param(
        Params._dummy(),
        "input_col",
        "the column that the model takes; None: the one that fits",
        TypeConverters.toString,
    )
    output_col: Param[str] = Param(Params._dummy(), "output_col", "the column of features", TypeConverters.toString)
    vector: Param[bool] = Param(
        Params._dummy(),
        "vector",
        "whether the features are an ML vector, as Spark ML's models take them; otherwise (nested) arrays",
        TypeConverters.toBoolean,
    )

    def __init__(self, *, model: Any = None, custom_objects: Mapping[str, Any] | None = None, **params: Any) -> None:
        super().__init__()
        self._bring(None, model, None, custom_objects)
        self._setDefault(layer=-2, input_col=None, output_col="features", vector=True)
        self._set_all(params)

    def setLayer(self, value: str | int) -> TFFeaturizer:
        """Set the layer."""
        return self._set(layer=value)

    def getLayer(self) -> str | int:
        """Return the layer."""
        layer: str | int = self.getOrDefault(self.layer)
        return layer

    def setInputCol(self, value: str | None) -> TFFeaturizer:
        """Set the column that the model takes."""
        return self._set(input_col=value)

    def getInputCol(self) -> str | None:
        """Return the column that the model takes."""
        return self.getOrDefault(self.input_col)

    def setOutputCol(self, value: str) -> TFFeaturizer:
        """Set the column of features."""
        return self._set(output_col=value)

    def getOutputCol(self) -> str:
        """Return the column of features."""
        return self.getOrDefault(self.output_col)

    def setVector(self, value: bool) -> TFFeaturizer:
        """Set whether the features are an ML vector."""
        return self._set(vector=value)

    def getVector(self) -> bool:
        """Return whether the features are an ML vector."""
        return self.getOrDefault(self.vector)

    def _place(self) -> Any:
        return one_place(model=self.model, export_dir=self.getExportDir())

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset)
        asked = Asked(
            inputs=self.getInputCol(),
            output=self.getOutputCol(),
            batch_size=self.getBatchSize(),
            keep=self.getKeepColumns(),
            nulls=self.getNullPolicy(),
            fill=self.getFill(),
            decode=self.getDecode(),
            words=_WORDS,
        )
        known = self._find(usable_session(dataset.sparkSession), Use(layer=self.getLayer()))
        if len(known.signature.outputs) > 1:
            raise PlanError(f"{known.name}: layer {self.getLayer()!r} has several outputs: use another layer")
        found = score(dataset, known, asked)
        (output,) = known.signature.outputs
        if not self.getVector():
            return found
        if output.dtype in ("string", "bool"):
            raise PlanError(f"{known.name}: layer {self.getLayer()!r} gives {output.dtype}: set vector=False")
        last = f"c{len(found.columns) - 1}"
        names = found.columns
        placed = found.toDF(*(f"c{index}" for index in range(len(names))))
        vector = _as_vector(placed[last], depth_of(column_type(output))[1])
        return placed.select(*placed.columns[:-1], vector.alias(last)).toDF(*names)


def _as_vector(column: Column, depth: int) -> Column:
    if not depth:
        column = F.array(column)
    for _ in range(1, depth):
        column = F.flatten(column)
    return array_to_vector(column.cast("array<double>"))


def featurize(
    model: Any, layer: str | int = -2, input_col: str | None = None, output_col: str = "features", **params: Any
) -> TFFeaturizer:
    """Cut a trained Keras model off at a layer: what comes out of it is a column of features.

    Parameters
    ----------
    model : keras.Model, str or path
        The model, or its ``.keras`` or ``.h5`` file, or a URL.
    layer : str or int
        The layer, by its name or its index. Default: the last but one.
    input_col : str, optional
        The column for the model's input. Default: the only one that fits.
    output_col : str
        The column of features, an ML vector.
    **params
        Further Params of :class:`TFFeaturizer`.

    Returns
    -------
    TFFeaturizer
        A Transformer.

    Examples
    --------
    >>> featurize("mnist.keras", "dense").transform(df)  # doctest: +SKIP
    """
    place = {"export_dir": model} if isinstance(model, str) or hasattr(model, "__fspath__") else {"model": model}
    return TFFeaturizer(**place, layer=layer, input_col=input_col, output_col=output_col, **params)
