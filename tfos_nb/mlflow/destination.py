"""Destination of a logged run: the tracking server, the experiment and MLflow's run.

MLflow keeps its active run by thread. So the destination is found in the thread that launches the cluster.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tfos_nb.errors import MissingPackage, PlanError

__all__ = [
    "RUN_TAG",
    "Destination",
    "check_option",
    "check_server",
    "chosen_experiment",
    "find_destination",
    "load_mlflow",
]

RUN_TAG = "tfos_nb.run"
"""Tag of an MLflow run that a cluster was logged to: the cluster's id."""

_CONNECTS, _ANSWERS = 5.0, 20.0  # seconds

Option = bool | str | None


@dataclass(frozen=True)
class Destination:
    """A place for one run.

    Parameters
    ----------
    tracking_uri : str
        The server, or the database.
    experiment : str
        The name of the experiment.
    experiment_id : str
        Its id. If neither is given, it is the one that the program, the environment or the host has chosen.
    run_id : str
        The user's active run to log to; empty: a new run.
    is_nested : bool
        Whether a run is made below ``run_id``, instead of logging to it.
    of_another_thread : bool
        Whether the active run is of another thread: a tuner's fits run in threads of their own.
    """

    tracking_uri: str
    experiment: str = ""
    experiment_id: str = ""
    run_id: str = ""
    is_nested: bool = False
    of_another_thread: bool = False


def check_option(option: Any) -> Option:
    """Return the ``mlflow`` argument of a launch, if it is one.

    Raises
    ------
    PlanError
        If it is not.
    """
    if option is None or isinstance(option, bool) or (isinstance(option, str) and option.strip()):
        return option
    raise PlanError(f"mlflow must be True, False, or the name of an experiment, got {option!r}")


def find_destination(option: Option) -> Destination | None:
    """Return where to log; None if nothing is to be logged.

    Parameters
    ----------
    option : bool, str or None
        None: to the active run, if the program has started one. True: to the active run, or else a new one. A text: to
        a new run in the experiment of this name. Where the active run is of another thread, as in a CrossValidator, a
        run is made below it. So it is for the second cluster within one active run, since MLflow's parameters cannot
        change: :class:`tfos_nb.mlflow.writing.RunWriter` sees to that.

    Raises
    ------
    MissingPackage
        If MLflow is asked for and not installed.
    """
    if option is False or (option is None and sys.modules.get("mlflow") is None):
        return None
    mlflow = load_mlflow()
    active, of_another_thread = _active_run(mlflow)
    if active is None and option is None:
        return None
    server = mlflow.get_tracking_uri()
    if isinstance(option, str):
        return Destination(server, experiment=option.strip())
    if active is None:
        return Destination(server)
    run_id, experiment_id = active.info.run_id, active.info.experiment_id
    return Destination(server, "", experiment_id, run_id, of_another_thread, of_another_thread)


def load_mlflow() -> Any:
    """Import MLflow.

    Raises
    ------
    MissingPackage
        If it is not installed.
    """
    try:
        import mlflow
    except ImportError as error:
        raise MissingPackage(
            "mlflow= needs MLflow, which is not installed here: pip install 'tfos_nb[mlflow]', or pip install mlflow. "
            "Only the driver needs it"
        ) from error
    return mlflow


def check_server(uri: str) -> None:
    """Check that a tracking server answers, since MLflow's client tries for minutes before it reports an error.

    Raises
    ------
    OSError
        If none does.
    """
    there = urlsplit(uri)
    if there.scheme not in ("http", "https") or not there.hostname:
        return
    import requests  # MLflow's own: it knows the same proxies

    place = f"{there.hostname}:{there.port or (443 if there.scheme == 'https' else 80)}"
    limits = _CONNECTS, _ANSWERS
    try:
        with contextlib.suppress(requests.exceptions.SSLError):  # it answers; MLflow knows which certificates it trusts
            requests.get(uri, timeout=limits, allow_redirects=False, stream=True).close()
    except requests.exceptions.ReadTimeout:
        raise OSError(f"the server at {place} takes connections, and does not answer within {_ANSWERS:g} s") from None
    except requests.exceptions.RequestException as error:
        raise OSError(f"no server answers at {place} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the system's words for a failed connection, which urllib3 has wrapped several times."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return str(found.strerror)
        found = found.__cause__ or found.__context__
    return type(error).__name__


def _active_run(mlflow: Any) -> tuple[Any, bool]:
    """Return the active run of this thread, or else the newest of any thread, and whether it is of another one."""
    active = mlflow.active_run()
    if active is not None:
        return active, False
    of_all_threads = getattr(mlflow.tracking.fluent, "_get_latest_active_run", None)  # since MLflow 2.14
    other = of_all_threads() if of_all_threads is not None else None
    return other, other is not None


def chosen_experiment() -> str:
    """Return the id of the experiment that ``mlflow.set_experiment``, the environment or the host has chosen.

    It may ask the tracking server.
    """
    mlflow = load_mlflow()
    choose = getattr(mlflow.tracking.fluent, "_get_experiment_id", None)
    return str((choose() if choose is not None else os.environ.get("MLFLOW_EXPERIMENT_ID")) or "0")
