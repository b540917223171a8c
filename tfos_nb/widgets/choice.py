"""Choose a screen by the user's setting, by the environment in which the code runs, and by the installed widgets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from tfos_nb.errors import PlanError
from tfos_nb.widgets.hosts import Host, detect_host
from tfos_nb.widgets.screens import ClearingScreen, LogScreen, NoScreen, NotebookScreen, Screen, TerminalScreen

__all__ = ["CHOICES", "choose_rendering", "choose_screen"]

CHOICES = ("auto", "widget", "html", "text", "none")
"""Allowed values of ``TFOS_NB_PROGRESS``."""


def choose_rendering(environ: Mapping[str, str] | None = None, host: Host | None = None) -> tuple[str, Host]:
    """Choose the rendering by ``TFOS_NB_PROGRESS`` or by the environment in which the code runs.

    Returns
    -------
    str, Host
        ``widget``, ``html``, ``text`` or ``none``, and the environment.

    Raises
    ------
    PlanError
        If the variable has none of its five values.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("TFOS_NB_PROGRESS", "").strip().lower() or "auto"
    if wanted not in CHOICES:
        raise PlanError(f"TFOS_NB_PROGRESS must be one of {', '.join(CHOICES)}, got {wanted}")
    host = detect_host(environ) if host is None else host
    if wanted == "auto":
        wanted = "html" if host.rendering == "widget" and host.headless else host.rendering
    return wanted, host


def choose_screen(environ: Mapping[str, str] | None = None, stream: TextIO | None = None) -> Screen:
    """Return the screen to draw on: see :func:`choose_rendering`."""
    out = stream or sys.stdout
    rendering, host = choose_rendering(environ)
    if rendering == "none":
        return NoScreen()
    if rendering == "widget":
        return _widget_screen(anywidget=host.name != "databricks")
    if rendering == "html":
        return ClearingScreen() if host.replaces_by_clearing else NotebookScreen()
    return TerminalScreen(out) if out.isatty() else LogScreen(out)


def _widget_screen(*, anywidget: bool) -> Screen:
    """Return the best screen whose widgets can be imported; if none can, the screen with HTML."""
    if anywidget:
        with contextlib.suppress(ImportError):
            from tfos_nb.widgets.panel import PanelScreen

            return PanelScreen()
    with contextlib.suppress(ImportError):
        from tfos_nb.widgets.plain import PlainScreen

        return PlainScreen()
    return NotebookScreen()
