"""All calls of :meth:`tfos_nb.Cluster.train`, in order, and how far the nodes have come with them.

While nothing fails a call is delivered and done with. When the members of the cluster are gathered anew, the nodes'
state is of an earlier moment, and they say of which: so many passes. What follows these is delivered again, by the call
of ``train`` that is under way, or by a thread if there is none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tfos_nb.errors import FeedFailed, TfosError
from tfos_nb.fate import Fate
from tfos_nb.roster import Roster
from tfos_nb.training import Call, Regathered

__all__ = ["Deliveries"]


@dataclass
class Deliveries:
    """What has been, and is to be, fed to one cluster.

    Attributes
    ----------
    lock : threading.Lock
        Held by whoever delivers.
    """

    fate: Fate
    roster: Roster
    lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: list[Call] = field(default_factory=list)
    _index: int = 0
    _generation: int = 1

    def train(self, call: Call) -> None:
        """Deliver a call's passes, and before them what a failure has left undelivered. The lock is held."""
        self._catch_up()
        self._calls.append(call)
        self._deliver()
        if self.roster.restarts_left <= 0:
            self._calls.clear()  # nobody will ask for these rows again
            self._index = 0

    def close(self, reason: str) -> None:
        """Tell the nodes that no more rows come, when all have been delivered. The lock is held."""
        while not self._closed_now(reason):
            self._catch_up()

    def _closed_now(self, reason: str) -> bool:
        with self.roster.changed:
            if self._generation != self.roster.generation and not self.fate.over.is_set():
                return False
            self.roster.feeds.close(reason)
            return True

    def rewind(self) -> None:
        """Deliver again what the nodes of a new generation want, in a thread of its own."""
        threading.Thread(target=self._rewind, name=f"tfos_nb feed {self.fate.name}", daemon=True).start()

    def _rewind(self) -> None:
        try:
            with self.lock:
                self._catch_up()
                if self.roster.feeds.closed:
                    self.roster.feeds.announce_end()
        except TfosError as error:
            if not self.fate.failing and not self.fate.over.is_set():
                self.fate.abort(error)

    def _catch_up(self) -> None:
        if self._generation != self.roster.generation:
            self._take_up()
            self._deliver()

    def _deliver(self) -> None:
        while self._index < len(self._calls):
            try:
                self._calls[self._index].deliver()
            except Regathered:
                self._take_up()
            else:
                self._index += 1

    def _take_up(self) -> None:
        """Wait for the new generation, or the one after it, and learn from where on it wants rows."""
        while self._generation != self.roster.generation:
            self._generation = self.roster.generation
            with contextlib.suppress(Regathered):
                self._meet(self._generation)

    def _meet(self, generation: int) -> None:
        for call in self._calls:
            call.place = None
        if not self._calls or not self._await(lambda: self.roster.all_reserved, generation):
            return
        self._calls[min(self._index, len(self._calls) - 1)].keep_validation()
        wanted = self.roster.feeds.wanted_from
        if self._await(lambda: bool(wanted), generation):
            self._go_to(next(iter(wanted.values())))

    def _await(self, reached: Callable[[], bool], generation: int) -> bool:
        """Wait for something of a generation; False if every main has returned before.

        Raises
        ------
        Regathered
            If another generation follows.
        TfosError
            If the cluster fails.
        """
        changed = self.roster.changed
        with changed:
            changed.wait_for(
                lambda: (
                    reached()
                    or self.fate.failing
                    or self.fate.over.is_set()
                    or self.roster.generation != generation
                    or self.roster.all_returned
                )
            )
            if self.roster.generation == generation and reached() and not self.fate.failing:
                return True
        if self.roster.generation != generation or (self.fate.failing and self.fate.await_decision(generation)):
            raise Regathered
        if self.fate.over.is_set() and self.fate.error is not None:
            self.fate.raise_outcome()
        return False

    def _go_to(self, passes: int) -> None:
        """Go on behind so many passes, counted over all calls."""
        left = passes
        for index, call in enumerate(self._calls):
            if left < call.epochs:
                self._index = index
                call.made = left
                for later in self._calls[index + 1 :]:
                    later.made = 0
                return
            left -= call.epochs
        if left:
            raise FeedFailed(
                f"the state that was put back holds {passes} passes, more than were fed: it is another program's"
            )
        self._index = len(self._calls)
