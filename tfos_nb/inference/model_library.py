"""The driver's view of models: how executors get one, and its inputs and outputs.

::

    find(model, spark, use)
        the model's bytes (broadcast) or its place ─▶ one task reads it ─▶ Known

The driver does not load TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import socket
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from tfos_nb.driver.launching import error_of_job
from tfos_nb.driver.prewarm import functions_with_tensorflow
from tfos_nb.errors import PlanError
from tfos_nb.redaction import without_password
from tfos_nb.runtime.code.custom_objects import ModelCode, pack
from tfos_nb.runtime.code.user_classes import own_objects
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.models.checkpoint_model import files_of
from tfos_nb.runtime.models.model import Use, check_directory, check_file, is_saved_model
from tfos_nb.runtime.models.model_cache import SentModel, Source, StoredModel
from tfos_nb.runtime.models.outputs import SPARK_TYPES
from tfos_nb.runtime.models.scoring import LOOK_SCHEMA, ModelLook, SignatureTask
from tfos_nb.runtime.models.signature import ModelUnusable, Signature
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import SparkJobs, slots_busy

__all__ = ["Known", "find", "is_keras_model", "keras_bytes", "look", "shown"]

_LOOK_SECONDS = 600.0
"""Time limit for reading a model: a slot must become free, and a large model must be loaded."""


@dataclass(frozen=True)
class Known:
    """Model that an executor has inspected: its source, its signature, and its name in messages."""

    source: Source
    signature: Signature
    name: str


def find(
    model: Any,
    spark: SparkSession,
    use: Use | None = None,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    model_fn: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
) -> Known:
    """Find a model and inspect it.

    Parameters
    ----------
    model : str, path or keras.Model
        On the driver's disk: its bytes go to the executors. A URL that fsspec knows, or a path that only the executors
        see: they read it.
    spark : SparkSession
        Where it will be used.
    use : Use, optional
        The part of it that is used.
    custom_objects : mapping, optional
        The user's own classes and functions. A Keras model object includes those of its layers.
    model_fn : callable, optional
        Builds the model whose weights a checkpoint has.
    args : tuple
        The arguments of ``model_fn``.

    Raises
    ------
    PlanError
        If the model cannot be loaded on an executor.
    """
    own = dict(custom_objects or {})
    use = use or Use()
    if is_keras_model(model):
        own = {**own_objects(model), **own}
        use = dataclasses.replace(use, trusted=True)
    code = pack(ModelCode(own, model_fn, args))
    source, name = _source_of(model, spark, dataclasses.replace(use, code=code))
    return Known(source, look(spark, source, name), name)


def is_keras_model(model: Any) -> bool:
    """Whether it is a model object of Keras 2 or 3."""
    return any(cls.__module__.partition(".")[0] in ("keras", "tf_keras") for cls in type(model).__mro__)


def _source_of(model: Any, spark: SparkSession, use: Use) -> tuple[SentModel | StoredModel, str]:
    """Return how executors get the model, and its name in messages."""
    if is_keras_model(model):
        return _sent_model(spark, ".keras", keras_bytes(model), use), f"this {type(model).__name__}"
    if isinstance(model, bytes):  # of a model object that was saved
        return _sent_model(spark, ".keras", model, use), "the saved model"
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise PlanError(f"model must be a path, a URL or a Keras model, got a {type(model).__name__}, {model!r}")
    name = str(os.fspath(model))
    if re.match(r"\w[\w+.-]+:/", name):
        return StoredModel(re.sub(r"^([^:/]+):/(?!/)", r"\1:///", name), use), shown(name)
    path = os.path.expanduser(name)
    if not os.path.exists(path):
        return StoredModel(path, use), name
    try:
        return _sent_model(spark, *_packed(path), use), name
    except ModelUnusable as error:
        raise PlanError(f"{name}: {error}") from None


def shown(url: str) -> str:
    """Return a URL without what may be secret: the user's part, and the query."""
    return without_password(url.partition("?")[0], instead="")


