"""Show a cluster as text, HTML or a widget, and keep the view up to date while the cluster runs.

The input is snapshots of a cluster, or recorded runs. The output is text, HTML and widgets in the notebook. ``magics``
and ``pipeline`` import this package.
"""

from __future__ import annotations

from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.live import LiveView, show, show_panel
from tfos_nb.widgets.text import render_text

__all__ = ["LiveView", "render_html", "render_text", "show", "show_panel"]
