"""Detect why the rows of a feed do not move: no node takes any, or Spark has no slot for the feeding tasks."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.feed_controller import Feed
from tfos_nb.spark.session import Job, SlotCounts, SparkJobs

__all__ = ["FeedWatchdog", "WithoutSlot", "needs_a_nodes_slot"]

logger = logging.getLogger(__name__)

_WORKS = 0.2  # of a core: a process that waits for its peers, or for rows, uses less
_ASK_SPARK = 1.0  # seconds between questions
_ASK_AT_FIRST = 0.25  # the same while a feed begins: after a loss the nodes train again only when its rows come
_BEGINS = 3.0
_TELL = 10.0  # seconds without a slot after which a warning is logged


class FeedWatchdog:
    """Measure how long no row has been taken; nodes that compute, report or save are not counted as stuck."""

    def __init__(self, controller: ClusterController, feed: Feed, timeout: float) -> None:
        self._controller, self._feed, self._timeout = controller, feed, timeout
        self._moved = self._since = time.monotonic()
        self._mark = self._progress()
        self._worked: dict[str, float] | None = None  # computed only when nothing moved: there may be a thousand nodes
        self._told = self.for_good = False

    def look(self) -> float:
        """Check; return the seconds for which no row was taken or sent while some were waiting."""
        now, mark = time.monotonic(), self._progress()
        moved = mark[:2] != self._mark[:2] or not self._controller.nodes_with_rows()
        if moved:
            self._moved, self._told = now, False
        if moved or mark != self._mark:
            self._since, self._mark, self._worked = now, mark, None
        elif self._worked is None:
            self._worked = self._controller.worked()
        elif now - self._since > self._timeout:
            self.for_good = not self._has_worked(now - self._since)
            self._since, self._worked = now, None
            self._tell_once()
        return now - self._moved

    def _tell_once(self) -> None:
        if not self.for_good and not self._told:
            self._told = True
            logger.warning(
                "%s took no row for %g s, in epoch %d; the feed keeps waiting, because the nodes compute",
                ", ".join(self._controller.nodes_with_rows()),
                self._timeout,
                self._feed.epoch,
            )

    def _has_worked(self, seconds: float) -> bool:
        """Whether a node has computed for a part of this time, or is writing a model."""
        least, before = _WORKS * seconds, self._worked or {}
        return self._controller.saving or any(
            worked - before.get(node, worked) >= least for node, worked in self._controller.worked().items()
        )

    def _progress(self) -> tuple[int, ...]:
        return self._feed.moved, *self._controller.progress


def needs_a_nodes_slot(room: SlotCounts) -> bool:
    """Return whether rows can only have the slot of a node: nodes hold all, and Spark starts no executor for them."""
    return room.is_for_nodes and not room.grows


class WithoutSlot:
    """Find out whether Spark has a slot for the tasks of a feed, and have a node's task leave one.

    Preflight has kept one slot free. When an executor is lost, Spark retries its node tasks in the remaining slots, and
    may use that one too. Then a node's task leaves its slot, and the node continues without a task.

    Parameters
    ----------
    controller, jobs, job, feed
        The nodes that may leave a slot, the cluster's Spark jobs, and the job and the feed that need one.
    timeout : float
        Seconds for which the rows wait for Spark to get an executor, if it has none.
    """

    def __init__(
        self, controller: ClusterController, jobs: SparkJobs, job: Job[Any], feed: Feed, timeout: float
    ) -> None:
        self._controller, self._jobs, self._job, self._feed, self._timeout = controller, jobs, job, feed, timeout
        self._begun = self._since = time.monotonic()
        self._asked_at = -math.inf
        self._moved = feed.moved
        self._told = False

    @property
    def pause(self) -> float:
        """Seconds until the next check."""
        begins = self._feed.moved == 0 and time.monotonic() - self._begun < _BEGINS
        return _ASK_AT_FIRST if begins else _ASK_SPARK

    def look(self) -> str:
        """Check, and have a node leave its slot where that helps; return the reason to give up, or empty text."""
        now = time.monotonic()
        if self._feed.moved != self._moved or self._job.done.is_set():
            self._moved, self._since, self._asked_at = self._feed.moved, now, now
            return ""
        if now - self._asked_at < self.pause:
            return ""
        self._asked_at = now
        room = self._jobs.room(self._job)
        if room is None or room.running or room.free:
            self._since = now
            return ""
        if needs_a_nodes_slot(room):
            self._controller.want_slot()
        seconds = now - self._since
        if seconds > _TELL and not self._told:
            self._told = True
            logger.warning("the rows of epoch %d wait for Spark: %s", self._feed.epoch, _said(room))
        nodes_alone = room.grows and room.is_for_nodes
        if (room.total and not nodes_alone) or seconds < self._timeout:
            return ""
        if nodes_alone:
            return (
                f"the rows of epoch {self._feed.epoch} waited {self._timeout:g} s for an executor: nodes hold all "
                f"{room.total} slots, and Spark has not started another. Find out why in its log or in the cluster "
                "manager, raise spark.dynamicAllocation.maxExecutors if all have been started, or raise feed_timeout"
            )
        return (
            f"the rows of epoch {self._feed.epoch} waited {self._timeout:g} s for Spark, which has no executor any "
            "more. Find out in its UI, or in the cluster manager, why the executors ended and no new one started. "
            "Raise feed_timeout if executors come later"
        )


def _said(room: SlotCounts) -> str:
    if not room.total:
        return "it has no executor now"
    runs = ", ".join(f"{one.tasks} of '{one.description}'" for one in room.stages)
    return f"none of its {room.total} slots is free for the tasks that bring them. Tasks that run: {runs}"
