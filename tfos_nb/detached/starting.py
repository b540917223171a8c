"""Start the process of a detached cluster, and wait until it has submitted its nodes."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfos_nb.detached import places
from tfos_nb.detached.attached import AttachedCluster, packed_reader
from tfos_nb.detached.handover import answer_of, hand_over, last_lines
from tfos_nb.detached.messages import Answer, Raised, error_of
from tfos_nb.detached.on_executor import start_on_executor
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError, TfosError, check_count
from tfos_nb.interrupts import interruptible
from tfos_nb.jupyter.connection import private_directory
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import python_path
from tfos_nb.spark.contexts import is_connect
from tfos_nb.spark.copied_session import copied_environment, copied_settings
from tfos_nb.spark.session import active_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ON_EXECUTOR", "DetachedLaunch", "start_detached"]

logger = logging.getLogger(__name__)

ON_EXECUTOR = "executor"
_MODULE = "tfos_nb.detached.process"
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
        Hours for which the process keeps the results, and waits for a kernel that feeds it.
    data, validation : bytes
        Functions that read the rows, pickled; empty if the rows are fed later, or none are.
    epochs : int
        Passes over the data.
    on_executor : bool
        Whether the process is on an executor, and a client of the kernel's Spark Connect server.
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
    on_executor: bool = False


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
    where: bool | str = True,
) -> AttachedCluster:
    """Start the process, and return its cluster once its nodes are submitted.

    Parameters
    ----------
    plan, settings, payload, arguments
        As :class:`~tfos_nb.cluster.Cluster` takes them.
    spark, mlflow
        As in :func:`tfos_nb.launch`.
    keep : float
        Hours for which the process keeps the results after the cluster's end, and waits for a kernel that feeds it.
    data, validation : callable, optional
        Functions of the session that return the rows. The cluster then ends when they are trained.
    epochs : int, optional
        Passes over the data.
    where : bool or str, optional
        True: on this host. ``"executor"``: on an executor of the session's Spark Connect server.

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
    session = _session_for_executor(spark, plan, data) if where == ON_EXECUTOR else None
    if session is not None:  # relative paths are relative to the kernel's directory, as for any cluster
        settings = settings.with_absolute_paths(plan.name)
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
        on_executor=session is not None,
    )
    _warn_of_active_run(mlflow)
    with interruptible():
        if session is not None:
            return _started_on_executor(session, launch)
        _start(launch)
    place = places.find(launch.id)
    assert place is not None, "the process has published it before it answered"
    return AttachedCluster(place, feeds=True)


def _started_on_executor(session: SparkSession, launch: DetachedLaunch) -> AttachedCluster:
    variables = {name: value for name, value in _environment().items() if name.startswith("MLFLOW_")}
    place = start_on_executor(session, launch, variables)
    places.publish(place)
    cluster = None
    try:
        cluster = AttachedCluster(place, feeds=True, spark=session)
        cluster.await_submission()
    except BaseException:  # also an interrupt: the caller has no cluster yet that it could stop
        if cluster is not None:
            cluster.close()
        else:  # the process ends by itself: no kernel has come
            places.forget(place.id)
        raise
    return cluster


def _session_for_executor(spark: SparkSession | None, plan: ClusterPlan, data: Any) -> SparkSession:
    """Return the session whose server a process on an executor can be a client of, too.

    Raises
    ------
    PlanError
        If there is none, or the rows would have to be fed later.
    """
    session = active_session() if spark is None else spark
    if session is None or not is_connect(session):
        raise PlanError(
            "detach='executor' needs a session of Spark Connect, at whose server a process on an executor can be a "
            "client: SparkSession.builder.remote('sc://host:15002'). With another session give detach=True: the "
            "process then is on this host, where the session's driver is"
        )
    if plan.input_mode is InputMode.SPARK and data is None:
        raise PlanError("detach='executor' takes the rows with the launch: give data=, a function of the SparkSession")
    return session


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
            hand_over(process, pickle.dumps(launch))
            answer = answer_of(answers)
    except BaseException:  # also an interrupt: the caller has no cluster yet that it could stop
        process.kill()
        places.forget(launch.id)
        raise
    if isinstance(answer, Answer):
        return
    output_told = last_lines(log)
    process.kill()
    places.forget(launch.id)
    if isinstance(answer, Raised):
        raise error_of(answer)
    raise TfosError(f"the process of the detached cluster did not start. Its last output:\n{output_told}")


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
