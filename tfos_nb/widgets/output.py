"""An output that is a widget while the cluster runs, and static HTML from its end on.

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
"""So many clusters that have ended keep their widgets."""

_ended: deque[list[Any]] = deque()


class WidgetScreen(Screen):
    """A widget that is shown once, changed while the cluster runs, and replaced by static HTML when it has ended."""

    def __init__(self) -> None:
        self.widgets: list[Any] = []
        """What has to be closed; the first of them is the one that is shown. Empty before and after."""
        self.stop: Callable[[], str] | None = None
        self.said = ""
        """What the cluster answered to the last press of the Stop button."""
        self._handle: DisplayHandle | None = None
        self._static: NotebookScreen | None = None
        self._last: tuple[ClusterState, str, float | None] | None = None

    @abstractmethod
    def make(self) -> list[Any]:
        """Make the widgets; the first of them is the one to show."""

    @abstractmethod
    def change(self, state: ClusterState, note: str, left: float | None) -> None:
        """Bring the widgets up to date, if a reader would see a difference."""

    def stop_with(self, stop: Callable[[], str] | None) -> None:
        """Take what the Stop button calls."""
        self.stop = stop

    def draw(self, state: ClusterState, note: str, left: float | None) -> None:
        """Show the widget the first time, change it from then on, and put HTML in its place at the end."""
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
        """Show the end, and put static HTML in the widget's place: nobody will bring it up to date any more.

        A page that was loaded anew while the cluster ran does not know the output as one that can be replaced. There
        the widget has the end in it, and JupyterLab's page puts the HTML in its place by itself.
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
            _let_go(_ended.popleft())

    def show_last(self, state: ClusterState, note: str, left: float | None) -> None:
        """Bring the widgets up to date a last time."""
        self.change(state, note, left)

    def press_stop(self) -> None:
        """Ask the cluster to stop, or tell why that cannot be; called by the page, in whatever thread."""
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


def _let_go(widgets: list[Any]) -> None:
    while widgets:
        widget = widgets.pop()
        for part in (widget, *(getattr(widget, name, None) for name in ("layout", "style"))):
            if part is not None:  # a widget does not close the ones that it has made for its looks
                part.close()


def answer_on_any_shell(comm: Any) -> None:
    """Let the page's messages come in while a cell runs.

    ipykernel 7.4 hands a widget's messages to the shell that last published on its comm: to the main shell, which is
    busy while a cell runs. Without its record of that, they go to the subshell that the page has sent them to.
    """
    with contextlib.suppress(AttributeError):
        del comm._reply_subshell_id
