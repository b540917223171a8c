"""Log a cluster to MLflow while it runs, and a recorded run afterwards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tfos_nb.errors import MissingPackage, PlanError, TfosError
from tfos_nb.mlflow.destination import Destination, check_option, find_destination
from tfos_nb.mlflow.models import Rows, log_model
from tfos_nb.mlflow.writing import RunWriter
from tfos_nb.records.recorder import RunRecorder
from tfos_nb.records.run import Run
from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage.remote import Unreachable, answered_within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tfos_nb.inference.column_matching import Inputs

__all__ = ["Followed", "Follower", "RunNotLogged", "follower", "log"]

logger = logging.getLogger(__name__)

_USUAL_FILE = "model.keras"
_LATE = "MLflow's server did not take the run's outcome within 10 s: tfos_nb.mlflow.log(RUN) logs the run once it does"
_DOWN = (
    "the run is not logged to MLflow: %s. The training continues, and tries again until it ends; "
    "tfos_nb.mlflow.log(RUN) logs it afterwards"
)
_ANSWERS_WITHIN = 120.0  # seconds


class RunNotLogged(TfosError):
    """MLflow did not take a run. The message says why."""


class Followed(Protocol):
    """Source of a run that is logged; :class:`tfos_nb.Cluster` implements it."""

    @property
    def run(self) -> Run:
        """Its record, as of now."""

    @property
    def model_dir(self) -> str:
        """Directory in which ``ctx.save`` writes."""

    def _html(self) -> str:
        """Return its panel."""


class Follower:
    """Log one cluster while it runs.

    Parameters
    ----------
    destination : Destination
        Where.
    """

    def __init__(self, destination: Destination) -> None:
        self._to = destination
        self._frame: Any = None
        self._environment: dict[str, str] = {}
        self._result: Callable[[], Any] = type(None)
        self.logs_model = not destination.of_another_thread
        """Whether the model is logged, too."""

    def begin(self, cluster: Followed, result: Callable[[], Any], environment: Mapping[str, str]) -> None:
        """Log from now on, in a thread. ``result`` returns what the chief's main returned."""
        self._cluster, self._result, self._environment = cluster, result, dict(environment)
        self._writer = RunWriter(self._to, cluster._html)
        self._recorder = RunRecorder(lambda: cluster.run, self._writer.write, partial(logger.warning, _DOWN))
        self._recorder.start()

    def fed(self, data: Any) -> None:
        """Take the rows that are fed: the first DataFrame gives the example of the model's input."""
        if self._frame is None and hasattr(data, "mapInArrow") and not data.isStreaming:
            self._frame = data

    def finish(self) -> None:
        """Log the outcome and the model. Called when the outcome is decided, before any caller goes on.

        A tuner's fits, which run in other threads, are logged without their models.
        """
        if not self._recorder.finish():
            if self._recorder.is_late:
                _late[self._cluster.run.id] = self
                logger.warning(_LATE)
            return
        model = _model_of(self._result(), self._cluster.model_dir)
        if model and self._cluster.run.outcome == "done" and self.logs_model:
            _log_model(self._to.tracking_uri, self._writer.run_id, model, _rows(self._frame), self._environment)

    def run_id(self, within: float) -> str:
        """Return MLflow's id of the run, once a late write has logged all of it; empty if it does not."""
        return self._writer.run_id if self._recorder.finish(within) else ""


_late: dict[str, Follower] = {}
"""Those whose last write took too long, by the cluster's id. It may still end, so nobody else writes meanwhile."""


def follower(option: Any) -> Follower | None:
    """Return what logs a cluster, for the ``mlflow`` argument of a launch; None if nothing is to be logged.

    An Estimator gives one that it has made itself.

    Raises
    ------
    PlanError
        If the argument is not valid.
    MissingPackage
        If MLflow is asked for and not installed.
    """
    if isinstance(option, Follower):
        return option
    destination = find_destination(check_option(option))
    return None if destination is None else Follower(destination)


