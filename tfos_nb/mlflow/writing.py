"""Write a run to MLflow's tracking server, as often as it has news."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.mlflow.destination import RUN_TAG, Destination, check_server, chosen_experiment, load_mlflow
from tfos_nb.records.run import Run, to_json
from tfos_nb.redaction import without_password
from tfos_nb.state.cluster_state import ClusterStatus
from tfos_nb.truncate import clip

__all__ = ["RunWriter"]

logger = logging.getLogger(__name__)

_IN_A_BATCH = 100  # parameters; MLflow takes 1,000 metrics at once
_METRICS_IN_A_BATCH = 500
_LONGEST_VALUE, _LONGEST_NAME = 500, 240
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
_OUTCOMES = {"DONE": "FINISHED", "FAILED": "FAILED", "STOPPED": "KILLED"}
_KILLED = "killed"
_OUTCOME_TAG = "tfos_nb.outcome"
_SOURCE_TAG, _SOURCE = "mlflow.source.name", "tfos_nb"  # of the runs that are made here


@contextlib.contextmanager
def _without_retries_told() -> Iterator[None]:
    """Suppress urllib3's retry warnings within the block, in this thread; the final error is reported."""
    own, tries = threading.get_ident(), logging.getLogger("urllib3.connectionpool")

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != own

    tries.addFilter(is_of_others)
    try:
        yield
    finally:
        tries.removeFilter(is_of_others)


class RunWriter:
    """One of MLflow's runs, that one run of a cluster is written to.

    A write that fails can be tried again: it goes on where the one before has ended, also in another process. What
    MLflow refuses, such as the name of a metric, is left out, and reported once.

    Parameters
    ----------
    destination : Destination
        Where.
    page : callable, optional
        Returns the cluster's panel as HTML, which is logged at the end.

    Attributes
    ----------
    run_id : str
        MLflow's id of the run; empty before it is made.
    """

    def __init__(self, destination: Destination, page: Callable[[], str | None] | None = None) -> None:
        self._to = destination
        self._page = page
        self._client: Any = None
        self._is_own = False  # made by tfos_nb, and so ended here
        self._is_described = False  # has its tags and parameters
        self._refused = set[str]()  # metrics
        self._logged: dict[int, dict[str, Any]] = {}  # epochs, by their steps
        self._there: dict[str, dict[int, float]] = {}  # what another writer has logged: metrics' values by step
        self._names: dict[str, str] = {}  # of metrics, in MLflow
        self._until = 0.0  # when the last of them had ended at the latest, in seconds since 1970
        self.run_id = ""

    def write(self, run: Run) -> None:
        """Write what is new: the parameters at first, then the metrics of each epoch, at last the outcome."""
        with _without_retries_told():
            check_server(self._to.tracking_uri)
            if not self.run_id:
                self._begin(run)
            if not self._is_described:
                self._describe(run)
            self._log_epochs(run)
            if ClusterStatus(run.status).ended or run.outcome == _KILLED:
                self._end(run)

    def _begin(self, run: Run) -> None:
        self._client = load_mlflow().MlflowClient(tracking_uri=self._to.tracking_uri)
        logged_there = self._run_logged_there() if self._to.run_id and not self._to.is_nested else None
        self._is_own = logged_there not in ("", run.id)  # parameters cannot change, so a second cluster gets its own
        begun = self._unfinished(run) if self._is_own else self._to.run_id
        if begun:
            self._read_metrics(begun, run)
        self.run_id = begun or self._new_run(run)

    def _describe(self, run: Run) -> None:
        for name, value in _tags(run).items():
            self._client.set_tag(self.run_id, name, value)
        param = load_mlflow().entities.Param
        made = [param(name, value) for name, value in _parameters(run).items()]
        self._tell_refused("parameters", self._log("params", made, _IN_A_BATCH))
        self._is_described = True

    def _log(self, kind: str, values: Sequence[Any], most: int) -> dict[str, str]:
        """Log parameters or metrics; return those that MLflow refuses, by their keys, with its reason."""
        refused = dict[str, str]()
        for start in range(0, len(values), most):
            batch = values[start : start + most]
            try:
                self._client.log_batch(self.run_id, **{kind: batch})
            except load_mlflow().MlflowException as error:
                if not _is_refusal(error):
                    raise
                if most > 1:  # it refuses the whole batch for one value
                    refused |= self._log(kind, [one for one in batch if one.key not in refused], 1)
                else:
                    refused[batch[0].key] = str(error).partition("\n")[0]
        return refused

    def _tell_refused(self, kind: str, refused: Mapping[str, str]) -> None:
        if refused:
            first = without_password(next(iter(refused.values())))
            logger.warning("MLflow did not take the %s %s: %s", kind, ", ".join(refused), first)

    def _run_logged_there(self) -> str:
        """Return the id of the cluster that was logged to the user's run already; empty if none was."""
        return str(self._client.get_run(self._to.run_id).data.tags.get(RUN_TAG, ""))

    def _unfinished(self, run: Run) -> Any:
        """Return the run that an earlier call has begun for this cluster, and could not end; empty if there is none."""
        found = self._client.search_runs([self._experiment()], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=20)
        left = (
            one.info.run_id
            for one in found
            if _OUTCOME_TAG not in one.data.tags and one.data.tags.get(_SOURCE_TAG) == _SOURCE
        )
        return next(left, "")

    def _read_metrics(self, run_id: str, run: Run) -> None:
        """Read what was logged of this cluster before, by another writer."""
        for name in dict.fromkeys(name for epoch in run.epochs for name in epoch if name != "epoch"):
            found = self._client.get_metric_history(run_id, self._metric_name(name))
            self._there[name] = {one.step: one.value for one in found}
            self._until = max([self._until, *(one.timestamp / 1000 for one in found)])

    def _metric_name(self, name: str) -> str:
        """Return a metric's name in MLflow; two metrics never have the same."""
        if name not in self._names:
            made = _name(name)
            while made in self._names.values():
                made += "_"
            self._names[name] = made
        return self._names[name]

    def _new_run(self, run: Run) -> str:
        tags = {"mlflow.runName": run.name, _SOURCE_TAG: _SOURCE, RUN_TAG: run.id}
        if self._to.run_id:
            tags["mlflow.parentRunId"] = self._to.run_id
        made = self._client.create_run(self._experiment(), start_time=int(run.started * 1000), tags=tags)
        return str(made.info.run_id)

    def _experiment(self) -> str:
        if not self._to.experiment:
            return self._to.experiment_id or chosen_experiment()
        found = self._client.get_experiment_by_name(self._to.experiment)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                raise PlanError(
                    f"MLflow's experiment {self._to.experiment!r} is deleted: restore it with mlflow experiments "
                    f"restore -x {found.experiment_id}, or give another name"
                )
            return str(found.experiment_id)
        # The name may be a slip of the pen.
        logger.warning("MLflow has no experiment %r: a new one is made", self._to.experiment)
        return str(self._client.create_experiment(self._to.experiment))

    def _log_epochs(self, run: Run) -> None:
        """Log the epochs that are new, and those that have other numbers since they were trained again."""
        metric = load_mlflow().entities.Metric
        steps = _steps(run.epochs)
        fresh = [
            (step, epoch) for step, epoch in zip(steps, run.epochs, strict=True) if self._logged.get(step) != epoch
        ]
        began, ended = self._until or run.started, run.started + run.seconds
        metrics = [
            metric(self._metric_name(name), value, int(1000 * (began + (ended - began) * place / len(fresh))), step)
            for place, (step, epoch) in enumerate(fresh, 1)  # when each of several epochs ended is not known
            for name, value in epoch.items()
            if name != "epoch" and self._metric_name(name) not in self._refused
            if self._there.get(name, {}).get(step) != value
        ]
        refused = self._log("metrics", metrics, _METRICS_IN_A_BATCH)
        self._tell_refused("metrics", refused)
        self._refused |= set(refused)
        self._logged |= fresh
        self._until = ended

    def _end(self, run: Run) -> None:
        client = self._client
        client.set_tag(self.run_id, "tfos_nb.rows", str(run.rows))
        if run.error:
            client.set_tag(self.run_id, "tfos_nb.error", clip(run.error, 4_000))
        if self._is_own:
            status = _OUTCOMES.get(run.status, "KILLED")
            client.set_terminated(self.run_id, status, end_time=int((run.started + run.seconds) * 1000))
        client.set_tag(self.run_id, _OUTCOME_TAG, run.outcome)  # at last: a run without it is begun and not ended
        try:
            client.log_text(self.run_id, to_json(run), "tfos_nb/run.json")
            page = self._page() if self._page is not None else None
            if page:
                client.log_text(self.run_id, _document(run.name, page), "tfos_nb/panel.html")
        except Exception as error:  # noqa: BLE001 - a store of artifacts may raise anything
            logger.warning("the run's record or panel could not be logged to MLflow: %s", without_password(str(error)))


