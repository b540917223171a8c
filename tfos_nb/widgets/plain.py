"""Panel that needs only ipywidgets, if anywidget is missing or does not work: HTML, and a Stop button below it."""

from __future__ import annotations

from typing import Any

import ipywidgets

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.model import STOPPABLE, change_key
from tfos_nb.widgets.output import WidgetScreen, answer_on_any_shell

__all__ = ["PlainScreen"]


class PlainScreen(WidgetScreen):
    """Output of a notebook with HTML and a Stop button of ipywidgets."""

    def __init__(self) -> None:
        super().__init__()
        self._html: Any = None
        self._button: Any = None
        self._answer: Any = None
        self._shown = ""

    def make(self) -> list[Any]:
        """Make the HTML, the button, and the label for the answer."""
        self._html = ipywidgets.HTML()
        self._button = ipywidgets.Button(description="Stop", icon="stop")
        self._answer = ipywidgets.Label()
        self._button.on_click(self._press)
        row = ipywidgets.HBox([self._button, self._answer])
        return [ipywidgets.VBox([self._html, row]), row, self._html, self._button, self._answer]

    def change(self, state: ClusterState, note: str, left: float | None) -> None:
        """Write the HTML again if anything besides the times has changed."""
        shown = f"{self.stop is not None} {change_key(state, note=note, said=self.said)}"
        if shown == self._shown:
            return
        self._shown = shown
        self._html.value = render_html(state, note=note, left=left)
        self._answer.value = self.said
        self._button.layout.display = None if self.stop is not None and state.status in STOPPABLE else "none"
        if state.status is ClusterStatus.STOPPING:
            self._button.description = "Cancel now"
        answer_on_any_shell(self._button.comm)

    def _press(self, _: Any) -> None:
        """Ask the cluster to stop. The cluster treats a second press as a request to cancel."""
        self.press_stop()
        self._answer.value = self.said
        self._button.description = "Cancel now"
