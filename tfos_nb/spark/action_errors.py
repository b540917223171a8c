"""Errors of a user's own Spark action that a cluster has caused: the action raises the cluster's error.

A result of ``cluster.inference`` is computed by the user's action. If the cluster has failed or ended, it cancels the
action's stage with a reason (:meth:`tfos_nb.spark.session.SparkJobs.cancel_stage`), and Spark raises a
``Py4JJavaError`` that has it somewhere in pages of Java's stack. PySpark itself converts Java's errors in py4j's
``get_return_value`` (``pyspark.errors.exceptions.captured.install_exception_handler``); this module adds a step there.
A mark in the reason says which error it is. Over Spark Connect there is no py4j, and the error stays Spark's.
"""

from __future__ import annotations

import copy
import sys
import threading
import uuid
from collections import deque
from typing import Any

from tfos_nb.errors import TfosError

__all__ = ["ActionErrors", "action_errors"]


class ActionErrors:
    """The errors to raise for the newest cancellations, at most ``most``.

    Examples
    --------
    >>> errors = ActionErrors(most=2)
    >>> reason = errors.reason_for(TfosError("worker:1: ValueError: no"))
    >>> errors.cause_of(f"[SPARK_JOB_CANCELLED] Job 3 was cancelled: {reason}")
    TfosError('worker:1: ValueError: no')
    >>> errors.cause_of("[SPARK_JOB_CANCELLED] Job 4 was cancelled by its user: worker:1: ValueError: no")
    """

    def __init__(self, most: int) -> None:
        self._known: deque[tuple[str, TfosError]] = deque(maxlen=most)
        self._lock = threading.Lock()

    def reason_for(self, error: TfosError) -> str:
        """Return the reason of a cancellation after which the user's action raises ``error``."""
        mark = f"[tfos_nb {uuid.uuid4().hex}]"
        with self._lock:
            self._known.append((mark, error))
        self._install()
        return f"{error}\n{mark}"

    def cause_of(self, said: str) -> TfosError | None:
        """Return the error of the cluster that has cancelled an action, by the text of Spark's error."""
        with self._lock:
            found = next((error for mark, error in self._known if mark in said), None)
        return None if found is None else copy.copy(found)  # it may be raised in several threads

    def _install(self) -> None:
        """Add the step to the function that PySpark wraps now, and again for each new session."""
        protocol: Any = sys.modules.get("py4j.protocol")  # not over Spark Connect
        if protocol is None or isinstance(protocol.get_return_value, _Converting):
            return
        from pyspark.errors.exceptions.captured import install_exception_handler

        protocol.get_return_value = _Converting(self, protocol.get_return_value)
        install_exception_handler()


class _Converting:
    """py4j's function that returns a call's value or raises its error, with this module's step."""

    def __init__(self, known: ActionErrors, before: Any) -> None:
        self._known = known
        self._before = before

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._before(*arguments, **named)
        except Exception as error:
            cause = self._known.cause_of(str(error))
            if cause is None:
                raise
        raise cause


action_errors = ActionErrors(most=32)
"""Those of this process."""
