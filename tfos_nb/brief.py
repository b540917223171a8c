"""Text cut to a number of bytes, for messages that must not grow."""

from __future__ import annotations

import json
from typing import Any

from tfos_nb.state import LogLine

__all__ = ["brief_line", "clip", "sendable", "size"]

_NODE_BYTES, _TEXT_BYTES = 24, 400


def brief_line(line: LogLine) -> list[Any]:
    """Write a line of the log as a page gets it, by whichever way: the time to a tenth, the text cut.

    The two ways must agree, since the page tells by the whole line which ones it has already.
    """
    return [round(line.time, 1), clip(line.node, _NODE_BYTES), clip(line.text, _TEXT_BYTES)]


def clip(text: str, room: int, more: str = "…") -> str:
    """Cut a text so that it takes at most so many bytes of JSON, quotes aside; half characters are left out."""
    whole = sendable(text)
    if size(whole) - 2 <= room:
        return whole
    low, high = 0, min(len(whole), room)
    while low < high:  # the size grows with every character, so halving finds the cut
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(whole[:middle] + more) - 2 <= room else (low, middle - 1)
    return whole[:low] + more if low else ""


def sendable(text: str) -> str:
    """Replace what UTF-8 cannot hold: a file's name, and so a traceback, may have half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def size(value: object) -> int:
    """Return the bytes that a value takes in a message."""
    return len(json.dumps(value, ensure_ascii=False).encode())
