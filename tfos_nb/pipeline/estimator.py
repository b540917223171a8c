"""An Estimator of Spark ML that trains with a function of the user's on a TensorFlow cluster."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame, SparkSession

from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.pipeline.conversion import Namespace
from tfos_nb.pipeline.estimating import Fitting, new_home
from tfos_nb.pipeline.fitting import Rows
from tfos_nb.pipeline.history import History
from tfos_nb.pipeline.model import TFModel
from tfos_nb.pipeline.params import (
    HasExportDir,
    HasInputMode,
    HasMasterNode,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTFRecordDir,
)
from tfos_nb.pipeline.records import written
from tfos_nb.pipeline.selection import feedable, selected
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.runtime.models.model import Use
from tfos_nb.runtime.program.estimator_programs import ExportProgram, TrainProgram
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.runtime.storage.remote import file_system

__all__ = ["TFEstimator"]

logger = logging.getLogger(__name__)

Function = Callable[[Any, Any], Any]


class TFEstimator(
    HasOutputMapping,
    HasExportDir,
    HasNumPS,
    HasMasterNode,
    HasReaders,
    HasSteps,
    HasProtocol,
    HasInputMode,
    HasTFRecordDir,
    HasSignatureDefKey,
    HasTagSet,
    Fitting,
    Estimator[Any],
):
    """Trains with ``train_fn(args, ctx)`` on a cluster of Spark's executors; ``fit`` returns a :class:`TFModel`.

    ::

        fit(df)   df's columns of input_mapping, under the tensors' names
                    ├─ spark: they are fed, epochs times        ctx.dataset(args.batch_size, x="image", y="label")
                    └─ tensorflow: written as TFRecords first   ctx.read(args.tfrecord_dir, args.batch_size, x=…, y=…)
                  train_fn returns where the model is, or exports it to args.export_dir; or export_fn(args) does so
                  afterwards, in a process of its own; or there are checkpoints in args.model_dir

    Parameters
    ----------
    train_fn : callable
        Runs on every node; takes the arguments and a :class:`tfos_nb.runtime.program.context.NodeContext`.
    tf_args : dict, Namespace or list, optional
        Your own arguments. ``train_fn`` gets them with every Param laid over them, as ``args.batch_size``.
    export_fn : callable, optional
        Takes the arguments; called once after the training. It may return the model's path.
    validation : DataFrame, optional
        Rows for ``ctx.validation(…)``.
    **params
        Params by their names; ``explainParams()`` describes each.

    Notes
    -----
    ``cluster_size`` counts all nodes: those of ``num_ps``, the ``master_node``, and workers. Without ``export_dir`` and
    ``model_dir`` each fit writes to a directory of its own under ``tfos_models``. Each fit of a CrossValidator is a
    cluster. With ``parallelism`` above 1, fits without free slots wait for the others.

    Examples
    --------
    >>> def train_fn(args, ctx):  # doctest: +SKIP
    ...     model = build()
    ...     model.fit(ctx.dataset(args.batch_size, x="image", y="digit"), epochs=args.epochs)
    ...     return ctx.save(model)
    >>> estimator = TFEstimator(train_fn, epochs=3)  # doctest: +SKIP
    >>> estimator.setInputMapping({"pixels": "image", "label": "digit"}).fit(df).transform(df)  # doctest: +SKIP
    """

    def __init__(
        self,
        train_fn: Function | None = None,
        tf_args: Any = None,
        export_fn: Callable[[Any], Any] | None = None,
        *,
        validation: DataFrame | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        self.args = Namespace(tf_args)
        self.train_fn = train_fn
        self.export_fn = export_fn
        self.setValidation(validation)
        self._set_all(params)

    def _fit(self, dataset: DataFrame) -> TFModel:
        self._check_functions()
        self._check_resume()
        training, held_out = self._parts(dataset)
        spark = training.sparkSession
        mapping = self.getInputMapping() or {name: name for name in feedable(training)}
        rows = Rows(
            self._fed(training, mapping),
            None if held_out is None else self._fed(held_out, mapping),
            self.getEpochs(),
            self.getSpill(),
        )
        home = self.getModelDir() or new_home(type(self).__name__)
        args = self._arguments(home)
        named = tuple(absolute(place) for place in (self.getModelDir(), self.getExportDir()) if place)
        fit = self._fit_of(home, self._plan(), named)
        program = self._program(self.train_fn, spark)
        if self.getInputMode() is InputMode.SPARK:
            fitted = fit.run(program, args, spark, rows)
        else:
            with written(rows, self.getTFRecordDir() or f"{home}/tfrecords", args):
                fitted = fit.run(program, args, spark)
        place = fitted.result
        if self.export_fn is not None:
            alone = self._fit_of(home, {"workers": 1, "input_mode": InputMode.TENSORFLOW}).single()
            place = alone.run(ExportProgram(self.export_fn), args, spark).result or args.export_dir
        model = self._model(spark, place, args)
        model.history = History(fitted.history)
        return model

    def _check_functions(self) -> None:
        if not callable(self.train_fn):
            raise PlanError(f"train_fn is a {type(self.train_fn).__name__}: give a function that takes (args, ctx)")
        if self.export_fn is None:
            return
        try:
            inspect.signature(self.export_fn).bind(None)
        except TypeError as error:
            raise PlanError(f"export_fn is called as export_fn(args): {error}") from None

    def _fed(self, df: DataFrame, mapping: dict[str, str]) -> DataFrame:
        """Return the columns that the nodes get, under the names that they know."""
        return selected(df, mapping, self._weight())

    def _program(self, train_fn: Any, spark: SparkSession) -> Any:
        """Return the function that a node calls."""
        del spark  # of use where a program wants to know more
        return TrainProgram(train_fn, self.getOrDefault(self.seed))

    def _arguments(self, home: str) -> Namespace:
        args = self.merge_args_params()
        args.model_dir = absolute(home)
        args.export_dir = absolute(self.getExportDir() or f"{home}/export")
        return args

    def _recorded(self) -> dict[str, Any]:
        return {**vars(self.args), **super()._recorded()}

    _chief: str | None = None  # as a plan has it

    def _plan(self) -> dict[str, Any]:
        """Return the roles: ``cluster_size`` counts them all."""
        size, servers, master = self.getClusterSize(), self.getNumPS(), self.getMasterNode()
        workers = size - servers - int(master is not None)
        coordinates = servers and self._chief is None
        if workers < 0 or (not workers and (master is None or coordinates)):
            parts = " and ".join(filter(None, (f"{servers} ps" if servers else "", "a chief" if master else "")))
            raise PlanError(
                f"cluster_size={size} counts all nodes: with {parts or 'no chief'} no worker is left; raise it "
                f"to {servers + int(master is not None) + 1}"
            )
        return {
            "workers": workers,
            "ps": servers,
            "chief": self._chief if master is not None else False,
            "master_node": master,
            "driver_ps_nodes": self.getDriverPSNodes(),
            "protocol": self.getProtocol(),
            "input_mode": self.getInputMode(),
        }

    def _model(self, spark: SparkSession, place: Any, args: Namespace) -> TFModel:
        """Return the model that the training left behind."""
        model = self._blank()
        model._resetUid(self.uid)
        self._copyValues(model)
        if isinstance(place, str) and (os.sep in place or place.endswith((".keras", ".h5"))):
            model.setExportDir(place)
        elif self.export_fn is not None or _exists(args.export_dir):
            model.setExportDir(args.export_dir)
        else:
            model._set(export_dir=None)
        model.setModelDir(args.model_dir)
        return self._of_its_inputs(spark, model)

    def _blank(self) -> TFModel:
        return TFModel(self.args)

    def _of_its_inputs(self, spark: SparkSession, model: TFModel) -> TFModel:
        """Leave out of the model's mapping the columns that are not inputs, such as the label."""
        mapping = model.getInputMapping()
        if not mapping:
            return model
        use = Use(model.getSignatureDefKey(), tuple(filter(None, (model.getTagSet() or "").split(","))))
        try:
            known = model._find(spark, use)
        except PlanError as error:
            logger.warning("the training succeeded, but its model cannot be applied: %s", error)
            return model
        names = [tensor.name for tensor in known.signature.inputs]
        return model.setInputMapping({column: tensor for column, tensor in mapping.items() if tensor in names})

    def stored(self) -> tuple[dict[str, Any], dict[str, Any], bytes | None]:
        """Return the contents to save in addition to the Params: arguments and functions.

        Raises
        ------
        PlanError
            If a validation DataFrame is set.
        """
        self._refuse_frame()
        functions = {"train_fn": self.train_fn, "export_fn": self.export_fn}
        return dict(vars(self.args)), {name: value for name, value in functions.items() if value is not None}, None

    def restore(self, args: dict[str, Any], code: dict[str, Any], content: bytes | None) -> None:
        """Undo :meth:`stored`."""
        del content
        self.args = Namespace(args)
        self.train_fn, self.export_fn = code.get("train_fn"), code.get("export_fn")


def _exists(place: str) -> bool:
    """Return whether a path exists, as far as this machine can see."""
    try:
        system, path = file_system(place)
        return bool(system.exists(path))
    except (OSError, ValueError) as error:
        raise FeedFailed(f"export_dir={place} cannot be reached from here: {error}") from error
