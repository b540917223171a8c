"""Show the recorded runs of a directory: as a widget where the host has widgets, else as a static table."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from IPython.display import display

from tfos_nb.records.runs import Runs, runs
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.widgets.choice import choose_rendering
from tfos_nb.widgets.live import show_bundle
from tfos_nb.widgets.reprs import runs_bundle

__all__ = ["show_runs"]


def show_runs(directory: str | None = None) -> None:
    """Show the runs of a directory.

    Parameters
    ----------
    directory : str, optional
        As in :func:`tfos_nb.runs`.

    Raises
    ------
    PlanError
        If the directory does not exist, or is a file.
    Unreachable
        If its store does not answer.
    """
    if directory is not None:
        directory = absolute(directory)  # the notebook may go elsewhere before a refresh
    found = runs(directory)
    rendering, host = choose_rendering()
    if rendering == "widget" and host.name != "databricks":
        with contextlib.suppress(ImportError):
            _show_widget(directory, found)
            return
    show_bundle(runs_bundle(found))


def _show_widget(directory: str | None, found: Runs) -> None:
    from tfos_nb.widgets.runs.widget import RunsTable  # here, since anywidget may be missing

    made: Any = RunsTable(partial(runs, directory), found).widget._repr_mimebundle_()
    data, metadata = made if isinstance(made, tuple) else (made, {})  # Colab needs the metadata
    display({**data, **runs_bundle(found)}, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]
