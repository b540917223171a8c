"""The Params of the pipeline, a mixin each; most with the names and defaults that TensorFlowOnSpark's pipeline has.

An Estimator or Model inherits those that it has. ``setInputMapping`` and the like return the object itself; a value of
a wrong type is a TypeError that names the Param.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasSeed, HasValidationIndicatorCol, HasWeightCol

from tfos_nb.pipeline.conversion import to_count, to_input_mode, to_mapping, to_number, to_path, to_text
from tfos_nb.runtime.control.plan import InputMode

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasEpochs",
    "HasExportDir",
    "HasFeed",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProgress",
    "HasProtocol",
    "HasReaders",
    "HasRecovery",
    "HasResources",
    "HasRowRoles",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
]

P = TypeVar("P", bound=Params)


def _param(name: str, doc: str, converter: Any) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=converter)


class HasInputMapping(Params):
    """Param ``input_mapping``: the input of each column, {column: tensor}."""

    input_mapping: Param[dict[str, str]] = _param(
        "input_mapping", "which column becomes which input, {column: tensor}", to_mapping
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(input_mapping={})

    def setInputMapping(self: P, value: dict[str, str]) -> P:
        """Set ``input_mapping``."""
        return self._set(input_mapping=value)

    def getInputMapping(self) -> dict[str, str]:
        """Return ``input_mapping``."""
        return self.getOrDefault(self.input_mapping)


class HasOutputMapping(Params):
    """Param ``output_mapping``: the column of each output, {tensor: column}."""

    output_mapping: Param[dict[str, str]] = _param(
        "output_mapping", "which output becomes which column, {tensor: column}", to_mapping
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(output_mapping={})

    def setOutputMapping(self: P, value: dict[str, str]) -> P:
        """Set ``output_mapping``."""
        return self._set(output_mapping=value)

    def getOutputMapping(self) -> dict[str, str]:
        """Return ``output_mapping``."""
        return self.getOrDefault(self.output_mapping)


class HasModelDir(Params):
    """The directory of checkpoints, a path or a URL."""

    model_dir: Param[str | None] = _param("model_dir", "the directory of checkpoints, a path or a URL", to_path)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(model_dir=None)

    def setModelDir(self: P, value: str | None) -> P:
        """Set ``model_dir``."""
        return self._set(model_dir=value)

    def getModelDir(self) -> str | None:
        """Return ``model_dir``."""
        return self.getOrDefault(self.model_dir)


class HasExportDir(Params):
    """The saved model: a SavedModel's directory or a Keras file, a path or a URL."""

    export_dir: Param[str | None] = _param(
        "export_dir", "the saved model: a SavedModel's directory or a Keras file, a path or a URL", to_path
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(export_dir=None)

    def setExportDir(self: P, value: str | None) -> P:
        """Set ``export_dir``."""
        return self._set(export_dir=value)

    def getExportDir(self) -> str | None:
        """Return ``export_dir``."""
        return self.getOrDefault(self.export_dir)


class HasBatchSize(Params):
    """Rows that the model takes at once."""

    batch_size: Param[int] = _param("batch_size", "rows that the model takes at once", to_count)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batch_size=100)

    def setBatchSize(self: P, value: int) -> P:
        """Set ``batch_size``."""
        return self._set(batch_size=value)

    def getBatchSize(self) -> int:
        """Return ``batch_size``."""
        return self.getOrDefault(self.batch_size)


