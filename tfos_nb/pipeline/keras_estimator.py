"""An Estimator of Spark ML that trains a Keras model: no training function has to be written."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StringType

from tfos_nb.brief import without_password
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.library import is_keras_model, keras_bytes, own_classes
from tfos_nb.matching import depth_of
from tfos_nb.pipeline.conversion import Namespace, to_number
from tfos_nb.pipeline.estimating import Fitting, absolute, new_home
from tfos_nb.pipeline.fitting import Fitted, Rows
from tfos_nb.pipeline.keras_model import HasPredictionColumns, KerasModel
from tfos_nb.pipeline.selection import check_column, filled, selected, without_nulls
from tfos_nb.runtime.baggage import Baggage, pack
from tfos_nb.runtime.heads import Task
from tfos_nb.runtime.keras_program import Columns, Compiling, KerasProgram
from tfos_nb.runtime.models import near
from tfos_nb.runtime.remote import file_system

__all__ = ["KerasEstimator"]

_TASKS = {"classification": Task.CLASSES, "regression": Task.VALUES}


def _to_task(value: Any) -> str:
    if value == "auto" or value in _TASKS:
        return str(value)
    raise TypeError(f"{value!r} is neither 'auto' nor {' nor '.join(map(repr, _TASKS))}")


def _to_rate(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise TypeError(f"{value!r} is no number above 0")


class KerasEstimator(HasPredictionColumns, HasLabelCol, Fitting, Estimator[Any]):
    """Trains a Keras model on a cluster of Spark's executors; ``fit`` returns a :class:`KerasModel`.

    With several nodes it trains under ``MultiWorkerMirroredStrategy``; ``batch_size`` is the global one. Each fit
    starts with the weights that the model has (or, of a function, with new ones) and leaves the model as it is.

    Parameters
    ----------
    model : keras.Model or callable
        The model, compiled or not; or a function without parameters that builds it on the nodes, so that the driver
        needs no TensorFlow.
    optimizer, loss : str, or an object of Keras, optional
        What to compile it with. Default: as it is compiled.
    metrics : list, optional
        Names, or objects of Keras.
    callbacks : list of keras.callbacks.Callback, optional
        For ``fit``, such as ``EarlyStopping``; every node gets its own.
    custom_objects : dict, optional
        Your own classes and functions. Those of a model object's layers come by themselves.
    validation : DataFrame, optional
        Rows to validate on; the other way is the Param ``validationIndicatorCol``.
    **params
        Params by their names: ``featuresCol``, ``labelCol``, ``weightCol``, ``predictionCol``, ``probabilityCol``,
        ``rawPredictionCol``, ``epochs``, ``batch_size``, ``learning_rate``, ``cluster_size``, ``gpus``, ``shuffle``,
        ``seed``, ``task`` … ``explainParams()`` tells about each.

    Notes
    -----
    What the model is for is told by its loss: a crossentropy means a classifier, whose label is a number from 0 on, as
    ``StringIndexer`` makes it. ``task`` says it otherwise.

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
    task: Param[str] = Param(
        Params._dummy(), "task", "classification, regression, or auto: what the loss says", _to_task
    )
    optimizer: Param[Any] = Param(Params._dummy(), "optimizer", "a name, or Keras' own description")
    loss: Param[Any] = Param(Params._dummy(), "loss", "a name, or Keras' own description")
    metrics: Param[Any] = Param(Params._dummy(), "metrics", "names, or Keras' own descriptions", TypeConverters.toList)

    def __init__(
        self,
        model: Any = None,
        *,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] = (),
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
        self.setValidation(validation)
        self.setCompiling(optimizer, loss, metrics)
        self._set_all(params)

    def setCompiling(self, optimizer: Any = None, loss: Any = None, metrics: Sequence[Any] = ()) -> KerasEstimator:
        """Set what the model is compiled with; what is left out stays as it was."""
        if optimizer is not None:
            self._set(optimizer=self._described(optimizer, "optimizers"))
        if loss is not None:
            self._set(loss=self._described(loss, "losses"))
        if metrics:
            metrics = [metrics] if isinstance(metrics, str) else metrics
            self._set(metrics=[self._described(metric, "metrics") for metric in metrics])
        return self

    def _described(self, value: Any, kind: str) -> Any:
        """Return the name of something of Keras', or its description; remember what is the user's own."""
        if isinstance(value, (str, dict)):
            return value
        if callable(value) and not isinstance(value, type) and not _is_keras(value):
            name = str(getattr(value, "__name__", type(value).__name__))
            self.custom_objects[name] = value
            return name
        return importlib.import_module(f"{_flavour(value)}.{kind}").serialize(value)

    def setLabelCol(self, value: str) -> KerasEstimator:
        """Set the column of the label."""
        return self._set(labelCol=value)

    def setLearningRate(self, value: float | None) -> KerasEstimator:
        """Set the optimizer's learning rate."""
        return self._set(learning_rate=value)

    def getLearningRate(self) -> float | None:
        """Return the optimizer's learning rate."""
        return self.getOrDefault(self.learning_rate)

    def setShuffle(self, value: int) -> KerasEstimator:
        """Set among how many rows the next one is drawn."""
        return self._set(shuffle=value)

    def getShuffle(self) -> int:
        """Return among how many rows the next one is drawn."""
        return self.getOrDefault(self.shuffle)

    def setTask(self, value: str) -> KerasEstimator:
        """Set what the model is for."""
        return self._set(task=value)

    def getTask(self) -> str:
        """Return what the model is for."""
        return self.getOrDefault(self.task)

    def _fit(self, dataset: DataFrame) -> KerasModel:
        self._check_model()
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
        self._check_names("optimizer", [self.getOrDefault(self.optimizer)], ["optimizers"])
        self._check_names("loss", [self.getOrDefault(self.loss)], ["losses"])
        self._check_names("metrics", self.getOrDefault(self.metrics), ["metrics", "losses"])

    def _check_names(self, what: str, given: Sequence[Any], kinds: Sequence[str]) -> None:
        """Refuse names that Keras does not know, as far as it is loaded here; otherwise the nodes tell."""
        loaded = [_flavour(self.model)] if is_keras_model(self.model) else ["keras", "tf_keras"]
        modules = [
            importlib.import_module(f"{name}.{kind}") for name in loaded if name in sys.modules for kind in kinds
        ]
        for name in given if modules else ():
            known = not isinstance(name, str) or name in self.custom_objects or ">" in name  # that is registered
            if not known and not any(_knows(module, name) for module in modules):
                names = [said for module in modules for said in dir(module) if not said.startswith("_")]
                names += [said.lower() for said in names]
                raise PlanError(
                    f"{what}: Keras has no {name!r}{near(name, dict.fromkeys(names))}; of your own, give it itself"
                )

    def _columns(self, df: DataFrame, validates: bool) -> Columns:
        label = check_column(df, self.getLabelCol(), "labelCol")
        kind, _ = depth_of(df.schema[label].dataType)
        if isinstance(kind, (StringType, BinaryType)):
            raise PlanError(
                f"labelCol: column {label!r} is {kind.simpleString()}, not numbers: index it with StringIndexer"
            )
        weight = self.getOrDefault(self.weightCol)
        if weight is not None:
            check_column(df, weight, "weightCol")
        mapping = self.getInputMapping()
        if not mapping:
            check_column(df, self.getFeaturesCol(), "featuresCol")
        x: Any = tuple(dict.fromkeys(mapping.values())) if mapping else self.getFeaturesCol()
        return Columns(x, label, weight, validates)

    def _fed(self, df: DataFrame) -> DataFrame:
        mapping = self.getInputMapping() or {self.getFeaturesCol(): self.getFeaturesCol()}
        also = list(dict.fromkeys([self.getLabelCol(), *self._weight()]))
        rows = selected(df, mapping, [name for name in also if mapping.get(name) != name])
        if self.getNullPolicy() == "skip":
            return without_nulls(rows)
        if self.getNullPolicy() == "fill":  # but no label, and no weight
            return filled(rows, [name for name in dict.fromkeys(mapping.values()) if name not in also], self.getFill())
        return rows

    def _program(self, columns: Columns) -> KerasProgram:
        own = dict(self.custom_objects)
        if is_keras_model(self.model):
            own = {**own_classes(self.model), **own}
        built = self.model if callable(self.model) and not is_keras_model(self.model) else None
        content = self.model if isinstance(self.model, bytes) else b"" if built else keras_bytes(self.model)
        task = self.getTask()
        return KerasProgram(
            content,
            pack(Baggage(own, built, (tuple(self.callbacks),))),
            columns,
            Compiling(
                self.getOrDefault(self.optimizer),
                self.getOrDefault(self.loss),
                tuple(self.getOrDefault(self.metrics)),
                self.getLearningRate(),
            ),
            self.getBatchSize(),
            self.getEpochs(),
            self.getShuffle(),
            _TASKS.get(task),
            self.getOrDefault(self.seed),
        )

    def _model(self, fitted: Fitted) -> KerasModel:
        own = own_classes(self.model) if is_keras_model(self.model) else {}
        model = KerasModel(model=_content(fitted.result["path"]), custom_objects={**own, **self.custom_objects})
        model._resetUid(self.uid)
        self._copyValues(model)
        model.history = fitted.history
        return model._set(head=fitted.result["task"] + (" logits" if fitted.result["logits"] else ""))

    def stored(self) -> tuple[dict[str, Any], dict[str, Any], bytes | None]:
        """Return what is saved beside the Params: the model, and code of the user's.

        Raises
        ------
        PlanError
            If there are callbacks, or a validation DataFrame.
        """
        self._refuse_frame()
        if self.callbacks:
            raise PlanError("callbacks cannot be saved: save the estimator without them")
        code: dict[str, Any] = dict(self.custom_objects)
        if is_keras_model(self.model):
            return {}, {**own_classes(self.model), **code}, keras_bytes(self.model)
        if callable(self.model):
            code["model_fn"] = self.model
        return {}, code, self.model if isinstance(self.model, bytes) else None

    def restore(self, args: dict[str, Any], code: dict[str, Any], content: bytes | None) -> None:
        """Undo :meth:`stored`."""
        del args
        self.model = code.pop("model_fn", content)
        self.custom_objects = code


def _is_keras(value: Any) -> bool:
    names = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return bool(names & {"keras", "tf_keras"}) or str(getattr(value, "__module__", "")).partition(".")[0] in (
        "keras",
        "tf_keras",
    )


_SHORT = ("acc", "crossentropy", "ce")  # of metrics, whose meaning the loss tells


def _knows(module: Any, name: str) -> bool:
    """Whether a module of Keras' has something of a name; nothing is made, which could take the driver's GPU."""
    plain = name.replace("_", "").lower()
    if plain in (said.replace("_", "").lower() for said in dir(module)):
        return True
    if module.__name__.endswith("metrics") and name in _SHORT:
        return True
    try:
        return module.__name__.endswith("losses") and callable(module.get(name))  # mse, kld
    except ValueError:
        return False


def _flavour(value: Any) -> str:
    names = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return "tf_keras" if "tf_keras" in names or str(value.__module__).startswith("tf_keras") else "keras"


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
