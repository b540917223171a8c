"""All calls of :meth:`tfos_nb.Cluster.train`, in order, and the nodes' progress with them.

While nothing fails, a call is delivered once and then finished. When the nodes start again, they restore an earlier
state, and report how many passes it includes. All later passes are delivered again, by the running call of ``train``,
or by a thread if no call runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.feeding.training import Call, NodesRestarted
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.errors import FeedFailed, TfosError
from tfos_nb.runtime.feed.messages import FeedFrom

__all__ = ["TrainingCalls"]

_NOTHING_RESTORED = (
    "resume= was given, but main has restored no state: fit does so by itself (docs/recovery.md says which one), and a "
    "loop of your own by ctx.resume. Launch without resume= to train from the beginning"
)
_LEDGERS_KEPT = 4  # calls about whose rows nodes may still send messages: they read ahead of their training


@dataclass
class TrainingCalls:
    """All calls of ``train`` of one cluster: delivered and still to deliver.

    Attributes
    ----------
    lock : threading.Lock
        Held by the thread that delivers.
    announced : bool
        Whether another thread is about to deliver; guarded by the controller's lock.
    """

    outcome: ClusterOutcome
    controller: ClusterController
    lock: threading.Lock = field(default_factory=threading.Lock)
    announced: bool = False
    _calls: list[Call] = field(default_factory=list)
    _index: int = 0
    _count: int = 0  # calls so far
    _rendezvous: int = 1
    _generation: int = 1  # the newest one whose position is known
    _from: int = 0  # passes in the state with which this generation began
    _resumes: bool = False  # an earlier cluster's training, and the nodes have not said yet from which position
    _ahead: FeedFrom | None = None  # the position, if it is beyond all calls so far

    def resume(self) -> None:
        """Record that the nodes continue an earlier cluster's training: they say from which position they want rows."""
        self._resumes = True

    def train(self, call: Call) -> None:
        """Deliver first what a failure left undelivered, then a call's passes. The lock is held."""
        self._catch_up()
        self._count += 1
        call.follow(sum(one.epochs for one in self._calls), self._count)
        self._calls.append(call)
        try:
            self._skip()
        except BaseException:  # nothing of this call was fed: the next one is made in its place
            self._calls[:] = [one for one in self._calls if one is not call]  # none is left if the cluster has ended
            self._count -= 1
            raise
        self._deliver()
        with self.controller.changed:
            if self._rendezvous != self.controller.rendezvous or self._ahead is not None:
                return
            last = self.controller.restarts_left <= 0  # these rows cannot be requested again
            for call in self._calls if last else self._calls[:-_LEDGERS_KEPT]:
                self.controller.feeds.close_ledgers(call.feeds)
            if last:
                self._calls.clear()
                self._index = 0

    def _skip(self) -> None:
        """Leave out what is in the state of an earlier cluster of the newest call."""
        if self._resumes:
            self._rendezvous = self._generation = 0  # until now no call could tell the nodes that rows come
            self._take_up()
        elif self._ahead is not None:
            self._go_to(self._ahead)

    def forget(self) -> None:
        """Drop all rows and ledgers: the cluster has ended."""
        with self.controller.changed:
            self._calls.clear()
            self.controller.feeds.forget()

    def announce(self) -> None:
        """Record that another thread is about to deliver."""
        with self.controller.changed:
            self.announced = True

    def begin(self) -> None:
        """Record that the announced delivery has begun. The lock is held, so other callers wait for it."""
        with self.controller.changed:
            self.announced = False
            self.controller.changed.notify_all()

    def await_announced(self, timeout: float | None) -> bool:
        """Wait until the announced delivery has begun, or cannot begin; return False after the timeout."""
        with self.controller.changed:
            return self.controller.changed.wait_for(lambda: not self.announced or self.outcome.over.is_set(), timeout)

    def close(self, reason: str) -> None:
        """Tell the nodes that no more rows come, after all have been delivered. The lock is held."""
        while not self._closed_now(reason):
            self._catch_up()

    def _closed_now(self, reason: str) -> bool:
        with self.controller.changed:
            if self._rendezvous != self.controller.rendezvous and not self.outcome.over.is_set():
                return False
            self.controller.feeds.close(reason)
            return True

    def rewind(self) -> None:
        """Deliver the rows that restarted nodes want again, in a thread of its own."""
        threading.Thread(target=self._rewind, name=f"tfos_nb feed {self.outcome.name}", daemon=True).start()

    def _rewind(self) -> None:
        try:
            with self.lock:
                self._catch_up()
                if self.controller.feeds.closed:
                    self.controller.feeds.announce_end()
        except TfosError as error:
            if not self.outcome.failing and not self.outcome.over.is_set():
                self.outcome.abort(error)

    def _catch_up(self) -> None:
        if self._rendezvous != self.controller.rendezvous:
            self._take_up()
            self._deliver()

    def _deliver(self) -> None:
        while self._index < len(self._calls):
            try:
                self._calls[self._index].deliver()
            except NodesRestarted:
                self._take_up()
            else:
                self._index += 1

    def _take_up(self) -> None:
        """Wait for the nodes that start again, and learn from which position they want rows."""
        while self._rendezvous != self.controller.rendezvous:
            with self.controller.changed:
                rendezvous = self._rendezvous = self.controller.rendezvous
                generation = self.controller.generation
            with contextlib.suppress(NodesRestarted):
                if generation == self._generation:
                    self._refill(rendezvous)
                else:
                    self._meet(rendezvous)
                    self._generation = generation  # only now: a node replaced meanwhile is asked too

    def _refill(self, rendezvous: int) -> None:
        """Feed the replacements of lost nodes, while the others continue.

        The feeds continue only when all nodes take rows. Until then a cancelled task that still runs receives the
        answer that they are over.
        """
        all_there = self._await(lambda: self.controller.all_reserved and self.controller.all_take_rows, rendezvous)
        for call in self._calls:
            call.go_on(rendezvous)
        if not all_there:
            return
        for node, place in self.controller.replaced.items():
            for call in self._calls[: self._index + 1]:
                call.refill(node, self._from + place.through, place.since)
            self.controller.fed_again(node)

    def _meet(self, rendezvous: int) -> None:
        """Learn from which position a new generation wants rows; it has not been fed yet."""
        self.controller.fed_again()
        for call in self._calls:
            call.begin_anew()
        if not self._calls or not self._await(
            lambda: self.controller.all_reserved and self.controller.all_take_rows, rendezvous
        ):
            return
        call = self._calls[min(self._index, len(self._calls) - 1)]
        call.make_room()
        call.keep_validation()
        if self._resumes:
            call.describe()
        if self._await(lambda: self.controller.feeds.is_position_known and self.controller.all_take_rows, rendezvous):
            if error := self.controller.feeds.disagreement:
                raise error
            position = next(iter(self.controller.feeds.wanted_from.values()))
            if self._resumes and not (position.passes or position.state or position.refused):
                raise FeedFailed(_NOTHING_RESTORED)
            self._go_to(position, may_be_ahead=self._resumes or self._ahead is not None)
            self._resumes = False

    def _await(self, reached: Callable[[], bool], rendezvous: int) -> bool:
        """Wait for a condition on the nodes of a rendezvous; return False if every main returns first.

        Raises
        ------
        NodesRestarted
            If the nodes start again.
        TfosError
            If the cluster fails.
        """
        changed = self.controller.changed
        with changed:
            changed.wait_for(
                lambda: (
                    reached()
                    or self.outcome.failing
                    or self.outcome.over.is_set()
                    or self.controller.rendezvous != rendezvous
                    or self.controller.all_returned
                )
            )
            if self.controller.rendezvous == rendezvous and reached() and not self.outcome.failing:
                return True
        if self.controller.rendezvous != rendezvous or (
            self.outcome.failing and self.outcome.await_decision(rendezvous)
        ):
            raise NodesRestarted
        if self.outcome.over.is_set() and self.outcome.error is not None:
            self.outcome.raise_outcome()
        return False

    def _go_to(self, wanted: FeedFrom, *, may_be_ahead: bool = True) -> None:
        """Continue after the passes, counted over all calls, and the rows of the next pass that a state includes.

        If ``may_be_ahead``, the state is of an earlier cluster, whose calls of ``train`` are made again.
        """
        left, self._ahead = wanted.passes, None
        self._from = left + sum(call.epochs for call in self._calls if call.number <= wanted.refused)
        for index, call in enumerate(self._calls):
            if call.number <= wanted.refused:
                continue
            if left < call.epochs:
                self._index = index
                held = self.controller.feeds.held.rows_of(wanted.state) if wanted.state else None
                call.continue_from(left, held, wanted.state)
                for later in self._calls[index + 1 :]:
                    later.continue_from(0)
                return
            left -= call.epochs
        if may_be_ahead and (left or wanted.state or wanted.refused > self._count):
            self._ahead = wanted
        elif left:
            raise FeedFailed(
                f"the restored state includes {wanted.passes} passes, but train() was called for "
                f"{wanted.passes - left}: it was saved by another program. Use another model_dir"
            )
        self._index = len(self._calls)
