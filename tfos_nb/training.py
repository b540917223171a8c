"""One call of :meth:`tfos_nb.Cluster.train`, in the caller's thread: Spark jobs that feed, and waiting for passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.errors import FeedFailed, FeedTimeout, TfosError
from tfos_nb.fate import Fate
from tfos_nb.feeding import Feed, feed_job
from tfos_nb.launching import Waking, error_of_job
from tfos_nb.roster import Roster
from tfos_nb.runtime.door import DoorAddress
from tfos_nb.session import Job, SparkJobs

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """Delivers passes over some data to the nodes of one cluster."""

    fate: Fate
    roster: Roster
    jobs: SparkJobs
    timeout: float
    door: DoorAddress = field(repr=False)

    def run(self, data: Any, epochs: int, spill: bool) -> None:
        """Deliver ``epochs`` passes; Spark is asked once, or once a pass where the nodes cannot keep the rows."""
        epoch = 1
        while epoch <= epochs and not self._nobody_wants():
            epoch += self._feed_once(data, epoch, epochs, spill)

    def _feed_once(self, data: Any, epoch: int, epochs: int, spill: bool) -> int:
        """Send the rows through Spark once; return how many passes that made."""
        passes = epochs - epoch + 1
        feed = self.roster.feeds.begin(passes, spill and passes > 1, epoch, epochs)
        name = f"tfos_nb cluster {self.fate.name}: feed epoch {epoch}"
        job = self.jobs.run(Waking(feed_job(data, feed, self.door), self.fate.wake), name)
        try:
            self._await(feed, job.done.is_set, job)
            if feed.error is None and not job.done.is_set():  # every node has all it wants
                return passes
            self._check(feed, job)
            replays = passes - 1 if feed.spill and feed.ledger.spilled else 0
            self.roster.feeds.end(feed, replays)
            if epoch + replays == epochs:
                self._await(feed, lambda: self._made(feed, 1 + replays))
            return 1 + replays
        finally:
            job.cancel()

    def _await(self, feed: Feed, reached: Callable[[], bool], job: Job[Any] | None = None) -> None:
        """Wait until ``reached()``, or no node wants rows; raise if the cluster fails or nothing moves."""
        mark, since = self._mark(feed), time.monotonic()
        while not self._over_or(reached, feed):
            if job is not None and feed.moved and not feed.partitions:  # now the last stage runs
                feed.partitions = job.partitions()
            if (now := self._mark(feed)) != mark or not self.roster.sated():
                mark, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                self.fate.abort(FeedTimeout(self._stall(feed)))
        if self._ending():
            self.fate.raise_outcome()

    def _over_or(self, reached: Callable[[], bool], feed: Feed) -> bool:
        """Look, then wait for a change, for a second at the most, and look again."""
        with self.roster.changed:
            if not self._enough(reached, feed):
                self.roster.changed.wait(1.0)
            return self._enough(reached, feed)

    def _enough(self, reached: Callable[[], bool], feed: Feed) -> bool:
        return bool(reached() or feed.error or self._nobody_wants() or self._ending())

    def _ending(self) -> bool:
        return self.fate.failing or self.fate.over.is_set()

    def _check(self, feed: Feed, job: Job[Any]) -> None:
        error: TfosError | None = feed.error
        if error is None and job.error is not None:
            error = error_of_job(job.error, "Spark could not deliver the rows")
        if error is None and feed.ledger.rows == 0:
            error = FeedFailed("the data have no rows")
        if error is not None:
            self.fate.abort(error)
            self.fate.raise_outcome()

    def _mark(self, feed: Feed) -> tuple[int, int]:
        return feed.moved, self.roster.rows_taken

    def _stall(self, feed: Feed) -> str:
        return (
            f"{', '.join(self.roster.sated())} took no row for {self.timeout:g} s, while rows of epoch {feed.epoch} "
            f"were waiting ({feed.ledger.rows} delivered so far). Does main go through ctx.dataset() as often as "
            f"epochs={feed.epochs}? A step that takes longer needs a longer feed_timeout"
        )

    def _made(self, feed: Feed, count: int) -> bool:
        done = feed.passes_done
        return all(done.get(node, 0) >= count or self.roster.is_over(node) for node in self.roster.feeds.nodes)

    def _nobody_wants(self) -> bool:
        return all(self.roster.is_over(node) for node in self.roster.feeds.nodes)
