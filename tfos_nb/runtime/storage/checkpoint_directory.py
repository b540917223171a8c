"""A directory of checkpoints, on a local or remote file system, in which each checkpoint is complete or absent.

::

    directory/
        00000003/                3 epochs
            …                    the files of the state
            place.json           {"epoch": 3, "generation": 1, "written": 1764360000}
        00000003-0001-00000002/  within epoch 4: epochs, generation, a number in the generation
        .part-…                  a checkpoint that is being written; renamed when it is complete
        fit/                     states of ``fit``, in the same form; of the second one in ``fit-2``
        state-3/                 a backup of Keras' ``BackupAndRestore``, renamed when it is complete
        worker-0/state-3/        the same, if each worker has its own
        00000003-….rows          which rows of epoch 4 that state includes (recovery.stored_rows)

A checkpoint is written to a temporary directory, which is renamed. In a remote store, a local copy is uploaded.
``place.json`` is written last, because object stores rename by copying one file after another. A directory without it
is no checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfos_nb.runtime.storage.paths import is_local
from tfos_nb.runtime.storage.remote import file_system, put_whole, rename_over

__all__ = [
    "BACKUP",
    "FIT",
    "CheckpointDirectory",
    "directory_of_run",
    "folders_of_fits",
    "generation_of",
    "is_of_a_whole_epoch",
    "newest_checkpoint",
    "rows_file",
    "write_place",
]

FIT = "fit"
"""The folder, in the directory of a cluster's checkpoints, of the states of the first ``fit``."""

BACKUP = "state-"
"""The beginning of the name of a complete backup of ``BackupAndRestore``; a number follows."""

_NAME = re.compile(r"\d{8}(-\d{4}-\d{6,8})?")
_PLACE, _PART, _ROWS = "place.json", ".part-", ".rows"


@dataclass(frozen=True)
class CheckpointDirectory:
    """Directory of checkpoints on a file system of fsspec."""

    filesystem: Any
    path: str

    @classmethod
    def at(cls, url: str) -> CheckpointDirectory:
        """Return the directory at a path or URL."""
        return cls(*file_system(url))

    @property
    def local(self) -> bool:
        """Whether the directory is local, so that TensorFlow can write to it."""
        return is_local(self.filesystem)

    def checkpoints(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the names of the complete checkpoints, the oldest first, and the content of their ``place.json``."""
        for name in self._named():
            # incomplete, removed by the chief meanwhile, or cut short by the end of its host
            with contextlib.suppress(FileNotFoundError, ValueError):
                yield name, json.loads(self.filesystem.cat_file(f"{self.path}/{name}/{_PLACE}"))

    def _is_complete(self, name: str) -> bool:
        return bool(self.filesystem.exists(f"{self.path}/{name}/{_PLACE}"))

    def _named(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, the oldest first."""
        return sorted(name for name in self.names() if _NAME.fullmatch(name))

    def names(self) -> list[str]:
        """Return the names of all files and directories there."""
        self.filesystem.invalidate_cache()
        if not self.filesystem.exists(self.path):
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in self.filesystem.ls(self.path, detail=False)]

    def rows(self) -> list[str]:
        """Return the names of the checkpoints of which there is a file that says which rows they include."""
        names = (name.removesuffix(_ROWS) for name in self.names() if name.endswith(_ROWS))
        return sorted(name for name in names if _NAME.fullmatch(name))

    def part(self) -> str:
        """Return the path of a new temporary directory. Temporary directories of earlier writers are removed.

        In a remote store, the directory itself is not created.
        """
        self.filesystem.makedirs(self.path, exist_ok=True)
        for name in self.filesystem.ls(self.path, detail=False):
            if name.rstrip("/").rpartition("/")[2].startswith(_PART):
                self.filesystem.rm(name, recursive=True)
        part = f"{self.path}/{_PART}{uuid.uuid4().hex}"
        if self.local:
            self.filesystem.makedirs(part)
        return part

    def put(self, folder: str, part: str, number: str, begun_from: str, keep: int) -> None:
        """Move or copy a written state to its final path, and remove old checkpoints.

        Parameters
        ----------
        folder : str
            Local directory of the state; equal to ``part`` if the directory of checkpoints is local.
        part : str
            Temporary path from :meth:`part`.
        number : str
            Name of the checkpoint.
        begun_from : str
            Name of the checkpoint from which this generation began; it is kept, because other nodes may restore it.
        keep : int
            Number of the newest checkpoints to keep. The newest one of whole epochs is kept too.
        """
        place = f"{self.path}/{number}"  # may exist from before a loss; it is then replaced
        if folder == part:
            rename_over(self.filesystem, part, place)
        else:
            put_whole(self.filesystem, folder, part, place, _PLACE)
        named = self._named()
        names = list(filter(self._is_complete, named))
        kept = {begun_from, *names[-max(keep, 1) :], *[name for name in names if is_of_a_whole_epoch(name)][-1:]}
        for old in named:
            if old not in kept:
                self.remove(old)
        oldest = min(kept.intersection(names), default=number)
        for old in self.rows():  # of checkpoints that were never complete
            if old < oldest:
                self._remove_rows(old)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, first its ``place.json``, so that no node reads an incomplete one."""
        place = f"{self.path}/{name}"
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{place}/{_PLACE}")
        self._remove_rows(name)
        self.filesystem.rm(place, recursive=True)

    def _remove_rows(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{self.path}/{rows_file(name)}")

    def get(self, number: str, scratch: str) -> str:
        """Return a local directory with a checkpoint's files; those of a remote store are copied to ``scratch``."""
        if self.local:
            return f"{self.path}/{number}"
        self.filesystem.get(f"{self.path}/{number}", f"{scratch}/{number}", recursive=True)
        return f"{scratch}/{number}"


