"""Run one fit of an Estimator: start a cluster when Spark has slots for it, show it, feed it, and wait for its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tfos_nb.cluster import Cluster, launch
from tfos_nb.errors import ClusterClosed, current_shell
from tfos_nb.interrupts import interruptible
from tfos_nb.mlflow.following import follower
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.spark.admission import Need, Place, admitted
from tfos_nb.state.cluster_state import ClusterStatus
from tfos_nb.state.metric_order import in_order

__all__ = ["Fit", "Fitted", "Rows"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Rows to feed: the training rows, and those of the validation."""

    training: DataFrame
    validation: DataFrame | None = None
    epochs: int = 1
    spill: bool = True

    def thinned(self, tasks: int | None) -> Rows:
        """Return the same rows in so many partitions at the most."""
        if tasks is None:
            return self
        held_out = None if self.validation is None else self.validation.coalesce(tasks)
        return Rows(self.training.coalesce(tasks), held_out, self.epochs, self.spill)


@dataclass(frozen=True)
class Fitted:
    """Result of a fit.

    Parameters
    ----------
    result : object
        The value that the chief's program returned.
    history : list of dict
        The metrics of each epoch, as the chief reported them.
    """

    result: Any
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Fit:
    """Settings of a fit.

    Parameters
    ----------
    name : str
        The cluster's.
    plan : dict
        Arguments of :func:`tfos_nb.launch` for the plan.
    settings : dict
        Its other arguments.
    progress : str
        How the fit is shown.
    slot_timeout : float
        Seconds that it waits for slots that other programs use.
    what : str
        Text next to its name in a line, such as the Params that a CrossValidator set.
    writes : tuple of str
        The directories that the user named, which no two fits may write at the same time.
    arguments : dict, optional
        The arguments in the run's record; default: those of the program.
    mlflow : bool, str or None
        The argument of :func:`tfos_nb.launch`. A tuner's fits are logged without their models.
    """

    name: str
    plan: dict[str, Any]
    settings: dict[str, Any]
    progress: str = "auto"
    slot_timeout: float = 600.0
    what: str = ""
    writes: tuple[str, ...] = ()
    arguments: dict[str, Any] | None = None
    mlflow: bool | str | None = None

    def single(self) -> Fit:
        """Return the same fit for a program that belongs to it: it has no record, and nothing to continue."""
        return replace(self, settings={**self.settings, "record": False, "resume": False}, mlflow=False)

    def run(self, main: Callable[[Any, Any], Any], args: Any, spark: SparkSession, rows: Rows | None = None) -> Fitted:
        """Start a cluster, feed it, wait for it, and return what its chief returned.

        If the user has stopped it once, the result is the value that the chief returned then.

        Raises
        ------
        TfosError
            As :func:`tfos_nb.launch` and :meth:`tfos_nb.Cluster.train` raise it.
        """
        plan = ClusterPlan(name=self.name, **self.plan)
        feeding = plan.input_mode is InputMode.SPARK
        need = Need(len(plan.spark_nodes), plan.cpus, plan.gpus, feeding, self.writes)
        screen = _screen(self.progress)
        with interruptible(), admitted(spark, need, self.slot_timeout, self._say) as place:
            begun = time.monotonic()
            logged = follower(self.mlflow)
            if logged is not None and threading.current_thread() is not threading.main_thread():
                logged.logs_model = False  # a tuner's fits: the best one is fitted again at the end
            settings = {**self.settings, "arguments": self.arguments, "wait_until_up": False, "mlflow": logged or False}
            cluster = launch(main, args, spark=spark, name=self.name, **self.plan, **settings)
            try:
                with _shown(cluster, screen):
                    self._work(cluster, place, rows)
            except BaseException:
                cluster.close()
                raise
            fitted = Fitted(cluster.result(), [dict(epoch) for epoch in cluster.history.epochs])
        if screen is None:
            self._say(f"done in {time.monotonic() - begun:.1f} s{_last(fitted.history)}")
        return fitted

    def _work(self, cluster: Cluster, place: Place, rows: Rows | None) -> None:
        cluster.wait_until_up()
        place.started()
        if rows is not None:
            rows = rows.thinned(place.feeders())
            try:
                cluster.train(rows.training, rows.epochs, spill=rows.spill, validation=rows.validation)
            except ClusterClosed:
                cluster.stop()
                if cluster.state is not ClusterStatus.STOPPED:
                    raise
        cluster.wait()

    def _say(self, line: str) -> None:
        """Tell a line: in a notebook below the cell, else to the log."""
        what = f" ({self.what})" if self.what else ""
        silent = self.progress == "none" or os.environ.get("TFOS_NB_PROGRESS", "").strip().lower() == "none"
        if silent or not _in_notebook():
            logger.info("%s%s: %s", self.name, what, line)
        else:
            sys.stdout.write(f"{self.name}{what}: {line}\n")
            sys.stdout.flush()


def _last(history: list[dict[str, Any]]) -> str:
    """Return the last epoch's metrics as text."""
    last = history[-1] if history else {}
    told = [f"{name} {last[name]:.4g}" for name in in_order(last) if isinstance(last[name], float)]
    return "".join(f", {metric}" for metric in told[:4])


def _in_notebook() -> bool:
    """Whether IPython runs."""
    return current_shell() is not None


def _screen(progress: str) -> Any:
    """Choose where a fit is drawn; None: nowhere.

    A CrossValidator's fits run in many threads: each of these fits prints one line.
    """
    if progress == "none" or (progress == "auto" and not _in_notebook()):
        return None
    if progress == "auto" and threading.current_thread() is not threading.main_thread():
        return None
    from tfos_nb.widgets.choice import choose_screen

    return choose_screen() if progress == "auto" else choose_screen({**os.environ, "TFOS_NB_PROGRESS": progress})


@contextlib.contextmanager
def _shown(cluster: Cluster, screen: Any) -> Iterator[None]:
    if screen is None:
        yield
        return
    from tfos_nb.widgets.live import LiveView

    with LiveView(cluster, screen=screen):
        yield
