"""Run one call of :meth:`tfos_nb.Cluster.train` in the caller's thread: start the Spark jobs, wait for the passes."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.feed_controller import Feed, FeedOf, check_feedable, describe_job, feed_job
from tfos_nb.driver.feeding.watchdog import FeedWatchdog, WithoutSlot, needs_a_nodes_slot
from tfos_nb.driver.launching import error_of_job
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.driver.settings import check_seconds
from tfos_nb.errors import FeedFailed, FeedTimeout, PlanError, TfosError
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.wire import expect
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.feed_task import ELSEWHERE, NOT_SENT
from tfos_nb.runtime.rows.fingerprint import KEEP_ROWS_ALIKE
from tfos_nb.spark.feedable import check_alike
from tfos_nb.spark.partitioning import SteadyPartitions
from tfos_nb.spark.session import Job, SparkJobs

__all__ = ["Call", "NodesRestarted", "Training"]

logger = logging.getLogger(__name__)

_NO_ROWS = "the data have no rows: check the query, as with df.count()"
_NOT_MOVING = 2.0  # seconds without a row taken, while some nodes have rows and others wait for some
_UNTIL_LOST = 5.0  # seconds after the heartbeat timeout within which a node is known to be lost
_ELSEWHERE_MOST = 20  # jobs of one feed, of which each gives Spark the chance to run tasks on other hosts
_UNREACHED = re.compile(r"Flight\w*Error|hung up while|[Cc]onnection (refused|reset|closed)|failed to connect")


class NodesRestarted(Exception):
    """The nodes start again: the current delivery is void."""


@dataclass(frozen=True)
class _OutsideJobGroup:
    """Spark action that continues when its streaming query is stopped, so that its batch is fed to the end."""

    action: Callable[[], Any]

    def __call__(self) -> Any:
        """Leave the query's job group, then run."""
        from pyspark import SparkContext

        context = SparkContext._active_spark_context
        assert context is not None, "a stream needs a SparkContext"
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]  # None removes it
        return self.action()


