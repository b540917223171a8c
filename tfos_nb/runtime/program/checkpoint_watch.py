"""Watch the checkpoints of a training for an evaluator, until the training is over.

Checkpoints are found by polling the directory. The driver says when the training is over.
"""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.storage.remote import file_system

if TYPE_CHECKING:
    from tfos_nb.runtime.feed.row_queue import RowQueue

__all__ = ["CheckpointWatch"]

_CLOCKS_DIFFER = 1.0  # seconds; some file systems also have a resolution of whole seconds
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified")
_PART_OF_CHECKPOINT = re.compile(r"\.data-\d+-of-\d+$|_temp$|(^|/)checkpoint$")


@dataclass(frozen=True, order=True)
class _Seen:
    """A file as seen at one poll. If two files have the same time, the numbers in their names decide which is newer."""

    modified: float
    numbers: tuple[int, ...]
    path: str
    size: int


@dataclass(frozen=True)
class CheckpointWatch:
    """Iterate over the checkpoints that are written to a directory while this process lives, each once.

    Each iteration returns the newest one. Older ones that were not returned yet are skipped, so a slow evaluator does
    not fall behind.

    Parameters
    ----------
    directory : str
        A path or a URL that fsspec knows.
    pattern : str
        Pattern of the names of checkpoint files, such as ``*.keras``.
    poll : float
        Seconds between two polls.
    passes : RowQueue
        The evaluator's queue, which is closed when the training is over.
    stopping : threading.Event
        Set when the user has asked to stop.
    """

    directory: str
    pattern: str
    poll: float
    passes: RowQueue
    stopping: threading.Event

    def __post_init__(self) -> None:
        if not self.poll > 0:
            raise PlanError(f"poll must be a number of seconds, more than 0, got {self.poll!r}")

    def __iter__(self) -> Iterator[str]:
        """Wait for each checkpoint and yield its path; end when the training is over and the newest one was yielded."""
        over = threading.Event()
        threading.Thread(target=self._await_end, args=(over,), name="tfos_nb training's end", daemon=True).start()
        since = _process_started() - _CLOCKS_DIFFER
        given: _Seen | None = None
        before: set[_Seen] = set()
        while not self.stopping.is_set():
            last = over.is_set()  # checked first, so that all files written before are seen below
            now = {seen for seen in self._look() if seen.modified >= since and (given is None or seen > given)}
            whole = now if last else now & before  # unchanged between two polls: the file is complete
            before = now
            if whole:
                given = max(whole)
                yield given.path
            elif last:
                return
            else:
                over.wait(self.poll)

    def _await_end(self, over: threading.Event) -> None:
        self.passes.schema()  # an evaluator is fed no rows: this returns when the driver says that none will come
        over.set()

    def _look(self) -> Iterator[_Seen]:
        filesystem, place = file_system(self.directory)
        filesystem.invalidate_cache()
        try:
            files = filesystem.ls(place, detail=True)
        except FileNotFoundError:
            return
        for info in files:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            if name.startswith(".") or _PART_OF_CHECKPOINT.search(name) or info.get("type") == "directory":
                continue
            if fnmatch.fnmatch(name, self.pattern):
                path = filesystem.unstrip_protocol(info["name"]) if "://" in self.directory else str(info["name"])
                numbers = tuple(int(digits) for digits in re.findall(r"\d+", name))
                modified, size = _modified(filesystem, info), int(info.get("size") or 0)
                yield _Seen(modified, numbers, path.removesuffix(".index"), size)


def _modified(filesystem: Any, info: dict[str, Any]) -> float:
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if value is None:
        value = filesystem.modified(info["name"])
    return float(value.timestamp()) if hasattr(value, "timestamp") else float(value)


def _process_started() -> float:
    import psutil

    return min(float(psutil.Process().create_time()), time.time())
