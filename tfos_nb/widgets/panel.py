"""The live panel in a notebook. ``panel.js`` shows the data of a cluster from :mod:`tfos_nb.widgets.model`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from tfos_nb.errors import TfosError
from tfos_nb.state.cluster_state import ClusterState
from tfos_nb.widgets.charts.esm import joined
from tfos_nb.widgets.model import key_of, page_model
from tfos_nb.widgets.output import WidgetScreen, answer_on_any_shell
from tfos_nb.widgets.screens import snapshot_bundle

__all__ = ["Panel", "PanelScreen"]

_log = logging.getLogger(__name__)

KEEP_ALIVE = 5.0
"""Seconds after which the page gets a message even if only times have changed, which the page counts itself."""

AT_MOST_EVERY = 0.5
"""Minimum seconds between two messages. An earlier change waits for the view's next update."""


class Panel(anywidget.AnyWidget):
    """The panel's widget. Its one dictionary is enough for a reloaded page to show everything again."""

    _esm = joined("panel.js")
    _css = joined("panel.css") + joined("chart.css")
    cluster = traitlets.Dict().tag(sync=True)
    outcome = traitlets.Dict().tag(sync=True)
    """Output by MIME type, by which a reloaded page replaces the panel after the cluster has ended."""


class PanelScreen(WidgetScreen):
    """Output of a notebook that is the live panel while the cluster runs.

    Parameters
    ----------
    clock : callable, optional
        Returns the time in seconds, like :func:`time.monotonic`.
    """

    asks_by_http = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._shown = ""
        self._sent = float("-inf")

    def make(self) -> list[Any]:
        """Make the panel, and register the callback of its button."""
        panel = Panel()
        panel.on_msg(self._hear)
        answer_on_any_shell(panel.comm)
        return [panel]

    def change(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the state if anything has changed besides the times, which the page counts itself."""
        quiet = self._clock() - self._sent
        if quiet < AT_MOST_EVERY:
            return
        stoppable = self.stop is not None or bool(state.id)
        data = page_model(state, note=note, left=left, said=self.said, stoppable=stoppable)
        shown = f"{stoppable} {key_of(data)}"
        if quiet < KEEP_ALIVE and shown == self._shown:
            return
        (panel,) = self.widgets
        panel.cluster = {**data, "widget": panel.model_id}
        answer_on_any_shell(panel.comm)
        self._shown, self._sent = shown, self._clock()

    def show_last(self, state: ClusterState, note: str, left: float | None) -> None:
        """Send the last state, even if another message was sent a moment ago."""
        self._sent = float("-inf")
        self._shown = ""
        super().show_last(state, note, left)
        self.widgets[0].outcome = snapshot_bundle(state, note, left)

    def _hear(self, panel: Panel, content: Any, buffers: Any) -> None:
        """Handle a message of the page."""
        if not isinstance(content, dict):
            return
        if content.get("kind") == "stop":
            self.press_stop()
        elif content.get("kind") == "curves":
            self._answer(panel, content, self._chart(content))
        elif content.get("kind") == "stacks":
            self._answer(panel, content, self._take_stacks())

    def _answer(self, panel: Panel, content: dict[str, Any], data: dict[str, Any]) -> None:
        panel.send({"kind": content["kind"], "asked": content.get("asked"), "data": data})
        answer_on_any_shell(panel.comm)

    def _take_stacks(self) -> dict[str, Any]:
        """Return the nodes' stacks, or a message if there are none."""
        try:
            return {"stacks": self.stacks()} if self.stacks is not None else {"message": "This cluster has no stacks."}
        except Exception as error:  # noqa: BLE001 - as with a chart
            if not isinstance(error, TfosError):
                _log.warning("the page asked for stacks that could not be taken", exc_info=True)
            return {"message": str(error)}

    def _chart(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a chart, or a message if there are none."""
        asked = {name: str(question.get(name) or "") for name in ("metric", "by", "node")}
        try:
            if self.curves is None:
                return {"message": "This cluster has no curves."}
            return self.curves(**asked)
        except Exception as error:  # noqa: BLE001 - a widget's callbacks swallow what they raise; the page waits for it
            _log.warning("the page asked for a chart that could not be made", exc_info=True)
            return {"message": f"The chart could not be made: {type(error).__name__}: {error}"}
