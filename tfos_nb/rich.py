"""Display of this package's objects at the end of a notebook's cell, by IPython's protocol.

A class that derives from :class:`Rich` names its rendering. The renderings are in :mod:`tfos_nb.widgets.reprs`, which
is above all other layers but the magics. So it is imported when IPython asks for a display, and never before. No layer
imports it, executors do not load it, and ``%load_ext tfos_nb`` is not needed.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

__all__ = ["Rich"]

_RENDERINGS = "tfos_nb.widgets.reprs"


class Rich:
    """Object that notebooks show as HTML, and terminals as text.

    ``_rich`` is the name of its rendering in ``tfos_nb.widgets.reprs.RENDERINGS``.
    """

    _rich: ClassVar[str]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return text, and HTML where it is shown. IPython leaves out what ``include`` and ``exclude`` leave out."""
        bundle: dict[str, str] = self._renderings().rendered(self._rich, self)
        return bundle

    def _repr_html_(self) -> str | None:
        """Return HTML, for hosts that ask for nothing else; None if the user has chosen text."""
        html: str | None = self._renderings().rendered_html(self._rich, self)
        return html

    def _html(self) -> str:
        """Return HTML for a file that others may read, whatever the user wants to see in the notebook."""
        html: str = self._renderings().page_of(self._rich, self)
        return html

    @staticmethod
    def _renderings() -> Any:
        return importlib.import_module(_RENDERINGS)
