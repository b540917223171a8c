"""View that keeps a rendering up to date while a cluster runs.

One daemon thread reads the cluster's state twice a second and draws only changes. An error while drawing is logged and
ends the view; it never affects the training.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from IPython.core.getipython import get_ipython
from IPython.display import display

from tfos_nb.errors import TfosError
from tfos_nb.state.cluster_state import ClusterState
from tfos_nb.widgets.choice import choose_rendering, choose_screen
from tfos_nb.widgets.cluster_display import cluster_bundle
from tfos_nb.widgets.screens import LastLineScreen, NoScreen, Screen
from tfos_nb.widgets.text import WIDTH
from tfos_nb.widgets.words import wording

__all__ = ["LiveView", "NoScreen", "Observed", "Screen", "choose_screen", "show", "show_bundle", "show_panel"]

_log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two updates: a page gets at most two messages per second."""

_DRAWN_WITHIN = 5.0  # seconds

REST, LONGEST_REST = 5, 5.0
"""After a slow update the view waits this many times as long as the update took, at most this many seconds.

So thousands of nodes are shown less often, and the driver has time for their messages.
"""


class Observed(Protocol):
    """Interface of a cluster that a view can show."""

    def snapshot(self) -> ClusterState:
        """Return the cluster's current state."""
        ...


def show(cluster: Observed, *, every_node: bool = True) -> None:
    """Show a cluster's current state once."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    show_bundle(cluster_bundle(cluster, every_node=every_node, width=width))


def show_bundle(bundle: dict[str, str]) -> None:
    """Show HTML where the host shows it; elsewhere write the text."""
    if choose_rendering()[0] in ("widget", "html"):
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(bundle["text/plain"] + "\n")


def show_panel(cluster: Observed) -> None:
    """Show the live panel of a cluster again. If the cluster has ended, show every node and the log at its end.

    If an output cannot be updated after its cell has returned, the cluster is shown once.
    """
    screen = choose_screen()
    if cluster.snapshot().status.ended or isinstance(screen, NoScreen) or not screen.outlives_cell:
        show(cluster)
        return
    with LiveView(cluster, screen=screen) as view:
        view.leave()


class LiveView:
    """Show a cluster, and keep the display up to date until the cluster ends or the view is closed.

    Parameters
    ----------
    cluster : Observed
        Any object with ``snapshot()``.
    note : str
        A line below the table.
    screen : Screen, optional
        The screen to draw on. Default: chosen by :func:`choose_screen`.

    Examples
    --------
    >>> with LiveView(cluster):  # doctest: +SKIP
    ...     cluster.wait()
    """

    def __init__(self, cluster: Observed, *, note: str = "", screen: Screen | None = None) -> None:
        self._cluster = cluster
        self._note, self._hint = note, ""
        self._screen = choose_screen() if screen is None else screen
        self._pace = _StepRate()
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._left = False
        self._thread: threading.Thread | None = None
        self._wire_stop(cluster)

    def __enter__(self) -> LiveView:
        """Draw at once, then continue in the background."""
        self._draw()
        self._thread = threading.Thread(target=self._keep_drawing, name="tfos-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the view, unless :meth:`leave` was called and no error was raised."""
        if error is not None or not self._left:
            self.close()

    def follow(self, cluster: Observed) -> None:
        """Show this cluster from now on, instead of its plan."""
        self._wire_stop(cluster)  # first, because the user may press the button as soon as it is shown
        self._cluster = cluster
        self._draw()

    def say(self, note: str) -> None:
        """Show a line below the table."""
        self._note = note
        self._draw()

    def hint(self, hint: str) -> None:
        """Show a hint to the user below the table until the cluster ends."""
        self._hint = hint
        self._draw()

    def leave(self) -> None:
        """Let the cell return while the cluster continues. A screen that needs the cell then only shows the outcome."""
        self._left = True
        with self._drawing:
            if not self._screen.outlives_cell:
                self._screen = LastLineScreen(sys.stdout)
        shell = get_ipython()
        if shell is not None:
            shell.events.register("post_run_cell", self._at_cell_end)

    def _at_cell_end(self, _: object = None) -> None:
        """Draw a cluster's end during the cell that ended it: a headless run ignores output after the last cell."""
        if self._cluster.snapshot().status.ended:
            self.close()
        shell = get_ipython()
        if self.closed and shell is not None:
            with contextlib.suppress(ValueError):  # raised by IPython if the callback is not registered
                shell.events.unregister("post_run_cell", self._at_cell_end)

    def close(self) -> None:
        """Draw a last time and end the thread. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_DRAWN_WITHIN)  # limited, because the thread may be writing to a page that does not read
        self._draw()
        self._close_screen()

    @property
    def closed(self) -> bool:
        """Whether the view is closed, so that it draws no more."""
        return self._over.is_set()

    def _wire_stop(self, cluster: Observed) -> None:
        """Set the function of the screen's Stop button; None for a plan, which has nothing to stop."""
        stop = getattr(cluster, "request_stop", None)
        self._screen.stop_with(stop)
        self._screen.draw_curves_with(getattr(cluster, "curves", None))
        self._screen.show_stacks_with(getattr(cluster, "stacks", None))
        if stop is not None and self._screen.asks_by_http:
            _let_the_page_ask(cluster)

    def _close_screen(self) -> None:
        with self._drawing:
            try:
                self._screen.close()
            except Exception:  # noqa: BLE001 - as with drawing
                _log.warning("the display of the cluster could not be closed", exc_info=True)

    def _keep_drawing(self) -> None:
        took = 0.0
        while not self._over.wait(max(PERIOD, min(REST * took, LONGEST_REST))):
            began = time.thread_time()
            if self._draw():
                self._over.set()
            took = time.thread_time() - began

    def _draw(self) -> bool:
        """Draw the newest state; return whether nothing more will be drawn."""
        with self._drawing:
            try:
                state = self._cluster.snapshot()
                hint = "" if state.status.ended else self._hint
                self._screen.draw(state, " · ".join(filter(None, (self._note, hint))), self._pace.left(state))
            except Exception:  # noqa: BLE001 - whatever a page, a pipe or a terminal does, the training goes on
                _log.warning("the display of the cluster failed and is switched off", exc_info=True)
                failed, self._screen = self._screen, NoScreen()
                with contextlib.suppress(Exception):  # the last drawing stays; a widget is replaced by HTML
                    failed.close()
                return True
            return state.status.ended


def _let_the_page_ask(cluster: Any) -> None:
    """Answer the page's requests through the Jupyter server, which also works while a cell blocks the kernel."""
    try:
        from tfos_nb.jupyter.endpoint import the_endpoint  # here, since it imports aiohttp

        the_endpoint().serve(cluster)
    except (ImportError, OSError, RuntimeError, TfosError):
        _log.warning("the page cannot ask the kernel by HTTP: Stop goes by the widget's own messages", exc_info=True)


class _StepRate:
    """Measure the speed of the training, from its first known progress on."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None

    def left(self, state: ClusterState) -> float | None:
        """Return the remaining seconds at the measured speed; None until 5 % of the training was measured."""
        total = wording.progress(state).total
        if total is None:
            return None
        if self._start is None or total < self._start[1]:
            self._start = (state.elapsed, total)
        time, share = state.elapsed - self._start[0], total - self._start[1]
        return None if share < 0.05 else (1 - total) * time / share
