"""Copy logs to a directory to which TensorFlow cannot write, such as one on ``hdfs://``.

TensorFlow writes to a local directory. A thread copies new and changed files to the URL.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from typing import Any

from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage.remote import file_system, tensorflow_opens

__all__ = ["LogMirror", "mirrored"]

logger = logging.getLogger(__name__)

_EVERY = 5.0  # seconds, TensorBoard's own interval of reloading
_LAST_WITHIN = 30.0  # seconds for the last copy
_EVENTS = "tfevents"  # part of the name of files to which TensorFlow only appends


def mirrored(log_dir: str, scratch: str) -> LogMirror | None:
    """Return a mirror for a log directory; None if TensorFlow can write to it, or it is empty."""
    return None if tensorflow_opens(log_dir) else LogMirror(log_dir, scratch)


class LogMirror:
    """Thread that copies the files of a local directory to a URL every 5 s until it is stopped.

    An error does not end the training. The first one is logged as a warning, and the copy is tried again.

    Parameters
    ----------
    url : str
        Directory to which the files are copied.
    scratch : str
        Local directory in which the directory for the program is made.

    Attributes
    ----------
    path : str
        Directory to which the program writes.
    """

    def __init__(self, url: str, scratch: str) -> None:
        self.path = tempfile.mkdtemp(prefix="logs-", dir=scratch)
        self._url = url
        self._sent: dict[str, tuple[int, int]] = {}  # by file: its size and modification time when it was copied last
        self._adds = True
        self._warned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfos_nb logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy the last changes and end the thread. Waits at most 30 s, because this delays the end of the training."""
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
            before = self._sent.pop(name, (0, 0))  # after an error, copy the whole file the next time
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
        """Copy a file up to its size when it was listed. Of an event file, append only the new bytes.

        ``sizes`` are the size at the last copy and the size now, in bytes.
        """
        start, end = sizes if _EVENTS in name and self._adds else (0, sizes[1])
        with open(os.path.join(self.path, name), "rb") as file:
            file.seek(start)
            new = file.read(end - start)
        system.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            with system.open(place, "ab" if start else "wb") as sink:
                sink.write(new)
        except (NotImplementedError, ValueError):  # an object store cannot append
            if not start:
                raise
            self._adds = False
            self._send(system, place, name, sizes)
