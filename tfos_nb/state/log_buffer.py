"""The lines that the nodes of a cluster wrote of late, as the driver keeps them: in bounded memory, with the time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from tfos_nb.state.cluster_state import LogLine
from tfos_nb.truncate import clip, clip_telling

__all__ = ["LogBook", "brief_line"]

_NODE_BYTES, _TEXT_BYTES = 24, 400  # of a line, as a page gets it
_LINES_KEPT, _CHARACTERS_KEPT = 10_000, 1 << 21  # of each node, but
_LINES_OF_ALL, _CHARACTERS_OF_ALL = 1_000_000, 1 << 28  # shared out among many, and
_LINES_AT_LEAST, _CHARACTERS_AT_LEAST = 200, 1 << 16
_NEWEST_KEPT = 1_000  # of all nodes
_OF_ENDED, _CHARACTERS_OF_ENDED = 50, 1 << 14  # of each node, in a cluster that ended before others
_BETWEEN = 1e-6
_OF_A_LINE = 200  # bytes, about, beside its characters


class _Lines:
    """One node's lines, with the seconds since 1970 at which they came."""

    def __init__(self, nodes: int) -> None:
        self.kept: deque[tuple[float, str]] = deque()
        self._characters = 0
        self._most = max(_LINES_AT_LEAST, min(_LINES_KEPT, _LINES_OF_ALL // nodes))
        self._most_characters = max(_CHARACTERS_AT_LEAST, min(_CHARACTERS_KEPT, _CHARACTERS_OF_ALL // nodes))

    def add(self, at: float, text: str) -> None:
        self.kept.append((at, text))
        self._characters += len(text)
        self.shorten(self._most, self._most_characters)

    def shorten(self, lines: int, characters: int) -> None:
        while len(self.kept) > lines or self._characters > characters:
            self._characters -= len(self.kept.popleft()[1])

    @property
    def size(self) -> int:
        return self._characters + _OF_A_LINE * len(self.kept)


class LogBook:
    """Keeps the newest lines of each node. No two lines have the same time, so a time says where to go on reading.

    Parameters
    ----------
    nodes : iterable of str
        Whose lines there will be.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        names = list(nodes)
        self._lines = {node: _Lines(len(names)) for node in names}
        self._newest: deque[LogLine] = deque(maxlen=_NEWEST_KEPT)
        self._last = 0.0

    def expect(self, nodes: Iterable[str]) -> None:
        """Keep the lines of these nodes too."""
        names = self._lines.keys() | set(nodes)
        for node in names - self._lines.keys():
            self._lines[node] = _Lines(len(names))

    def add(self, node: str, lines: Sequence[str]) -> None:
        """Keep lines that a node wrote, in their order."""
        now = time.time()
        for text in lines:
            self._last = max(now, self._last + _BETWEEN)  # should the clock be set back, the order stays
            self._lines[node].add(self._last, text)
            self._newest.append(LogLine(self._last, node, text))

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return sum(lines.size for lines in self._lines.values())

    def shorten(self, most: int | None = None) -> None:
        """Keep some of each node's last lines only; so many that they take at most these bytes, all together."""
        kept = _OF_ENDED, _CHARACTERS_OF_ENDED
        if most is not None:
            of_each = most // max(1, len(self._lines)) // 2
            kept = of_each // _OF_A_LINE, of_each
        for lines in self._lines.values():
            lines.shorten(*kept)
        self._newest = deque(self.tail(_OF_ENDED), maxlen=_NEWEST_KEPT)

    def texts(self, node: str) -> list[str]:
        """Return the lines of a node that are kept, without their times."""
        return [text for _, text in self._lines[node].kept]

    def lines(self, node: str, after: float | None = None, limit: int | None = None) -> list[LogLine]:
        """Return the newest lines of a node, or the first ones that came after a time; in their order."""
        kept: Iterable[tuple[float, str]] = self._lines[node].kept
        if after is not None:
            kept = islice(((at, text) for at, text in kept if at > after), limit)
        elif limit is not None:
            kept = list(kept)[max(0, len(self._lines[node].kept) - limit) :]
        return [LogLine(at, node, text) for at, text in kept]

    def tail(self, count: int) -> list[LogLine]:
        """Return the newest lines of all nodes, the oldest first."""
        if count <= len(self._newest) or len(self._newest) < _NEWEST_KEPT:
            return list(islice(self._newest, max(0, len(self._newest) - count), None))
        every = [LogLine(at, node, text) for node, lines in self._lines.items() for at, text in lines.kept]
        return sorted(every, key=lambda line: line.time)[-count:]


def brief_line(line: LogLine) -> list[Any]:
    """Write a line of the log as a page gets it, by whichever way: the time to a tenth, the text cut.

    The two ways must agree, since the page tells by the whole line which ones it has already.
    """
    return [round(line.time, 1), clip(line.node, _NODE_BYTES), clip_telling(line.text, _TEXT_BYTES)]