def directory_of_run(model_dir: str, run: str) -> str:
    """Return the directory of the checkpoints of one cluster, which no other cluster uses.

    Examples
    --------
    >>> directory_of_run("hdfs:///models/", "abcdef000001")
    'hdfs:///models/checkpoints/abcdef000001'
    """
    return f"{model_dir.rstrip('/')}/checkpoints/{run}"


def newest_checkpoint(directory: str) -> tuple[str, float] | None:
    """Return the newest complete checkpoint in the directory of a cluster; None without one.

    Parameters
    ----------
    directory : str
        From :func:`directory_of_run`, on a local disk.

    Returns
    -------
    tuple of str and float, or None
        The path of the checkpoint, and when it was written, in seconds since 1970.

    Raises
    ------
    OSError
        If the directory cannot be read.
    """
    places = [directory, *folders_of_fits(directory)]
    found = [*itertools.chain.from_iterable(map(_written_in, places)), *_backups_in(directory)]
    return max(found, key=lambda one: one[1], default=None)


def folders_of_fits(directory: str) -> list[str]:
    """Return the directories of the states of each ``fit`` in the directory of a cluster's checkpoints."""
    names = CheckpointDirectory.at(directory).names()
    return [f"{directory}/{name}" for name in sorted(names) if re.fullmatch(rf"{FIT}(-\d+)?", name)]


def _written_in(directory: str) -> Iterator[tuple[str, float]]:
    """Yield the path and the time of each complete checkpoint, the oldest first."""
    for name, _ in CheckpointDirectory.at(directory).checkpoints():
        place = f"{directory}/{name}"
        with contextlib.suppress(FileNotFoundError):
            yield place, os.stat(f"{place}/{_PLACE}").st_mtime


def _backups_in(directory: str) -> Iterator[tuple[str, float]]:
    """Yield the path and the time of each complete backup of ``BackupAndRestore``."""
    for pattern in (f"{BACKUP}*", f"*/{BACKUP}*"):
        for folder in Path(directory).glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if folder.is_dir() and folder.name.removeprefix(BACKUP).isdecimal():
                    yield str(folder), folder.stat().st_mtime


def is_of_a_whole_epoch(name: str) -> bool:
    """Return whether a checkpoint is of whole epochs, so that the nodes need not have reported its rows."""
    return "-" not in name


def rows_file(name: str) -> str:
    """Return the name of the file that says which rows a checkpoint within an epoch includes."""
    return f"{name}{_ROWS}"


def generation_of(name: str) -> int:
    """Return the generation in a checkpoint's name; 0 for one of whole epochs.

    Examples
    --------
    >>> generation_of("00000003-0002-000040"), generation_of("00000003")
    (2, 0)
    """
    return 0 if is_of_a_whole_epoch(name) else int(name.split("-")[1])


def write_place(folder: str, epoch: int, generation: int) -> None:
    """Write the file that makes a directory a checkpoint, after the others."""
    with open(f"{folder}/{_PLACE}", "w", encoding="utf-8") as file:
        json.dump({"epoch": epoch, "generation": generation, "written": int(time.time())}, file)