def _steps(epochs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the step of each epoch: its number, counted over several calls of ``fit``.

    Examples
    --------
    >>> _steps([{"epoch": 4}, {"epoch": 5}, {"epoch": 1}, {"epoch": 2}])
    [4, 5, 6, 7]
    """
    steps, before, last = list[int](), 0, 0
    for epoch in epochs:
        number = int(epoch["epoch"])
        before += last if number <= last else 0
        steps.append(before + number)
        last = number
    return steps


def _parameters(run: Run) -> dict[str, str]:
    """Return the plan and the arguments; an argument whose name the plan has is called ``args.NAME``."""
    found = dict(_flat({"plan": run.plan}))
    for name, value in _flat(run.arguments):
        found[f"args.{name}" if name in found else name] = value
    return found


def _tags(run: Run) -> dict[str, str]:
    versions = {f"tfos_nb.version.{name}": version for name, version in run.versions.items()}
    spark = {f"tfos_nb.spark.{name}": value for name, value in run.spark.items() if value}
    return {RUN_TAG: run.id, **versions, **spark, "tfos_nb.cluster": run.name, "tfos_nb.model_dir": run.model_dir}


def _is_refusal(error: Any) -> bool:
    """Return whether MLflow refuses a value; otherwise its server cannot be reached, or takes nothing at all."""
    return error.get_http_status_code() in (400, 409)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Return parameters as MLflow has them: names and texts; those of a dictionary in it have both names.

    Examples
    --------
    >>> list(_flat({"lr": 0.1, "net": {"units": [8, 4]}}))
    [('lr', '0.1'), ('net.units', '[8, 4]')]
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield _name(f"{before}{name}"), clip(str(value), _LONGEST_VALUE)


def _name(name: str) -> str:
    """Return a name that MLflow accepts: it allows some characters, and names that are also normal relative paths.

    Examples
    --------
    >>> _name("top@5"), _name("val_loss"), _name("/a/../b"), _name("loss/")
    ('top_5', 'val_loss', 'a/_/b', 'loss/_')
    """
    parts = _NOT_IN_NAMES.sub("_", clip(name, _LONGEST_NAME)).lstrip("/").split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _document(name: str, body: str) -> str:
    """Return a whole page, so that a browser does not guess the encoding."""
    from html import escape

    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title></head>'
    return f"{head}<body>{body}</body></html>"
