"""Notices from the chief of a synchronous strategy to other workers: which files it saves, and when each is complete.

::

    chief: begun(path) ─▶ … writes … ─▶ written(path) ──▶ TensorFlow's coordination service ──▶ other workers: wait

The service belongs to ``MultiWorkerMirroredStrategy`` and runs in its leader. It keeps values by key and lets a reader
wait for a key. A key cannot be written twice, so the notices are numbered, and each worker reads them in their order.
No collective is used: a worker that saves alone does not block the others.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Notice", "NoticeReader", "NoticeWriter"]

logger = logging.getLogger(__name__)

BEGUN, WRITTEN, FAILED = "begun", "written", "failed"
_KEY = "tfos_nb/saves/{}"
_BEGINS = 60.0  # seconds that a worker waits for the chief to begin, because the chief may run other callbacks before
_BEGINS_AFTER_ANOTHER = 5.0  # seconds, if the chief has saved another file meanwhile
_BEGINS_SELDOM = 1.0  # seconds, if the chief did not save a file of such a name before
_SAYS_SO = 10.0  # seconds after which a waiting worker logs that it waits
_VARIES = re.compile(r"tmp[a-z0-9_]{8}|\d+")  # the variable parts of names: those of Python's tempfile, and epochs


@dataclass(frozen=True)
class Notice:
    """Notice from the chief about one file.

    Parameters
    ----------
    path : str
        Normalized path that the program gave.
    what : {"begun", "written", "failed"}
        State of the save.
    file_id : list
        The chief's host, and device and inode of the file's directory there.
    mark : list of int
        Size of the file in bytes, and its modification time in nanoseconds.
    why : str
        Reason of a failure.
    """

    path: str
    what: str
    file_id: list[Any] = field(default_factory=list)
    mark: list[int] = field(default_factory=list)
    why: str = ""


class NoticeWriter:
    """Sender of notices, on the chief."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def tell(self, notice: Notice) -> None:
        """Send a notice. An error of the service is only logged, because the file itself is saved."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        with self._lock:
            key = _KEY.format(next(self._numbers))
            try:
                context.context().set_config_key_value(key, json.dumps(asdict(notice)))
            except (tf.errors.OpError, AttributeError) as error:
                logger.warning("the other workers could not be notified of %s: %s", notice.path, error)


class NoticeReader:
    """Receiver of notices, on another worker. One thread reads all notices; threads that save wait for theirs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: Counter[str] = Counter()
        self._ended: dict[str, tuple[int, Notice]] = {}
        self._saved: Counter[str] = Counter()  # by this worker
        self._others_seen = 0
        self._last = time.monotonic()
        self._lost = False
        self._own: set[str] = set()
        self._thread: threading.Thread | None = None

    def wait(self, path: str) -> Notice | None:
        """Wait until the chief has saved a file as often as this worker has.

        Returns
        -------
        Notice or None
            Result of the chief's save. None if the chief does not begin to save this file in time, or has ended.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="tfos_nb saves", daemon=True)
                self._thread.start()
            self._saved[path] += 1
            began, said = time.monotonic(), False
            while not self._lost and not self._has_ended(path):
                left = self._patience(path, began)
                if left <= 0:
                    break
                if not said and time.monotonic() - began > _SAYS_SO:
                    said = True
                    logger.info("waits for the chief to save %s", path)
                self._changed.wait(min(left, _SAYS_SO))
            return self._outcome(path)

    def latest(self, path: str) -> Notice | None:
        """Wait until the chief is not saving a file, and return the result of its last save; None if it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._is_idle(path))
            return None if self._lost else self._ended[path][1]

    @property
    def lost(self) -> bool:
        """Whether no more notices will arrive, because the chief or the cluster has ended."""
        return self._lost

    def _outcome(self, path: str) -> Notice | None:
        self._others_seen = self._begun.total()
        if self._has_ended(path):
            self._own.discard(_VARIES.sub("#", path))
            return self._ended[path][1]
        if not self._lost:
            self._saved[path] -= 1
            self._own.add(_VARIES.sub("#", path))
        return None

    def _has_ended(self, path: str) -> bool:
        return path in self._ended and self._ended[path][0] >= self._saved[path]

    def _is_idle(self, path: str) -> bool:
        return self._begun[path] <= self._ended[path][0]

    def _patience(self, path: str, began: float) -> float:
        """Return the remaining seconds to wait for the chief."""
        if self._begun.total() > sum(number for number, _ in self._ended.values()):
            return _BEGINS  # the chief is writing, this file or one before it
        now = time.monotonic()
        if _VARIES.sub("#", path) in self._own:
            return began + _BEGINS_SELDOM - now
        if self._begun.total() > self._others_seen:
            return max(began, self._last) + _BEGINS_AFTER_ANOTHER - now
        return began + _BEGINS - now

    def _read(self) -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        try:
            for number in itertools.count():
                self._take(Notice(**json.loads(context.context().get_config_key_value(_KEY.format(number)))))
        except (tf.errors.OpError, AttributeError) as error:
            logger.debug("the chief sends no more notices of its saves: %s", error)
        finally:
            with self._changed:
                self._lost = True
                self._changed.notify_all()

    def _take(self, notice: Notice) -> None:
        with self._changed:
            self._last = time.monotonic()
            if notice.what == BEGUN:
                self._begun[notice.path] += 1
            else:
                ended = self._ended[notice.path][0] if notice.path in self._ended else 0
                self._ended[notice.path] = ended + 1, notice
            self._changed.notify_all()
