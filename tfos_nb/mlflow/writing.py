"""Write a run to MLflow's tracking server, as often as it has news."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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

    Parameters
    ----------
    destination : Destination
        Where.
    page : callable, optional
        Returns the cluster's panel as HTML, which is logged at the end.

    Attributes
    ----------
    run_id : str
        MLflow's id of the run; empty before the first write.
    """

    def __init__(self, destination: Destination, page: Callable[[], str | None] | None = None) -> None:
        self._to = destination
        self._page = page
        self._client: Any = None
        self._is_own = False  # made here, and so ended here
        self._logged: dict[int, dict[str, Any]] = {}  # epochs, by their steps
        self._until = 0.0  # when the last of them had ended at the latest, in seconds since 1970
        self.run_id = ""

    def write(self, run: Run) -> None:
        """Write what is new: the parameters at first, then the metrics of each epoch, at last the outcome."""
        with _without_retries_told():
            check_server(self._to.tracking_uri)
            if not self.run_id:
                self._begin(run)
            self._log_epochs(run)
            if ClusterStatus(run.status).ended or run.outcome == _KILLED:
                self._end(run)

    def _begin(self, run: Run) -> None:
        self._client = client = load_mlflow().MlflowClient(tracking_uri=self._to.tracking_uri)
        self._is_own = not self._to.run_id or self._to.is_nested or self._is_taken(run)
        run_id = self._new_run(run) if self._is_own else self._to.run_id
        try:
            for name, value in {RUN_TAG: run.id, **_tags(run)}.items():
                client.set_tag(run_id, name, value)
            self._log_parameters(run_id, _parameters(run))
        except Exception:
            if self._is_own:  # otherwise it would be shown as running for ever
                client.set_terminated(run_id, "FAILED")
            raise
        self.run_id = run_id

    def _log_parameters(self, run_id: str, named: Mapping[str, str]) -> None:
        """Log parameters, without those that MLflow refuses: a name that it does not allow, or one that is taken."""
        mlflow = load_mlflow()
        made = [mlflow.entities.Param(name, value) for name, value in named.items()]
        refused: dict[str, str] = {}
        for start in range(0, len(made), _IN_A_BATCH):
            batch = made[start : start + _IN_A_BATCH]
            try:
                self._client.log_batch(run_id, params=batch)
            except mlflow.MlflowException:  # of the whole batch
                refused |= self._log_one_by_one(run_id, batch)
        if refused:
            first = next(iter(refused.values()))
            logger.warning("MLflow did not take the parameters %s: %s", ", ".join(refused), without_password(first))

    def _log_one_by_one(self, run_id: str, parameters: Sequence[Any]) -> dict[str, str]:
        refused = {}
        for one in parameters:
            try:
                self._client.log_param(run_id, one.key, one.value)
            except load_mlflow().MlflowException as error:
                refused[one.key] = str(error).partition("\n")[0]
        return refused

    def _is_taken(self, run: Run) -> bool:
        """Return whether another cluster was logged to the user's run already."""
        tags: Mapping[str, str] = self._client.get_run(self._to.run_id).data.tags
        return tags.get(RUN_TAG, run.id) != run.id

    def _new_run(self, run: Run) -> str:
        tags = {"mlflow.runName": run.name, "mlflow.source.name": "tfos_nb"}
        if self._to.run_id:
            tags["mlflow.parentRunId"] = self._to.run_id
        made = self._client.create_run(self._experiment(), start_time=int(run.started * 1000), tags=tags)
        return str(made.info.run_id)

    def _experiment(self) -> str:
        if not self._to.experiment:
            return self._to.experiment_id or chosen_experiment()
        found = self._client.get_experiment_by_name(self._to.experiment)
        if found is not None:
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
            metric(_name(name), value, int(1000 * (began + (ended - began) * place / len(fresh))), step)
            for place, (step, epoch) in enumerate(fresh, 1)  # when each of several epochs ended is not known
            for name, value in epoch.items()
            if name != "epoch"
        ]
        for start in range(0, len(metrics), _METRICS_IN_A_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_IN_A_BATCH])
        self._logged |= fresh
        self._until = ended

    def _end(self, run: Run) -> None:
        client = self._client
        client.set_tag(self.run_id, "tfos_nb.outcome", run.outcome)
        client.set_tag(self.run_id, "tfos_nb.rows", str(run.rows))
        if run.error:
            client.set_tag(self.run_id, "tfos_nb.error", clip(run.error, 4_000))
        if self._is_own:
            status = _OUTCOMES.get(run.status, "KILLED")
            client.set_terminated(self.run_id, status, end_time=int((run.started + run.seconds) * 1000))
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
    return {**versions, **spark, "tfos_nb.cluster": run.name, "tfos_nb.model_dir": run.model_dir}


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
    """Return a name that MLflow accepts.

    Examples
    --------
    >>> _name("top@5"), _name("val_loss")
    ('top_5', 'val_loss')
    """
    return clip(_NOT_IN_NAMES.sub("_", name), _LONGEST_NAME).lstrip("/") or "_"


def _document(name: str, body: str) -> str:
    """Return a whole page, so that a browser does not guess the encoding."""
    from html import escape

    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title></head>'
    return f"{head}<body>{body}</body></html>"
