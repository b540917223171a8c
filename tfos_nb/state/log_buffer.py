"""Keep the newest lines of output of a cluster's nodes in the driver, with their times, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from tfos_nb.state.cluster_state import LogLine
from tfos_nb.truncate import clip, clip_telling

__all__ = ["LogBook", "brief_line"]

_NODE_BYTES, _TEXT_BYTES = 24, 400  # maximum sizes of the node's name and the text in a line that is sent to a page
_LINES_KEPT, _CHARACTERS_KEPT = 10_000, 1 << 21  # maximum of each node
_LINES_OF_ALL, _CHARACTERS_OF_ALL = 1_000_000, 1 << 28  # maximum of all nodes, divided equally among them
_LINES_AT_LEAST, _CHARACTERS_AT_LEAST = 200, 1 << 16  # maximum of each node if they are very many
_NEWEST_KEPT = 1_000  # newest lines of all nodes together
_OF_ENDED, _CHARACTERS_OF_ENDED = 50, 1 << 14  # maximum of each node in a cluster that ended before others
_BETWEEN = 1e-6  # seconds, the least difference between the times of two lines
_OF_A_LINE = 200  # approximate bytes of a line besides its characters


class _Lines:
    """One node's lines, with the times at which they were received, in seconds since 1970."""

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
    """Keep the newest lines of each node.

    No two lines have the same time. So a reader can continue after the time of its last line.

    Parameters
    ----------
    nodes : iterable of str
        Names of the nodes whose lines are kept.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        names = list(nodes)
        self._lines = {node: _Lines(len(names)) for node in names}
        self._newest: deque[LogLine] = deque(maxlen=_NEWEST_KEPT)
        self._last = 0.0

    def expect(self, nodes: Iterable[str]) -> None:
        """Keep the lines of these nodes as well."""
        names = self._lines.keys() | set(nodes)
        for node in names - self._lines.keys():
            self._lines[node] = _Lines(len(names))

    def add(self, node: str, lines: Sequence[str]) -> None:
        """Keep lines that a node wrote, in their order."""
        now = time.time()
        for text in lines:
            self._last = max(now, self._last + _BETWEEN)  # keeps the order even if the clock is set back
            self._lines[node].add(self._last, text)
            self._newest.append(LogLine(self._last, node, text))

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(lines.size for lines in self._lines.values())

    def shorten(self, most: int | None = None) -> None:
        """Keep only some of each node's last lines: 50, or as many as all together take at most ``most`` bytes."""
        kept = _OF_ENDED, _CHARACTERS_OF_ENDED
        if most is not None:
            of_each = most // max(1, len(self._lines)) // 2
            kept = of_each // _OF_A_LINE, of_each
        for lines in self._lines.values():
            lines.shorten(*kept)
        self._newest = deque(self.tail(_OF_ENDED), maxlen=_NEWEST_KEPT)

    def texts(self, node: str) -> list[str]:
        """Return the kept lines of a node, without their times."""
        return [text for _, text in self._lines[node].kept]

    def lines(self, node: str, after: float | None = None, limit: int | None = None) -> list[LogLine]:
        """Return, in order, the newest ``limit`` lines of a node, or the first ``limit`` lines after a time.

        Without ``limit`` all of them are returned.
        """
        kept: Iterable[tuple[float, str]] = self._lines[node].kept
        if after is not None:
            kept = islice(((at, text) for at, text in kept if at > after), limit)
        elif limit is not None:
            kept = list(kept)[max(0, len(self._lines[node].kept) - limit) :]
        return [LogLine(at, node, text) for at, text in kept]

    def tail(self, count: int) -> list[LogLine]:
        """Return the newest ``count`` lines of all nodes, the oldest first."""
        if count <= len(self._newest) or len(self._newest) < _NEWEST_KEPT:
            return list(islice(self._newest, max(0, len(self._newest) - count), None))
        every = [LogLine(at, node, text) for node, lines in self._lines.items() for at, text in lines.kept]
        return sorted(every, key=lambda line: line.time)[-count:]


def brief_line(line: LogLine) -> list[Any]:
    """Return a line of the log as it is sent to a page: time rounded to a tenth of a second, node, and cut text.

    A page can receive lines by two ways. Both must use this function, since the page compares whole lines to find the
    ones that it already has.
    """
    return [round(line.time, 1), clip(line.node, _NODE_BYTES), clip_telling(line.text, _TEXT_BYTES)]
