"""The driver's request to save a state after one of the next steps, and to wait there.

::

    driver: StateWanted ──▶ all nodes: a state, then StateHeld or PositionHeld(waits=True) ──▶ driver: StartAgain

The driver asks when nodes are about to join or to leave. It ends the processes once the state is there. A node that
waits until then does no step that would have to be done again.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["SaveRequest"]

_log = logging.getLogger(__name__)

_SECONDS = 30.0


class SaveRequest:
    """State of the request on one node.

    Examples
    --------
    >>> request = SaveRequest()
    >>> request.change(True)
    >>> request.asked
    True
    >>> threading.Timer(0.1, request.change, [False]).start()
    >>> request.pause()
    >>> request.asked
    False
    """

    def __init__(self) -> None:
        self._none = threading.Event()
        self._none.set()

    @property
    def asked(self) -> bool:
        """Whether the driver wants a state."""
        return not self._none.is_set()

    def change(self, wanted: bool) -> None:
        """Record whether the driver wants a state; if it does not, :meth:`pause` returns."""
        if wanted:
            self._none.clear()
        else:
            self._none.set()

    def pause(self) -> None:
        """Wait, after a state was saved, until the driver ends this process.

        Wait even if only another node has received the request so far.
        """
        self._none.clear()
        if not self._none.wait(_SECONDS):
            _log.warning("no node has joined or left within %g s: training continues", _SECONDS)
            self._none.set()

    def pause_if_asked(self) -> None:
        """Wait, if the driver has asked for the state that was saved."""
        if self.asked:
            self.pause()
