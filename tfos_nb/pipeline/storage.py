"""Write and read Transformers and Estimators: their Params, arguments and model.

::

    metadata/   Spark ML's metadata, in JSON: Params, arguments, and the user's functions by module and name
    model/      the .keras file of a model object, in pieces of 16 MiB, as Parquet: on any file system of Spark's

Nothing is pickled. Reading a directory of another person imports the modules that it names, but runs no other code.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.pipeline.history import History
from tfos_nb.spark.contexts import is_connect

__all__ = ["ScorerReader", "ScorerWriter"]

_PIECE = 16 << 20


class ScorerWriter(MLWriter):
    """Writer of a Transformer or Estimator, which describes itself by ``stored()``."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:
        spark = self.sparkSession
        if is_connect(spark):  # Spark ML's own method needs a JVM here; so let the server overwrite the directory
            spark.createDataFrame([], "value string").write.mode("overwrite").text(path)
        else:
            super()._handleOverwrite(path)

    def saveImpl(self, path: str) -> None:
        """Write the instance. Spark ML calls this after it has checked that the path is free.

        Raises
        ------
        PlanError
            If an argument cannot be written as JSON, or a function is not in an importable module.
        """
        args, code, content = self.instance.stored()
        extra = {
            "args": _jsonable(args),
            "code": {name: _reference(value, name) for name, value in code.items()},
            "model": content is not None,
            "history": getattr(self.instance, "history", []),
        }
        spark = self.sparkSession
        DefaultParamsWriter.saveMetadata(self.instance, path, _for_params(spark), extra)
        if content is not None:
            _write(spark, f"{path}/model", content)


def _for_params(spark: SparkSession) -> Any:
    """Return the argument for Spark ML's own reader and writer: the SparkContext, or on Connect the session."""
    return spark if is_connect(spark) else spark.sparkContext


class ScorerReader(MLReader[Any]):
    """Reader for directories of :class:`ScorerWriter`.

    Parameters
    ----------
    cls : type
        The expected class.
    """

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Read an instance from a directory.

        Raises
        ------
        PlanError
            If the directory contains another class, or needs a function that cannot be imported here.
        """
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, _for_params(spark))
        kind = f"{self.cls.__module__}.{self.cls.__name__}"
        if metadata["class"] != kind:
            raise PlanError(f"{path} contains a {metadata['class']}, not a {kind}: load it with that class")
        instance: Any = self.cls()
        instance._resetUid(metadata["uid"])
        unset = [name for name, value in metadata["paramMap"].items() if value is None]  # Spark ML refuses None
        DefaultParamsReader.getAndSetParams(instance, metadata, skipParams=unset)
        instance._set(**dict.fromkeys(unset))
        code = {name: _found(text) for name, text in metadata["code"].items()}
        instance.restore(metadata["args"], code, _read(spark, f"{path}/model") if metadata["model"] else None)
        instance.history = History(metadata.get("history", []))
        return instance


def _write(spark: SparkSession, path: str, content: bytes) -> None:
    pieces = [(at, bytearray(content[at : at + _PIECE])) for at in range(0, len(content), _PIECE)]
    spark.createDataFrame(pieces, "at long, piece binary").repartition(1).write.parquet(path)


def _read(spark: SparkSession, path: str) -> bytes:
    return b"".join(bytes(row.piece) for row in spark.read.parquet(path).orderBy("at").collect())


def _jsonable(args: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise PlanError(
                f"tf_args: {name!r} is a {type(value).__name__}, which cannot be saved: make it text or a number"
            ) from None
    return dict(args)


def _reference(value: Any, name: str) -> str:
    """Return ``MODULE:NAME`` of a function or class.

    Raises
    ------
    PlanError
        If it cannot be imported by this name. ``name`` is the parameter, for the message.
    """
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    text = f"{module}:{qualified}"
    if module in (None, "__main__") or "<" in qualified or _resolved(text) is not value:
        export = (
            "" if name.endswith("_fn") else ", or export the model with model.export(DIRECTORY) and use that directory"
        )
        raise PlanError(
            f"{name} is defined in the notebook or inside a function, where it cannot be imported from: put it into a "
            f"module{export}"
        )
    return text


def _resolved(text: str) -> Any:
    module, _, qualified = text.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _found(text: str) -> Any:
    try:
        return _resolved(text)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"the saved stage needs {text.replace(':', '.')}, which cannot be imported here ({error}); put its "
            "module on sys.path"
        ) from error
