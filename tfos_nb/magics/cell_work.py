"""A cluster's work while a cell waits for it: in a thread, so that the kernel stays free to be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tfos_nb.interrupts import interruptible
from tfos_nb.magics.clusters import RunningCluster, say_stopped

__all__ = ["CellWork", "StoppedByUser"]

_LOOK_UP = 0.2
"""Seconds between two looks at what no event tells, and between two chances of an interrupt on Windows."""

_PATIENCE = 3
"""So many interrupts give the cell back, whatever the nodes do: one stops them, one cancels them, one leaves."""


class StoppedByUser(KeyboardInterrupt):
    """The user interrupted the cell and the cluster was stopped.

    A KeyboardInterrupt, so that "Run All" ends here as it does after any interrupt; shown as one line.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CellWork:
    """Work on a cluster that a cell waits for.

    The first interrupt asks the cluster to stop, and the cell goes on waiting; the second cancels it.

    Parameters
    ----------
    cluster : RunningCluster
        What an interrupt stops.
    work : callable
        What is done in a thread of its own.
    say : callable
        Takes a line for the display: what an interrupt led to.
    name : str
        Of the thread.
    """

    def __init__(
        self, cluster: RunningCluster, work: Callable[[], object], say: Callable[[str], object], name: str
    ) -> None:
        self._cluster = cluster
        self._work = work
        self._say = say
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._go, name=f"tfos-{name}", daemon=True)

    def start(self) -> None:
        """Begin, and do not wait."""
        self._thread.start()

    def run(self) -> None:
        """Begin, and return when the work is done.

        Raises
        ------
        StoppedByUser
            If the kernel was interrupted meanwhile.
        Exception
            What the work raised.
        """
        with interruptible():
            try:
                self._thread.start()
                while not self._over.wait(_LOOK_UP):
                    pass
            except KeyboardInterrupt:
                self._stop()
                raise StoppedByUser(say_stopped(self._cluster, "stopped by you")) from None
        if self._error is not None:
            raise self._error

    def _go(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised in the cell
            self._error = error
        finally:
            self._over.set()

    def _stop(self) -> None:
        """Ask the cluster to stop and wait until it has; each further interrupt asks again, the last one leaves."""
        interrupts, told = 1, 0
        while interrupts < _PATIENCE:
            try:
                if told < interrupts:
                    told = interrupts
                    self._say(self._cluster.request_stop())
                if self._has_ended():
                    return
                threading.Event().wait(_LOOK_UP)  # no event tells of both the work and the cluster
            except KeyboardInterrupt:
                interrupts += 1

    def _has_ended(self) -> bool:
        return self._over.is_set() and self._cluster.snapshot().status.ended
