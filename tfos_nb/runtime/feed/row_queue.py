"""The rows of one queue of a node: what is fed to it, and the passes that its program goes through.

::

    driver ── FeedBegins, FeedSchema, FeedEnds ──▶ RowQueue ──▶ PassSchedule: which pass is next
    Spark's tasks ── rows ──▶ FeedRows, one a feed ──▶ RowQueue.next_pass() ──▶ ctx.dataset()

A :class:`RowQueue` has the one lock, and does what its schedule says. The driver is told without it, so that rows are
taken while a message waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed import pass_schedule as schedule
from tfos_nb.runtime.feed.batching import Pass
from tfos_nb.runtime.feed.feed_rows import FeedRows
from tfos_nb.runtime.feed.ledger import FeedBegins, FeedEnds, FeedFrom, FeedSchema, MakeRoom, PassDone
from tfos_nb.runtime.feed.pass_schedule import Command, PassSchedule, Turn
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.feed.spill import Spill

__all__ = ["RowQueue", "Told", "ValidationRows"]

Told = PassDone | FeedFrom | PositionHeld

logger = logging.getLogger(__name__)

_ANNOUNCED_WITHIN = 60.0  # seconds between a feed's first row and the driver's word of it, by another way


class RowQueue:
    """All rows of one queue of this node, and how far its program has come with them.

    Parameters
    ----------
    node : str
        This node.
    directory : str
        Where to spill.
    buffer_bytes, spill_bytes : int
        The most bytes that wait in memory, and that are kept on disk, of each feed.
    tell : callable
        Called with what the driver is to know, such as a :class:`PassDone` after each pass.

    Attributes
    ----------
    rows_out : int
        Rows that were given out.
    passes_before : int
        Passes that the node that was here before has been through: this one begins behind them.
    shuffled : bool
        Whether the rows are shuffled after they were given out, so that nobody knows which were the first ones.
    """

    def __init__(
        self, node: str, directory: str, buffer_bytes: int, spill_bytes: int, tell: Callable[[Told], object]
    ) -> None:
        self._node = node
        self._directory = directory
        self._spill_bytes = spill_bytes
        self.buffer_bytes = buffer_bytes
        self._tell = tell
        self._changed = threading.Condition()
        self._schedule = PassSchedule(node)
        self._rows: dict[int, FeedRows] = {}
        self._due: deque[Told] = deque()
        self._telling = threading.Lock()
        self._waits_for_rows = False
        self._validating = 0  # passes over validation rows that go on
        self._forgotten_rows = 0
        self.rows_out = 0
        self.passes_before = 0
        self.shuffled = False

    # --- what the driver says ---

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        spill = self.new_spill() if begins.spill else None
        with self._changed:
            commands = self._schedule.begin(begins)
            state = self._schedule.feeds[begins.feed]
            self._rows[begins.feed] = FeedRows(state, self._changed, self.buffer_bytes, spill)
            self._do(commands)
        self._tell_due()

    def describe(self, schema: FeedSchema) -> None:
        """Learn what the rows look like."""
        with self._changed:
            self._schedule.describe(schema)
            self._changed.notify_all()

    def end(self, ends: FeedEnds) -> None:
        """Learn that the share is complete, and how often to go through it again."""
        with self._changed:
            self._do(self._schedule.end(ends))
        self._tell_due()

    def make_room(self, message: MakeRoom) -> None:
        """Take in more of a feed than was agreed, if it has begun here."""
        with self._changed:
            rows = self._rows.get(message.feed)
            if rows is not None:
                rows.make_room()

    def close(self) -> None:
        """Learn that no feed comes any more; the passes that wait are still given out."""
        with self._changed:
            self._schedule.close()
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out nothing more and let every sender go."""
        with self._changed:
            self._do(self._schedule.stop())

    def take_place(self, passes: int) -> None:
        """Begin behind so many passes, which the node that was here before has been through."""
        with self._changed:
            self.passes_before = passes

    def come_again(self) -> None:
        """Learn that this is a later generation: the driver feeds when it hears from where on."""
        with self._changed:
            self._schedule.come_again()

    # --- what Spark's tasks bring ---

    def feed_rows(self, feed: int) -> FeedRows:
        """Return the rows of a feed, waiting for the driver's word of it.

        Raises
        ------
        FeedFailed
            If it does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: feed in self._rows, _ANNOUNCED_WITHIN):
                raise FeedFailed(f"{self._node} was not told of feed {feed} within {_ANNOUNCED_WITHIN:.0f} s")
            return self._rows[feed]

    # --- what the program asks for ---

    def schema(self) -> FeedSchema | None:
        """Wait for the first row anywhere; None if no feed will come."""
        if self._schedule.schema is None:
            self.ask()
        with self._changed:
            self._wait_for_rows(lambda: self._schedule.schema is not None or self._schedule.closed)
            return self._schedule.schema

    def next_pass(self) -> Pass | None:
        """Wait for the next pass and return its batches; None if there is none any more."""
        with self._changed:
            self._do((*self._schedule.ask(), *self._schedule.settle()))
        self._tell_due()
        with self._changed:
            self._wait_for_rows(lambda: self._schedule.has_turn or self._schedule.closed)
            turn, commands = self._schedule.take()
            self._do(commands)
            if turn is None:
                if self.rows_out:
                    logger.warning("the rows were fed for fewer passes than are asked for: this one is empty")
                return None
            rows = self._rows[turn.feed]
        return Pass(self._run(turn, rows), rows.shares)

    def _run(self, turn: Turn, feed: FeedRows) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            for batch in feed.first_pass() if turn.number == 1 else feed.replay():
                rows += batch.num_rows
                self.rows_out += batch.num_rows
                yield batch
        except GeneratorExit:
            logger.info("pass %d of feed %d was left after %d rows", turn.number, turn.feed, rows)
            if turn.number == 1:
                feed.discard()
            self._done(turn, rows)
            raise
        self._done(turn, rows)

    def _done(self, turn: Turn, rows: int) -> None:
        with self._changed:
            self._do(self._schedule.done(turn, rows))
        self._tell_due()

    def next_batch(self, after: int) -> int | None:
        """Wait for the next micro-batch behind ``after`` and return its number; None if the stream is over.

        Raises
        ------
        FeedFailed
            If the rows come from no stream, or the stream goes on behind a batch that was never given out.
        """
        with self._changed:
            self._do(self._schedule.settle())
        self._tell_due()
        while True:
            with self._changed:
                self._wait_for_rows(self._schedule.is_batch_settled)
                number, is_left_out, commands = self._schedule.next_batch(after)
                self._do(commands)
            self._tell_due()
            if not is_left_out:
                return number
            logger.info("batch %s of the stream is in the state already, and is left out", number)

    def enough(self) -> None:
        """Want no more rows of the latest call of ``train``, nor of those before it.

        What waits is dropped, and the driver is told. Rows that a dataset is giving out just now end early. Without a
        feed, nothing happens.
        """
        with self._changed:
            self._do(self._schedule.refuse_latest())
        self._tell_due()

    def enough_of_pass(self) -> None:
        """Want no more of the call of ``train`` whose rows were given out last: the next one may have been made."""
        with self._changed:
            self._do(self._schedule.refuse_current())
        self._tell_due()

    def resume(self, passes: int, state: str = "") -> None:
        """Learn that the state holds so many passes already: those that follow are fed.

        ``state`` is its name if it holds rows of the next pass, too.

        Raises
        ------
        FeedFailed
            If rows have been asked for already.
        """
        with self._changed:
            self._schedule.resume(passes, state)

    def ask(self) -> None:
        """Ask for rows, once; from then on it is settled from where on they come."""
        with self._changed:
            self._do(self._schedule.ask())
        self._tell_due()

    def leave_to_another(self) -> None:
        """Have another node say from where on rows are fed: it knows the state, and this one does not."""
        with self._changed:
            self._schedule.leave_to_another()

    def repeat(self) -> None:
        """Learn that the rows are gone through again for as long as there are steps: see :class:`PassSchedule`."""
        with self._changed:
            self._do(self._schedule.repeat())
        self._tell_due()

    def cut(self) -> None:
        """Leave out the passes that have not begun over rows that are here: they are fed again, to more nodes."""
        with self._changed:
            self._do(self._schedule.cut())

    def hold(self, state: str, epoch: int, rows: int) -> None:
        """Tell the driver which rows a state holds that is saved in the middle of a pass.

        Raises
        ------
        ValueError
            If it is another pass than that after ``epoch`` passes, or nobody knows which rows were the first ones.
        """
        said = f"ctx.checkpoint(epoch={epoch}, rows={rows})"
        try:
            with self._changed:
                turn = self._schedule.turn_after(epoch)
                feed = self._rows[turn.feed]
            if self.shuffled:
                raise ValueError(
                    "with shuffle= the first rows of a pass may be any. Shuffle in Spark, df.orderBy(rand()), or "
                    "save after whole epochs"
                )
            reached, known = feed.reached(rows)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        self._due.append(PositionHeld(self._node, turn.feed, state, reached, known))
        self._tell_due()

    # --- how far the program has come ---

    @property
    def asked(self) -> bool:
        """Whether it is settled from where on rows come."""
        with self._changed:
            return self._schedule.asked

    @property
    def begun(self) -> int:
        """Passes that were begun."""
        with self._changed:
            return self._schedule.begun

    @property
    def passes_done(self) -> int:
        """Passes that were done, with those that the state held."""
        with self._changed:
            return self._schedule.passes_done

    @property
    def missed(self) -> int:
        """Passes that were asked for when no more were to come."""
        with self._changed:
            return self._schedule.missed

    @property
    def waiting(self) -> tuple[Turn, ...]:
        """The passes that wait to be given out."""
        with self._changed:
            return self._schedule.waiting

    @property
    def batch(self) -> int | None:
        """The number of the micro-batch that is given out, or was last; None if the rows come from no stream."""
        with self._changed:
            current = self._schedule.current
            return current.batch if current is not None else None

    def status(self) -> FeedStatus:
        """Return what a heartbeat says of the feed."""
        with self._changed:
            feeds = self._rows.values()
            hungry = self._waits_for_rows or any(not feed.queued_bytes and feed.ended is None for feed in feeds)
            return FeedStatus(
                sum(feed.rows_in for feed in feeds) + self._forgotten_rows,
                self.rows_out,
                sum(feed.queued_bytes for feed in feeds),
                hungry or self._validating > 0,  # while it validates, it takes none for a good reason
            )

    # --- validation rows ---

    def validation_schema(self) -> FeedSchema | None:
        """Wait until the driver has said what is fed; return what the validation rows look like, None without a feed.

        Raises
        ------
        FeedFailed
            If no validation rows were given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._schedule.knows_validation or self._schedule.closed)
            return self._schedule.validation_schema()

    def validation_pass(self) -> Pass | None:
        """Return all validation rows of the share once more.

        Raises
        ------
        FeedFailed
            If none were given, or they could not be kept.
        """
        with self._changed:
            state = self._schedule.validation_feed()
            if state is None:
                return None
            rows = self._rows[state.begins.feed]
        assert state.ended is not None, "the driver feeds validation rows before all others"
        if rows.spill is None or not rows.spill.whole or rows.rows_in != state.ended.rows:
            raise FeedFailed(f"{rows.rows_in} validation rows came, and not all of them could be kept on disk")
        return Pass(self._validate(rows.spill.batches()), rows.shares)

    def _validate(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._validating += 1
        try:
            yield from batches
        finally:
            self._validating -= 1

    # --- within ---

    def new_spill(self) -> Spill:
        """Return a place on disk for rows, within this queue's limit."""
        return Spill(self._directory, self._spill_bytes)

    def _wait_for_rows(self, settled: Callable[[], bool]) -> None:
        """Wait for what the driver or a row's arrival changes. The lock is held."""
        self._waits_for_rows = True
        self._changed.wait_for(settled)
        self._waits_for_rows = False

    def _do(self, commands: tuple[Command, ...]) -> None:
        """Carry out what the schedule says, and wake all that wait. The lock is held; the driver is told after it."""
        for command in commands:
            match command:
                case schedule.Tell(message):
                    self._due.append(message)
                case schedule.Discard(feed):
                    self._rows[feed].discard()
                case schedule.Seal(feed):
                    self._rows[feed].seal()
                case schedule.Free(feed):
                    self._rows[feed].free()
                case schedule.LeaveBehind(feed):
                    self._rows[feed].forget_order()
                case schedule.Forget(feed):
                    self._forgotten_rows += self._rows.pop(feed).rows_in
        self._changed.notify_all()

    def _tell_due(self) -> None:
        """Tell the driver, in the order in which it came about."""
        with self._telling:
            while self._due:
                self._tell(self._due.popleft())


@dataclass(frozen=True)
class ValidationRows:
    """The validation rows of a node's share: as often as they are asked for.

    Which ones: those that were given to the call of ``train`` whose rows the node is going through.
    """

    queue: RowQueue

    def schema(self) -> FeedSchema | None:
        """Wait until the driver has said what is fed; None if nothing will be."""
        return self.queue.validation_schema()

    def next_pass(self) -> Pass | None:
        """Return all rows of the share once more."""
        return self.queue.validation_pass()
