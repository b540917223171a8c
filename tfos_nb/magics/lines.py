"""The line magics of clusters: each parses its line, calls the public API, and shows the result."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from tfos_nb.errors import PlanError, TfosError, check_count, nearest
from tfos_nb.interrupts import interruptible
from tfos_nb.magics import parsers
from tfos_nb.magics.arguments import check_identifier, find_data, find_reader, find_variable, is_data
from tfos_nb.magics.cell_work import CellWork
from tfos_nb.magics.clusters import RunningCluster, check_free, clusters_of, pick, say_stopped
from tfos_nb.magics.defaults import Defaults
from tfos_nb.magics.diagnosis.preflight import preflight
from tfos_nb.magics.diagnosis.spark_checks import session_settings
from tfos_nb.magics.options import parse_options
from tfos_nb.state.cluster_state import ClusterStatus
from tfos_nb.widgets.hosts import detect_host
from tfos_nb.widgets.live import LiveView, show, show_bundle
from tfos_nb.widgets.reprs import plan_bundle

__all__ = ["ClusterLines"]

_FOLLOW_SECONDS = 0.5  # a node sends its lines with its heartbeat, once a second

_PROVIDED = {
    "attach": "tfos_nb.detached.attached",
    "show_panel": "tfos_nb.widgets.live",
    "show_tensorboard": "tfos_nb.widgets.tensorboard",
    "show_runs": "tfos_nb.widgets.runs.display",
    "predict": "tfos_nb.magics.applying",
}
"""Functions that are called, and their modules, which are imported when needed, since some of them import Spark."""


@magics_class
class ClusterLines(Magics):
    """Status, logs, stop, panel, plan, train, inference, TensorBoard and recorded runs of clusters.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell.
    defaults : Defaults
        The settings of ``%config``.
    provided : mapping of str to callable, optional
        Functions that are called instead of this package's ``attach``, ``show_panel``, ``show_tensorboard``,
        ``show_runs`` or ``predict``.
    """

    def __init__(
        self, shell: InteractiveShell, defaults: Defaults, provided: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(shell)
        self._namespace: dict[str, Any] = shell.user_ns
        self._defaults = defaults
        self._provided = dict(provided or {})

    @line_magic
    def tfos_status(self, line: str) -> None:
        """Show how a cluster stands."""
        found = parsers.STATUS.understand(line)
        show(pick("%tfos_status", found.cluster, self._namespace)[1])

    @line_magic
    def tfos_panel(self, line: str) -> None:
        """Show the panel of a cluster once more, here."""
        found = parsers.PANEL.understand(line)
        self._call("show_panel", pick("%tfos_panel", found.cluster, self._namespace)[1])

    @line_magic
    def tfos_attach(self, line: str) -> None:
        """Show a detached cluster, and make it a variable."""
        found = parsers.ATTACH.understand(line)
        cluster = self._call("attach", found.detached or "")
        variable = found.variable or cluster.plan.name
        check_identifier(variable, "VAR")
        if getattr(self._namespace.get(variable), "id", "") != cluster.id:
            check_free(variable, self._namespace)
        self._namespace[variable] = cluster
        self._call("show_panel", cluster)

    @line_magic
    def tfos_stop(self, line: str) -> None:
        """Stop a cluster and free its slots."""
        found = parsers.STOP.understand(line)
        name, cluster = pick("%tfos_stop", found.cluster, self._namespace)
        before = cluster.snapshot().status
        with interruptible():
            cluster.stop(0.0 if found.now else None)
        said = f"it was {before.value.lower()} already" if before.ended else say_stopped(cluster, "stopped")
        sys.stdout.write(f"{name}: {said}\n")

    @line_magic
    def tfos_logs(self, line: str) -> None:
        """Show what a node wrote."""
        found = parsers.LOGS.understand(line)
        node = parsers.LOGS.require(found, "node", "NODE")
        if node in clusters_of(self._namespace) and found.cluster is None:
            nodes = [str(known) for known in clusters_of(self._namespace)[node].plan.nodes]
            raise PlanError(f"%tfos_logs {node}: name a node before the cluster: %tfos_logs {nodes[-1]} {node}")
        name, cluster = pick("%tfos_logs", found.cluster, self._namespace)
        nodes = [str(known) for known in cluster.plan.nodes]
        if node not in nodes:
            hint = nearest(node, nodes) or f"; it has {_several(nodes)}"
            raise PlanError(f"%tfos_logs {node}: {name} has no such node{hint}")
        lines = cluster.logs(node).splitlines()
        _write(lines if found.lines is None else lines[-found.lines :])
        if found.follow:
            _follow(cluster, node, lines)
        elif not lines:
            _write([f"{node} has written nothing yet"])

    @line_magic
    def tfos_plan(self, line: str) -> None:
        """Check a plan with Spark without starting anything, or show the plan of a cluster."""
        words = line.split()
        if len(words) == 1 and words[0] in clusters_of(self._namespace):
            show_bundle(plan_bundle(clusters_of(self._namespace)[words[0]].plan))
            return
        options = parse_options(line, self._defaults.launch_defaults(), magic="%tfos_plan")
        options.rows(self._namespace)
        if options.args is not None:
            find_variable("--args", options.args, self._namespace)
        plan = options.plan()
        show_bundle(plan_bundle(plan, note=preflight(plan)))

    @line_magic
    def tfos_train(self, line: str) -> None:
        """Feed a DataFrame to a cluster that waits for rows; an interrupt stops the cluster as it does in its cell."""
        found = parsers.TRAIN.understand(line)
        source = parsers.TRAIN.require(found, "df", "DF")
        epochs = 1 if found.epochs is None else found.epochs
        check_count("--epochs", epochs, 1)
        name, cluster = pick("%tfos_train", found.cluster, self._namespace)
        find = find_reader if getattr(cluster, "reads_its_rows", False) else find_data
        data = find(source, self._namespace, "%tfos_train")
        held_out = found.validation and find(found.validation, self._namespace, "--validation")
        more = {} if held_out is None else {"validation": held_out}
        screen = self._defaults.screen()
        with LiveView(cluster, screen=screen) as view:
            CellWork(cluster, partial(cluster.train, data, epochs=epochs, **more), view.say, cluster.plan.name).run()
            view.hint(f"{name} has these rows: %tfos_train feeds it more, {name}.wait() waits for its end.")
            if screen.outlives_cell:  # keep the output up to date until the cluster's end, as in the cluster's cell
                view.leave()

    @line_magic
    def tfos_inference(self, line: str) -> None:
        """Apply a model to a DataFrame on the executors; the outcome becomes the variable OUT."""
        found = parsers.INFERENCE.understand(line)
        source = parsers.INFERENCE.require(found, "df", "DF")
        out = parsers.INFERENCE.require(found, "out", "-o OUT")
        check_identifier(out, "OUT")
        _check_out(out, self._namespace)
        data = find_data(source, self._namespace, "%tfos_inference")
        model = found.model or self._model_of(found.cluster)
        inputs = None if found.inputs is None else [column for column in found.inputs.split(",") if column]
        scored = self._call("predict", data, model, inputs=inputs, output=found.output, batch_size=found.batch_size)
        self._namespace[out] = scored
        _write([f"{out}: {source} with {found.output}, by {model}; computed when it is asked for rows"])

    @line_magic
    def tfos_tensorboard(self, line: str) -> None:
        """Show TensorBoard, of a cluster or of a directory."""
        found = parsers.TENSORBOARD.understand(line)
        cluster = None
        if found.cluster is not None and found.log_dir is not None:
            raise PlanError(
                f"give a cluster or --logdir, got {found.cluster} and --logdir {found.log_dir}; leave one out"
            )
        if found.cluster is not None or found.log_dir is None:
            cluster = pick("%tfos_tensorboard", found.cluster, self._namespace)[1]
        height = self._defaults.height if found.height is None else found.height
        if height < 1:
            raise PlanError(f"--height must be a number of pixels, 1 or more, got {height}")
        more: dict[str, Any] = {"proxy_url": self._defaults.proxy_url} if self._defaults.proxy_url else {}
        if detect_host().name == "databricks":  # Spark's configuration has the address of its driver proxy
            more["spark_conf"] = session_settings() or {}
        self._call("show_tensorboard", cluster, log_dir=found.log_dir, height=height, frame=found.frame, **more)

    @line_magic
    def tfos_runs(self, line: str) -> None:
        """List the runs that clusters have recorded, to compare their curves and arguments."""
        found = parsers.RUNS.understand(line)
        usual = self._defaults.model_dir
        there = "://" in usual or os.path.isdir(os.path.expanduser(usual))  # the first cluster makes it
        self._call("show_runs", found.directory or (usual if there else None))

    def _model_of(self, name: str | None) -> str:
        """Return the path that the cluster's chief returned."""
        variable, cluster = pick("%tfos_inference", name, self._namespace)
        status = cluster.snapshot().status
        if not status.ended or status is ClusterStatus.FAILED:
            why = "failed, so it has no model" if status.ended else "still runs, so it has no model yet"
            raise PlanError(f"%tfos_inference: {variable} {why}; name one with --model PATH")
        try:
            result = cluster.result()
        except TfosError as error:
            said = str(error).partition("\n")[0]
            raise PlanError(f"%tfos_inference: {variable} has no model: {said}; name one with --model PATH") from None
        if not isinstance(result, (str, os.PathLike)):
            kind = type(result).__name__
            raise PlanError(
                f"%tfos_inference: the chief of {variable} returned a value of type {kind}, not the path of a model: "
                "let main return ctx.save(model), or name one with --model PATH"
            )
        return os.fspath(result)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if name not in self._provided:
            self._provided[name] = getattr(importlib.import_module(_PROVIDED[name]), name)
        return self._provided[name](*args, **options)


