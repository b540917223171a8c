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
_BEGINS = 60.0  # seconds that a worker waits for the chief to begin: the chief's other callbacks come before it
_BEGINS_AFTER_ANOTHER = 5.0  # where the chief has saved another file meanwhile
_BEGINS_SELDOM = 1.0  # where the chief did not save a file of such a name before
_SAYS_SO = 10.0
_VARIES = re.compile(r"tmp[a-z0-9_]{8}|\d+")  # what Python's tempfile makes up, and epochs


@dataclass(frozen=True)
class Notice:
    """What the chief says of one file.

    Parameters
    ----------
    path : str
        As the program gave it.
    what : str
        ``"begun"``, ``"written"`` or ``"failed"``.
    seat : list
        The chief's host, and there the device and the inode of the directory.
    mark : list of int
        The file's size and its time of change, in nanoseconds.
    why : str
        Of a failure, the reason.
    """

    path: str
    what: str
    seat: list[Any] = field(default_factory=list)
    mark: list[int] = field(default_factory=list)
    why: str = ""


class NoticeWriter:
    """The chief's end."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def tell(self, notice: Notice) -> None:
        """Send a notice; an error of the service is logged, since the file is what counts."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        with self._lock:
            key = _KEY.format(next(self._numbers))
            try:
                context.context().set_config_key_value(key, json.dumps(asdict(notice)))
            except (tf.errors.OpError, AttributeError) as error:
                logger.warning("the other workers could not be notified of %s: %s", notice.path, error)


class NoticeReader:
    """Another worker's end: a thread reads the notices, and a saving thread waits for its own."""

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
        """Wait until the chief has saved a file as often as this worker.

        Returns
        -------
        Notice or None
            How the chief's save ended. None if the chief does not save this file, or is gone.
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
        """Return how the chief's last save of a file ended, once none is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._is_idle(path))
            return None if self._lost else self._ended[path][1]

    @property
    def lost(self) -> bool:
        """Whether nothing more will be heard: the chief or this cluster is gone."""
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
        """Return for how many more seconds to wait."""
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
            logger.debug("the chief's saves are no longer heard of: %s", error)
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
