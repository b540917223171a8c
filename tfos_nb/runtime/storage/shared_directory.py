"""Check that a directory is the same one on every node's host: both ends.

::

    node: ctx.resume, ctx.checkpoint ── PlaceSeen(directory, mark) ──▶ driver: PlacesSeen ── two marks: refused

The first node that looks leaves a mark in the directory, and the others read it. Where a path leads to each host's own
disk each node finds a mark of its own, and what the chief saves would be there for the chief's host alone. Without a
look one hears of it after a loss, when what was saved is wanted.
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
_SETTLES = 0.5  # seconds in which hosts that each believe to have left the mark see which one is there


@message
@dataclass(frozen=True)
class PlaceSeen:
    """From a node: on its host this directory holds this mark."""

    node: str
    host: str
    place: str
    mark: str


def mark_in(directory: str) -> str:
    """Return a directory's mark, leaving one where there is none; empty where it cannot be told.

    Raises
    ------
    OSError
        If this host may not write there.
    """
    path, mark = os.path.join(directory, _MARK), uuid.uuid4().hex
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(mark)
        # Where an object store is mounted several may make it at once, and the last one's stays.
        threading.Event().wait(_SETTLES)
        return _read(path, len(mark)) or mark
    except FileExistsError:
        return _read(path, len(mark))  # or the other one is about to write it
    except OSError as error:  # who writes there says so
        if is_forbidden(error):
            raise
        return ""


def _read(path: str, length: int) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        found = file.read()
    return found if len(found) == length else ""


class PlacesSeen:
    """Behind the door: what the nodes have seen."""

    def __init__(self) -> None:
        self._seen: dict[str, PlaceSeen] = {}

    def unlike(self, said: PlaceSeen) -> str:
        """Take a node's word; say what is wrong if another has seen another directory."""
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
