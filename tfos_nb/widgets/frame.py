"""The widget that frames TensorBoard: ``frame.js`` finds the way from the page."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["Frame"]


class Frame(anywidget.AnyWidget):
    """TensorBoard of a cluster; ``other`` is a link for pages whose server has no extension, and opens once."""

    _esm = Path(__file__).with_name("frame.js")
    _css = Path(__file__).with_name("frame.css")
    cluster = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    log_dir = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int().tag(sync=True)
    other = traitlets.Unicode().tag(sync=True)
    advice = traitlets.Unicode().tag(sync=True)
