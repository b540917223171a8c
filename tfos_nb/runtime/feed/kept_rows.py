"""A node's rows on its host's disk, in files that others hold: they outlive the process that received them.

::

    file A, file B, which is whole ◀── written in turn ── TF process of generation 1
                                   ─── read ────────────▶ TF process of generation 2

After a loss, a node that has kept its rows needs none of them from Spark. The node's task or supervisor holds the files
(:mod:`tfos_nb.runtime.node.node_files`). A process writes a feed's rows into a file that no pass reads, and in which no
row is still in use. When all of them are there, that file is the whole one. The rows of the last feed stay until the
next one begins.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tfos_nb.runtime.host.held_files import HeldFiles, can_hold_files

if TYPE_CHECKING:
    from tfos_nb.runtime.feed.spill import Spill

__all__ = ["KeptFiles", "KeptRows"]

_FILES = 2
_WHOLE = struct.Struct("!8sQQ")  # what it is; the feed, and its file
_MARK = b"tfos_nb1"


class KeptFiles:
    """The side of the process that holds the files. Only Linux has it.

    Parameters
    ----------
    directory : str
        Where the rows are written.
    inherited : sequence of int
        :attr:`descriptors` of the process that has created the files, if this one has inherited them.
    """

    def __init__(self, directory: str, inherited: Sequence[int] = ()) -> None:
        self._files = HeldFiles(inherited)
        if inherited or not can_hold_files():
            return
        try:
            for _ in range(_FILES):
                self._files.add_on_disk(directory)
            self._files.add_in_memory("tfos_nb-rows-whole")
        except OSError:  # a feed says so that finds no room there
            self._files.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files, for a child process that inherits them."""
        return self._files.descriptors

    @property
    def places(self) -> list[str]:
        """Where a child process finds the files, and the note which of them is whole."""
        return self._files.places

    def close(self) -> None:
        """Release the disk space."""
        self._files.close()


class _Whole(NamedTuple):
    """The feed whose rows are all there, and the number of its file; zero and -1 if there is none."""

    feed: int = 0
    file: int = -1


class KeptRows:
    """TensorFlow's process's side of the files. One queue of the node uses it, with its lock.

    Parameters
    ----------
    places : sequence of str
        :attr:`KeptFiles.places`.

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> files = KeptFiles(tempfile.gettempdir())
    >>> rows = KeptRows(files.places)
    >>> spill = rows.new(7, 1 << 20)
    >>> spill.write(pa.RecordBatch.from_pydict({"id": [1, 2]}))
    >>> spill.seal()
    >>> rows.sealed(7)
    >>> later = KeptRows(files.places)
    >>> later.feed, [batch.num_rows for batch in later.again(7).batches()]
    (7, [2])
    >>> files.close()
    """

    def __init__(self, places: Sequence[str]) -> None:
        *self._files, self._note = places
        self._used: dict[int, int] = {}  # files by feed
        self._spills: list[tuple[int, Spill]] = []  # of this process, with their files
        self._lock = threading.RLock()  # a garbage collection may end a pass in a thread that holds it
        for file in range(len(self._files)):
            if file != self._whole().file:  # an earlier process was writing there
                self._empty(file)

    @property
    def feed(self) -> int:
        """The feed whose rows are all there; 0 if there is none."""
        return self._whole().feed

    def new(self, feed: int, limit: int) -> Spill | None:
        """Return a place for a feed's rows; None if both files are in use.

        ``limit``: the most bytes.
        """
        from tfos_nb.runtime.feed.spill import Spill  # it imports Arrow, which the supervisor does without

        with self._lock:
            free = [number for number in range(len(self._files)) if not self._is_used(number)]
            if not free:
                return None
            if self._whole().file in free:  # two feeds would take twice the disk
                os.truncate(self._note, 0)
            for number in free:
                self._empty(number)
            self._used[feed] = free[0]
            return self._remembered(free[0], Spill("", limit, self._files[free[0]]))

    def again(self, feed: int) -> Spill:
        """Return the rows of :attr:`feed`, which an earlier process has received."""
        from tfos_nb.runtime.feed.spill import Spill

        with self._lock:
            whole = self._whole()
            assert whole.feed == feed, "this node has said so"
            self._used[feed] = whole.file
            return self._remembered(whole.file, Spill.of_file(self._files[whole.file]))

    def sealed(self, feed: int) -> None:
        """Record that all rows of a feed are there, if they are in one of the files."""
        with self._lock:
            file, before = self._used.get(feed), self._whole()
            if file is None or before.feed == feed:
                return
            with open(self._note, "r+b", buffering=0) as note:
                note.write(_WHOLE.pack(_MARK, feed, file))
            if before.feed and not self._is_used(before.file):
                self._empty(before.file)

    def freed(self, feed: int) -> None:
        """Record that no pass reads a feed's rows any more. They stay if they are the whole ones."""
        with self._lock:
            file = self._used.pop(feed, None)
            if file is not None and file != self._whole().file and not self._is_used(file):
                self._empty(file)

    def _is_used(self, file: int) -> bool:
        """Whether a pass reads a file, or rows that were read from it are still in use."""
        return file in self._used.values() or any(spill.is_mapped for of, spill in self._spills if of == file)

    def _remembered(self, file: int, spill: Spill) -> Spill:
        still = [(of, one) for of, one in self._spills if one.is_mapped or of in self._used.values()]
        self._spills = [*still, (file, spill)]
        return spill

    def _whole(self) -> _Whole:
        with open(self._note, "rb") as note:
            said = note.read(_WHOLE.size)
        return _Whole(*_WHOLE.unpack(said)[1:]) if len(said) == _WHOLE.size and said.startswith(_MARK) else _Whole()

    def _empty(self, file: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self._files[file], 0)
