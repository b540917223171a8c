"""The view that keeps a rendering up to date while a cluster runs.

One daemon thread looks at the cluster twice a second and draws only what changed. What goes wrong while drawing is
logged and ends the view; it never reaches the training.
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
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.screens import LastLineScreen, NoScreen, Screen
from tfos_nb.widgets.text import WIDTH, render_text
from tfos_nb.widgets.words import wording

__all__ = ["LiveView", "NoScreen", "Observed", "Screen", "choose_screen", "show", "show_panel"]

_log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks: a page gets at most two messages a second."""

_DRAWN_WITHIN = 5.0  # seconds

REST, LONGEST_REST = 5, 5.0
"""After a look that took long the view rests so many times as long, and so many seconds at the most.

Of thousands of nodes it shows less often, and the driver has time for what they say.
"""


class Observed(Protocol):
    """What a view needs of a cluster."""

    def snapshot(self) -> ClusterState:
        """Return the cluster as it is now."""
        ...


def show(cluster: Observed, *, every_node: bool = True) -> None:
    """Show a cluster once, as it is now."""
    state = cluster.snapshot()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    text = render_text(state, every_node=every_node, width=width)
    if choose_rendering()[0] in ("widget", "html"):
        bundle = {"text/html": render_html(state, every_node=every_node), "text/plain": text}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(text + "\n")


def show_panel(cluster: Observed) -> None:
    """Show the live panel of a cluster again; of one that has ended, every node and the log as they were at its end.

    Where nothing can be kept up to date after the cell has returned, the cluster is shown once.
    """
    screen = choose_screen()
    if cluster.snapshot().status.ended or isinstance(screen, NoScreen) or not screen.outlives_cell:
        show(cluster)
        return
    with LiveView(cluster, screen=screen) as view:
        view.leave()


class LiveView:
    """Shows a cluster and keeps it up to date until it ends or the view is closed.

    Parameters
    ----------
    cluster : Observed
        Anything with ``snapshot()``.
    note : str
        A line below the table.
    screen : Screen, optional
        Where to draw; chosen by :func:`choose_screen` if not given.

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
        """Draw at once, then go on in the background."""
        self._draw()
        self._thread = threading.Thread(target=self._keep_drawing, name="tfos-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the view, unless it was left to go on and nothing went wrong."""
        if error is not None or not self._left:
            self.close()

    def follow(self, cluster: Observed) -> None:
        """Look at this cluster from now on: the plan has become one."""
        self._wire_stop(cluster)  # first: a page that shows the button may be pressed at once
        self._cluster = cluster
        self._draw()

    def say(self, note: str) -> None:
        """Put this line below the table."""
        self._note = note
        self._draw()

    def hint(self, hint: str) -> None:
        """Say, until the cluster ends, what can be done with it."""
        self._hint = hint
        self._draw()

    def leave(self) -> None:
        """Let the cell return while the cluster runs on; a screen that needs the cell then only tells the outcome."""
        self._left = True
        with self._drawing:
            if not self._screen.outlives_cell:
                self._screen = LastLineScreen(sys.stdout)
        shell = get_ipython()
        if shell is not None:
            shell.events.register("post_run_cell", self._at_cell_end)

    def _at_cell_end(self, _: object = None) -> None:
        """Draw a cluster's end within the cell that ended it: after the last cell a headless run listens no more."""
        if self._cluster.snapshot().status.ended:
            self.close()
        shell = get_ipython()
        if self.closed and shell is not None:
            with contextlib.suppress(ValueError):  # IPython's word for one that is not registered
                shell.events.unregister("post_run_cell", self._at_cell_end)

    def close(self) -> None:
        """Draw a last time and end the thread. Calling it again does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_DRAWN_WITHIN)  # what is drawn goes to a page that may not read
        self._draw()
        self._let_go()

    @property
    def closed(self) -> bool:
        """Whether nothing will be drawn any more."""
        return self._over.is_set()

    def _wire_stop(self, cluster: Observed) -> None:
        """Give the screen's Stop button what it calls; a plan that is no cluster yet has nothing to stop."""
        stop = getattr(cluster, "request_stop", None)
        self._screen.stop_with(stop)
        if stop is not None and self._screen.asks_by_http:
            _let_the_page_ask(cluster)

    def _let_go(self) -> None:
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
        """Draw the newest state; return whether it is the last one there will be."""
        with self._drawing:
            try:
                state = self._cluster.snapshot()
                hint = "" if state.status.ended else self._hint
                self._screen.draw(state, " · ".join(filter(None, (self._note, hint))), self._pace.left(state))
            except Exception:  # noqa: BLE001 - whatever a page, a pipe or a terminal does, the training goes on
                _log.warning("the display of the cluster failed and is switched off", exc_info=True)
                failed, self._screen = self._screen, NoScreen()
                with contextlib.suppress(Exception):  # what was drawn last stays, as HTML where it was a widget
                    failed.close()
                return True
            return state.status.ended


def _let_the_page_ask(cluster: Any) -> None:
    """Answer the page through the Jupyter server: it reaches a kernel that is busy with a cell."""
    try:
        from tfos_nb.jupyter.endpoint import the_endpoint  # here, since aiohttp comes with it

        the_endpoint().serve(cluster)
    except (ImportError, OSError, RuntimeError, TfosError):
        _log.warning("the page cannot ask the kernel by HTTP: Stop goes by the widget's own messages", exc_info=True)


class _StepRate:
    """Measures how fast the training goes, from the first progress seen on."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None

    def left(self, state: ClusterState) -> float | None:
        """Return the seconds that are left at the pace so far, once a twentieth of the way is measured."""
        total = wording.progress(state).total
        if total is None:
            return None
        if self._start is None or total < self._start[1]:
            self._start = (state.elapsed, total)
        time, share = state.elapsed - self._start[0], total - self._start[1]
        return None if share < 0.05 else (1 - total) * time / share