def _packed(path: str) -> tuple[str, bytes]:
    if not os.path.isdir(path):
        check_file(path)
        with open(path, "rb") as file:
            return os.path.splitext(path)[1].lower(), file.read()
    check_directory(path)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in _files(path):
            # A fixed date: the same content is the same bytes, and is loaded once.
            entry = zipfile.ZipInfo(name)
            with open(os.path.join(path, name), "rb") as file, archive.open(entry, "w", force_zip64=True) as into:
                into.write(file.read())
    return "", packed.getvalue()


def _files(path: str) -> list[str]:
    if not is_saved_model(path):
        return files_of(path)  # of all its checkpoints, the newest
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, files in os.walk(path) for name in files
    )


def keras_bytes(model: Any) -> bytes:
    """Return the ``.keras`` file of a model object.

    Raises
    ------
    PlanError
        If Keras cannot save it.
    """
    with tempfile.TemporaryDirectory(prefix="tfos_nb-model-") as directory:
        path = os.path.join(directory, "model.keras")
        try:
            model.save(path)
        except Exception as error:
            raise PlanError(
                f"this {type(model).__name__} cannot be saved, so it cannot be sent to the executors: {error}. "
                "Export it with "
                "model.export(DIRECTORY) and give that directory"
            ) from error
        with open(path, "rb") as file:
            return file.read()


def _sent_model(spark: SparkSession, suffix: str, content: bytes, use: Use) -> SentModel:
    return SentModel(suffix, hashlib.sha256(content).hexdigest(), context_of(spark).shared(content), use)


# --- the look -----------------------------------------------------------------------------------------------------


def look(spark: SparkSession, source: Source, name: str) -> Signature:
    """Ask one executor for the model's inputs and outputs.

    Raises
    ------
    PlanError
        If it cannot be loaded there, or Spark has no type for its inputs or outputs.
    """
    jobs = SparkJobs(spark, f"tfos_nb-inference-{uuid.uuid4().hex[:8]}")
    with functions_with_tensorflow(spark):
        action = spark.range(0, 1, 1, 1).mapInArrow(SignatureTask(source), LOOK_SCHEMA).collect
    job = jobs.run(action, f"tfos_nb: look at the model {name}")
    try:
        ended = job.done.wait(_LOOK_SECONDS)
    finally:
        if not job.done.is_set():
            job.cancel()
    if not ended:
        running = ", ".join(f"{stage.tasks} of {stage.description!r}" for stage in slots_busy(spark)) or "nothing"
        raise PlanError(f"{name}: no executor has read the model within {_LOOK_SECONDS:g} s; running tasks: {running}")
    if job.error is not None or not job.result:
        error = job.error or PlanError("no row came back")
        raise PlanError(f"{name}: {error_of_job(error, 'reading the model failed')}") from error
    found = wire.expect(ModelLook, job.result[0][0])
    if found.signature is None:
        raise PlanError(_problem(found, source, name))
    return _checked(found.signature, name)


def _problem(found: ModelLook, source: Source, name: str) -> str:
    told = found.problem
    if isinstance(source, StoredModel):
        told = told.replace(source.url, name)
        if found.absent and "://" not in source.url:
            return (
                f"{name} is neither here ({socket.gethostname()}) nor on the executor's host ({found.host}): give the "
                "path of a model on either, or a URL that the executors can read"
            )
        told += f" (looked for on the executor's host, {found.host})" if found.absent else ""
    return f"{name}: {told}"


def _checked(signature: Signature, name: str) -> Signature:
    for role, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        for tensor in tensors:
            if tensor.dtype not in SPARK_TYPES:
                raise PlanError(
                    f"{name}: {role} {tensor.name!r} is {tensor.dtype}, for which Spark has no type; save a model that "
                    "casts it, for example to or from float32"
                )
    return signature
