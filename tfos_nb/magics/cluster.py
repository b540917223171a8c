"""``%%tfos_cluster`` and its companions: each parses its line, calls what is public, and displays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from tfos_nb.errors import PlanError
from tfos_nb.magics.cell import CellProgram, parse_cell
from tfos_nb.magics.options import LaunchOptions, describe, find_data, find_variable, nearest, parse_options
from tfos_nb.runtime.plan import ClusterPlan, InputMode
from tfos_nb.state import ClusterState, NodeState
from tfos_nb.widgets.live import LiveView, NoScreen, show

__all__ = ["RunningCluster", "StoppedByUser", "TfosMagics"]

_LOOK_UP = 0.2
"""Seconds between two chances of the kernel's interrupt where a wait cannot be interrupted (Windows)."""


class RunningCluster(Protocol):
    """What the magics need of a :class:`tfos_nb.Cluster`."""

    @property
    def plan(self) -> ClusterPlan: ...  # noqa: D102

    def snapshot(self) -> ClusterState: ...  # noqa: D102

    def wait_until_up(self) -> object: ...  # noqa: D102

    def train(self, data: Any, epochs: int = 1) -> object: ...  # noqa: D102

    def wait(self, timeout: float | None = None) -> object: ...  # noqa: D102

    def stop(self) -> object: ...  # noqa: D102

    def logs(self, node: str) -> str: ...  # noqa: D102


Launch = Callable[..., RunningCluster]


class StoppedByUser(KeyboardInterrupt):
    """The user interrupted the cell and the cluster was stopped.

    A KeyboardInterrupt, so that "Run All" ends here as it does after any interrupt; shown as one line.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@magics_class
class TfosMagics(Magics):
    """The magics of tfos_nb.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell.
    launch : callable, optional
        What starts a cluster; :func:`tfos_nb.cluster.launch` if not given, imported when it is first needed.
    """

    def __init__(self, shell: InteractiveShell, launch: Launch | None = None) -> None:
        super().__init__(shell)
        self._shell = shell
        self._launch = launch
        self._namespace: dict[str, Any] = shell.user_ns

    @line_cell_magic
    def tfos_cluster(self, line: str, cell: str | None = None) -> None:
        """Run this cell's function on a TensorFlow cluster of Spark executors."""
        options = parse_options(line)
        program = self._read(cell or "", options)
        data = None if options.data is None else find_data(options.data, self._namespace)
        args = None if options.args is None else find_variable("--args", options.args, self._namespace)
        with LiveView(
            _Planned(options.plan()), note=program.note, screen=NoScreen() if options.quiet else None
        ) as view:
            cluster = self._start(program, args, options)
            self._namespace[options.variable] = cluster
            view.follow(cluster)
            _Course(cluster, view, options, data).run()

    @line_magic
    def tfos_status(self, line: str) -> None:
        """Show how a cluster stands: ``%tfos_status [NAME]``."""
        show(self._pick("%tfos_status", line.strip())[1])

    @line_magic
    def tfos_stop(self, line: str) -> None:
        """Stop a cluster and free its slots: ``%tfos_stop [NAME]``."""
        name, cluster = self._pick("%tfos_stop", line.strip())
        before = cluster.snapshot().status
        cluster.stop()
        said = f"it was {before.value.lower()} already" if before.ended else _say_stopped(cluster, "stopped")
        sys.stdout.write(f"{name}: {said}\n")

    @line_magic
    def tfos_logs(self, line: str) -> None:
        """Show what a node wrote: ``%tfos_logs NODE [NAME]``, as in ``%tfos_logs worker:1 mnist``."""
        words = line.split()
        if not 1 <= len(words) <= 2:
            raise PlanError("%tfos_logs takes a node and, of several clusters, a NAME: %tfos_logs worker:1 mnist")
        name, cluster = self._pick("%tfos_logs", words[1] if len(words) > 1 else "")
        nodes = [str(node) for node in cluster.plan.nodes]
        if words[0] not in nodes:
            raise PlanError(f"%tfos_logs {words[0]}: {name} has no such node{nearest(words[0], nodes)}")
        text = cluster.logs(words[0])
        sys.stdout.write(text if text.endswith("\n") else f"{text or f'{words[0]} has written nothing yet'}\n")

    def launcher(self) -> Launch:
        """Return what starts a cluster."""
        if self._launch is None:
            from tfos_nb.cluster import launch  # here, since it brings Spark with it

            self._launch = launch
        return self._launch

    def _read(self, cell: str, options: LaunchOptions) -> CellProgram:
        """Run the cell, once nothing of the user's is in danger and it is known to have a function."""
        _check_free(options.variable, self._namespace)
        parsed = parse_cell(self._shell, cell, options.fn)
        if options.variable in parsed.names:
            raise PlanError(f"{options.variable}: the cell defines it; give the cluster another NAME")
        return parsed.run()

    def _start(self, program: CellProgram, args: Any, options: LaunchOptions) -> RunningCluster:
        try:
            return self.launcher()(
                program.function, args, sources=program.sources, wait_until_up=False, **options.launch_arguments()
            )
        except KeyboardInterrupt:
            raise StoppedByUser("stopped by you before any node was started") from None

    def _pick(self, magic: str, name: str) -> tuple[str, RunningCluster]:
        """Find the cluster that is meant: the one named, else the only one that runs, else the only one."""
        clusters = {key: value for key, value in self._namespace.items() if _is_cluster(value) and key[0] != "_"}
        if name:
            value = find_variable(magic, name, self._namespace, clusters)
            if not _is_cluster(value):
                raise PlanError(f"{magic} {name}: not a cluster but of type {type(value).__name__}")
            return name, value
        running = {key: value for key, value in clusters.items() if not value.snapshot().status.ended}
        meant = running or clusters
        if len({id(value) for value in meant.values()}) > 1:
            raise PlanError(f"{magic}: which one? {magic} {' or '.join(sorted(meant))}")
        if not meant:
            raise PlanError(f"{magic}: there is no cluster yet; %%tfos_cluster starts one")
        return next(iter(meant.items()))


