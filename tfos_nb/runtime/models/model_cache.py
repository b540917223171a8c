"""Load models from their sources in an executor's Python process, and cache the last one.

::

    SentModel     bytes that came by Spark's broadcast        ┐
    StoredModel   a URL or path that every executor reads     ├▶ ModelCache.take(…) ─▶ Model
    Function      a user's function (runtime.models.blocks)   ┘
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import multiprocessing
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tfos_nb.runtime.code.on_import import spare_scikit_learn
from tfos_nb.runtime.control.processes import PARENT_VARIABLE, die_with_parent
from tfos_nb.runtime.host.gpu import gpu_variables
from tfos_nb.runtime.models.loading import load
from tfos_nb.runtime.models.model import WHOLE, Model, Use, why_not_loaded
from tfos_nb.runtime.models.signature import ModelUnusable, Signature
from tfos_nb.runtime.rows.ragged import Output
from tfos_nb.runtime.storage.paths import spill_directory
from tfos_nb.runtime.storage.remote import file_system

__all__ = ["Inline", "ModelAbsent", "ModelCache", "Reader", "SentModel", "Source", "StoredModel", "TaskResources"]

Array = np.ndarray[Any, Any]
Reader = Callable[[], Model]


class Source(Protocol):
    """Source of a model."""

    @property
    def use(self) -> Use:
        """Part of the model that is used."""

    def version(self) -> str:
        """Return a text that changes when the model's content changes."""

    def on_disk(self) -> contextlib.AbstractContextManager[str]:
        """Return a context manager with the model's local path, which exists until the context ends."""

    def reader(self, path: str) -> Reader:
        """Return a picklable function that loads the model from that path, in this process or another."""


class ModelAbsent(ModelUnusable):
    """No model exists at the path or URL, as seen from this process."""


class Shared(Protocol):
    """Content that reaches the tasks: Spark's ``Broadcast``, or :class:`Inline`."""

    @property
    def value(self) -> bytes:
        """The content."""


@dataclass(frozen=True)
class Inline:
    """Content that is pickled into each task, for Spark Connect, which has no broadcast."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class SentModel:
    """Model whose bytes are sent to the tasks.

    Parameters
    ----------
    suffix : str
        ``.keras`` or ``.h5``. Empty: the content is a zip file of a directory.
    digest : str
        Digest of the content.
    content : Shared
        Bytes of the file, or of the zip file.
    use : Use
        Part of the model that is used.
    """

    suffix: str
    digest: str
    content: Shared = field(repr=False)
    use: Use = WHOLE

    def version(self) -> str:
        """Return the digest."""
        return self.digest

    def reader(self, path: str) -> Reader:
        """Return a picklable function that loads the model from a path, in this process or another."""
        return functools.partial(load, path, self.use)

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Write the content to a temporary path, and remove it when the context ends."""
        with tempfile.TemporaryDirectory(prefix="tfos_nb-model-", dir=spill_directory()) as directory:
            path = os.path.join(directory, f"model{self.suffix}")
            if self.suffix:
                with open(path, "wb") as file:
                    file.write(self.content.value)
            else:
                zipfile.ZipFile(io.BytesIO(self.content.value)).extractall(path)
            yield path


