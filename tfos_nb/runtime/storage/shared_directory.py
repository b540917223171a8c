"""Check that a directory is the same one on every node's host, before a loss makes the saved states necessary.

::

    node: ctx.resume, ctx.checkpoint ── PlaceSeen(directory, mark) ──▶ driver: PlacesSeen ── two marks: refused

The first node writes a file with a random mark into the directory, and the others read it. If the path is on each
host's own disk, the nodes find different marks. Then only the chief's host would have the states that the chief saves.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass

from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.storage.paths import is_forbidden

__all__ = ["PlaceSeen", "PlacesSeen", "mark_in"]

_MARK = ".tfos_nb-mark"
_SETTLES = 0.5  # seconds after which hosts that wrote the mark at the same time all read the same one


@message
@dataclass(frozen=True)
class PlaceSeen:
    """Message from a node: the mark that it found in a directory on its host."""

    node: str
    host: str
    place: str
    mark: str


def mark_in(directory: str) -> str:
    """Return a directory's mark, and write one if there is none. Return an empty text if the mark is unknown.

    Raises
    ------
    OSError
        If this host may not write there.
    """
    path, mark = os.path.join(directory, _MARK), uuid.uuid4().hex
    try:
        os.makedirs(directory, exist_ok=True)
        try:
            with open(path, "x", encoding="ascii") as file:
                file.write(mark)
        except FileExistsError:
            return _read(path, len(mark))  # empty if the other node has not written it yet
        # On a mounted object store, several hosts can create the file at the same time, and the last one wins.
        threading.Event().wait(_SETTLES)
        return _read(path, len(mark)) or mark
    except OSError as error:  # other errors are raised when a state is saved
        if is_forbidden(error):
            raise
        return ""


def _read(path: str, length: int) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        found = file.read()
    return found if len(found) == length else ""


class PlacesSeen:
    """Marks that the nodes have found, on the driver."""

    def __init__(self) -> None:
        self._seen: dict[str, PlaceSeen] = {}

    def unlike(self, said: PlaceSeen) -> str:
        """Add a node's message. Return an error message if another node has found another mark; empty if not."""
        if said.mark:
            self._seen.setdefault(said.mark, said)
        if len(self._seen) < 2:
            return ""
        one, other = list(self._seen.values())[:2]
        same = one.place == other.place
        return (
            f"{one.node} on {one.host} and {other.node} on {other.host} see different directories"
            + (f" at {one.place}" if same else f", {one.place} and {other.place}")
            + ": after a loss a node would not find what another has saved. Give model_dir= as a directory that all "
            "hosts share, or as a URL, such as hdfs:///models"
        )