class HasSignatureDefKey(Params):
    """The SavedModel's signature."""

    signature_def_key: Param[str | None] = _param(
        "signature_def_key", "the SavedModel's signature; None: the one that serves, or the only one", to_text
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(signature_def_key=None)

    def setSignatureDefKey(self: P, value: str | None) -> P:
        """Set ``signature_def_key``."""
        return self._set(signature_def_key=value)

    def getSignatureDefKey(self) -> str | None:
        """Return ``signature_def_key``."""
        return self.getOrDefault(self.signature_def_key)


class HasTagSet(Params):
    """The tags of the SavedModel's graph, commas between."""

    tag_set: Param[str | None] = _param(
        "tag_set", "the tags of the SavedModel's graph, commas between; None: serve, or the only one", to_text
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(tag_set=None)

    def setTagSet(self: P, value: str | None) -> P:
        """Set ``tag_set``."""
        return self._set(tag_set=value)

    def getTagSet(self) -> str | None:
        """Return ``tag_set``."""
        return self.getOrDefault(self.tag_set)


class HasClusterSize(Params):
    """Param ``cluster_size``: the number of nodes, those of ``num_ps`` among them."""

    cluster_size: Param[int] = _param(
        "cluster_size", "how many nodes the cluster has, those of num_ps among them", to_count
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(cluster_size=1)

    def setClusterSize(self: P, value: int) -> P:
        """Set ``cluster_size``."""
        return self._set(cluster_size=value)

    def getClusterSize(self) -> int:
        """Return ``cluster_size``."""
        return self.getOrDefault(self.cluster_size)


class HasNumPS(Params):
    """Param ``num_ps``: how many of the nodes are parameter servers."""

    num_ps: Param[int] = _param("num_ps", "how many of the nodes are parameter servers", to_number)
    driver_ps_nodes: Param[bool] = _param(
        "driver_ps_nodes", "whether the parameter servers run on the driver", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(num_ps=0, driver_ps_nodes=False)

    def setNumPS(self: P, value: int) -> P:
        """Set ``num_ps``."""
        return self._set(num_ps=value)

    def getNumPS(self) -> int:
        """Return ``num_ps``."""
        return self.getOrDefault(self.num_ps)

    def setDriverPSNodes(self: P, value: bool) -> P:
        """Set whether they run on the driver."""
        return self._set(driver_ps_nodes=value)

    def getDriverPSNodes(self) -> bool:
        """Return whether they run on the driver."""
        return self.getOrDefault(self.driver_ps_nodes)


class HasReaders(Params):
    """Param ``readers``: the number of readers that the program uses."""

    readers: Param[int] = _param("readers", "how many readers the program uses; handed to it", to_count)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(readers=1)

    def setReaders(self: P, value: int) -> P:
        """Set ``readers``."""
        return self._set(readers=value)

    def getReaders(self) -> int:
        """Return ``readers``."""
        return self.getOrDefault(self.readers)


class HasMasterNode(Params):
    """Param ``master_node``: the name of the first worker, chief or master."""

    master_node: Param[str | None] = _param(
        "master_node", "the name of the first worker, chief or master; None: no chief", to_text
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(master_node="chief")

    def setMasterNode(self: P, value: str | None) -> P:
        """Set ``master_node``."""
        return self._set(master_node=value)

    def getMasterNode(self) -> str | None:
        """Return ``master_node``."""
        return self.getOrDefault(self.master_node)


class HasTensorboard(Params):
    """Param ``tensorboard``: whether TensorBoard runs during the training."""

    tensorboard: Param[bool] = _param(
        "tensorboard", "whether TensorBoard runs during the training", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(tensorboard=False)

    def setTensorboard(self: P, value: bool) -> P:
        """Set ``tensorboard``."""
        return self._set(tensorboard=value)

    def getTensorboard(self) -> bool:
        """Return ``tensorboard``."""
        return self.getOrDefault(self.tensorboard)


class HasSteps(Params):
    """Param ``steps``: the number of steps that the program makes."""

    steps: Param[int] = _param("steps", "how many steps the program makes; handed to it", to_count)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(steps=1000)

    def setSteps(self: P, value: int) -> P:
        """Set ``steps``."""
        return self._set(steps=value)

    def getSteps(self) -> int:
        """Return ``steps``."""
        return self.getOrDefault(self.steps)


class HasEpochs(Params):
    """Param ``epochs``: the number of passes over the rows."""

    epochs: Param[int] = _param("epochs", "how often the rows are gone through", to_count)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(epochs=1)

    def setEpochs(self: P, value: int) -> P:
        """Set ``epochs``."""
        return self._set(epochs=value)

    def getEpochs(self) -> int:
        """Return ``epochs``."""
        return self.getOrDefault(self.epochs)


class HasProtocol(Params):
    """Param ``protocol``: the protocol between the nodes."""

    protocol: Param[str] = _param("protocol", "how the nodes talk to each other; handed to the program", to_text)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(protocol="grpc")

    def setProtocol(self: P, value: str) -> P:
        """Set ``protocol``."""
        return self._set(protocol=value)

    def getProtocol(self) -> str:
        """Return ``protocol``."""
        return self.getOrDefault(self.protocol)


class HasTFRecordDir(Params):
    """Param ``tfrecord_dir``: the directory for the rows as TFRecords, a path or a URL."""

    tfrecord_dir: Param[str | None] = _param(
        "tfrecord_dir", "where the rows are written as TFRecords, a path or a URL", to_path
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(tfrecord_dir=None)

    def setTFRecordDir(self: P, value: str | None) -> P:
        """Set ``tfrecord_dir``."""
        return self._set(tfrecord_dir=value)

    def getTFRecordDir(self) -> str | None:
        """Return ``tfrecord_dir``."""
        return self.getOrDefault(self.tfrecord_dir)


class HasGraceSecs(Params):
    """Seconds that the nodes have to end when they are stopped."""

    grace_secs: Param[int] = _param("grace_secs", "seconds that the nodes have to end when they are stopped", to_number)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(grace_secs=30)

    def setGraceSecs(self: P, value: int) -> P:
        """Set ``grace_secs``."""
        return self._set(grace_secs=value)

    def getGraceSecs(self) -> int:
        """Return ``grace_secs``."""
        return self.getOrDefault(self.grace_secs)


class HasInputMode(Params):
    """Param ``input_mode``: the source of the nodes' data."""

    input_mode: Param[str] = _param(
        "input_mode", "spark: rows are fed; tensorflow: the program reads files", to_input_mode
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(input_mode=InputMode.SPARK)

    def setInputMode(self: P, value: InputMode | str | int) -> P:
        """Set ``input_mode``."""
        return self._set(input_mode=value)

    def getInputMode(self) -> InputMode:
        """Return ``input_mode``."""
        return InputMode(self.getOrDefault(self.input_mode))


# --- how an Estimator fits --------------------------------------------------------------------------------------------

PROGRESS = ("auto", "widget", "html", "text", "none")


def _to_seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise TypeError(f"the value must be a positive number of seconds, got {value!r}")


def _to_seconds_or_none(value: Any) -> float | None:
    return None if value is None else _to_seconds(value)


def _to_resume(value: Any) -> bool | str:
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    raise TypeError(f"the value must be True, False, or a run's directory, got {value!r}")


def _to_mlflow(value: Any) -> bool | str | None:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise TypeError(f"the value must be True, False, or the name of an experiment, got {value!r}")


def _to_progress(value: Any) -> str:
    if value in PROGRESS:
        return str(value)
    raise TypeError(f"the value must be one of {', '.join(PROGRESS)}, got {value!r}")


class HasRowRoles(HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """Spark ML's Params for the rows' weights, the rows of the validation, and the seed."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(weightCol=None, validationIndicatorCol=None, seed=None)

    def setWeightCol(self: P, value: str | None) -> P:
        """Set the column of the rows' weights."""
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self: P, value: str | None) -> P:
        """Set the boolean column that is true for validation rows."""
        return self._set(validationIndicatorCol=value)

    def setSeed(self: P, value: int | None) -> P:
        """Set what Python, NumPy and TensorFlow are seeded with on the nodes."""
        return self._set(seed=value)


class HasResources(Params):
    """Params for the resources of the nodes, and the time that a fit waits for them."""

    gpus: Param[int] = Param(Params._dummy(), "gpus", "GPUs of each node that trains", to_number)
    cpus: Param[int] = Param(Params._dummy(), "cpus", "Spark's CPUs of each node", to_count)
    slot_timeout: Param[float] = Param(
        Params._dummy(), "slot_timeout", "seconds that a fit waits for slots that something else holds", _to_seconds
    )
    rendezvous_timeout: Param[float] = Param(
        Params._dummy(), "rendezvous_timeout", "seconds within which all nodes must have come", _to_seconds
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(gpus=0, cpus=1, slot_timeout=600.0, rendezvous_timeout=120.0)

    def setGpus(self: P, value: int) -> P:
        """Set ``gpus``."""
        return self._set(gpus=value)

    def getGpus(self) -> int:
        """Return ``gpus``."""
        return self.getOrDefault(self.gpus)

    def setCpus(self: P, value: int) -> P:
        """Set ``cpus``."""
        return self._set(cpus=value)

    def getCpus(self) -> int:
        """Return ``cpus``."""
        return self.getOrDefault(self.cpus)

    def setSlotTimeout(self: P, value: float) -> P:
        """Set ``slot_timeout``."""
        return self._set(slot_timeout=value)

    def getSlotTimeout(self) -> float:
        """Return ``slot_timeout``."""
        return self.getOrDefault(self.slot_timeout)

    def setRendezvousTimeout(self: P, value: float) -> P:
        """Set ``rendezvous_timeout``."""
        return self._set(rendezvous_timeout=value)

    def getRendezvousTimeout(self) -> float:
        """Return ``rendezvous_timeout``."""
        return self.getOrDefault(self.rendezvous_timeout)


class HasFeed(Params):
    """Params for feeding rows to the nodes."""

    feed_timeout: Param[float] = Param(
        Params._dummy(), "feed_timeout", "seconds for which a node may leave rows waiting", _to_seconds
    )
    spill: Param[bool] = Param(
        Params._dummy(),
        "spill",
        "whether the nodes keep their rows on local disk for the later epochs; otherwise Spark is asked for each",
        TypeConverters.toBoolean,
    )
    buffer_bytes: Param[int] = Param(
        Params._dummy(), "buffer_bytes", "bytes of rows that may wait in a node's memory", to_count
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(feed_timeout=600.0, spill=True, buffer_bytes=256 << 20)

    def setFeedTimeout(self: P, value: float) -> P:
        """Set ``feed_timeout``."""
        return self._set(feed_timeout=value)

    def getFeedTimeout(self) -> float:
        """Return ``feed_timeout``."""
        return self.getOrDefault(self.feed_timeout)

    def setSpill(self: P, value: bool) -> P:
        """Set ``spill``."""
        return self._set(spill=value)

    def getSpill(self) -> bool:
        """Return ``spill``."""
        return self.getOrDefault(self.spill)

    def setBufferBytes(self: P, value: int) -> P:
        """Set ``buffer_bytes``."""
        return self._set(buffer_bytes=value)

    def getBufferBytes(self) -> int:
        """Return ``buffer_bytes``."""
        return self.getOrDefault(self.buffer_bytes)


class HasRecovery(Params):
    """Params for fault tolerance of a fit."""

    restarts: Param[int] = Param(
        Params._dummy(),
        "restarts",
        "how often the nodes start again when one was lost, and continue from their saved state",
        to_number,
    )
    min_workers: Param[int | None] = Param(
        Params._dummy(),
        "min_workers",
        "how many workers train on while a lost one is not back, with restarts; None: all wait for it",
        to_count,
    )
    checkpoint_every: Param[float | None] = Param(
        Params._dummy(),
        "checkpoint_every",
        "every how many seconds the state is also written to model_dir, with restarts; None: it is in memory only",
        _to_seconds_or_none,
    )
    resume: Param[bool | str] = Param(
        Params._dummy(),
        "resume",
        "whether to continue the fit that was saved last in model_dir, with restarts; or a run's directory",
        _to_resume,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(restarts=0, min_workers=None, checkpoint_every=None, resume=False)

    def setRestarts(self: P, value: int) -> P:
        """Set ``restarts``."""
        return self._set(restarts=value)

    def getRestarts(self) -> int:
        """Return ``restarts``."""
        return self.getOrDefault(self.restarts)

    def setMinWorkers(self: P, value: int | None) -> P:
        """Set ``min_workers``."""
        return self._set(min_workers=value)

    def getMinWorkers(self) -> int | None:
        """Return ``min_workers``."""
        return self.getOrDefault(self.min_workers)

    def setCheckpointEvery(self: P, value: float | None) -> P:
        """Set ``checkpoint_every``."""
        return self._set(checkpoint_every=value)

    def getCheckpointEvery(self) -> float | None:
        """Return ``checkpoint_every``."""
        return self.getOrDefault(self.checkpoint_every)

    def setResume(self: P, value: bool | str) -> P:
        """Set ``resume``."""
        return self._set(resume=value)

    def getResume(self) -> bool | str:
        """Return ``resume``."""
        return self.getOrDefault(self.resume)


class HasMlflow(Params):
    """Whether a fit is logged to MLflow."""

    mlflow: Param[Any] = Param(
        Params._dummy(),
        "mlflow",
        "whether a fit is logged to MLflow: True, False, or the name of an experiment (default: to the active run, if "
        "there is one)",
        _to_mlflow,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(mlflow=None)

    def setMlflow(self: P, value: bool | str | None) -> P:
        """Set ``mlflow``."""
        return self._set(mlflow=value)

    def getMlflow(self) -> bool | str | None:
        """Return ``mlflow``."""
        found: bool | str | None = self.getOrDefault(self.mlflow)
        return found


class HasProgress(Params):
    """Params for the display of a fit."""

    progress: Param[str] = Param(
        Params._dummy(),
        "progress",
        "how a fit is shown: auto (in a notebook the panel; a line for each fit of a CrossValidator), widget, html, "
        "text or none",
        _to_progress,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(progress="auto")

    def setProgress(self: P, value: str) -> P:
        """Set ``progress``."""
        return self._set(progress=value)

    def getProgress(self) -> str:
        """Return ``progress``."""
        return self.getOrDefault(self.progress)
