"""Log a trained model to MLflow, with its signature and an example of its input from the DataFrame.

The model is loaded in a process of its own (:mod:`tfos_nb.mlflow.log_model`), so that the notebook's kernel does not
load TensorFlow. Which column is for which input is found as :func:`tfos_nb.predict` finds it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tfos_nb.errors import TfosError
from tfos_nb.inference.column_matching import Inputs, feeds_of
from tfos_nb.inference.model_library import find
from tfos_nb.redaction import without_password
from tfos_nb.runtime.control.processes import python_path
from tfos_nb.runtime.storage.remote import file_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["NO_EXAMPLE", "ModelJob", "ModelNotLogged", "Rows", "log_model"]

NO_EXAMPLE = "tfos_nb: no example: "
"""Begins a line of the other process."""

_ROWS = 5
_WITHIN = 120.0  # seconds
_LAST_LINES = 3


class ModelNotLogged(TfosError):
    """A model could not be logged to MLflow. The message says why."""


@dataclass(frozen=True)
class ModelJob:
    """Job of the other process: load ``model``, and log it to ``run_id``.

    ``example`` is a file of NumPy's ``npz`` with an array for each input, by its number; ``inputs`` has their names.
    """

    tracking_uri: str
    run_id: str
    model: str
    example: str = ""
    inputs: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write it for the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelJob:
        """Read it there."""
        found = json.loads(text)
        return cls(**{**found, "inputs": tuple(found["inputs"])})


@dataclass(frozen=True)
class Rows:
    """The rows that an example is taken from, and which columns are for which input."""

    frame: DataFrame
    inputs: Inputs = None


def log_model(tracking_uri: str, run_id: str, model: str, rows: Rows | None, env: Mapping[str, str]) -> str:
    """Log a model, and wait for it.

    Parameters
    ----------
    tracking_uri, run_id : str
        Where.
    model : str
        A ``.keras`` or ``.h5`` file, or the directory of a SavedModel; a path on this machine, or a URL.
    rows : Rows, optional
        What an example of the input is taken from.
    env : mapping of str to str
        Environment variables of the nodes, such as ``TF_USE_LEGACY_KERAS``.

    Returns
    -------
    str
        Why there is no example; empty if there is one, or none was asked for.

    Raises
    ------
    ModelNotLogged
        If the model cannot be read or loaded, or the server does not take it.
    """
    with tempfile.TemporaryDirectory(prefix="tfos_nb-mlflow-") as scratch:
        place = _on_disk(model, scratch)
        job, why = ModelJob(tracking_uri, run_id, place), ""
        if rows is not None:
            try:
                names, arrays = _example(place, rows)
            except Exception as error:  # noqa: BLE001 - a model without an example is better than none
                why = str(error).partition("\n")[0] or type(error).__name__
            else:
                example = os.path.join(scratch, "example.npz")
                np.savez(example, *arrays, allow_pickle=False)
                job = replace(job, example=example, inputs=names)
        return _run(job, env) or why


def _on_disk(model: str, scratch: str) -> str:
    """Return the path of a model on this machine's disk; a URL's files are fetched."""
    shown = without_password(model)
    if "://" not in model:
        if not os.path.exists(model):
            raise ModelNotLogged(f"{shown} is not on the driver's disk: save models to a shared path or a URL")
        return model
    system, path = file_system(model)
    place = os.path.join(scratch, os.path.basename(path.rstrip("/")))
    try:
        system.get(path, place, recursive=system.isdir(path))
    except OSError as error:
        raise ModelNotLogged(f"{shown} cannot be read on the driver: {error}") from error
    return place


def _example(model: str, rows: Rows) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of the model's inputs, and an array with some rows for each."""
    known = find(model, rows.frame.sparkSession)
    feeds = feeds_of(known.signature.inputs, rows.frame.schema.fields, rows.inputs)
    names = list(dict.fromkeys(name for feed in feeds for name in feed.names))
    some = rows.frame.select(*(f"`{name}`" for name in names)).limit(_ROWS)
    table = _as_arrow(some)
    if not table.num_rows:
        raise ModelNotLogged("the DataFrame has no rows, from which the model's signature is made: check its query")
    batch = table.combine_chunks().to_batches()[0]
    columns = {name: batch.column(place) for place, name in enumerate(names)}
    placed = [(feed, [columns[name] for name in feed.names]) for feed in feeds]
    arrays = [replace(feed, positions=tuple(range(len(found)))).array(found) for feed, found in placed]
    return tuple(feed.tensor.name for feed in feeds), [_as_text(array) for array in arrays]


def _as_arrow(frame: DataFrame) -> Any:
    import pyarrow as pa

    if hasattr(frame, "toArrow"):  # Spark 4
        return frame.toArrow()
    return pa.Table.from_batches(frame._collect_as_arrow())  # type: ignore[operator]


def _as_text(array: Any) -> Any:
    """Return an array that NumPy can save without pickle: texts are bytes in an array of objects."""
    return array.astype("S") if array.dtype == object else array


def _run(job: ModelJob, env: Mapping[str, str]) -> str:
    """Log the model in another process; return what it says about the example."""
    environment = {
        **os.environ,
        **env,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(python_path()),
        "MLFLOW_TRACKING_URI": job.tracking_uri,
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tfos_nb.mlflow.log_model"],
            input=job.to_json(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_WITHIN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelNotLogged(
            f"the model was not logged within {_WITHIN:g} s: log it with tfos_nb.mlflow.log(RUN, model=…)"
        ) from None
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-_LAST_LINES:]
        raise ModelNotLogged(without_password(" ".join(last)) or f"its process ended with {ended.returncode}")
    return "".join(line.removeprefix(NO_EXAMPLE) for line in ended.stdout.splitlines() if line.startswith(NO_EXAMPLE))
