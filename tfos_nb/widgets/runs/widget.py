"""The widget of the table of runs. ``runs.js`` shows the data of :mod:`tfos_nb.widgets.runs.data`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from tfos_nb.errors import TfosError
from tfos_nb.records.runs import Runs
from tfos_nb.widgets.charts.esm import joined
from tfos_nb.widgets.output import answer_on_any_shell
from tfos_nb.widgets.runs.data import answer, page_model

__all__ = ["RunsTable", "RunsWidget"]

_log = logging.getLogger(__name__)

KEPT = 3
"""Number of tables whose runs stay in memory. An older one reads its directory again when its page asks."""

_newest: deque[RunsTable] = deque()


class RunsWidget(anywidget.AnyWidget):
    """The table's widget. Its one dictionary is enough for a reloaded page to show the rows again."""

    _esm = joined("runs.js")
    _css = joined("panel.css") + joined("chart.css") + joined("runs.css")
    table = traitlets.Dict().tag(sync=True)


class RunsTable:
    """Table of a directory's runs in a page, which asks for curves, or to have the directory read again.

    Parameters
    ----------
    read : callable
        Returns the runs of the directory as they are now.
    runs : Runs
        Those to begin with.
    """

    def __init__(self, read: Callable[[], Runs], runs: Runs) -> None:
        self._read = read
        self._runs: Runs | None = runs
        self.widget = RunsWidget()
        self._send()
        self.widget.on_msg(self._hear)
        answer_on_any_shell(self.widget.comm)
        self._keep()

    def forget(self) -> None:
        """Free the memory of the runs."""
        self._runs = None

    def _keep(self) -> None:
        if self in _newest:
            _newest.remove(self)
        _newest.append(self)
        while len(_newest) > KEPT:
            _newest.popleft().forget()

    def _send(self) -> None:
        self.widget.table = {**page_model(self._known()), "widget": self.widget.model_id}

    def _known(self) -> Runs:
        if self._runs is None:
            self._runs = self._read()
            self._keep()
        return self._runs

    def _hear(self, widget: RunsWidget, content: Any, buffers: Any) -> None:
        """Handle a message of the page."""
        if not isinstance(content, dict) or content.get("kind") not in ("curves", "refresh"):
            return
        try:
            data = self._curves(content) if content["kind"] == "curves" else self._refresh()
        except TfosError as error:
            data = {"message": f"{error}"}
        except Exception as error:  # noqa: BLE001 - a widget's callbacks swallow what they raise; the page waits for it
            _log.warning("the page asked for something of the runs that could not be given", exc_info=True)
            data = {"message": f"The runs could not be read: {type(error).__name__}: {error}"}
        widget.send({"kind": content["kind"], "asked": content.get("asked"), "data": data})
        answer_on_any_shell(widget.comm)

    def _curves(self, question: dict[str, Any]) -> dict[str, Any]:
        ids = question.get("runs")
        chosen = [str(run) for run in ids] if isinstance(ids, list) else []
        return answer(self._known(), chosen, str(question.get("metric") or ""), str(question.get("by") or ""))

    def _refresh(self) -> dict[str, Any]:
        self._runs = self._read()
        self._keep()
        self._send()
        return {}
