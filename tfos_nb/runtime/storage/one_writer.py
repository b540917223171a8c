"""Keep only the chief's copy of files that every worker of a synchronous strategy saves, as Keras programs do.

::

    chief:   writes to a temporary directory beside the target ─▶ renames ─▶ notifies the others
    others:  write to a scratch directory ─▶ wait for the chief ─▶ remove the scratch directory

The others must write too, because TensorFlow reads some variables by a collective. A worker keeps its own file in two
cases: the chief does not save it, such as ``worker-1.keras``, or the chief's file is not visible on this host. The
latter happens if the path is on each host's own disk, or relative to a directory of each node.

This applies to processes that have built a ``MultiWorkerMirroredStrategy`` of several workers. In other processes,
files are saved unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from tfos_nb.runtime.storage.paths import is_forbidden
from tfos_nb.runtime.storage.save_notices import BEGUN, FAILED, WRITTEN, Notice, NoticeReader, NoticeWriter

__all__ = ["WRITER", "OneWriter", "is_the_same", "mark_of"]

logger = logging.getLogger(__name__)

Write = Callable[[str], object]

SCRATCH = "tfos_nb-scratch-"
_TENSORFLOWS_SCRATCH = "workertemp"  # its name in TensorFlow's guide and in tf_keras
_PART = ".part-"
_LEFT_BEHIND = 3600.0  # seconds without a change, after which a temporary directory's writer must have been killed
_SHOWS = 3.0  # maximum seconds until a shared directory shows a file that another host has renamed
_OF_A_MODEL = {"assets", "assets.extra", "variables", "saved_model.pb", "fingerprint.pb", "keras_metadata.pb"}
_cleared: set[str] = set()


class OneWriter:
    """Save function of a process that decides whether this worker's copy of a file is kept."""

    def __init__(self) -> None:
        self._strategy: Any = None
        self._writer = NoticeWriter()
        self._reader = NoticeReader()
        self._unshared: set[str] = set()
        self._local = threading.local()

    def join(self, strategy: Any) -> None:
        """Register a ``MultiWorkerMirroredStrategy`` that this process has built."""
        if strategy.extended._in_multi_worker_mode():
            self._strategy = strategy

    @property
    def is_other(self) -> bool:
        """Whether this worker is not the chief, so that the chief's files are kept."""
        return self._strategy is not None and not self._strategy.extended.should_checkpoint

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Let this thread save files unchanged within the block."""
        before = getattr(self._local, "given", False)
        self._local.given = True
        try:
            yield
        finally:
            self._local.given = before

    def save(self, path: str, write: Write) -> None:
        """Save a file or directory.

        Parameters
        ----------
        path : str
            Path, or a URL that TensorFlow opens.
        write : callable
            Takes the path to write to, which has the same last component. It may write more files beside that path.

        Raises
        ------
        OSError
            If the chief could not write it. It is raised on every worker that saves this path.
        """
        if self._strategy is None or getattr(self._local, "given", False) or _is_of_this_process(path):
            write(path)
            return
        with self.as_given():  # write() may call save() for parts of the same file
            (self._save_for_others if self.is_other else self._save_for_all)(path, write)

    def _save_for_all(self, path: str, write: Write) -> None:
        place, named = _local_place(path), _named(path)
        self._writer.tell(Notice(named, BEGUN))
        try:
            if place:
                _write_whole(place, write)
            else:
                write(path)
        except BaseException as error:
            self._writer.tell(Notice(named, FAILED, why=f"{type(error).__name__}: {error}"))
            raise
        self._writer.tell(Notice(named, WRITTEN, _file_id(place), mark_of(place)))

    def _save_for_others(self, path: str, write: Write) -> None:
        place = _local_place(path)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
            try:
                write(os.path.join(scratch, os.path.basename(place or path.rstrip("/"))))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                logger.warning("%s has no room for this worker's copy of %s: %s", tempfile.gettempdir(), path, error)
            notice = self._reader.wait(_named(path))
            if notice is not None and notice.what == FAILED:
                raise OSError(f"the chief could not save {path}: {notice.why}")
            if notice is None and not self._reader.lost:
                logger.info("the chief does not save %s, so this worker saves it", path)
                _copy_whole(scratch, place or path)
            elif notice is not None and place and not self._is_here(place, notice):
                self._save_on_this_host(scratch, place, notice)

    def _is_here(self, place: str, notice: Notice) -> bool:
        """Return whether this host's path is the chief's file, waiting for a shared directory to show it."""
        above = os.path.dirname(place)
        until = time.monotonic() + (0 if above in self._unshared else _SHOWS)
        while notice.file_id != _file_id(place):
            latest = self._reader.latest(notice.path)
            if latest is None or is_the_same(mark_of(place), latest.mark):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def _save_on_this_host(self, scratch: str, place: str, notice: Notice) -> None:
        above = os.path.dirname(place)
        if above not in self._unshared:
            self._unshared.add(above)
            logger.info("%s on %s is not the directory of the chief's host %s", above, _host(), notice.file_id[:1])
        try:
            _copy_whole(scratch, place)
        except OSError as error:
            if not is_forbidden(error):
                raise
            logger.warning("the chief's %s is not on this host, which may not write it: %s", place, error)


def _is_of_this_process(path: str) -> bool:
    """Return whether a path is in a scratch directory, or in TensorFlow's file system in memory."""
    parts = path.split("/")
    return path.startswith("ram://") or any(part.startswith((SCRATCH, _TENSORFLOWS_SCRATCH)) for part in parts)


