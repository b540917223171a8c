"""An Estimator of Spark ML that trains a Keras model: no training function has to be written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StringType

from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.inference.column_matching import depth_of, feeds_of
from tfos_nb.inference.model_library import is_keras_model, keras_bytes
from tfos_nb.pipeline.compiling import check_names, describe
from tfos_nb.pipeline.conversion import Namespace, to_number
from tfos_nb.pipeline.estimating import Fitting, new_home
from tfos_nb.pipeline.fitting import Fitted, Rows
from tfos_nb.pipeline.history import History
from tfos_nb.pipeline.keras_model import BY_FEATURES, BY_MAPPING, HasPredictionColumns, KerasModel
from tfos_nb.pipeline.selection import check_column, filled, selected, without_nulls
from tfos_nb.redaction import without_password
from tfos_nb.runtime.code.custom_objects import ModelCode, pack
from tfos_nb.runtime.code.user_classes import own_objects, own_objects_of
from tfos_nb.runtime.models.classifier_outputs import Task
from tfos_nb.runtime.models.keras_inputs import input_tensors
from tfos_nb.runtime.models.keras_outputs import Label, Outputs, label_columns, takes_any_shape
from tfos_nb.runtime.program.keras_estimator_program import Columns, Compiling, KerasProgram
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.runtime.storage.remote import file_system

__all__ = ["KerasEstimator"]

_TASKS = {"classification": Task.CLASSES, "regression": Task.VALUES}


def _to_task(value: Any) -> str:
    if value == "auto" or value in _TASKS:
        return str(value)
    raise TypeError(f"the value must be 'auto', {' or '.join(map(repr, _TASKS))}, got {value!r}")


def _to_rate(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise TypeError(f"the value must be a number above 0, got {value!r}")


def _to_metrics(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return TypeConverters.toList(value)


def _to_labels(value: Any) -> dict[str, str] | list[str]:
    names = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
        raise TypeError(
            f"the value must be a list of columns or a dictionary, such as {{'output': 'column'}}, got {value!r}"
        )
    return {str(output): column for output, column in value.items()} if isinstance(value, Mapping) else list(value)


class KerasEstimator(HasPredictionColumns, HasLabelCol, Fitting, Estimator[Any]):
    """Trains a Keras model on a cluster of Spark's executors; ``fit`` returns a :class:`KerasModel`.

    With several nodes it trains under ``MultiWorkerMirroredStrategy``; ``batch_size`` is the global one. Each fit
    starts with the model's weights (or with new ones, if a function builds the model) and does not change the model.

    Parameters
    ----------
    model : keras.Model or callable
        The model, compiled or not; or a function without parameters that builds it on the nodes, so that the driver
        needs no TensorFlow.
    optimizer, loss : str, or an object of Keras, optional
        Arguments of ``compile``. Default: as the model is compiled. A loss of your own is a function, or an object of a
        Keras class. For several outputs, a list in their order or a dictionary by their names.
    metrics : list or dict, optional
        Names, or objects of Keras; for several outputs a list with an entry (or a list) for each, or a dictionary.
    callbacks : list of keras.callbacks.Callback, optional
        For ``fit``, such as ``EarlyStopping``; every node gets its own.
    custom_objects : dict, optional
        Your own classes and functions. Those that a model object contains, or that the function refers to, are included
        automatically.
    validation : DataFrame, optional
        Rows to validate on; the other way is the Param ``validationIndicatorCol``.
    **params
        Params by their names: ``featuresCol``, ``labelCol``, ``label_cols``, ``weightCol``, ``predictionCol``,
        ``probabilityCol``, ``rawPredictionCol``, ``decode``, ``epochs``, ``batch_size``, ``learning_rate``,
        ``cluster_size``, ``gpus``, ``shuffle``, ``seed``, ``task`` … ``explainParams()`` tells about each.

    Notes
    -----
    The loss determines the model's task: a crossentropy means a classifier, whose label is a number from 0 on, as
    ``StringIndexer`` makes it, or one-hot. ``task`` overrides this.

    A model with several outputs has a label for each: ``label_cols={"price": "paid", "kind": "label"}``. The fitted
    model's columns end with the output's name: ``prediction_price``, ``probability_kind``.

    Examples
    --------
    >>> estimator = KerasEstimator(model, loss="sparse_categorical_crossentropy", epochs=20)  # doctest: +SKIP
    >>> Pipeline(stages=[indexer, assembler, estimator]).fit(df).transform(df)  # doctest: +SKIP
    """

    learning_rate: Param[float | None] = Param(
        Params._dummy(), "learning_rate", "the optimizer's; None: as it is", _to_rate
    )
    shuffle: Param[int] = Param(
        Params._dummy(), "shuffle", "rows of a node among which the next one is drawn; 0: in order", to_number
    )
    task: Param[str] = Param(Params._dummy(), "task", "classification, regression, or auto: by the loss", _to_task)
    optimizer: Param[Any] = Param(Params._dummy(), "optimizer", "a name, or Keras' own description")
    loss: Param[Any] = Param(Params._dummy(), "loss", "a name, or Keras' own description")
    metrics: Param[Any] = Param(Params._dummy(), "metrics", "names, or Keras' own descriptions", _to_metrics)
    label_cols: Param[Any] = Param(
        Params._dummy(),
        "label_cols",
        "the label's column of each of several outputs: {output: column}, or a list in their order; None: labelCol",
        _to_labels,
    )

    def __init__(
        self,
        model: Any = None,
        *,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = (),
        callbacks: Sequence[Any] = (),
        custom_objects: Mapping[str, Any] | None = None,
        validation: DataFrame | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        self.args = Namespace()
        self.model = model
        self.callbacks = list(callbacks)
        self.custom_objects = dict(custom_objects or {})
        self._setDefault(learning_rate=None, shuffle=10_000, task="auto", optimizer=None, loss=None, metrics=[])
        self._setDefault(label_cols=None)
        self.setValidation(validation)
        self.setCompiling(optimizer, loss, metrics)
        self._set_all(params)

    def setCompiling(self, optimizer: Any = None, loss: Any = None, metrics: Any = ()) -> KerasEstimator:
        """Set the arguments of ``compile``; omitted ones keep their values."""
        if optimizer is not None:
            self._set(optimizer=describe(optimizer, "optimizers", self.custom_objects))
        if loss is not None:
            self._set(loss=describe(loss, "losses", self.custom_objects))
        if metrics:
            several = isinstance(metrics, (list, tuple, Mapping))
            self._set(metrics=describe(metrics if several else [metrics], "metrics", self.custom_objects))
        return self

    def setLabelCol(self, value: str) -> KerasEstimator:
        """Set the column of the label."""
        return self._set(labelCol=value)

    def setLabelCols(self, value: Mapping[str, str] | Sequence[str] | None) -> KerasEstimator:
        """Set the label's column for each of several outputs: by the outputs' names, or in their order."""
        return self._set(label_cols=value)

    def getLabelCols(self) -> dict[str, str] | list[str] | None:
        """Return the label's column for each of several outputs."""
        columns: dict[str, str] | list[str] | None = self.getOrDefault(self.label_cols)
        return columns

    def setLearningRate(self, value: float | None) -> KerasEstimator:
        """Set the optimizer's learning rate."""
        return self._set(learning_rate=value)

    def getLearningRate(self) -> float | None:
        """Return the optimizer's learning rate."""
        return self.getOrDefault(self.learning_rate)

    def setShuffle(self, value: int) -> KerasEstimator:
        """Set the size of the shuffle buffer in rows."""
        return self._set(shuffle=value)

    def getShuffle(self) -> int:
        """Return the size of the shuffle buffer in rows."""
        return self.getOrDefault(self.shuffle)

    def setTask(self, value: str) -> KerasEstimator:
        """Set the task of the model."""
        return self._set(task=value)

    def getTask(self) -> str:
        """Return the task of the model."""
        return self.getOrDefault(self.task)

    def _fit(self, dataset: DataFrame) -> KerasModel:
        self._check_model()
        self._check_resume()
        training, held_out = self._parts(dataset)
        columns = self._columns(training, held_out is not None)
        rows = Rows(
            self._fed(training), None if held_out is None else self._fed(held_out), self.getEpochs(), self.getSpill()
        )
        home = self.getModelDir() or new_home(type(self).__name__)
        plan = {"workers": self.getClusterSize()}
        writes = () if self.getModelDir() is None else (absolute(home),)
        try:
            fitted = self._fit_of(home, plan, writes).run(self._program(columns), None, training.sparkSession, rows)
            model = self._model(fitted)
        finally:
            if not writes and not self.getTensorboard():  # which shows the logs there after the end too
                shutil.rmtree(home, ignore_errors=True)
        return model

    def _check_model(self) -> None:
        if is_keras_model(self.model):
            if not getattr(self.model, "compiled", True) and self.getOrDefault(self.loss) is None:
                raise PlanError("the model is not compiled: give loss= (and optimizer=), or compile it")
        elif not callable(self.model) and not isinstance(self.model, bytes):
            raise PlanError(
                f"model is a {type(self.model).__name__}: give a Keras model, or a function that builds one"
            )
        model, own = self.model, self.custom_objects
        check_names(model, "optimizer", self.getOrDefault(self.optimizer), ["optimizers"], own)
        check_names(model, "loss", self.getOrDefault(self.loss), ["losses"], own)
        check_names(model, "metrics", self.getOrDefault(self.metrics), ["metrics", "losses"], own)

    def _label(self) -> Label:
        label: Label | None = self.getLabelCols()
        return self.getLabelCol() if label is None else label

    def _check_outputs(self) -> None:
        """Refuse labels, losses and metrics that are not for the outputs of the model, where it is known here."""
        if is_keras_model(self.model) and not takes_any_shape(self.model):
            loss = self.getOrDefault(self.loss)
            if loss is None:
                loss = getattr(self.model, "loss", None)
            Outputs.of(self.model).check(self._label(), loss, self.getOrDefault(self.metrics))

    def _check_inputs(self, df: DataFrame) -> None:
        """Refuse features that do not fit the model, as far as it is known here, and columns that are not pictures."""
        mapping = self.getInputMapping()
        features = list(mapping) or [self.getFeaturesCol()]
        for name in self.getDecode():
            check_column(df, name, "decode")
            kind = df.schema[name].dataType
            if name not in features:
                raise PlanError(f"decode: column {name!r} is not a feature ({', '.join(features)}): leave it out")
            if not isinstance(kind, BinaryType):
                raise PlanError(
                    f"decode: column {name!r} must be binary, with encoded images, got {kind.simpleString()}: leave "
                    "it out"
                )
        if is_keras_model(self.model) and not takes_any_shape(self.model):
            tensors = input_tensors(self.model)
            inputs: dict[str, list[str]] = {}
            for column, tensor in mapping.items():
                inputs.setdefault(tensor, []).append(column)
            if len(tensors) == len(inputs) == 1:  # whatever it is called
                inputs = {tensors[0].name: next(iter(inputs.values()))}
            words = BY_MAPPING if mapping else BY_FEATURES
            feeds_of(tensors, df.schema.fields, inputs or self.getFeaturesCol(), self.getDecode(), words)

    def _columns(self, df: DataFrame, validates: bool) -> Columns:
        label, what = self._label(), "labelCol" if self.getLabelCols() is None else "label_cols"
        for name in label_columns(label):
            kind, _ = depth_of(df.schema[check_column(df, name, what)].dataType)
            if isinstance(kind, (StringType, BinaryType)):
                raise PlanError(
                    f"{what}: column {name!r} is {kind.simpleString()}, not numbers: index it with StringIndexer"
                )
        weight = self.getOrDefault(self.weightCol)
        if weight is not None:
            check_column(df, weight, "weightCol")
        mapping = self.getInputMapping()
        if not mapping:
            check_column(df, self.getFeaturesCol(), "featuresCol")
        self._check_outputs()
        self._check_inputs(df)
        x: Any = tuple(dict.fromkeys(mapping.values())) if mapping else self.getFeaturesCol()
        decode = frozenset(mapping.get(name, name) for name in self.getDecode())
        return Columns(x, label, weight, validates, decode)

    def _fed(self, df: DataFrame) -> DataFrame:
        mapping = self.getInputMapping() or {self.getFeaturesCol(): self.getFeaturesCol()}
        also = list(dict.fromkeys([*label_columns(self._label()), *self._weight()]))
        rows = selected(df, mapping, [name for name in also if mapping.get(name) != name])
        if self.getNullPolicy() == "skip":
            return without_nulls(rows)
        if self.getNullPolicy() == "fill":  # but no label, and no weight
            return filled(rows, [name for name in dict.fromkeys(mapping.values()) if name not in also], self.getFill())
        return rows

    def _own(self) -> dict[str, Any]:
        """Return the user's own code that the model needs, by its names."""
        own = dict(self.custom_objects)
        if is_keras_model(self.model):
            return {**own_objects(self.model), **own}
        return {**own_objects_of(self.model), **own} if callable(self.model) else own

    def _program(self, columns: Columns) -> KerasProgram:
        own = self._own()
        built = self.model if callable(self.model) and not is_keras_model(self.model) else None
        content = self.model if isinstance(self.model, bytes) else b"" if built else keras_bytes(self.model)
        task = self.getTask()
        return KerasProgram(
            content,
            pack(ModelCode(own, built, (tuple(self.callbacks),))),
            columns,
            Compiling(
                self.getOrDefault(self.optimizer),
                self.getOrDefault(self.loss),
                self.getOrDefault(self.metrics),
                self.getLearningRate(),
            ),
            self.getBatchSize(),
            self.getEpochs(),
            self.getShuffle(),
            _TASKS.get(task),
            self.getOrDefault(self.seed),
            not isinstance(self.model, bytes),
        )

    def _model(self, fitted: Fitted) -> KerasModel:
        model = KerasModel(model=_content(fitted.result["path"]), custom_objects=self._own())
        model._made_here = not isinstance(self.model, bytes)
        model._resetUid(self.uid)
        self._copyValues(model)
        model.history = History(fitted.history)
        outputs = (f"{task} logits" if logits else task for task, logits in fitted.result["classifier_outputs"])
        return model._set(head=", ".join(outputs))

    def stored(self) -> tuple[dict[str, Any], dict[str, Any], bytes | None]:
        """Return the contents to save in addition to the Params: the model, and the user's code.

        Raises
        ------
        PlanError
            If there are callbacks, or a validation DataFrame.
        """
        self._refuse_frame()
        if self.callbacks:
            raise PlanError("callbacks cannot be saved: remove them, then save the estimator")
        code: dict[str, Any] = dict(self.custom_objects)
        if is_keras_model(self.model):
            return {}, self._own(), keras_bytes(self.model)
        if callable(self.model):
            code["model_fn"] = self.model
        return {}, code, self.model if isinstance(self.model, bytes) else None

    def restore(self, args: dict[str, Any], code: dict[str, Any], content: bytes | None) -> None:
        """Undo :meth:`stored`."""
        del args
        self.model = code.pop("model_fn", content)
        self.custom_objects = code


def _content(path: str) -> bytes:
    """Return the file that the chief has written."""
    try:
        system, place = file_system(path)
        with system.open(place, "rb") as file:
            content: bytes = file.read()
    except (OSError, ValueError) as error:
        raise FeedFailed(
            without_password(f"the trained model is in {path}, and this machine cannot read it: {error}. ")
            + "Set model_dir to a path that the executors' hosts and this one share, or to a URL"
        ) from error
    return content