@dataclass(frozen=True)
class Training:
    """Deliver passes over some data to the nodes of one cluster."""

    outcome: ClusterOutcome
    controller: ClusterController
    jobs: SparkJobs
    timeout: float
    door: DoorAddress = field(repr=False)
    queue: str = "input"
    partitions: SteadyPartitions | None = None

    def __post_init__(self) -> None:
        check_seconds("feed_timeout", self.timeout, above=0)

    def call(self, data: Any, epochs: int, spill: bool, validation: Any = None) -> Call:
        """Return a call of ``train`` after checking its data; the validation rows are sent first, once."""
        if type(spill) is not bool:
            raise PlanError(f"spill must be True or False, got {spill!r}")
        check_feedable(data)
        if validation is not None:
            check_feedable(validation)
            check_alike(data, validation)
        self.keep_partitions(data)
        return Call(self, data, epochs, spill, validation)

    def keep_partitions(self, data: Any, parallelism: int = 0) -> None:
        """Have Spark cut the data's files into the same partitions from now on: as with so many cores, if given."""
        if self.partitions is not None:
            self.partitions.hold(data)
            self.partitions.use(parallelism)
            self.controller.feeds.parallelism = self.partitions.parallelism

    def begin_call(self, validation: Any = None, number: int | None = None, kept: int = 0) -> FeedOf:
        """Number a call of ``train``, and send its validation rows, which were checked before.

        ``kept`` is the feed that has brought them to an earlier generation: the nodes may have them still.
        """
        place = FeedOf(self.controller.feeds.begin_call(number), queue=self.queue)
        if validation is None:
            return place
        if kept and self.controller.feeds.resume_validation(kept, replace(place, validates=True)):
            return replace(place, validation=kept)
        return replace(place, validation=self._keep(validation, place))

    def _keep(self, validation: Any, place: FeedOf) -> int:
        """Send the validation rows, which the nodes keep; return the feed's number."""
        feed = self.controller.feeds.begin(2, True, 1, 1, replace(place, validates=True))
        empty = "the validation data have no rows: check the query, as with df2.count()"
        with self._delivered(validation, feed, "feed validation rows") as job:
            self._check(feed, job, empty)
            if not feed.ledger.spilled and not self.nobody_wants(place.call):
                self._fail(
                    FeedFailed(
                        f"the validation rows ({feed.ledger.rows}) could not be kept on the executors' local disk: it "
                        "is full, or spill_bytes is less than they take. Validate on a sample, or raise spill_bytes"
                    ),
                    feed,
                )
            self.controller.feeds.end(feed, 0)
            self.controller.feeds.close_ledgers([feed])
        return feed.number

    def describe(self, data: Any) -> None:
        """Tell the nodes the schema of rows that are fed later: they restore a state first, and may need it for that.

        Raises
        ------
        FeedFailed
            If there are no rows, or Spark cannot read them.
        NodesRestarted
            If the nodes start again.
        """
        what = f"tfos_nb cluster {self.outcome.name}: look at the first rows"
        rendezvous, job = self.controller.rendezvous, self.jobs.run(describe_job(data), what, self.outcome.wake)
        try:
            self.outcome.wait_for(lambda: job.done.is_set() or self.controller.rendezvous != rendezvous, None)
            self.raise_if_ended(rendezvous)
        finally:
            job.cancel()
        if job.error is not None:
            raise error_of_job(job.error, "Spark could not deliver the rows")
        if not job.result:
            raise FeedFailed(_NO_ROWS)
        self.controller.feeds.describe(expect(messages.FeedSchema, job.result[0][0]))

    def begin_feed(self, call: Call, place: FeedOf) -> Feed:
        """Announce the rows of a call's next epoch and, where the nodes can keep them, of the epochs that follow.

        The rest of an interrupted epoch cannot be replayed as the next one.
        """
        passes = 1 if call.held else call.epochs - call.made
        spill, before = call.spill and passes > 1, call.before + call.made
        return self.controller.feeds.begin(
            passes, spill, call.made + 1, call.epochs, place, held=call.held, before=before
        )

    def feed_once(self, data: Any, feed: Feed) -> int:
        """Send the rows through Spark once; return how many passes that made."""
        if feed.lacking:
            self._feed_lacking(data, feed)
        if feed.replays is None:
            with self._delivered(data, feed, f"feed epoch {feed.epoch}") as job:
                if feed.error is None and not job.done.is_set():  # every node has all the rows it wants
                    return feed.passes
                self._check(feed, job)
                kept = feed.spill and feed.ledger.spilled and feed.ledger.claimed.keys() >= set(self._nodes)
                self.controller.feeds.end(feed, feed.passes - 1 if kept else 0)
        made = 1 + (feed.replays or 0)
        if feed.epoch + made - 1 == feed.epochs:
            self._await(feed, lambda: self.controller.feeds.has_made(feed, made))
            if feed.error is not None:  # the nodes have restored different states
                self._fail(feed.error, feed)
        return made - feed.resumed

    def _feed_lacking(self, data: Any, feed: Feed) -> None:
        """Send the rows of a delivered feed once more, for the nodes of a new generation that have not kept theirs."""
        with self._delivered(data, feed, f"feed {', '.join(sorted(feed.lacking))} again") as job:
            if job.done.is_set():
                self._check(feed, job)
                try:
                    self.controller.feeds.end_resumed(feed)
                except FeedFailed as error:
                    self._fail(error, feed)

    def feed_again(self, data: Any, feed: Feed, node: str) -> None:
        """Send the rows of a feed through Spark once more, for a replacement node.

        The ledger still knows the node of each row, and the other nodes know which rows they have.
        """
        if node not in feed.ledger.claimed:  # it came late and has no share
            self.controller.feeds.end_again(feed, node)
            return
        with self._job(data, feed, f"feed {node} again") as job:
            self._await(feed, job.done.is_set, job)
            if job.done.is_set():
                self._check(feed, job)
                self.controller.feeds.end_again(feed, node)

    def feed_batch(self, data: Any, place: FeedOf) -> bool:
        """Send a stream's micro-batch; return whether every node has finished it and asked for the next one.

        The batch may be empty. False means that the nodes had enough before its end.
        """
        feed = self.controller.feeds.begin(1, False, 1, 1, place)
        with self._job(data, feed, f"feed batch {place.batch}") as job:
            self._await(feed, job.done.is_set, job)
            if feed.error is None and not job.done.is_set():
                return False
            self._check(feed, job, "")
            self.controller.feeds.end(feed, 0)
            self._await(feed, lambda: self.controller.feeds.has_made(feed, 1))
            return not self.nobody_wants(place.call) or all(feed.passes_done.get(node) for node in self._nodes)

    @contextlib.contextmanager
    def _delivered(self, data: Any, feed: Feed, what: str) -> Iterator[Job[Any]]:
        """Run the Spark job of a feed to its end, and again while a task ran on a host that does not reach all nodes.

        The ledger knows the nodes of the rows that were sent, and the nodes know which rows they have.
        """
        for left in reversed(range(_ELSEWHERE_MOST)):
            with self._job(data, feed, what) as job:
                self._await(feed, job.done.is_set, job)
                if not left or not _is_left_elsewhere(job):
                    yield job
                    return

    @contextlib.contextmanager
    def _job(self, data: Any, feed: Feed, what: str) -> Iterator[Job[Any]]:
        """Run the Spark job of a feed; leaving the block cancels what was not read."""
        action = feed_job(data, feed, self.door)
        if feed.place.batch is not None:
            action = _OutsideJobGroup(action)
        job = self.jobs.run(action, f"tfos_nb cluster {self.outcome.name}: {what}", self.outcome.wake)
        try:
            yield job
        finally:
            job.cancel()

    def _await(self, feed: Feed, reached: Callable[[], bool], job: Job[Any] | None = None) -> None:
        """Wait until ``reached()``, or until no node wants rows; raise if the cluster fails or no row moves.

        Raises
        ------
        NodesRestarted
            If the nodes start again.
        """
        watchdog = FeedWatchdog(self.controller, feed, self.timeout)
        without_slot = None if job is None else WithoutSlot(self.controller, self.jobs, job, feed, self.timeout)
        while not self._over_or(reached, feed, without_slot.pause if without_slot is not None else 1.0):
            if job is not None and feed.moved and not feed.partitions:  # now the last stage runs
                self.controller.feeds.set_partitions(feed, job.partitions())
            if without_slot is not None and (told := without_slot.look()):
                self.outcome.abort(FeedTimeout(told))
            seconds = watchdog.look()
            if watchdog.for_good:
                self.outcome.abort(FeedTimeout(self._stall(feed)))
            elif seconds > _NOT_MOVING and self.controller.nodes_without_rows():
                # The nodes with full queues may wait for the others, and these wait for rows.
                self.controller.send(messages.MakeRoom(feed.number), self.controller.nodes_with_rows())
        self.raise_if_ended(feed.rendezvous)

    def raise_if_ended(self, rendezvous: int | None = None) -> None:
        """Raise the error that ends the cluster. When every ``main`` has returned, only the feed ends."""
        of = self.controller.rendezvous if rendezvous is None else rendezvous
        if self.controller.rendezvous != of or (self.outcome.failing and self.outcome.await_decision(of)):
            raise NodesRestarted
        if self.outcome.failing or (self.outcome.over.is_set() and self.outcome.error is not None):
            self.outcome.raise_outcome()

    def _over_or(self, reached: Callable[[], bool], feed: Feed, seconds: float) -> bool:
        """Check, wait at most ``seconds`` seconds for a change, and check again."""
        with self.controller.changed:
            if not self._enough(reached, feed):
                self.controller.changed.wait(seconds)
            return self._enough(reached, feed)

    def _enough(self, reached: Callable[[], bool], feed: Feed) -> bool:
        ending = self.ending or self.controller.rendezvous != feed.rendezvous
        return bool(reached() or feed.error or self.nobody_wants(feed.place.call) or ending)

    @property
    def ending(self) -> bool:
        """Whether the cluster ends, or has ended."""
        return self.outcome.failing or self.outcome.over.is_set()

    def _check(self, feed: Feed, job: Job[Any], empty: str = _NO_ROWS) -> None:
        error: TfosError | None = feed.error
        if error is None and job.error is not None:
            error = error_of_job(job.error, "Spark could not deliver the rows")
        given_up = [partition for partition, rows in job.result or () if rows == NOT_SENT]
        if error is None and _is_left_elsewhere(job):
            error = FeedFailed(
                "some partitions were not fed: Spark ran their tasks only on hosts that do not reach all nodes. Check "
                "the network between the hosts, or leave slots free on the others"
            )
        if error is None and given_up:
            error = FeedFailed(
                f"partition {given_up[0]} was not fed to its end, because a node stopped taking its rows. The nodes' "
                "logs say why: cluster.logs(node)"
            )
        elif error is None and job.done.is_set():
            read = sum(rows for _, rows in job.result or ())  # by the attempts that Spark counts as successful
            if read != feed.ledger.rows:
                error = FeedFailed(
                    f"Spark read {read} rows, but the nodes were sent {feed.ledger.rows}: the query may give other "
                    f"rows when Spark repeats a task. {KEEP_ROWS_ALIKE}"
                )
            elif (cut := feed.ledger.cut_short()) is not None:
                partition, now, before = cut
                error = FeedFailed(
                    f"partition {partition} has {now} rows now, and had {before} or more when the nodes' state was "
                    f"saved. {KEEP_ROWS_ALIKE}"
                )
        if error is None and feed.ledger.rows == 0 and empty and not self.nobody_wants(feed.place.call):
            error = FeedFailed(empty)
        if error is not None:
            unreached = given_up or (job.error is not None and _UNREACHED.search(str(job.error)))
            if self.controller.restarts_left > 0 and unreached:
                # A task notices a lost node before the heartbeat timeout does.
                self.outcome.wait_for(lambda: False, self.controller.heartbeat_timeout + _UNTIL_LOST)
            self._fail(error, feed)

    def _fail(self, error: TfosError, feed: Feed) -> None:
        if not self.outcome.failing and self.controller.rendezvous == feed.rendezvous:
            self.outcome.abort(error)
        self.raise_if_ended(feed.rendezvous)
        raise error

    def _stall(self, feed: Feed) -> str:
        idle = ", ".join(self.controller.nodes_with_rows())
        if waiting := self.controller.nodes_without_rows():
            return (
                f"{', '.join(waiting)} waited {self.timeout:g} s for rows of epoch {feed.epoch}, while {idle} took no "
                f"row and did not compute for {self.timeout:g} s. If the nodes train in step, the rows of one node "
                "come after more rows of another than fit into its memory: repartition the DataFrame into more "
                "partitions, or raise buffer_bytes"
            )
        return (
            f"{idle} took no row and did not compute for {self.timeout:g} s, while rows of epoch {feed.epoch} were "
            f"waiting ({feed.ledger.rows} delivered so far). main must iterate over ctx.dataset() {feed.epochs} times, "
            "as epochs= says. If main waits longer for something else, raise feed_timeout"
        )

    def tell_if_unread(self) -> None:
        """Log a warning if no node took any of the rows that were fed: nothing was trained, and nothing failed."""
        if self.controller.unread and self.outcome.stop is None and not self.controller.was_restarted:
            logger.warning(
                "cluster %s: every main has returned, and none has taken a row that train() fed. Take them with "
                "ctx.dataset(64, …), or ctx.get_data_feed()",
                self.outcome.name,
            )

    def nobody_wants(self, call: int) -> bool:
        """Whether no node takes rows of this call of ``train`` any more."""
        feeds = self.controller.feeds
        return all(feeds.is_through(node, call) for node in self._nodes)

    @property
    def _nodes(self) -> Sequence[str]:
        return self.controller.feeds.nodes


