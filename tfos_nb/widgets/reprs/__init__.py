"""Displays of this package's objects at the end of a cell, as HTML and as text: see :mod:`tfos_nb.rich`.

The input is an object. The output is HTML and text by MIME type. It imports no Spark, no TensorFlow and no library of
charts. The HTML has no script and fetches nothing. Its style is that of the panel; if a host removes it, tables and
sentences remain. ``magics`` and ``widgets.runs`` import this package. :mod:`tfos_nb.rich` loads it by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tfos_nb.widgets.choice import choose_rendering
from tfos_nb.widgets.cluster_display import cluster_bundle, cluster_page
from tfos_nb.widgets.reprs.plans import plan_bundle, planned_state
from tfos_nb.widgets.reprs.records import saved_bundle, skipped_bundle
from tfos_nb.widgets.reprs.runs import run_bundle, runs_bundle
from tfos_nb.widgets.reprs.trainings import history_bundle

__all__ = ["RENDERINGS", "page_of", "plan_bundle", "planned_state", "rendered", "rendered_html", "runs_bundle"]

RENDERINGS: Mapping[str, Callable[[Any], dict[str, str]]] = {
    "cluster": cluster_bundle,
    "plan": plan_bundle,
    "history": history_bundle,
    "saved": saved_bundle,
    "skipped": skipped_bundle,
    "run": run_bundle,
    "runs": runs_bundle,
}
"""By the name that a class of :class:`tfos_nb.rich.Rich` has in ``_rich``."""


def rendered(name: str, thing: object) -> dict[str, str]:
    """Return an object by MIME type, with HTML only where ``TFOS_NB_PROGRESS`` or else the host wants it.

    Raises
    ------
    PlanError
        If ``TFOS_NB_PROGRESS`` has none of its values.
    """
    bundle = RENDERINGS[name](thing)
    if choose_rendering()[0] not in ("widget", "html"):
        del bundle["text/html"]
    return bundle


def rendered_html(name: str, thing: object) -> str | None:
    """Return an object as HTML; None if ``TFOS_NB_PROGRESS`` says that no HTML is wanted.

    The host is not considered: one that is not known, and has no IPython, may well show HTML.
    """
    if os.environ.get("TFOS_NB_PROGRESS", "").strip().lower() in ("text", "none"):
        return None
    return RENDERINGS[name](thing)["text/html"]


def page_of(name: str, thing: object) -> str:
    """Return an object as HTML for a file that others may read."""
    return cluster_page(thing) if name == "cluster" else RENDERINGS[name](thing)["text/html"]
