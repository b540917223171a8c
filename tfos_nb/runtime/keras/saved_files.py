"""Write the files that all workers save under ``MultiWorkerMirroredStrategy`` only once, and atomically.

All of Keras 3's files go through a few functions. Their path is replaced by :mod:`tfos_nb.runtime.storage.one_writer`::

    saving_lib.save_model                    model.save and ModelCheckpoint: .keras
    legacy_h5_format.save_model_to_hdf5      the same: .h5
    saving_lib.save_weights_only             save_weights, ModelCheckpoint(save_weights_only=True)
    save.save_and_return_nodes               tf.saved_model.save, model.export
    export.export_onnx, …                    model.export(format=…)

``CSVLogger`` and ``TensorBoard`` write during training: only the chief's callbacks write to the user's path.
``BackupAndRestore`` already has a directory for each worker (:mod:`tfos_nb.runtime.keras.fit`).

In tf_keras, the ``ModelCheckpoint`` and ``TensorBoard`` of workers other than the chief write below the user's
directory. Here ``ModelCheckpoint`` saves as in Keras 3.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.storage.one_writer import SCRATCH, WRITER

__all__ = ["write_files_once"]

_log = logging.getLogger(__name__)

_EXPORTS = ("export_onnx", "export_openvino", "export_litert")


def write_files_once() -> None:
    """Let only the chief write the files that all workers save. Call it once, before the user's code.

    It runs no TensorFlow operation.
    """
    import tensorflow as tf
    from tensorflow.python.saved_model import save

    strategy = tf.distribute.MultiWorkerMirroredStrategy
    if hasattr(strategy.__init__, "tfos_nb_joins"):
        return
    strategy.__init__ = _joining(strategy.__init__)
    _redirect(save, "save_and_return_nodes", "export_dir")
    for flavour, mend in (("keras", _mend_keras), ("tf_keras", _mend_tf_keras)):
        when_imported(flavour, functools.partial(_mend, mend))


def _joining(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_and_join(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        WRITER.join(self)

    init_and_join.tfos_nb_joins = True  # type: ignore[attr-defined]
    return init_and_join


def _mend(mend: Callable[[Any], None], keras: Any) -> None:
    try:
        mend(keras)
    except (ImportError, AttributeError) as error:  # the patched names are private to Keras
        _log.warning(
            "this version of %s is not supported (%s): all workers may write the same file", keras.__name__, error
        )


def _mend_keras(keras: Any) -> None:
    if not keras.__version__.startswith("3."):
        return
    from keras.src import callbacks, export
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils import file_utils

    _redirect(saving_lib, "save_model", "filepath")
    _redirect(saving_lib, "save_weights_only", "filepath")
    _redirect(legacy_h5_format, "save_model_to_hdf5", "filepath")
    for name in _EXPORTS:
        if hasattr(export, name):  # some of them are newer than Keras 3.8
            _redirect(export, name, "filepath")
    _wrap(file_utils, "makedirs", _making_directories)
    _wrap(callbacks.BackupAndRestore, "_save_model", _saving_as_given)
    _mend_csv(callbacks.CSVLogger)
    _mend_board(callbacks.TensorBoard)


def _mend_tf_keras(tf_keras: Any) -> None:
    from tf_keras.src.distribute import distributed_file_utils
    from tf_keras.src.saving import saving_api

    _redirect(saving_api, "save_model", "filepath")
    _redirect(saving_api, "save_weights", "filepath")
    tf_keras.models.save_model = tf_keras.saving.save_model = saving_api.save_model
    # Only ModelCheckpoint calls these two.
    distributed_file_utils.write_filepath = _path_as_given
    distributed_file_utils.remove_temp_dir_with_filepath = _path_as_given
    _mend_csv(tf_keras.callbacks.CSVLogger)


def _path_as_given(filepath: str, strategy: Any) -> str:
    """Replace the function that gives a worker other than the chief a directory of its own."""
    return filepath


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _redirect(module: Any, name: str, parameter: str) -> None:
    """Let a function write to the path from :class:`OneWriter`, instead of the one in its parameter."""
    _wrap(module, name, functools.partial(_redirected, parameter=parameter))


def _redirected(function: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        path = given.arguments.get(parameter)
        if not isinstance(path, (str, os.PathLike)):  # an open file
            return function(*args, **kwargs)
        returned = []

        def write(place: str) -> None:
            given.arguments[parameter] = place
            returned.append(function(*given.args, **given.kwargs))

        WRITER.save(str(os.fspath(path)), write)
        return returned[0] if returned else None

    return save


def _making_directories(makedirs: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap Keras' ``makedirs``, which several workers call at once, some of them without permission."""

    @functools.wraps(makedirs)
    def make(path: str) -> Any:
        try:
            return makedirs(path)
        except OSError:
            if not (WRITER.is_other or os.path.isdir(path)):
                raise
        return None

    return make


def _saving_as_given(save_model: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(save_model)
    def save(self: Any) -> Any:
        with WRITER.as_given():
            return save_model(self)

    return save


def _mend_csv(logger: Any) -> None:
    on_train_begin = logger.on_train_begin

    @functools.wraps(on_train_begin)
    def open_if_chief(self: Any, logs: Any = None) -> None:
        filename = self.filename
        if WRITER.is_other:
            self.filename = os.devnull
        try:
            on_train_begin(self, logs)
        finally:
            self.filename = filename

    logger.on_train_begin = open_if_chief


def _mend_board(board: Any) -> None:
    set_model, on_train_end = board.set_model, board.on_train_end

    @functools.wraps(set_model)
    def set_model_of_worker(self: Any, model: Any) -> None:
        log_dir = self.log_dir
        if WRITER.is_other:
            self.log_dir = _scratch_of(self)
        try:
            set_model(self, model)
        finally:
            self.log_dir = log_dir

    @functools.wraps(on_train_end)
    def end_and_remove(self: Any, logs: Any = None) -> None:
        on_train_end(self, logs)
        if hasattr(self, "_tfos_scratch"):
            shutil.rmtree(self._tfos_scratch, ignore_errors=True)

    board.set_model = set_model_of_worker
    board.on_train_end = end_and_remove


def _scratch_of(callback: Any) -> str:
    """Return a temporary directory of the callback, which is removed with it."""
    if not hasattr(callback, "_tfos_scratch"):
        callback._tfos_scratch = tempfile.mkdtemp(prefix=SCRATCH)
        weakref.finalize(callback, shutil.rmtree, callback._tfos_scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.makedirs(callback._tfos_scratch, exist_ok=True)
    return str(callback._tfos_scratch)
