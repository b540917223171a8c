"""Text cut to a number of bytes, for messages that must not grow."""

from __future__ import annotations

import json

__all__ = ["clip", "clip_lines", "clip_telling", "sendable", "size"]

_TELLING_BYTES = len("… ( more characters)".encode())


def clip(text: str, room: int, more: str = "…") -> str:
    """Cut a text so that it takes at most so many bytes of JSON, quotes aside; half characters are left out."""
    whole = sendable(text[: room + 1])  # the rest cannot be in it
    if size(whole) - 2 <= room:
        return whole
    low, high = 0, min(len(whole), room)
    while low < high:  # the size grows with every character, so halving finds the cut
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(whole[:middle] + more) - 2 <= room else (low, middle - 1)
    return whole[:low] + more if low else ""


def clip_telling(text: str, room: int) -> str:
    """Cut a text as :func:`clip` does, and say how much is missing: a reader who copies it must see that it is cut.

    Examples
    --------
    >>> clip_telling("x" * 5000, 40)
    'xxxxxxxxxxxxx… (4,987 more characters)'
    """
    whole = sendable(text)
    if size(whole) - 2 <= room:
        return whole
    kept = clip(whole, room - _TELLING_BYTES - len(f"{len(whole):,}"), more="")
    return f"{kept}… ({len(whole) - len(kept):,} more characters)"


def clip_lines(text: str, room: int) -> str:
    """Keep a text's last lines, each shortened. A traceback ends with the exception, so keep the end."""
    whole = sendable(text)
    if size(whole) <= room:
        return whole
    lines: list[str] = []
    room -= 8
    for line in reversed(whole.splitlines()):
        short = clip(line, 400)
        room -= size(short)
        if room < 0:
            break
        lines.append(short)
    return "\n".join(["…", *reversed(lines)])


def sendable(text: str) -> str:
    """Replace what UTF-8 cannot hold: a file's name, and so a traceback, may have half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def size(value: object) -> int:
    """Return the bytes that a value takes in a message."""
    return len(json.dumps(value, ensure_ascii=False).encode())
