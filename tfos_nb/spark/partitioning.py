"""Have Spark cut files into the same partitions, with whatever executors it has when a training reads them again.

A state within an epoch says how many rows of each partition it includes. Spark cuts small files by the number of cores
that the application has at the moment: after the loss of an executor the partitions would be others, and the training
could not continue. So that number is fixed in the DataFrame's session, from the first ``train`` of a cluster that may
start again until its end, as ``spark.sql.leafNodeDefaultParallelism``.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

from tfos_nb.spark.contexts import context_of

__all__ = ["SteadyPartitions"]

_SETTING = "spark.sql.leafNodeDefaultParallelism"
_lock = threading.Lock()
_fixed: dict[int, _Fixed] = {}  # by the session's id; several clusters may feed from one


@dataclass
class _Fixed:
    session: Any
    before: str | None
    holders: int = 0


class SteadyPartitions:
    """Hold of one cluster on the partitions of the DataFrames that it feeds.

    Attributes
    ----------
    parallelism : int
        The number of cores by which Spark cuts files; 0 before the first :meth:`hold`.

    Examples
    --------
    >>> partitions = SteadyPartitions()
    >>> partitions.hold(spark.read.parquet("rows"))  # doctest: +SKIP
    >>> partitions.release()
    """

    def __init__(self) -> None:
        self.parallelism = 0
        self._held: set[int] = set()

    def hold(self, data: Any) -> None:
        """Keep the partitions of a DataFrame's files; an RDD has its own."""
        session = getattr(data, "sparkSession", None)
        if session is None or id(session) in self._held:
            return
        with _lock:
            if id(session) not in _fixed:
                before = session.conf.get(_SETTING, None)
                session.conf.set(_SETTING, str(self.parallelism or before or _of_spark(session)))
                _fixed[id(session)] = _Fixed(session, before)
            _fixed[id(session)].holders += 1
            self._held.add(id(session))
            self.parallelism = int(session.conf.get(_SETTING))

    def use(self, parallelism: int) -> None:
        """Cut files as with so many cores: a saved state is of such partitions."""
        if parallelism in (0, self.parallelism):
            return
        self.parallelism = parallelism
        with _lock:
            for one in self._held:
                _fixed[one].session.conf.set(_SETTING, str(parallelism))

    def release(self) -> None:
        """Let Spark choose again, once no other cluster feeds from the same session."""
        with _lock:
            for one in self._held:
                fixed = _fixed[one]
                fixed.holders -= 1
                if not fixed.holders:
                    del _fixed[one]
                    with contextlib.suppress(Exception):  # the session has ended
                        _restore(fixed)
            self._held.clear()


def _of_spark(session: Any) -> int:
    """Return the number that Spark would take now."""
    context = context_of(session)
    return int(context.setting("spark.default.parallelism") or max(2, context.cores()))


def _restore(fixed: _Fixed) -> None:
    if fixed.before is None:
        fixed.session.conf.unset(_SETTING)
    else:
        fixed.session.conf.set(_SETTING, fixed.before)
