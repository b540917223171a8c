"""Start the process of a detached cluster, and wait until it has submitted its nodes."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfos_nb.detached import places
from tfos_nb.detached.attached import AttachedCluster, packed_reader
from tfos_nb.detached.messages import Answer, Raised, error_of
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError, TfosError, check_count
from tfos_nb.interrupts import interruptible
from tfos_nb.jupyter.connection import private_directory
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import python_path, read_frame
from tfos_nb.spark.copied_session import copied_environment, copied_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DetachedLaunch", "start_detached"]

logger = logging.getLogger(__name__)

_MODULE = "tfos_nb.detached.process"
_STARTED_WITHIN = 300.0  # seconds for Spark to start an application: on YARN and Kubernetes it may wait for its place
_LINES_SHOWN = 20
_LONGEST_KEPT = 10_000.0  # hours


@dataclass(frozen=True)
class DetachedLaunch:
    """Data that the kernel sends to the process through a pipe.

    Parameters
    ----------
    id : str
        The cluster's id.
    plan, settings
        The cluster's.
    payload : bytes
        ``main`` and its arguments, pickled.
    arguments : dict
        The run's arguments in its record.
    mlflow : bool, str or None
        As in :func:`tfos_nb.launch`.
    spark : dict or None
        Configuration of the session; None for an embedded local Spark.
    keep : float
        Hours for which the process keeps the results.
    data, validation : bytes
        Functions that read the rows, pickled; empty if the rows are fed later, or none are.
    epochs : int
        Passes over the data.
    """

    id: str
    plan: ClusterPlan
    settings: Settings
    payload: bytes = field(repr=False)
    arguments: dict[str, Any] = field(repr=False)
    mlflow: bool | str | None = None
    spark: dict[str, str] | None = field(default=None, repr=False)
    keep: float = 24.0
    data: bytes = field(default=b"", repr=False)
    validation: bytes = field(default=b"", repr=False)
    epochs: int = 1


def start_detached(
    plan: ClusterPlan,
    settings: Settings,
    payload: bytes,
    arguments: Mapping[str, Any],
    *,
    spark: SparkSession | None,
    mlflow: bool | str | None,
    keep: Any,
    data: Any = None,
    validation: Any = None,
    epochs: int = 1,
) -> AttachedCluster:
    """Start the process, and return its cluster once its nodes are submitted.

    Parameters
    ----------
    plan, settings, payload, arguments
        As :class:`~tfos_nb.cluster.Cluster` takes them.
    spark, mlflow
        As in :func:`tfos_nb.launch`.
    keep : float
        Hours for which the process keeps the results after the cluster's end.
    data, validation : callable, optional
        Functions of the session that return the rows. The cluster then ends when they are trained.
    epochs : int, optional
        Passes over the data.

    Raises
    ------
    PlanError
        If this cannot be detached.
    TfosError
        If the process does not start; the message has its last output.
    """
    check_count("epochs", epochs, 1)
    if not isinstance(keep, (int, float)) or isinstance(keep, bool) or not 0 <= keep <= _LONGEST_KEPT:
        raise PlanError(f"keep must be a number of hours, 0 or more and at most {_LONGEST_KEPT:g}, got {keep!r}")
    if validation is not None and data is None:
        raise PlanError("validation= needs data=: without it, give both to cluster.train")
    if data is not None and plan.input_mode is InputMode.TENSORFLOW:
        raise PlanError("data: with input_mode='tensorflow' the nodes read files themselves; leave it out")
    launch = DetachedLaunch(
        id=uuid.uuid4().hex[:12],
        plan=plan,
        settings=settings,
        payload=payload,
        arguments=dict(arguments),
        mlflow=mlflow,
        spark=copied_settings(spark),
        keep=keep,
        data=b"" if data is None else packed_reader("data", data),
        validation=b"" if validation is None else packed_reader("validation", validation),
        epochs=epochs,
    )
    _warn_of_active_run(mlflow)
    with interruptible():
        _start(launch)
    place = places.find(launch.id)
    assert place is not None, "the process has published it before it answered"
    return AttachedCluster(place, feeds=True)


def _start(launch: DetachedLaunch) -> None:
    log = private_directory(places.detached_directory()) / f"{launch.id}.log"
    ready, told = os.pipe()
    try:
        with log.open("wb") as output:
            log.chmod(0o600)
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(told)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                start_new_session=True,  # Jupyter ends a kernel with its process group
                env=_environment(),
            )
    finally:
        os.close(told)
    # The kernel must collect the exit status of its child, however long the child lives.
    threading.Thread(target=process.wait, name="tfos_nb detached", daemon=True).start()
    try:
        with os.fdopen(ready, "rb") as answers:
            _hand_over(process, launch)
            answer = _answer(answers)
    except BaseException:  # also an interrupt: the caller has no cluster yet that it could stop
        process.kill()
        places.forget(launch.id)
        raise
    if isinstance(answer, Answer):
        return
    output_told = _last_lines(log)
    process.kill()
    places.forget(launch.id)
    if isinstance(answer, Raised):
        raise error_of(answer)
    raise TfosError(f"the process of the detached cluster did not start. Its last output:\n{output_told}")


def _hand_over(process: subprocess.Popen[bytes], launch: DetachedLaunch) -> None:
    assert process.stdin is not None, "it is a pipe"
    try:
        with process.stdin as pipe:
            pickle.dump(launch, pipe)
    except BrokenPipeError:
        pass  # the process has ended: its output says why


def _answer(answers: Any) -> Any:
    """Return the process's message; None if it has ended without one, or needs too long."""
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        return read_frame(answers) if selector.select(_STARTED_WITHIN) else None


def _warn_of_active_run(option: Any) -> None:
    """Say that a run of the kernel's is not continued: it ends with the kernel."""
    mlflow = sys.modules.get("mlflow")
    if option is None and mlflow is not None and mlflow.active_run() is not None:
        logger.warning(
            "the cluster is not logged to this kernel's active MLflow run, which ends with the kernel: "
            "mlflow='EXPERIMENT' logs it to a run of its own"
        )


def _environment() -> dict[str, str]:
    environment = copied_environment()
    environment["PYTHONPATH"] = os.pathsep.join(python_path())
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None:  # a program may have set it by a call
        environment["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()
    return environment


def _last_lines(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
    except OSError as error:
        return f"{log} cannot be read: {error}"
