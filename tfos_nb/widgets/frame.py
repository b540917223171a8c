"""Widget that shows TensorBoard in a frame. ``frame.js`` finds an address that the page can reach."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["Frame"]


class Frame(anywidget.AnyWidget):
    """Widget with the TensorBoard of a cluster.

    ``proxied`` and ``local`` are addresses of the kernel's port, for pages whose server has no extension.
    ``access_links`` are appended to these addresses, one for the frame and one for the link beside it; each works once.
    ``widget`` is the widget's own id, which identifies it in a saved notebook.
    """

    _esm = Path(__file__).with_name("frame.js")
    _css = Path(__file__).with_name("frame.css")
    widget = traitlets.Unicode().tag(sync=True)
    cluster = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    log_dir = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int().tag(sync=True)
    proxied = traitlets.Unicode().tag(sync=True)
    local = traitlets.Unicode().tag(sync=True)
    access_links = traitlets.List(traitlets.Unicode()).tag(sync=True)
    advice = traitlets.Unicode().tag(sync=True)
