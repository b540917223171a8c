"""Run a cluster's work in a thread while the cell waits, so that the kernel can be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tfos_nb.interrupts import interruptible
from tfos_nb.magics.clusters import RunningCluster, say_stopped

__all__ = ["CellWork", "StoppedByUser"]

_LOOK_UP = 0.2
"""Seconds between two checks of states that have no event. On Windows an interrupt is handled only between them."""

_PATIENCE = 3
"""Number of interrupts after which the cell returns: one stops the nodes, one cancels them, one leaves them."""


class StoppedByUser(KeyboardInterrupt):
    """The user interrupted the cell and the cluster was stopped.

    It is a KeyboardInterrupt, so that "Run All" ends as after any interrupt. It is shown as one line.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CellWork:
    """Work on a cluster for which a cell waits.

    The first interrupt asks the cluster to stop, and the cell continues to wait. The second interrupt cancels it.

    Parameters
    ----------
    cluster : RunningCluster
        The cluster that an interrupt stops.
    work : callable
        The work, which runs in a separate thread.
    say : callable
        Called with a line for the display about the effect of an interrupt.
    name : str
        Name of the thread.
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
        """Start the work, and do not wait for it."""
        self._thread.start()

    def run(self) -> None:
        """Start the work, and return when it is done.

        Raises
        ------
        StoppedByUser
            If the kernel was interrupted during the work.
        Exception
            Any exception that the work raised.
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
        """Ask the cluster to stop, and wait until it has stopped.

        Each further interrupt asks again. The last one returns without waiting.
        """
        interrupts, told = 1, 0
        while interrupts < _PATIENCE:
            try:
                if told < interrupts:
                    told = interrupts
                    self._say(self._cluster.request_stop())
                if self._has_ended():
                    return
                threading.Event().wait(_LOOK_UP)  # no single event covers both the work and the cluster
            except KeyboardInterrupt:
                interrupts += 1

    def _has_ended(self) -> bool:
        return self._over.is_set() and self._cluster.snapshot().status.ended