def log(
    run: Run | Followed,
    *,
    experiment: str | None = None,
    model: str | os.PathLike[str] | None = None,
    rows: DataFrame | None = None,
    inputs: Inputs = None,
) -> str:
    """Log a recorded run to MLflow: its arguments, plan, metrics by epoch, outcome, and panel.

    It is for runs that were not logged while they ran, because MLflow was not asked for or its server was down.

    Parameters
    ----------
    run : Run or Cluster
        One of :func:`tfos_nb.runs`, or a cluster.
    experiment : str, optional
        The name of the experiment; it is made if it does not exist. Default: the active run, or else a new run in the
        experiment that ``mlflow.set_experiment`` has chosen.
    model : str, optional
        A model to log with it: a ``.keras`` file or the directory of a SavedModel.
    rows : pyspark.sql.DataFrame, optional
        Rows that the model's signature and an example of its input are taken from.
    inputs : str, list or dict, optional
        Which of their columns the model takes, as in :func:`tfos_nb.predict`.

    Returns
    -------
    str
        MLflow's id of the run.

    Raises
    ------
    MissingPackage
        If MLflow is not installed.
    PlanError
        If an argument is not valid: nothing is logged.
    RunNotLogged
        If the server does not answer within 120 seconds, or takes nothing of the run: the message has its reason.
    ModelNotLogged
        If the model cannot be loaded, or the server does not take it: the run is logged without it.

    Notes
    -----
    Each call makes a new run, unless the program has an active one, or the experiment has one that was begun for this
    run and not ended: because the server was down, or the kernel was killed. A run that still goes on is logged as far
    as it came, and stays running in MLflow; the next call goes on with it.

    Examples
    --------
    >>> tfos_nb.mlflow.log(tfos_nb.runs()[0], experiment="digits")  # doctest: +SKIP
    '0a2c6f…'
    """
    _check_log(experiment, model, rows)
    record = run if isinstance(run, Run) else getattr(run, "run", None)
    if not isinstance(record, Run):
        raise PlanError(f"run must be a Run, such as tfos_nb.runs()[0], or a cluster, got {run!r:.80}")
    destination = find_destination(check_option(True if experiment is None else experiment))
    assert destination is not None
    late = _late.pop(record.id, None)
    run_id = "" if late is None else late.run_id(_ANSWERS_WITHIN)
    if not run_id:
        writer = RunWriter(destination, run._html)
        _write_in_time(writer, record)
        run_id = writer.run_id
    if model is not None:
        log_model(destination.tracking_uri, run_id, os.fspath(model), _rows(rows, inputs), {})
    return run_id


def _write_in_time(writer: RunWriter, record: Run) -> None:
    """Write a run, or raise: MLflow's client alone waits for hours for a server that takes requests and hangs."""
    try:
        answered_within(_ANSWERS_WITHIN, "MLflow", partial(writer.write, record))
    except (PlanError, MissingPackage):
        raise
    except Unreachable:
        raise _not_logged(record, writer, f" within {_ANSWERS_WITHIN:g} s", "the server answers") from None
    except Exception as error:
        why = without_password(str(error).strip().partition("\n")[0]) or type(error).__name__
        raise _not_logged(record, writer, f": {why.rstrip('.')}", "this is mended") from error


def _not_logged(record: Run, writer: RunWriter, why: str, when: str) -> RunNotLogged:
    begun = f" Its first part is run {writer.run_id}; the next call goes on with it." if writer.run_id else ""
    return RunNotLogged(f"MLflow did not take the run {record.id}{why}.{begun} Call log() again when {when}")


def _check_log(experiment: Any, model: Any, rows: Any) -> None:
    if not isinstance(experiment, (str, type(None))) or experiment == "":
        raise PlanError(f"experiment must be the name of an experiment, got {experiment!r}")
    if not isinstance(model, (str, os.PathLike, type(None))):
        raise PlanError(f"model must be the path or the URL of a saved model, got {model!r}")
    if rows is not None and (model is None or not hasattr(rows, "mapInArrow")):
        raise PlanError(f"rows must be a DataFrame, and needs model=, got rows={type(rows).__name__}, model={model!r}")
    if model is not None and "://" not in str(model) and not os.path.exists(model):
        raise PlanError(f"model={os.fspath(model)!r} is not on this machine's disk: give a path or a URL that exists")
    if model is not None and os.path.isdir(model) and not _is_saved_model(os.fspath(model)):
        raise PlanError(
            f"model={os.fspath(model)!r} is a directory without a saved_model.pb: give a .keras file, or the directory "
            "of a SavedModel"
        )


def _rows(frame: DataFrame | None, inputs: Inputs = None) -> Rows | None:
    return None if frame is None else Rows(frame, inputs)


def _log_model(server: str, run_id: str, model: str, rows: Rows | None, environment: Mapping[str, str]) -> None:
    shown = without_password(model)
    try:
        without = log_model(server, run_id, model, rows, environment)
    except Exception as error:  # noqa: BLE001 - a server may raise anything, and the training is done
        logger.warning("MLflow did not get the model %s: %s", shown, without_password(str(error)))
        return
    if without:
        logger.warning("model %s was logged to MLflow without a signature: %s", shown, without_password(without))


def _model_of(result: Any, model_dir: str) -> str:
    """Return the model that a chief's main has saved: the path that it returned, or the usual one; empty if none."""
    if isinstance(result, Mapping):  # KerasEstimator's program
        result = result.get("path")
    if isinstance(result, str) and (result.endswith((".keras", ".h5")) or _is_saved_model(result)):
        return result
    usual = f"{model_dir.rstrip('/')}/{_USUAL_FILE}"
    return usual if "://" not in usual and os.path.exists(usual) else ""


def _is_saved_model(path: str) -> bool:
    return "://" not in path and os.path.isfile(os.path.join(path, "saved_model.pb"))
