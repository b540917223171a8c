"""The model that an executor's Python process has loaded: where it came from, and which GPUs it may use.

::

    Parcel  its bytes came by Spark's broadcast   ┐
    Place   a URL or a path that executors read   ┴▶ ModelCache.take(…) ─▶ Model, the same until another is asked for
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
from tfos_nb.runtime.models.model import WHOLE, Model, ModelUnusable, Signature, Use, why_not_loaded
from tfos_nb.runtime.rows.ragged import Output
from tfos_nb.runtime.storage.paths import spill_directory
from tfos_nb.runtime.storage.remote import file_system

__all__ = ["Inline", "ModelAbsent", "ModelCache", "Parcel", "Place", "Reader", "Share", "Source"]

Array = np.ndarray[Any, Any]
Reader = Callable[[], Model]


class Source(Protocol):
    """Where a model comes from."""

    @property
    def use(self) -> Use:
        """Which part of it is used."""

    def version(self) -> str:
        """Tell one content from another."""

    def on_disk(self) -> contextlib.AbstractContextManager[str]:
        """Give it a path for as long as it is loaded."""

    def reader(self, path: str) -> Reader:
        """Return what loads it from there, in this process or another."""


class ModelAbsent(ModelUnusable):
    """The model is not where this process looks for it."""


class Shared(Protocol):
    """Content that tasks have: Spark's ``Broadcast``, or what is :class:`Inline`."""

    @property
    def value(self) -> bytes:
        """The content."""


@dataclass(frozen=True)
class Inline:
    """Content that each task carries, where Spark has no broadcast."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class Parcel:
    """A model that came with the task.

    Parameters
    ----------
    suffix : str
        ``.keras`` or ``.h5``; empty if it is a directory, which travels as a zip.
    digest : str
        Of its content.
    content : Shared
        Its bytes.
    use : Use
        Which part of it is used.
    """

    suffix: str
    digest: str
    content: Shared = field(repr=False)
    use: Use = WHOLE

    def version(self) -> str:
        """Tell one content from another."""
        return self.digest

    def reader(self, path: str) -> Reader:
        """Return what loads it from there, in this process or another."""
        return functools.partial(load, path, self.use)

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Give it a path for as long as it is loaded."""
        with tempfile.TemporaryDirectory(prefix="tfos_nb-model-", dir=spill_directory()) as directory:
            path = os.path.join(directory, f"model{self.suffix}")
            if self.suffix:
                with open(path, "wb") as file:
                    file.write(self.content.value)
            else:
                zipfile.ZipFile(io.BytesIO(self.content.value)).extractall(path)
            yield path


@dataclass(frozen=True)
class Place:
    """A model that every executor reads where it is.

    Parameters
    ----------
    url : str
        A URL that fsspec knows, or a path on the executor's host.
    use : Use
        Which part of it is used.
    """

    url: str = field(repr=False)  # it may have a token in it
    use: Use = WHOLE

    def version(self) -> str:
        """Tell one content from another, by what its file system says of it.

        Raises
        ------
        ModelAbsent
            If nothing is there.
        """
        system, path = file_system(self.url)
        if not system.exists(path):
            raise ModelAbsent("the file or directory does not exist")
        known = system.find(path, detail=True) if system.isdir(path) else {path: system.info(path)}
        return hashlib.sha256(repr((self.url, sorted(known.items(), key=str))).encode()).hexdigest()

    def reader(self, path: str) -> Reader:
        """Return what loads it from there, in this process or another."""
        return functools.partial(load, path, self.use)

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Give it a path for as long as it is loaded."""
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
class Share:
    """What a Spark task may use of its machine."""

    gpus: tuple[str, ...] = ()
    cpus: int = 1

    @classmethod
    def of_task(cls) -> Share:
        """Return that of the task that runs here."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            return cls()
        gpus = context.resources().get("gpu")
        return cls(tuple(gpus.addresses) if gpus is not None else (), context.cpus())


class ModelCache:
    """Holds the model that this process used last, and lets go of it when another one is asked for."""

    def __init__(self) -> None:
        self._version: tuple[str, Use, tuple[str, ...]] | None = None
        self._model: Model | None = None
        self._gpus: tuple[str, ...] | None = None

    def take(self, source: Source, share: Share) -> Model:
        """Return a model; it is loaded if it is not the one that is here.

        Raises
        ------
        ModelUnusable
            If it cannot be.
        """
        try:
            version = (source.version(), source.use, share.gpus)
            if self._model is None or version != self._version:
                self._let_go()
                with source.on_disk() as path:
                    self._model = self._load(source.reader(path), share)
                self._version = version
                _settle()
        except ModelUnusable:
            raise
        except Exception as error:
            raise ModelUnusable(why_not_loaded(error)) from error
        return self._model

    def _let_go(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = self._version = None
        gc.unfreeze()
        gc.collect()  # Keras models are cycles

    def _load(self, read: Reader, share: Share) -> Model:
        if self._gpus is None:
            _set_up(share)
            self._gpus = share.gpus
        if share.gpus != self._gpus:
            return _load_elsewhere(read, share)
        return read()


def _settle() -> None:
    """Leave what is here now out of the garbage collection, until the model is let go of.

    Spark's Python worker collects after each task, and to look through all objects of TensorFlow takes it 0.2 s.
    """
    gc.collect()
    gc.freeze()


def _set_up(share: Share) -> None:
    """Limit TensorFlow, before it has looked at any device, to what the task has."""
    os.environ.update(gpu_variables(share.gpus))
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    spare_scikit_learn()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # a user's own function has run TensorFlow in this process before
        tf.config.threading.set_intra_op_parallelism_threads(share.cpus)
        tf.config.threading.set_inter_op_parallelism_threads(share.cpus)


# TensorFlow keeps the GPUs that it saw first, and Spark may give a reused Python process others for its next task:
# those are used by a process of their own.


def _load_elsewhere(read: Reader, share: Share) -> Model:
    context = multiprocessing.get_context("spawn")  # a fork of a process that has run TensorFlow hangs
    pool = ProcessPoolExecutor(1, context, _begin_elsewhere, (share, os.getpid()))
    try:
        told = pool.submit(_keep, read).result()
    except BaseException:
        pool.shutdown(wait=False)
        raise
    return Model(told, lambda arrays: pool.submit(_apply_kept, list(arrays)).result(), pool.shutdown)


_kept: list[Model] = []


def _begin_elsewhere(share: Share, parent: int) -> None:
    os.environ[PARENT_VARIABLE] = str(parent)
    die_with_parent()
    _set_up(share)


def _keep(read: Reader) -> Signature:
    _kept[:] = [read()]
    return _kept[0].signature


def _apply_kept(arrays: list[Array]) -> list[Output]:
    return _kept[0].apply(arrays)