def _local_place(path: str) -> str:
    """Return the absolute local path; empty for a URL."""
    path = path.removeprefix("file://")
    return "" if "://" in path else os.path.abspath(path)


def _named(path: str) -> str:
    """Return the name of a file that is the same on all workers. A relative path stays relative."""
    return path.rstrip("/") if "://" in path else os.path.normpath(path)


def _host() -> str:
    return socket.gethostname()


def _file_id(place: str) -> list[Any]:
    """Return host, device and inode of a path's directory. Paths with the same file_id and name are the same file."""
    if not place:
        return []
    try:
        above = os.stat(os.path.dirname(os.path.realpath(place)))
    except OSError:
        return [_host()]
    return [_host(), above.st_dev, above.st_ino]


def mark_of(place: str) -> list[int]:
    """Return the size and the modification time in ns of a local file; an empty list if it does not exist here."""
    for path in (place, f"{place}.index"):  # tf_keras saves weights as several files, one of which is the .index
        with contextlib.suppress(OSError):
            status = os.stat(path)
            return [status.st_size, status.st_mtime_ns]
    return []


def is_the_same(mine: list[int], theirs: list[int]) -> bool:
    """Return whether two marks (size, modification time in ns) may be of one file.

    If one time is in whole seconds, only seconds are compared, because some file systems store no fractions.
    """
    second = 10**9
    if not mine or not theirs or mine[0] != theirs[0]:
        return False
    rounded = 0 in (mine[1] % second, theirs[1] % second)
    return mine[1] == theirs[1] or (rounded and mine[1] // second == theirs[1] // second)


def _write_whole(place: str, write: Write) -> None:
    """Write into a temporary directory beside the target, and then rename its entries."""
    target = os.path.realpath(place)
    above = os.path.dirname(target)
    part = os.path.join(above, f"{_PART}{uuid.uuid4().hex}")
    try:
        os.makedirs(above, exist_ok=True)
        _remove_left_behind(above)
        os.mkdir(part)
    except OSError as error:
        if not is_forbidden(error) or not os.path.exists(target):
            raise
        write(place)  # this host may overwrite the file, but not create another one in its directory
        return
    try:
        write(os.path.join(part, os.path.basename(place)))
        _publish(part, os.path.basename(place), target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy_whole(scratch: str, place: str) -> None:
    """Copy the content of a scratch directory to a path (atomically) or a URL."""
    if not os.listdir(scratch):
        return
    if "://" not in place:
        _write_whole(place, lambda part: shutil.copytree(scratch, os.path.dirname(part), dirs_exist_ok=True))
        return
    import tensorflow as tf

    above = place.rstrip("/").rpartition("/")[0]
    for folder, _, files in os.walk(scratch):
        there = os.path.normpath(os.path.join("/", os.path.relpath(folder, scratch))).rstrip("/")
        tf.io.gfile.makedirs(f"{above}{there}")
        for file in files:
            tf.io.gfile.copy(os.path.join(folder, file), f"{above}{there}/{file}", overwrite=True)


def _publish(part: str, name: str, target: str) -> None:
    """Move each entry of a directory to its target. Files that name other files are moved last."""
    for entry in sorted(os.listdir(part), key=lambda entry: (entry == "checkpoint", entry.endswith(".json"), entry)):
        source = os.path.join(part, entry)
        place = target if entry == name else os.path.join(os.path.dirname(target), entry)
        if os.path.isdir(source) and os.path.isdir(place):
            _swap(source, place, os.path.join(part, f"{_PART}before"))
        else:
            os.replace(source, place)


def _swap(source: str, place: str, aside: str) -> None:
    """Replace a directory by another one. Entries of the old one that do not belong to a SavedModel are kept."""
    os.rename(place, aside)
    os.rename(source, place)
    for entry in set(os.listdir(aside)) - set(os.listdir(place)) - _OF_A_MODEL:
        os.rename(os.path.join(aside, entry), os.path.join(place, entry))


def _remove_left_behind(above: str) -> None:
    """Remove old temporary directories of killed writers, once for each parent directory."""
    if above in _cleared:
        return
    _cleared.add(above)
    for entry in os.scandir(above):
        with contextlib.suppress(OSError):  # another process may be removing it
            if _is_left_behind(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left_behind(entry: os.DirEntry[str]) -> bool:
    if not entry.name.startswith(_PART) or not entry.is_dir(follow_symlinks=False):
        return False
    times = [os.stat(folder).st_mtime for folder, _, _ in os.walk(entry.path)]
    times += [os.stat(one.path).st_mtime for one in os.scandir(entry.path)]
    return time.time() - max(times) > _LEFT_BEHIND


WRITER = OneWriter()
"""The writer of this process."""
