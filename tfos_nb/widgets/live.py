"""The view that keeps a rendering up to date while a cluster runs.

One daemon thread looks at the cluster twice a second and draws only what changed. What goes wrong while drawing is
logged and ends the view; it never reaches the training.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, TextIO

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from tfos_nb.errors import PlanError
from tfos_nb.state import ClusterState, NodeState
from tfos_nb.widgets import wording
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.text import WIDTH, render_text

__all__ = ["LiveView", "Observed", "Screen", "choose_screen", "show"]

_log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks: a page gets at most two messages a second."""

CHOICES = ("auto", "html", "text", "none")
"""What ``TFOS_NB_PROGRESS`` may be."""


class Observed(Protocol):
    """What a view needs of a cluster."""

    def snapshot(self) -> ClusterState:
        """Return the cluster as it is now."""
        ...


class Screen(Protocol):
    """Where a view draws.

    ``outlives_cell`` says whether it can still be drawn on when the cell that made it has returned.
    """

    outlives_cell: bool

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Bring what is shown up to date."""
        ...


class NotebookScreen:
    """An output of a notebook, replaced in place; its last content is what the saved file holds."""

    outlives_cell = True

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._shown = ""

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the HTML, with the text beside it for those who show no HTML."""
        html = render_html(state, note=note, left=left)
        if html == self._shown:
            return
        bundle = {"text/html": html, "text/plain": render_text(state, note=note, left=left)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)  # type: ignore[no-untyped-call]
        self._shown = html


class TerminalScreen:
    """A terminal: the table is drawn over itself."""

    outlives_cell = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Go up to the first line of the last drawing and write over it, clearing each line's rest."""
        width, height = shutil.get_terminal_size((WIDTH, 24))
        text = render_text(state, note=note, left=left)
        lines = [line[: width - 1] for line in text.splitlines()][: height - 1]  # a wrapped line would break the count
        if lines == self._lines:
            return
        up = f"\x1b[{len(self._lines)}F" if self._lines else ""
        body = "".join(f"{line}\x1b[K\n" for line in lines)
        self._stream.write(f"{up}{body}\x1b[J")
        self._stream.flush()
        self._lines = lines


class LogScreen:
    """A log file or a pipe: the table first and last, and between them a line for each new state or epoch."""

    outlives_cell = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: ClusterState | None = None
        self._note = ""
        self._ended = False

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Write what changed since the last drawing, if anything did."""
        lines = []
        if self._last is None or (state.status.ended and not self._ended):
            lines = render_text(state, note=note).splitlines()
        else:
            lines = _changes(self._last, state) + ([note] if note and note != self._note else [])
        self._last, self._note, self._ended = state, note, state.status.ended
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()


class LastLineScreen:
    """A prompt that the user types at: nothing but the outcome."""

    outlives_cell = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Say how it ended, once."""
        if state.status.ended and not self._told:
            self._told = True
            self._stream.write(f"\n{state.name}: {wording.sentence(state)}\n")
            self._stream.flush()


class NoScreen:
    """Nothing at all."""

    outlives_cell = True

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Do nothing."""


def choose_screen(environ: Mapping[str, str] | None = None, stream: TextIO | None = None) -> Screen:
    """Choose where to draw, by ``TFOS_NB_PROGRESS`` or by where the code runs.

    Raises
    ------
    PlanError
        If the variable has none of its four values.
    """
    out = stream or sys.stdout
    wanted = (os.environ if environ is None else environ).get("TFOS_NB_PROGRESS", "auto").strip().lower() or "auto"
    if wanted not in CHOICES:
        raise PlanError(f"TFOS_NB_PROGRESS={wanted}: it is one of {', '.join(CHOICES)}")
    if wanted == "none":
        return NoScreen()
    if wanted == "html" or (wanted == "auto" and _in_notebook()):
        return NotebookScreen()
    return TerminalScreen(out) if out.isatty() else LogScreen(out)


def show(cluster: Observed, *, every_node: bool = True) -> None:
    """Show a cluster once, as it is now."""
    state = cluster.snapshot()
    text = render_text(state, every_node=every_node)
    if isinstance(choose_screen(), NotebookScreen):
        bundle = {"text/html": render_html(state, every_node=every_node), "text/plain": text}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(text + "\n")


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
        self._pace = _Pace()
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._left = False
        self._thread: threading.Thread | None = None

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

    def close(self) -> None:
        """Draw a last time and end the thread. Calling it again does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._draw()

    @property
    def closed(self) -> bool:
        """Whether nothing will be drawn any more."""
        return self._over.is_set()

    def _keep_drawing(self) -> None:
        while not self._over.wait(PERIOD):
            if self._draw():
                self._over.set()

    def _draw(self) -> bool:
        """Draw the newest state; return whether it is the last one there will be."""
        with self._drawing:
            try:
                state = self._cluster.snapshot()
                hint = "" if state.status.ended else self._hint
                self._screen.draw(state, " · ".join(filter(None, (self._note, hint))), self._pace.left(state))
            except Exception:  # noqa: BLE001 - whatever a page, a pipe or a terminal does, the training goes on
                _log.warning("the display of the cluster failed and is switched off", exc_info=True)
                self._screen = NoScreen()
                return True
            return state.status.ended


class _Pace:
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


def _changes(before: ClusterState, now: ClusterState) -> list[str]:
    """Say what changed between two states, nodes with the same change in one line."""
    old = {node.node: node for node in before.nodes}
    said: dict[str, list[str]] = {}
    for node in now.nodes:
        change = _change(old.get(node.node), node)
        if change:
            said.setdefault(change, []).append(node.node)
    at = f"[{wording.duration(now.elapsed)}]"
    lines = [f"{at} {now.name}: {wording.cluster_word(now).lower()}"] if before.status is not now.status else []
    loss = dict(wording.progress(before).metrics).get("loss")
    for change, nodes in said.items():
        names = ", ".join(nodes) if len(nodes) <= 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
        so_far = f", loss {wording.number(loss)} so far" if change.startswith("epoch") and loss is not None else ""
        lines.append(f"{at} {names}: {change}{so_far}")
    return lines


def _change(old: NodeState | None, new: NodeState) -> str:
    if old is None or old.status is not new.status:
        where = f" on {new.host}" if new.host and (old is None or old.host != new.host) else ""
        return wording.node_word(new) + where
    if new.epoch is not None and old.epoch != new.epoch:
        return f"epoch {new.epoch} of {new.epochs}" if new.epochs else f"epoch {new.epoch}"
    return ""


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs us, rather than a terminal or a script."""
    shell = get_ipython()
    return shell is not None and bool(shell.has_trait("kernel"))