@dataclass(frozen=True)
class StoredModel:
    """Model that every executor reads from a URL or path.

    Parameters
    ----------
    url : str
        A URL of a scheme that fsspec supports, or a path on the executor's host.
    use : Use
        Part of the model that is used.
    """

    url: str = field(repr=False)  # it may contain a token
    use: Use = WHOLE

    def version(self) -> str:
        """Return a SHA-256 of the URL and of the files' metadata, such as sizes and times. The files are not read.

        Raises
        ------
        ModelAbsent
            If no file or directory exists there.
        """
        system, path = file_system(self.url)
        if not system.exists(path):
            raise ModelAbsent("the file or directory does not exist")
        known = system.find(path, detail=True) if system.isdir(path) else {path: system.info(path)}
        return hashlib.sha256(repr((self.url, sorted(known.items(), key=str))).encode()).hexdigest()

    def reader(self, path: str) -> Reader:
        """Return a picklable function that loads the model from a path, in this process or another."""
        return functools.partial(load, path, self.use)

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Yield the path itself if it is local. Otherwise download the model, and remove the copy afterwards."""
        from fsspec.implementations.local import LocalFileSystem

        system, path = file_system(self.url)
        if isinstance(system, LocalFileSystem):
            yield path
            return
        scratch = tempfile.mkdtemp(prefix="tfos_nb-model-", dir=spill_directory())
        try:
            local = os.path.join(scratch, os.path.basename(path.rstrip("/")))
            system.get(path.rstrip("/"), local, recursive=system.isdir(path))
            yield local
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class TaskResources:
    """GPUs (their addresses) and number of CPUs that Spark assigned to a task."""

    gpus: tuple[str, ...] = ()
    cpus: int = 1

    @classmethod
    def of_task(cls) -> TaskResources:
        """Return the resources of the current task; no GPU and one CPU outside a task."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            return cls()
        gpus = context.resources().get("gpu")
        return cls(tuple(gpus.addresses) if gpus is not None else (), context.cpus())


class ModelCache:
    """Cache of one model: the one that this process used last."""

    def __init__(self) -> None:
        self._version: tuple[str, Use, tuple[str, ...]] | None = None
        self._model: Model | None = None
        self._gpus: tuple[str, ...] | None = None

    def take(self, source: Source, resources: TaskResources) -> Model:
        """Return a model. It is loaded if its version, ``use`` or GPUs differ from the cached model's.

        Raises
        ------
        ModelUnusable
            If it cannot be loaded.
        """
        try:
            version = (source.version(), source.use, resources.gpus)
            if self._model is None or version != self._version:
                self._release()
                with source.on_disk() as path:
                    self._model = self._load(source.reader(path), resources)
                self._version = version
                _settle()
        except ModelUnusable:
            raise
        except Exception as error:
            raise ModelUnusable(why_not_loaded(error)) from error
        return self._model

    def _release(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = self._version = None
        gc.unfreeze()
        gc.collect()  # Keras models contain reference cycles

    def _load(self, read: Reader, resources: TaskResources) -> Model:
        if self._gpus is None:
            _set_up(resources)
            self._gpus = resources.gpus
        if resources.gpus != self._gpus:
            return _load_elsewhere(read, resources)
        return read()


def _settle() -> None:
    """Exclude all present objects from garbage collection until the model is released.

    Spark's Python worker runs ``gc.collect()`` after each task, which takes 0.2 s with TensorFlow's objects.
    """
    gc.collect()
    gc.freeze()


def _set_up(resources: TaskResources) -> None:
    """Limit TensorFlow to the task's GPUs and CPUs. Must run before TensorFlow lists its devices."""
    os.environ.update(gpu_variables(resources.gpus))
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    spare_scikit_learn()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # a user's function has already run TensorFlow in this process
        tf.config.threading.set_intra_op_parallelism_threads(resources.cpus)
        tf.config.threading.set_inter_op_parallelism_threads(resources.cpus)


# TensorFlow cannot change its visible GPUs later, and Spark may assign other GPUs to the next task of a reused Python
# process. A model for other GPUs is therefore loaded in a child process.


def _load_elsewhere(read: Reader, resources: TaskResources) -> Model:
    context = multiprocessing.get_context("spawn")  # a forked process hangs if TensorFlow has run before the fork
    pool = ProcessPoolExecutor(1, context, _begin_elsewhere, (resources, os.getpid()))
    try:
        told = pool.submit(_keep, read).result()
    except BaseException:
        pool.shutdown(wait=False)
        raise
    return Model(told, lambda arrays: pool.submit(_apply_kept, list(arrays)).result(), pool.shutdown)


_kept: list[Model] = []


def _begin_elsewhere(resources: TaskResources, parent: int) -> None:
    os.environ[PARENT_VARIABLE] = str(parent)
    die_with_parent()
    _set_up(resources)


def _keep(read: Reader) -> Signature:
    _kept[:] = [read()]
    return _kept[0].signature


def _apply_kept(arrays: list[Array]) -> list[Output]:
    return _kept[0].apply(arrays)
