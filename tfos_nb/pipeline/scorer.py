"""Common parts of the Transformers with a model: the model, how rows are read, writing and reading."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.inference.frames import NULLS
from tfos_nb.inference.model_library import Known, find, is_keras_model, keras_bytes
from tfos_nb.pipeline.conversion import Namespace, TFParams
from tfos_nb.pipeline.history import History
from tfos_nb.pipeline.storage import ScorerReader, ScorerWriter
from tfos_nb.runtime.code.user_classes import own_objects
from tfos_nb.runtime.models.model import Use
from tfos_nb.spark.contexts import context_of

__all__ = ["HasRows", "Scorer", "one_place"]

P = TypeVar("P", bound=Params)


def _to_policy(value: Any) -> str:
    if value in NULLS:
        return str(value)
    raise TypeError(f"the value must be one of {', '.join(NULLS)}, got {value!r}")


class HasRows(Params):
    """Params for reading rows and for the columns that are kept."""

    keep_columns: Param[list[str] | None] = Param(
        Params._dummy(), "keep_columns", "the columns that stay; None: all", TypeConverters.toListString
    )
    null_policy: Param[str] = Param(
        Params._dummy(),
        "null_policy",
        "a row with a null in an input: fail (naming it), skip (the row is left out), fill (with the Param fill); a "
        "train_fn is fed the nulls, and ctx.dataset(…, fill=…) fills them",
        _to_policy,
    )
    fill: Param[Any] = Param(
        Params._dummy(), "fill", "what to fill nulls with: a value, or {column: value}; None: 0 or empty text"
    )
    decode: Param[list[str]] = Param(
        Params._dummy(), "decode", "the binary columns that hold encoded pictures", TypeConverters.toListString
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(keep_columns=None, null_policy="fail", fill=None, decode=[])

    def setKeepColumns(self: P, value: list[str] | None) -> P:
        """Set which columns stay."""
        return self._set(keep_columns=value)

    def getKeepColumns(self) -> list[str] | None:
        """Return which columns stay."""
        return self.getOrDefault(self.keep_columns)

    def setNullPolicy(self: P, value: str) -> P:
        """Set what becomes of rows with a null."""
        return self._set(null_policy=value)

    def getNullPolicy(self) -> str:
        """Return what becomes of rows with a null."""
        return self.getOrDefault(self.null_policy)

    def setFill(self: P, value: Any) -> P:
        """Set what nulls are filled with."""
        return self._set(fill=value)

    def getFill(self) -> Any:
        """Return what nulls are filled with."""
        return self.getOrDefault(self.fill)

    def setDecode(self: P, value: list[str]) -> P:
        """Set which columns hold encoded pictures."""
        return self._set(decode=value)

    def getDecode(self) -> list[str]:
        """Return which columns hold encoded pictures."""
        return self.getOrDefault(self.decode)


class Scorer(HasRows, TFParams, MLReadable[Any], MLWritable):
    """A Transformer's model, and the code of the user's that it needs.

    Attributes
    ----------
    model : keras.Model, path, URL, bytes or None
        The model itself, or its saved form.
    model_fn : callable or None
        Builds the model whose weights a checkpoint has; it takes nothing, or the arguments with the Params.
    custom_objects : dict
        The user's own classes and functions, by the names that the model's file has for them.
    history : History
        The metrics of each epoch, where an Estimator of this package has trained the model: a list of dictionaries,
        ``history[-1]["loss"]``, that also gives one metric of all epochs, ``history["loss"]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bring()

    def _bring(
        self,
        tf_args: Any = None,
        model: Any = None,
        model_fn: Callable[..., Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        # Not in __init__: the mixins' take nothing.
        self.args = Namespace(tf_args)
        self.model = model
        self.model_fn = model_fn
        self.custom_objects = dict(custom_objects or {})
        self.history = History()
        self._seen: tuple[Any, Known] | None = None
        self._made_here = False  # its bytes are a model's that this session trained

    def _place(self) -> Any:
        """Return the model, or where it is."""
        return self.model

    def _find(self, spark: SparkSession, use: Use) -> Known:
        """Look at the model, once for each content that it has."""
        model = self._place()
        key = (use, context_of(spark).key, _stamp(model))
        if self._seen is not None and self._seen[0] == key and key[2]:
            return self._seen[1]
        args = () if self.model_fn is None or not _takes_one(self.model_fn) else (self.merge_args_params(),)
        known = find(model, spark, use, custom_objects=self.custom_objects, model_fn=self.model_fn, args=args)
        self._seen = (key, known)
        return known

    def write(self) -> ScorerWriter:
        """Return what saves it."""
        return ScorerWriter(self)

    @classmethod
    def read(cls) -> ScorerReader:
        """Return what loads it."""
        return ScorerReader(cls)

    def stored(self) -> tuple[dict[str, Any], dict[str, Any], bytes | None]:
        """Return the contents to save in addition to the Params: arguments, code, and the bytes of a model object.

        Raises
        ------
        PlanError
            If the model object cannot be saved.
        """
        code = dict(self.custom_objects)
        content = self.model if isinstance(self.model, bytes) else None
        if is_keras_model(self.model):
            code = {**own_objects(self.model), **code}
            content = keras_bytes(self.model)
        if self.model_fn is not None:
            code[_MODEL_FN] = self.model_fn
        args = dict(vars(self.args))
        if isinstance(self.model, (str, os.PathLike)):
            args[_PATH] = os.fspath(self.model)
        return args, code, content

    def restore(self, args: dict[str, Any], code: dict[str, Any], content: bytes | None) -> None:
        """Undo :meth:`stored`."""
        self.model, self._made_here = args.pop(_PATH, content), False
        self.args = Namespace(args)
        self.model_fn = code.pop(_MODEL_FN, None)
        self.custom_objects = code


_MODEL_FN = "model_fn"
_PATH = "tfos_nb model"


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    return False


def _stamp(model: Any) -> tuple[Any, ...]:
    """Return a fingerprint of a model's bytes or local files; empty if there is none."""
    if isinstance(model, bytes):
        return (hashlib.sha256(model).hexdigest(),)
    if not isinstance(model, (str, os.PathLike)):
        return ()
    path = os.path.expanduser(os.fspath(model))
    if not os.path.exists(path):
        return ()
    files = (
        [path] if os.path.isfile(path) else [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    )
    return tuple(sorted((file, os.path.getsize(file), os.stat(file).st_mtime_ns) for file in files))


def one_place(**places: Any) -> Any:
    """Return the one that is given.

    Raises
    ------
    PlanError
        If none is.
    """
    found = next((place for place in places.values() if place is not None), None)
    if found is None:
        raise PlanError(f"the model is missing: give {' or '.join(places)}")
    return found