class _Planned:
    """A plan in the place of a cluster that is not there yet."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan

    def snapshot(self) -> ClusterState:
        """Return the plan as a state in which nothing has started."""
        return ClusterState(self._plan.name, nodes=tuple(self._nodes()))

    def _nodes(self) -> list[NodeState]:
        made = []
        for node in self._plan.nodes:
            gpus = self._plan.gpus_of(node)
            slot = f"{self._plan.cpus} CPU" + (f" and {gpus} GPU" if gpus else "")
            fed = ", fed from Spark" if node in self._plan.fed_nodes else ""
            made.append(NodeState(str(node), detail=slot + fed))
        return made


class _Course:
    """Takes a cluster through up, train and wait, in a thread: the kernel stays free to be interrupted."""

    def __init__(self, cluster: RunningCluster, view: LiveView, options: LaunchOptions, data: Any) -> None:
        self._cluster = cluster
        self._view = view
        self._options = options
        self._data = data
        self._over = threading.Event()
        self._error: Exception | None = None
        # without --data the user feeds the cluster in a later cell, so this one must return
        self._to_the_end = data is not None or options.input_mode is InputMode.TENSORFLOW

    def run(self) -> None:
        """Go, and return when the cell is to return; an interrupt stops the cluster."""
        threading.Thread(target=self._go, name=f"tfos-{self._options.name}", daemon=True).start()
        try:
            while not self._options.background and not self._over.wait(_LOOK_UP):
                pass
        except KeyboardInterrupt:
            self._cluster.stop()
            raise StoppedByUser(_say_stopped(self._cluster, "stopped by you")) from None
        if self._over.is_set() and self._error is not None:
            raise self._error
        self._leave()

    def _go(self) -> None:
        try:
            self._cluster.wait_until_up()
            if self._data is not None:
                self._cluster.train(self._data, epochs=self._options.epochs or 1)
            if self._to_the_end:
                self._cluster.wait()
        except Exception as error:  # noqa: BLE001 - raised in the cell, or told in the display
            self._error = error
            self._give_up(error)
        finally:
            self._over.set()

    def _give_up(self, error: Exception) -> None:
        """Free the slots, whatever it was that failed; tell what the state does not."""
        self._cluster.stop()
        if self._options.background and not self._cluster.snapshot().error:
            self._view.say(f"{type(error).__name__}: {error}")

    def _leave(self) -> None:
        """Say what comes next, if the cluster goes on when the cell returns."""
        name = self._options.variable
        if self._options.background:
            self._view.hint(f"{name} runs in the background: {name}.wait() waits for it, {name}.stop() stops it.")
        elif not self._to_the_end:
            self._view.hint(f"{name} is up and waits for rows: {name}.train(df), then {name}.wait().")
        else:
            return
        self._view.leave()


def _check_free(name: str, namespace: dict[str, Any]) -> None:
    """Refuse a NAME that holds something of the user's, or a cluster that runs."""
    value = namespace.get(name)
    if value is None:
        return
    if not _is_cluster(value):
        raise PlanError(f"{name}: NAME would overwrite your {type(value).__name__} {name}; take another")
    state = value.snapshot()
    if not state.status.ended:
        nodes = sum(not node.status.ended for node in state.nodes)
        raise PlanError(f"{name}: this cluster still runs ({nodes} nodes); {name}.stop() ends it")


def _is_cluster(value: object) -> bool:
    """Whether a value is a Cluster; asked without importing Spark."""
    return callable(getattr(type(value), "snapshot", None)) and isinstance(getattr(value, "plan", None), ClusterPlan)


def _say_stopped(cluster: RunningCluster, how: str) -> str:
    nodes = cluster.snapshot().nodes
    ended = sum(node.status.ended for node in nodes)
    if ended == len(nodes):
        return f"{how}: {ended} node{' ended, its slot is' if ended == 1 else 's ended, their slots are'} free"
    return f"{how}: {ended} of {len(nodes)} nodes ended so far"


def _document() -> str:
    """Write the text of ``%%tfos_cluster?``, with the defaults of launch where it can be imported."""
    try:
        from tfos_nb.cluster import launch
    except ImportError:
        return describe()
    return describe(launch)


# IPython asks a documented object for getdoc() first: so the text is made when somebody reads it
vars(TfosMagics)["tfos_cluster"].getdoc = _document
