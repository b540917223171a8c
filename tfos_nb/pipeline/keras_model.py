"""A trained Keras model as a Model of Spark ML, with the columns that its evaluators ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
)
from pyspark.sql import DataFrame

from tfos_nb.errors import PlanError
from tfos_nb.inference.column_matching import Words
from tfos_nb.inference.frames import Asked, check_frame, score
from tfos_nb.pipeline.params import HasBatchSize, HasInputMapping
from tfos_nb.pipeline.scorer import Scorer, one_place
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput, Task
from tfos_nb.runtime.models.model import Use
from tfos_nb.spark.session import usable_session

__all__ = ["BY_FEATURES", "BY_MAPPING", "HasPredictionColumns", "KerasModel"]

P = TypeVar("P", bound=Params)

_VECTORS = ("rawPrediction", "probability")
BY_MAPPING = Words("input_mapping", "keep_columns", "predictionCol", "{}Col", by_column=True)
BY_FEATURES = Words("featuresCol", "keep_columns", "predictionCol", "{}Col", several=False)


def _to_classifier_outputs(value: Any) -> str:
    for output in str(value).split(", "):
        task, _, logits = output.partition(" ")
        if task not in tuple(Task) or logits not in ("", "logits"):
            raise TypeError(
                f"the value must be one of {', '.join(Task)}, with or without ' logits' after it, got {value!r}"
            )
    return str(value)


class HasPredictionColumns(HasFeaturesCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """The column that a model takes, and those that it gives; Spark ML's own Params. An empty name leaves one out."""

    def setFeaturesCol(self: P, value: str) -> P:
        """Set the column that the model takes: numbers, arrays or ML vectors."""
        return self._set(featuresCol=value)

    def setPredictionCol(self: P, value: str) -> P:
        """Set the column of the class, or of the value."""
        return self._set(predictionCol=value)

    def setProbabilityCol(self: P, value: str) -> P:
        """Set the column of the classes' probabilities, a vector."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self: P, value: str) -> P:
        """Set the column of logits, a vector."""
        return self._set(rawPredictionCol=value)


class KerasModel(HasPredictionColumns, HasInputMapping, HasBatchSize, Scorer, Model):
    """Applies a trained Keras model, as Spark ML's own models are applied.

    A classifier gives ``prediction`` (the class as a double), ``probability`` and ``rawPrediction`` (vectors), a
    regression gives ``prediction``. Of a model with several outputs each gives its own columns, with its name behind
    theirs: ``prediction_price``. :class:`KerasEstimator` makes it; its weights are saved and loaded with it.

    Parameters
    ----------
    model : keras.Model or bytes, optional
        The model, or its ``.keras`` file's content.
    custom_objects : dict, optional
        Your own classes and functions that the file has by name only.
    **params
        Params by their names, such as ``featuresCol``, ``predictionCol``, ``batch_size``, ``keep_columns``.

    Attributes
    ----------
    history : History
        The metrics of each epoch: ``history[-1]["loss"]``, or by metric, ``history["loss"]``.
    """

    # Saved models have this Param by its name, so the name stays.
    head: Param[str] = Param(
        Params._dummy(),
        "head",
        "the task of the model: classes, binary or values; with ' logits' after it; of several 'values, binary'",
        _to_classifier_outputs,
    )

    def __init__(self, *, model: Any = None, custom_objects: Mapping[str, Any] | None = None, **params: Any) -> None:
        super().__init__()
        self._bring(None, model, None, custom_objects)
        self._setDefault(head=Task.VALUES.value)
        self._set_all(params)

    @property
    def task(self) -> Task:
        """Task of the model; of several outputs, the task of the first."""
        return self._classifier_outputs()[0].task

    def _classifier_outputs(self) -> tuple[ClassifierOutput, ...]:
        outputs = (output.partition(" ") for output in self.getOrDefault(self.head).split(", "))
        return tuple(ClassifierOutput(Task(task), bool(logits)) for task, _, logits in outputs)

    def _place(self) -> Any:
        return one_place(model=self.model)

    def _columns(self, names: Sequence[str]) -> dict[str, str]:
        """Return the column of each output, by the output's name; an empty column drops the output."""
        params = {
            "rawPrediction": self.getRawPredictionCol(),
            "probability": self.getProbabilityCol(),
            "prediction": self.getPredictionCol(),
        }
        kinds = dict.fromkeys(name.partition("_")[0] for name in names)
        wanted = [params[kind] for kind in kinds if params[kind]]
        if len(set(wanted)) < len(wanted):
            raise PlanError(f"two of the columns {', '.join(params.values())} have the same name: rename one")
        parts = {name: name.partition("_") for name in names}
        return {
            name: f"{params[kind]}{line}{output}" if params[kind] else ""
            for name, (kind, line, output) in parts.items()
        }

    def _inputs(self) -> str | dict[str, list[str]]:
        inputs: dict[str, list[str]] = {}
        for column, tensor in self.getInputMapping().items():
            inputs.setdefault(tensor, []).append(column)
        return inputs or self.getFeaturesCol()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset)
        use = Use(classifier_outputs=self._classifier_outputs(), trusted=self._made_here)
        known = self._find(usable_session(dataset.sparkSession), use)
        named = self._columns([tensor.name for tensor in known.signature.outputs])
        hidden = {name: column or f"tfos_nb {name}" for name, column in named.items()}
        asked = Asked(
            inputs=self._inputs(),
            output=hidden,
            batch_size=self.getBatchSize(),
            keep=self.getKeepColumns(),
            nulls=self.getNullPolicy(),
            fill=self.getFill(),
            decode=self.getDecode(),
            words=BY_MAPPING if self.getInputMapping() else BY_FEATURES,
        )
        return _laid_out(score(dataset, known, asked), list(named.items()))


def _laid_out(scored: DataFrame, given: Sequence[tuple[str, str]]) -> DataFrame:
    """Make vectors of the last columns that are to be, and leave out those without a name."""
    frame = scored.toDF(*(f"c{index}" for index in range(len(scored.columns))))
    first = len(scored.columns) - len(given)
    columns, names = [frame[name] for name in frame.columns[:first]], list(scored.columns[:first])
    for index, (name, column) in enumerate(given, first):
        if column:
            value = frame[f"c{index}"]
            columns.append(array_to_vector(value) if name.partition("_")[0] in _VECTORS else value)
            names.append(column)
    return frame.select(*columns).toDF(*names)
