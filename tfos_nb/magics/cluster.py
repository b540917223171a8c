"""Implement ``%%tfos_cluster``: parse its line, run the cell, launch the cluster, and show it while it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from tfos_nb.errors import ClusterClosed, PlanError
from tfos_nb.magics.arguments import find_variable
from tfos_nb.magics.cell import CellProgram, parse_cell
from tfos_nb.magics.cell_work import CellWork, StoppedByUser
from tfos_nb.magics.clusters import Launch, PlannedCluster, RunningCluster, check_free
from tfos_nb.magics.defaults import Defaults
from tfos_nb.magics.options import LaunchOptions, describe, parse_options
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.spark.feedable import check_table
from tfos_nb.state.cluster_state import ClusterStatus
from tfos_nb.widgets.hosts import detect_host
from tfos_nb.widgets.live import LiveView

__all__ = ["TfosMagics"]


@magics_class
class TfosMagics(Magics, Defaults):
    """The cell magic of tfos_nb, and the settings of ``%config TfosMagics`` for all magics.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell.
    launch : callable, optional
        Starts a cluster. Default: :func:`tfos_nb.cluster.launch`, imported when it is first needed.
    """

    def __init__(self, shell: InteractiveShell, launch: Launch | None = None) -> None:
        super().__init__(shell)
        self._shell = shell
        self._launch = launch
        self._namespace: dict[str, Any] = shell.user_ns

    @line_cell_magic
    def tfos_cluster(self, line: str, cell: str | None = None) -> None:
        """Run this cell's function on a TensorFlow cluster of Spark executors."""
        options = parse_options(line, self.launch_defaults())
        refusal = detect_host().refusal
        if refusal:
            raise PlanError(refusal)
        program = self._read(cell or "", options)
        data, held_out = options.rows(self._namespace)
        if not options.detach:
            check_table(data, held_out)  # before anything starts
        args = None if options.args is None else find_variable("--args", options.args, self._namespace)
        screen = self.screen(options.quiet)
        with LiveView(PlannedCluster(options.plan()), note=program.note, screen=screen) as view:
            rows = {"data": data, "epochs": options.epochs or 1, "validation": held_out} if options.detach else {}
            cluster = self._start(program, args, options, rows)
            self._namespace[options.variable] = cluster
            view.follow(cluster)
            if options.detach:
                attach = f"%tfos_attach {cluster.plan.name}"
                name = options.variable
                view.hint(f"{name} outlives this kernel: {attach} shows it in another; {name}.stop() stops it.")
                view.leave()
                return
            _TrainingWork(cluster, view, options, data, held_out).run()

    def launcher(self) -> Launch:
        """Return the function that starts a cluster."""
        if self._launch is None:
            from tfos_nb.cluster import launch  # here, since it imports Spark

            self._launch = launch
        return self._launch

    def _read(self, cell: str, options: LaunchOptions) -> CellProgram:
        """Run the cell and return its function, after checking NAME and that the cell has a function."""
        check_free(options.variable, self._namespace)
        parsed = parse_cell(self._shell, cell, options.fn)
        if options.variable in parsed.names:
            raise PlanError(f"{options.variable}: the cell defines it; give the cluster another NAME")
        return parsed.run()

    def _start(
        self, program: CellProgram, args: Any, options: LaunchOptions, rows: Mapping[str, Any]
    ) -> RunningCluster:
        arguments = {**options.launch_arguments(), **rows}
        try:
            return self.launcher()(program.function, args, wait_until_up=False, **arguments)
        except KeyboardInterrupt:
            raise StoppedByUser("stopped by you before any node was started") from None


class _TrainingWork:
    """Wait until a cluster runs, feed it, and wait for its end.

    If the cell returns before the end, show a hint how to continue.
    """

    def __init__(
        self, cluster: RunningCluster, view: LiveView, options: LaunchOptions, data: Any, held_out: Any
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._options = options
        self._data = data
        self._more = {} if held_out is None else {"validation": held_out}
        # without --data the user feeds the cluster in a later cell, so this one must return
        self._to_the_end = data is not None or options.input_mode is InputMode.TENSORFLOW or options.wait

    def run(self) -> None:
        """Start the work, and return when the cell must return."""
        if self._data is not None:  # the user may call wait() before the thread has called train()
            self._cluster.announce_train()
        work = CellWork(self._cluster, self, self._view.say, self._options.name)
        name = self._options.variable
        if self._options.background:
            work.start()
            self._view.hint(f"{name} runs in the background: {name}.wait() waits for it, {name}.stop() stops it.")
        else:
            work.run()
            if self._to_the_end:
                return
            self._view.hint(f"{name} is up: {name}.train(df) feeds it, {name}.wait() waits for its end.")
        self._view.leave()

    def __call__(self) -> None:
        """Do the work, in the thread. If anything fails, stop the cluster to free its slots."""
        try:
            self._cluster.wait_until_up()
            if self._data is not None:
                self._cluster.train(self._data, epochs=self._options.epochs or 1, **self._more)
            if self._to_the_end:
                self._cluster.wait()
        except Exception as error:
            self._cluster.stop()
            state = self._cluster.snapshot()
            if isinstance(error, ClusterClosed) and state.status is ClusterStatus.STOPPED and not state.error:
                return  # the feed ended early because the user stopped the cluster, and every main has returned
            if self._options.background and not state.error:
                self._view.say(f"{type(error).__name__}: {error}")
            raise


def _document() -> str:
    """Return the text of ``%%tfos_cluster?``, with the defaults of ``launch`` if it can be imported."""
    try:
        from tfos_nb.cluster import launch
    except ImportError:
        return describe()
    return describe(launch)


# IPython calls an object's getdoc() first, so the text is made only when it is read
vars(TfosMagics)["tfos_cluster"].getdoc = _document