def _write(lines: list[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def _follow(cluster: RunningCluster, node: str, seen: list[str]) -> None:
    """Print the new lines of a node until its cluster has ended or the kernel is interrupted."""
    with interruptible():
        try:
            _write_until_ended(cluster, node, seen)
        except KeyboardInterrupt:
            _write([f"{node} is no longer followed; its cluster continues"])


def _write_until_ended(cluster: RunningCluster, node: str, seen: list[str]) -> None:
    while True:
        ended = cluster.snapshot().status.ended  # checked first, so that the last lines are still read below
        now = cluster.logs(node).splitlines()
        _write(now[_overlap(seen, now) :])
        if ended:
            return
        seen = now
        threading.Event().wait(_FOLLOW_SECONDS)


def _several(nodes: list[str]) -> str:
    more = f" and {len(nodes) - 5} more" if len(nodes) > 6 else ""
    return ", ".join(nodes[: 5 if more else 6]) + more


def _overlap(before: list[str], now: list[str]) -> int:
    """Return how many of the lines ``now`` were shown already: old lines are dropped when new ones come."""
    for length in range(min(len(before), len(now)), 0, -1):
        if before[len(before) - length :] == now[:length]:
            return length
    return 0


def _check_out(name: str, namespace: Mapping[str, Any]) -> None:
    value = namespace.get(name)
    if value is not None and not is_data(value):
        raise PlanError(f"{name}: OUT would overwrite your {type(value).__name__} {name}; take another")


for _name, _parser in parsers.CLUSTER_LINES.items():
    vars(ClusterLines)[_name].getdoc = _parser.document
