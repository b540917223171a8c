"""A log directory that TensorFlow cannot write to, such as ``hdfs://``: it writes here, and what grows is copied."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from typing import Any

from tfos_nb.runtime.storage.remote import file_system, tensorflow_opens
from tfos_nb.truncate import without_password

__all__ = ["LogMirror", "mirrored"]

logger = logging.getLogger(__name__)

_EVERY = 5.0  # seconds: as often as TensorBoard looks
_LAST_WITHIN = 30.0
_EVENTS = "tfevents"  # in the name of a file to which TensorFlow only ever adds


def mirrored(log_dir: str, scratch: str) -> LogMirror | None:
    """Return what copies a node's logs to their URL; None if the program can write there, or writes none."""
    return None if tensorflow_opens(log_dir) else LogMirror(log_dir, scratch)


class LogMirror:
    """Copies the files of a directory to a URL, again and again, until it is stopped.

    Logs may be lost, training may not: what cannot be copied is said once in the log, and tried again.

    Parameters
    ----------
    url : str
        Where the files belong.
    scratch : str
        A directory on this host in which to make the one that the program writes to.

    Attributes
    ----------
    path : str
        Where the program writes.
    """

    def __init__(self, url: str, scratch: str) -> None:
        self.path = tempfile.mkdtemp(prefix="logs-", dir=scratch)
        self._url = url
        self._sent: dict[str, tuple[int, int]] = {}  # a file's name -> its size and time when it was copied last
        self._adds = True
        self._warned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfos_nb logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what there is now, and end; give up where the place does not answer: the training's end waits."""
        self._over.set()
        self._thread.join(_LAST_WITHIN)
        if self._thread.is_alive():
            place = without_password(self._url)
            logger.warning("the last logs are not copied to %s: it has not answered for %g s", place, _LAST_WITHIN)

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001 - a log that cannot be written must not end a training
            if not self._warned:
                reason = without_password(str(error).partition("\n")[0])
                logger.warning("the logs cannot be copied to %s: %s", without_password(self._url), reason)
            self._warned = True

    def _copy(self) -> None:
        changed = [(name, now) for name, now in self._files().items() if self._sent.get(name) != now]
        if not changed:
            return
        system, root = file_system(self._url)
        for name, now in changed:
            before = self._sent.pop(name, (0, 0))  # if it fails half-way, the next copy is of the whole file
            self._send(system, f"{root.rstrip('/')}/{name}", name, (before[0], now[0]))
            self._sent[name] = now

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                status = os.stat(path)
                found[os.path.relpath(path, self.path)] = status.st_size, status.st_mtime_ns
        return found

    def _send(self, system: Any, place: str, name: str, sizes: tuple[int, int]) -> None:
        """Copy a file as it was when it was looked at; only what is new, if the rest is there and stays as it is."""
        start, end = sizes if _EVENTS in name and self._adds else (0, sizes[1])
        with open(os.path.join(self.path, name), "rb") as file:
            file.seek(start)
            new = file.read(end - start)
        system.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            with system.open(place, "ab" if start else "wb") as sink:
                sink.write(new)
        except (NotImplementedError, ValueError):  # a store of whole objects
            if not start:
                raise
            self._adds = False
            self._send(system, place, name, sizes)
