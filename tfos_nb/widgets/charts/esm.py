"""Join scripts that import each other into one module, since a widget's script is one text without a place."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["joined"]

_FOLDER = Path(__file__).parents[1]
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


@cache
def joined(name: str) -> str:
    """Return a file of ``widgets``: a script after those that it imports, each once.

    All of them then share one scope, so no two may give the same name to different things.
    """
    included: dict[str, str] = {}
    _include(name, included)
    *imported, own = included.values()
    return "\n".join([*(_EXPORT.sub("", text) for text in imported), own])


def _include(name: str, included: dict[str, str]) -> None:
    text = (_FOLDER / name).read_text(encoding="utf-8")
    for other in _IMPORT.findall(text):
        if other not in included:
            _include(other, included)
    included[name] = _IMPORT.sub("", text)
