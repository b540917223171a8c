"""Outputs on which a cluster can be drawn without widgets: a notebook's output, a terminal, a log."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TextIO

from IPython.display import DisplayHandle, clear_output, display

from tfos_nb.state.cluster_state import ClusterState, NodeState
from tfos_nb.widgets import terminal
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.text import WIDTH, render_text
from tfos_nb.widgets.words import wording

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

    ``outlives_cell`` says whether it can still be drawn on after the cell that made it has returned. ``asks_by_http``
    says whether it has a page that sends requests to the kernel through the Jupyter server.
    """

    outlives_cell = True
    asks_by_http = False

    @abstractmethod
    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Bring what is shown up to date."""

    def stop_with(self, stop: Callable[[], str] | None) -> None:  # noqa: B027 - most screens have no button
        """Take what a Stop button calls: it returns at once and says what happens now."""

    def close(self) -> None:  # noqa: B027 - most screens hold nothing
        """Let go of what the screen holds; what it shows stays. Nothing is drawn after it."""


def snapshot_bundle(state: ClusterState, note: str, left: float | None) -> dict[str, str]:
    """Return a cluster as a static output, by MIME: HTML, and text for those who show no HTML."""
    return {
        "text/html": render_html(state, note=note, left=left),
        "text/plain": render_text(state, note=note, left=left),
    }


class NotebookScreen(Screen):
    """An output of a notebook, replaced in place; its last content is what the saved file holds.

    Parameters
    ----------
    handle : DisplayHandle, optional
        An output that is there already; a new one if not given.
    """

    def __init__(self, handle: DisplayHandle | None = None) -> None:
        self._handle = handle
        self._shown = ""

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the HTML, with the text beside it for those who show no HTML."""
        bundle = snapshot_bundle(state, note, left)
        if bundle["text/html"] == self._shown:
            return
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)  # type: ignore[no-untyped-call]
        self._shown = bundle["text/html"]


class ClearingScreen(Screen):
    """An output of a host that can replace it only by clearing all that the running cell has shown (Zeppelin)."""

    outlives_cell = False

    def __init__(self) -> None:
        self._shown = ""

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the HTML; the host clears the old one when the new one is there."""
        bundle = snapshot_bundle(state, note, left)
        if bundle["text/html"] == self._shown:
            return
        clear_output(wait=True)  # type: ignore[no-untyped-call]
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        self._shown = bundle["text/html"]


class TerminalScreen(Screen):
    """A terminal: the table is drawn over itself."""

    outlives_cell = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Go up to the first line of the last drawing and write over it, clearing each line's rest."""
        width, height = shutil.get_terminal_size((WIDTH, 24))
        text = render_text(state, note=note, left=left, width=width - 1)  # the terminal wraps a full one
        # A line that wraps would break the count of those to go up.
        lines = [terminal.fit(line, width - 1) for line in text.splitlines()][: height - 1]
        if lines == self._lines:
            return
        up = f"\x1b[{len(self._lines)}F" if self._lines else ""
        body = "".join(f"{line}\x1b[K\n" for line in lines)
        self._stream.write(f"{up}{body}\x1b[J")
        self._stream.flush()
        self._lines = lines


class LogScreen(Screen):
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
            self._stream.write("".join(f"{terminal.plain(line)}\n" for line in lines))
            self._stream.flush()


class LastLineScreen(Screen):
    """A prompt that the user types at: nothing but the outcome."""

    outlives_cell = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Say how it ended, once."""
        if state.status.ended and not self._told:
            self._told = True
            said = terminal.plain(f"{state.name}: {wording.sentence(state)}")
            self._stream.write(f"\n{said}\n")
            self._stream.flush()


class NoScreen(Screen):
    """Nothing at all."""

    outlives_cell = True

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Do nothing."""


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
