"""Width of text in a terminal, where a character may take two columns or none."""

from __future__ import annotations

import unicodedata

__all__ = ["fit", "pad", "plain", "width"]


def width(text: str) -> int:
    """Return how many columns a line takes.

    The two columns of East Asian and most emoji characters are those of Unicode's annex 11; a combining mark has none.

    Examples
    --------
    >>> width("loss"), width("損失"), width("e\u0301")
    (4, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def fit(text: str, columns: int) -> str:
    """Cut a line so that it takes at most so many columns; what is cut ends in an ellipsis.

    Examples
    --------
    >>> fit("損失 0.18", 6)
    '損失 …'
    """
    if width(text) <= columns:
        return text
    taken, kept = 1, []  # one for the ellipsis
    for char in text:
        taken += _columns(char)
        if taken > columns:
            break
        kept.append(char)
    return "".join(kept) + "…"


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """Bring a line to so many columns: cut, or filled with blanks, on the left where ``right`` is its side."""
    cut = fit(text, columns)
    blanks = " " * (columns - width(cut))
    return blanks + cut if right else cut + blanks


def plain(text: str) -> str:
    """Put a blank in the place of what would not be shown but obeyed: escape codes, line ends, marks of direction."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def _columns(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
