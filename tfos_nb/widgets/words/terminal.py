"""Measure and cut text for a terminal, in which a character may take two columns or none."""

from __future__ import annotations

import unicodedata

__all__ = ["fit", "pad", "plain", "width"]


def width(text: str) -> int:
    """Return the number of columns of a line.

    By Unicode's annex 11, East Asian characters and most emojis have two columns. A combining mark has none.

    Examples
    --------
    >>> width("loss"), width("損失"), width("e\u0301")
    (4, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def fit(text: str, columns: int) -> str:
    """Cut a line to at most ``columns`` columns. A cut line ends with an ellipsis.

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
    """Cut or pad a line to exactly ``columns`` columns. It is aligned left, or right if ``right``."""
    cut = fit(text, columns)
    blanks = " " * (columns - width(cut))
    return blanks + cut if right else cut + blanks


def plain(text: str) -> str:
    """Replace characters that a terminal would execute by blanks: escape codes, line ends, direction marks."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def _columns(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
