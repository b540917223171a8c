"""Outputs on which a cluster can be drawn without widgets: a notebook's output, a terminal, a log."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TextIO

from IPython.display import DisplayHandle, clear_output, display

from tfos_nb.state.cluster_state import ClusterState, NodeState
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.text import WIDTH, render_text
from tfos_nb.widgets.words import terminal, wording

__all__ = [
    "ClearingScreen",
    "LastLineScreen",
    "LogScreen",
    "NoScreen",
    "NotebookScreen",
    "Screen",
    "TerminalScreen",
    "snapshot_bundle",
]


class Screen(ABC):
    """Output that a view draws on.

    ``outlives_cell`` says whether a view can still draw on it after the cell that made it has returned.
    ``asks_by_http`` says whether it has a page that sends requests to the kernel through the Jupyter server.
    """

    outlives_cell = True
    asks_by_http = False

    @abstractmethod
    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Show the state."""

    def stop_with(self, stop: Callable[[], str] | None) -> None:  # noqa: B027 - most screens have no button
        """Set the function that a Stop button calls. It must return at once, with a line that says what happens."""

    def draw_curves_with(self, curves: Callable[..., dict[str, Any]] | None) -> None:  # noqa: B027 - nor a chart
        """Set the function that gives a chart's numbers, for keywords ``metric``, ``by`` and ``node``."""

    def show_stacks_with(self, stacks: Callable[[], dict[str, str]] | None) -> None:  # noqa: B027 - nor stacks
        """Set the function that gives the nodes' stacks. It may take some seconds."""

    def close(self) -> None:  # noqa: B027 - most screens hold nothing
        """Free the screen's resources; its content stays. Nothing is drawn afterwards."""


def snapshot_bundle(state: ClusterState, note: str, left: float | None) -> dict[str, str]:
    """Return a cluster as a static output by MIME type: HTML, and text for clients that show no HTML."""
    return {
        "text/html": render_html(state, note=note, left=left),
        "text/plain": render_text(state, note=note, left=left),
    }


class NotebookScreen(Screen):
    """Output of a notebook that is updated in place. The saved file has its last content.

    Parameters
    ----------
    handle : DisplayHandle, optional
        An existing output. Default: a new one.
    """

    def __init__(self, handle: DisplayHandle | None = None) -> None:
        self._handle = handle
        self._shown = ""

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the HTML, with text for clients that show no HTML."""
        bundle = snapshot_bundle(state, note, left)
        if bundle["text/html"] == self._shown:
            return
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)  # type: ignore[no-untyped-call]
        self._shown = bundle["text/html"]


class ClearingScreen(Screen):
    """Output of a host that can replace it only by clearing all outputs of the running cell (Zeppelin)."""

    outlives_cell = False

    def __init__(self) -> None:
        self._shown = ""

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the HTML. The host clears the old output when the new one arrives."""
        bundle = snapshot_bundle(state, note, left)
        if bundle["text/html"] == self._shown:
            return
        clear_output(wait=True)  # type: ignore[no-untyped-call]
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        self._shown = bundle["text/html"]


class TerminalScreen(Screen):
    """Terminal, in which each drawing overwrites the last one."""

    outlives_cell = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Move up to the first line of the last drawing, and overwrite it."""
        width, height = shutil.get_terminal_size((WIDTH, 24))
        text = render_text(state, note=note, left=left, width=width - 1)  # the terminal wraps a line of full width
        # If a line wrapped, the number of lines to move up would be wrong.
        lines = [terminal.fit(line, width - 1) for line in text.splitlines()][: height - 1]
        if lines == self._lines:
            return
        up = f"\x1b[{len(self._lines)}F" if self._lines else ""
        body = "".join(f"{line}\x1b[K\n" for line in lines)
        self._stream.write(f"{up}{body}\x1b[J")
        self._stream.flush()
        self._lines = lines


class LogScreen(Screen):
    """Log file or pipe: the table at the start and at the end, and a line for each new state or epoch between them."""

    outlives_cell = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: ClusterState | None = None
        self._note = ""
        self._ended = False

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Write the changes since the last drawing, if there are any."""
        lines = []
        if self._last is None or (state.status.ended and not self._ended):
            lines = render_text(state, note=note).splitlines()
        else:
            lines = _changes(self._last, state) + ([note] if note and note != self._note else [])
        self._last, self._note, self._ended = state, note, state.status.ended
        if lines:
            self._stream.write("".join(f"{terminal.plain(line)}\n" for line in lines))
            self._stream.flush()


class LastLineScreen(Screen):
    """Terminal at whose prompt the user may be typing: only the outcome is written."""

    outlives_cell = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Write the outcome once, when the cluster has ended."""
        if state.status.ended and not self._told:
            self._told = True
            said = terminal.plain(f"{state.name}: {wording.sentence(state)}")
            self._stream.write(f"\n{said}\n")
            self._stream.flush()


class NoScreen(Screen):
    """Screen that shows nothing."""

    outlives_cell = True

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Do nothing."""


def _changes(before: ClusterState, now: ClusterState) -> list[str]:
    """Return lines about the changes between two states, with one line for all nodes that have the same change."""
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
