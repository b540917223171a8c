"""Output that is a widget while the cluster runs, and static HTML after its end.

The first output contains the widget, the HTML and the text. A reopened notebook shows an error for a widget whose
kernel has ended, even if the output has HTML too. So at the end the output is replaced by one without the widget.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from IPython.display import DisplayHandle, display

from tfos_nb.state.cluster_state import ClusterState
from tfos_nb.widgets.screens import NotebookScreen, Screen, snapshot_bundle

__all__ = ["WidgetScreen", "answer_on_any_shell"]

_log = logging.getLogger(__name__)


KEPT = 8
"""Number of ended clusters whose widgets are kept."""

_ended: deque[list[Any]] = deque()


class WidgetScreen(Screen):
    """Screen with a widget that is shown once, updated while the cluster runs, and then replaced by static HTML."""

    def __init__(self) -> None:
        self.widgets: list[Any] = []
        """The widgets to close; the first one is shown. Empty before the first drawing and after the end."""
        self.stop: Callable[[], str] | None = None
        self.curves: Callable[..., dict[str, Any]] | None = None
        self.stacks: Callable[[], dict[str, str]] | None = None
        self.said = ""
        """The cluster's answer to the last press of the Stop button."""
        self._handle: DisplayHandle | None = None
        self._static: NotebookScreen | None = None
        self._last: tuple[ClusterState, str, float | None] | None = None

    @abstractmethod
    def make(self) -> list[Any]:
        """Make and return the widgets, with the one to show first."""

    @abstractmethod
    def change(self, state: ClusterState, note: str, left: float | None) -> None:
        """Update the widgets if the user would see a difference."""

    def stop_with(self, stop: Callable[[], str] | None) -> None:
        """Set the function that the Stop button calls."""
        self.stop = stop

    def draw_curves_with(self, curves: Callable[..., dict[str, Any]] | None) -> None:
        """Set the function that gives a chart's numbers."""
        self.curves = curves

    def show_stacks_with(self, stacks: Callable[[], dict[str, str]] | None) -> None:
        """Set the function that gives the nodes' stacks."""
        self.stacks = stacks

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Show the widget the first time, update it later, and replace it by HTML at the cluster's end."""
        self._last = (state, note, left)
        if self._static is not None:
            self._static.draw(state, note, left)
        elif state.status.ended:
            self.close()
        elif self._handle is None:
            self.widgets = self.make()
            self.change(state, note, left)
            self._display(state, note, left)
        else:
            self.change(state, note, left)

    def close(self) -> None:
        """Show the last state, and replace the widget by static HTML, because it will not be updated any more.

        A page that was reloaded while the cluster ran cannot replace the output. So the widget itself has the HTML too,
        and in JupyterLab its script puts the HTML in its place.
        """
        if self._last is not None and self._static is None:
            if self.widgets:
                self.show_last(*self._last)
            self._static = NotebookScreen(self._handle)
            self._static.draw(*self._last)
        if self.widgets:
            _ended.append(self.widgets)
            self.widgets = []
        while len(_ended) > KEPT:
            _close(_ended.popleft())

    def show_last(self, state: ClusterState, note: str, left: float | None) -> None:
        """Update the widgets for the last time."""
        self.change(state, note, left)

    def press_stop(self) -> None:
        """Ask the cluster to stop, and set :attr:`said` to its answer or the reason why it cannot be stopped.

        The page's message calls it, in any thread.
        """
        if self.stop is None:
            self.said = "This cluster cannot be stopped from here: interrupt the cell, or run %tfos_stop."
            return
        try:
            self.said = str(self.stop() or "")
        except Exception as error:  # noqa: BLE001 - a widget's callbacks swallow what they raise; the user must see it
            _log.warning("the cluster could not be asked to stop", exc_info=True)
            self.said = f"The cluster could not be asked to stop: {type(error).__name__}: {error}"

    def _display(self, state: ClusterState, note: str, left: float | None) -> None:
        made = self.widgets[0]._repr_mimebundle_()
        data, metadata = made if isinstance(made, tuple) else (made, {})  # Colab needs the metadata
        bundle = {**data, **snapshot_bundle(state, note, left)}
        self._handle = display(bundle, metadata=metadata, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _close(widgets: list[Any]) -> None:
    while widgets:
        widget = widgets.pop()
        for part in (widget, *(getattr(widget, name, None) for name in ("layout", "style"))):
            if part is not None:  # a widget does not close its own layout and style widgets
                part.close()


def answer_on_any_shell(comm: Any) -> None:
    """Let the page's messages arrive while a cell runs.

    ipykernel 7.4 passes a widget's messages to the shell that last published on its comm. That is the main shell, which
    is busy while a cell runs. If its record of that shell is deleted, messages go to the subshell to which the page has
    sent them.
    """
    with contextlib.suppress(AttributeError):
        del comm._reply_subshell_id