def _is_left_elsewhere(job: Job[Any]) -> bool:
    """Whether a job has ended, and tasks of it were on a host that does not reach all nodes."""
    return job.done.is_set() and job.error is None and any(rows == ELSEWHERE for _, rows in job.result or ())


@dataclass
class Call:
    """State of one call of ``train``: its rows, and how many passes over them have been delivered.

    ``before`` counts the passes of the calls before it. ``feeds`` are its feeds in this generation. ``held`` are the
    rows of the next pass that the nodes' saved state includes already.
    """

    training: Training
    data: Any
    epochs: int
    spill: bool
    validation: Any = None
    before: int = 0
    number: int = 1
    made: int = 0
    place: FeedOf | None = None
    held: messages.HeldRows = field(default_factory=messages.HeldRows)
    feeds: list[Feed] = field(default_factory=list)
    _validated: int = 0  # the feed that has brought the validation rows
    _under_way: Feed | None = None
    _kept: Feed | None = None  # the newest one that was delivered whose rows the nodes have kept on disk
    _state: str = ""  # from which this generation continues

    def begin_anew(self) -> None:
        """Forget the feeds of the generation before, except one whose rows the nodes may have kept."""
        self._kept = next((feed for feed in reversed(self.feeds) if feed.spill and feed.replays), self._kept)
        self.place = self._under_way = None
        self._state = ""
        self.held = messages.HeldRows()
        self.feeds.clear()

    def make_room(self) -> None:
        """Have a node leave its slot if none is free for the rows: nodes that start again want them in a moment."""
        room = self.training.jobs.room()
        if room is not None and not room.free and needs_a_nodes_slot(room):
            self.training.controller.want_slot()

    def keep_validation(self) -> FeedOf:
        """Send the validation rows, unless the nodes have them."""
        if self.place is None:
            self.place = self.training.begin_call(self.validation, self.number, self._validated)
            self._validated = self.place.validation
        return self.place

    def describe(self) -> None:
        """Tell the nodes the schema of its rows."""
        self.training.describe(self.data)

    def deliver(self) -> None:
        """Deliver the passes that are left.

        One Spark job reads the rows, or one job for each pass where the nodes cannot keep the rows.
        """
        place = self.keep_validation()
        while self.made < self.epochs and not self.training.nobody_wants(place.call):
            if self._under_way is None:
                self._under_way = self._resumed(place) or self.training.begin_feed(self, place)
                self.feeds.append(self._under_way)
            self.made += self.training.feed_once(self.data, self._under_way)
            self._under_way, self.held = None, messages.HeldRows()

    def _resumed(self, place: FeedOf) -> Feed | None:
        """Go on with the feed whose rows the nodes have kept, if the next pass is one of its; return that feed."""
        feeds, (feed, self._kept) = self.training.controller.feeds, (self._kept, None)
        if feed is None:
            return None
        passes, positions = self.before + self.made - feed.before, feeds.held.positions_in(feed.number, self._state)
        # Rows of which none is in the state may come in any order: those that were kept would not fit to the others.
        if positions is None or not feeds.can_resume(feed, passes, by_all=not positions):
            return None
        feeds.resume(feed, passes, place, held=self.held, positions=positions)
        return feed

    def go_on(self, rendezvous: int) -> None:
        """Keep the feeds for a new rendezvous: some nodes were replaced, and the others continue."""
        self.training.controller.feeds.go_on(self.feeds, rendezvous)

    def follow(self, before: int, number: int) -> None:
        """Record how many passes the earlier calls have, and its number among all calls, from 1."""
        self.before, self.number = before, number

    def continue_from(self, made: int, held: messages.HeldRows | None = None, state: str = "") -> None:
        """Continue after ``made`` passes, and the rows of the next pass that a saved state includes."""
        self.made, self._state = made, state
        if held is not None:
            self.held = held
            self.training.keep_partitions(self.data, held.parallelism)

    def refill(self, node: str, through: int, since: int) -> None:
        """Feed a replacement node, whose predecessor had finished ``through`` passes over all calls.

        The current feed is only announced to it: its rows are sent when that feed continues.
        """
        controller = self.training.controller.feeds
        for feed in self.feeds:
            skipped = max(0, through - feed.before)
            if node not in feed.ledger.claimed:  # it came late: the remaining rows are shared again
                controller.cut(feed, skipped)
            if controller.has_enough(node, feed.place.call) or (feed.replays is not None and skipped > feed.replays):
                continue
            controller.begin_again(feed, node, skipped if feed.replays is not None else 0, since)
            if feed.replays is not None:
                self.training.feed_again(self.data, feed, node)
