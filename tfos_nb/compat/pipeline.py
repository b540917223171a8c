"""``pipeline``: Spark ML's Estimator and Model, under TensorFlowOnSpark's names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark.ml.param import TypeConverters
from pyspark.sql import DataFrame, SparkSession

from tfos_nb.compat import util
from tfos_nb.compat._program import Program
from tfos_nb.compat.TFCluster import InputMode, _gpus_wanted, _meta, _spark_user
from tfos_nb.pipeline import estimator, model
from tfos_nb.pipeline.conversion import TFParams
from tfos_nb.pipeline.params import (
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasExportDir,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
)
from tfos_nb.runtime.code.program_arguments import Namespace
from tfos_nb.runtime.control import plan

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasEpochs",
    "HasExportDir",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProtocol",
    "HasReaders",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
    "Namespace",
    "TFEstimator",
    "TFModel",
    "TFParams",
    "TFTypeConverters",
    "get_meta_graph_def",
    "single_node_env",
    "yield_batch",
]


class TFTypeConverters:
    """Converters of parameter values, in addition to Spark ML's own."""

    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:  # noqa: N802 - its name
        """Return a mapping as a dictionary; raise TypeError for any other value."""
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"the value must be a dictionary, got {value!r}")


class TFModel(model.TFModel):
    """Apply a saved model. As in TensorFlowOnSpark no input column is kept, unless ``keep_columns`` names it."""

    def __init__(self, tf_args: Any = None, **given: Any) -> None:
        super().__init__(tf_args)
        self._setDefault(keep_columns=TypeConverters.toListString([]))
        self._set_all(given)


class TFEstimator(estimator.TFEstimator):
    """Train with ``train_fn(args, ctx)``, which gets TensorFlowOnSpark's ``ctx`` and reads ``ctx.get_data_feed(…)``.

    The rows have the columns of ``input_mapping``, sorted by name.
    """

    _chief = "trains"

    def __init__(self, train_fn: Any = None, tf_args: Any = None, export_fn: Any = None, **given: Any) -> None:
        super().__init__(train_fn, tf_args, export_fn, **given)
        self._setDefault(keep_columns=TypeConverters.toListString([]))

    def _fed(self, df: DataFrame, mapping: dict[str, str]) -> DataFrame:
        return super()._fed(df, {column: column for column in sorted(mapping)})

    def _plan(self) -> dict[str, Any]:
        plan, spark = super()._plan(), SparkSession.getActiveSession()
        if spark is None or self.isSet(self.gpus):
            return plan
        return {**plan, "gpus": _gpus_wanted(spark.sparkContext, self.args)}

    def _program(self, train_fn: Any, spark: SparkSession) -> Any:
        sc, master = spark.sparkContext, self.getMasterNode()
        meta = _meta(sc, self.getClusterSize(), self.getNumPS(), master, False)
        program = Program(train_fn, meta["default_fs"], meta["working_dir"], master or "chief", _spark_user(sc))
        return super()._program(program, spark)

    def _arguments(self, home: str) -> Namespace:
        args = super()._arguments(home)
        fed = self.getInputMode() is plan.InputMode.SPARK
        args.input_mode = InputMode.SPARK if fed else InputMode.TENSORFLOW
        return args

    def _blank(self) -> TFModel:
        return TFModel(self.args)


def single_node_env(args: Any) -> None:
    """Let TensorFlow in this process run without a cluster. If ``args`` is a list, it is also set as ``sys.argv``."""
    if isinstance(args, list):
        sys.argv = list(args)
    found = args.get("num_gpus") if isinstance(args, dict) else getattr(args, "num_gpus", None)
    util.single_node_env(1 if found is None else found)


def get_meta_graph_def(saved_model_dir: str, tag_set: str) -> Any:
    """Return the graph of a SavedModel with these tags, separated by commas."""
    from tensorflow.python.tools import saved_model_utils

    return saved_model_utils.get_meta_graph_def(saved_model_dir, tag_set)


def yield_batch(iterable: Iterable[Any], batch_size: int, num_tensors: int = 1) -> Iterator[list[list[Any]]]:
    """Divide rows into batches, each with a list of values for each of the first ``num_tensors`` fields."""
    batch: list[list[Any]] = [[] for _ in range(num_tensors)]
    for row in iterable:
        if row is None:
            break
        for place, values in enumerate(batch):
            values.append(bytes(row[place]) if isinstance(row[place], bytearray) else row[place])
        if len(batch[0]) >= batch_size:
            yield batch
            batch = [[] for _ in range(num_tensors)]
    if batch[0]:
        yield batch
