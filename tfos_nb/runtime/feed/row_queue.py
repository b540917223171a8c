"""Rows of one queue of a node: the feeds that fill it, and the passes that its program reads.

::

    driver ── FeedBegins, FeedSchema, FeedEnds ──▶ RowQueue ──▶ PassSchedule: which pass is next
    Spark's tasks ── rows ──▶ FeedRows, one a feed ──▶ RowQueue.next_pass() ──▶ ctx.dataset()

A :class:`RowQueue` has the one lock, and executes the commands of its schedule. Messages to the driver are sent without
the lock, so rows can be taken while a message waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed import pass_schedule as schedule
from tfos_nb.runtime.feed.feed_rows import FeedRows
from tfos_nb.runtime.feed.kept_rows import KeptRows
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema, HeldRows, MakeRoom
from tfos_nb.runtime.feed.pass_record import PassRecord
from tfos_nb.runtime.feed.pass_schedule import Command, PassSchedule, Told, Turn
from tfos_nb.runtime.feed.passes import Pass, Readers
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.feed.spill import Spill

__all__ = ["ANNOUNCED_WITHIN", "RowQueue", "ValidationRows"]

logger = logging.getLogger(__name__)

ANNOUNCED_WITHIN = 60.0  # seconds between a feed's first row and the driver's announcement, which comes separately


class RowQueue:
    """All rows of one queue of this node, and its program's progress with them.

    Parameters
    ----------
    node : str
        This node's name.
    directory : str
        Where to spill.
    buffer_bytes, spill_bytes : int
        The most bytes of each feed that wait in memory, and that are kept on disk.
    tell : callable
        Called with messages for the driver, such as a :class:`PassDone` after each pass.
    kept, kept_validation : KeptRows, optional
        Where rows, and validation rows, are kept on disk for a later process of the node, too.

    Attributes
    ----------
    rows_out : int
        Rows that were handed out.
    validated : int
        Validation rows that were handed out, each time anew.
    passes_before : int
        Passes that this node's predecessor finished; this node begins after them.
    """

    def __init__(
        self,
        node: str,
        directory: str,
        buffer_bytes: int,
        spill_bytes: int,
        tell: Callable[[Told], object],
        *,
        kept: KeptRows | None = None,
        kept_validation: KeptRows | None = None,
    ) -> None:
        self._node = node
        self._kept = {False: kept, True: kept_validation}  # by whether they are validation rows
        self._directory = directory
        self._spill_bytes = spill_bytes
        self.buffer_bytes = buffer_bytes
        self._tell = tell
        self._changed = threading.Condition()
        self._schedule = PassSchedule(node)
        self._rows: dict[int, FeedRows] = {}
        self._due: deque[Told] = deque()
        self._telling = threading.Lock()
        self._teller = 0  # the thread that holds it
        self._waits_for_rows = False
        self._forgotten_rows = 0
        self._record = PassRecord()  # of the pass that began last
        self.rows_out = self.validated = 0
        self.passes_before = 0

    # --- messages of the driver ---

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        with self._changed:
            spill = self._spill_for(begins)
            commands = self._schedule.begin(begins)
            state = self._schedule.feeds[begins.feed]
            self._rows[begins.feed] = FeedRows(state, self._changed, self.buffer_bytes, spill)
            self._do(commands)
        self._tell_due()

    def _spill_for(self, begins: FeedBegins) -> Spill | None:
        """Return where a feed's rows are kept on disk, or are already; None if they are not."""
        if (kept := self._kept[begins.validates]) is not None:
            if begins.again is not None and begins.again.kept:
                return kept.again(begins.feed)
            if begins.spill and (spill := kept.new(begins.feed, self._spill_bytes)) is not None:
                return spill
        return self.new_spill() if begins.spill else None

    def describe(self, schema: FeedSchema) -> None:
        """Record the schema of the rows."""
        with self._changed:
            self._schedule.describe(schema)
            self._changed.notify_all()

    def end(self, ends: FeedEnds) -> None:
        """Record that the share is complete, and how often to repeat it."""
        self._apply(self._schedule.end, ends)

    def make_room(self, message: MakeRoom) -> None:
        """Let more rows of a feed wait than the limit allows, if it has begun here."""
        with self._changed:
            rows = self._rows.get(message.feed)
            if rows is not None:
                rows.make_room()

    def close(self) -> None:
        """Record that no feed will come any more; waiting passes are still handed out."""
        with self._changed:
            self._schedule.close()
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more passes, and release every waiting sender."""
        with self._changed:  # without telling: it must not wait for a message that is under way
            self._do(self._schedule.stop())

    @property
    def was_stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._schedule.stopped

    def skip_passes(self, passes: int) -> None:
        """Begin after ``passes`` passes, which this node's predecessor finished."""
        with self._changed:
            self.passes_before = passes

    def begin_generation(self, continues_earlier: bool = False) -> None:
        """Record that this is a later generation: the driver feeds it once it knows the position.

        ``continues_earlier``: an earlier cluster's training is continued, so the driver describes the rows by itself.
        """
        with self._changed:
            self._schedule.begin_generation(continues_earlier)

    # --- what Spark's tasks bring ---

    def feed_rows(self, feed: int) -> FeedRows:
        """Return the rows of a feed; wait until the driver has announced it.

        Raises
        ------
        FeedFailed
            If the announcement does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: feed in self._rows, ANNOUNCED_WITHIN):
                raise FeedFailed(
                    f"the driver did not announce feed {feed} to {self._node} within {ANNOUNCED_WITHIN:.0f} s: look at "
                    "the driver's log, and train again"
                )
            return self._rows[feed]

    # --- requests of the program ---

    def schema(self) -> FeedSchema | None:
        """Wait for the first row on any node and return the schema; None if no feed will come."""
        if self._schedule.schema is None and not self._schedule.is_described:
            self.ask()
        with self._changed:
            self._wait_for_rows(lambda: self._schedule.schema is not None or self._schedule.closed)
            return self._schedule.schema

    def next_pass(self, readers: Readers | None = None) -> Pass | None:
        """Wait for the next pass and return its batches; None after the last pass, or if its ``readers`` are gone."""
        with self._changed:
            self._do((*self._schedule.ask(), *self._schedule.settle()))
        self._tell_due()
        with (readers or Readers()).waiting(self._wake) as are_gone, self._changed:
            self._wait_for_rows(lambda: self._schedule.has_turn or self._schedule.closed or are_gone())
            if are_gone():
                return None
            turn, commands = self._schedule.take()
            self._do(commands)
            if turn is None:
                if self.rows_out:
                    logger.warning("train() fed fewer passes than main asks for, so this pass is empty; raise epochs")
                return None
            rows, again = self._rows[turn.feed], self._schedule.feeds[turn.feed].begins.again
            position = again.position if again is not None and turn.number == 1 else None
            gone = position.rows if position is not None and rows.lacks_held else 0
            self._record = PassRecord(position.batches if position is not None else 0, rows.lacks_held)
            number = self._schedule.passes_before_current + 1
        return Pass(
            self._run(turn, rows, self._record), rows.shares, self._record, number, position=position, gone=gone
        )

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self, turn: Turn, feed: FeedRows, record: PassRecord) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            for batch in feed.first_pass() if turn.number == 1 else feed.replay():
                rows += batch.num_rows
                self.rows_out += batch.num_rows
                yield batch
            record.is_cut_short = turn.number == 1 and not feed.is_whole(rows)
        except GeneratorExit:
            logger.info("pass %d of feed %d was left after %d rows", turn.number, turn.feed, rows)
            if turn.number == 1:
                feed.discard()
            self._done(turn, rows)
            raise
        self._done(turn, rows)

    def _done(self, turn: Turn, rows: int) -> None:
        self._apply(self._schedule.done, turn, rows)

    def next_batch(self, after: int) -> int | None:
        """Wait for the next micro-batch after ``after`` and return its number; None if the stream is over.

        Raises
        ------
        FeedFailed
            If the rows do not come from a stream, or the stream continues after a batch that was never handed out.
        """
        self._apply(self._schedule.settle)
        while True:
            with self._changed:
                self._wait_for_rows(self._schedule.is_batch_settled)
                number, is_left_out, commands = self._schedule.next_batch(after)
                self._do(commands)
            self._tell_due()
            if not is_left_out:
                return number
            logger.info("batch %s of the stream is in the state already, and is skipped", number)

    def enough(self) -> None:
        """Refuse further rows of the latest call of ``train`` and of all earlier calls.

        Waiting rows are dropped, and the driver is notified. A pass that a dataset is reading ends early. Without a
        feed, nothing happens.
        """
        self._apply(self._schedule.refuse_latest)

    def enough_of_pass(self) -> None:
        """Refuse further rows of the current call of ``train``, even if the next call was already made."""
        self._apply(self._schedule.refuse_current)

    @property
    def current_call(self) -> int:
        """Number of the call of ``train`` whose rows are read now; 0 if there is none."""
        with self._changed:
            return self._schedule.current_call

    def resume(
        self, passes: int, state: str = "", refused: tuple[int, int] = (0, 0), rows: HeldRows | None = None
    ) -> None:
        """Record that the restored state includes ``passes`` passes: only later passes are fed.

        ``state`` is its name if it also includes rows of the next pass; ``rows`` are these, if it is of an earlier
        cluster. ``refused`` is as :attr:`refused` was when it was saved.

        Raises
        ------
        FeedFailed
            If rows were asked for already.
        """
        with self._changed:
            self._schedule.resume(passes, state, refused, rows)

    @property
    def refused(self) -> tuple[int, int]:
        """The last call of ``train`` of which no more rows are wanted, and the number of passes until then."""
        with self._changed:
            return self._schedule.refused

    @property
    def refused_with_current(self) -> tuple[int, int]:
        """The same when the current call is refused, too."""
        with self._changed:
            return self._schedule.refused_with_current

    def ask(self) -> None:
        """Ask the driver for rows, once; from then on the position is fixed."""
        self._apply(self._schedule.ask)

    def leave_to_another(self) -> None:
        """Leave the question of the position to another node, which knows the restored state."""
        with self._changed:
            self._schedule.leave_to_another()

    def repeat(self) -> None:
        """Record that the rows are repeated for as long as there are steps: see :class:`PassSchedule`."""
        self._apply(self._schedule.repeat)

    def cut(self) -> None:
        """Drop the passes over delivered rows that have not begun: they are fed again, to more nodes."""
        with self._changed:
            self._do(self._schedule.cut())

    def hold(self, state: str, epoch: int, rows: int, *, waits: bool = False, stored: bool = False) -> None:
        """Tell the driver which rows a state includes that is saved in the middle of a pass: the first ``rows`` ones.

        ``waits``: this node has saved its part of the state before, and runs no further step. ``stored``: this node
        also writes the state to the ``model_dir``.

        Raises
        ------
        ValueError
            As :meth:`position`.
        """
        self.tell_held(replace(self.position(state, epoch, rows), waits=waits, stored=stored))

    def tell_held(self, position: PositionHeld) -> None:
        """Tell the driver which rows a state includes, which is saved now."""
        self._due.append(position)
        self._tell_due()

    def rows_after(self, steps: int) -> int:
        """Return how many of this node's rows are in so many steps of the current pass; the number must not go back.

        Raises
        ------
        ValueError
            If there were fewer steps.
        """
        with self._changed:
            record = self._record
        known = record.steps if record.steps is not None else record.batches // record.replicas
        if not record.counted <= steps * record.replicas or steps > known:
            raise ValueError(
                f"step={steps}: this pass over the rows has had {known} steps so far, and {record.counted} batches are "
                "in the last state. Give the number of steps since the pass began"
            )
        return record.rows_after(steps * record.replicas)

    def position(self, state: str, epoch: int, rows: int) -> PositionHeld:
        """Return which rows a state includes that is saved in the middle of a pass: the first ``rows`` ones.

        Raises
        ------
        ValueError
            If the current pass is not the one after ``epoch`` passes, or fewer rows have come.
        """
        said = f"ctx.checkpoint(epoch={epoch}, rows={rows})"
        try:
            with self._changed:
                turn = self._schedule.turn_after(epoch)
                feed, record = self._rows[turn.feed], self._record
            end, others = record.first(rows)
            adds = turn.number == 1 and feed.lacks_held
            reached, known = feed.reached(end, rest=adds)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        left = feed.rows_at(others.tolist(), rest=adds)
        at = None if adds else record.position(rows)  # on the disk, the rows are in another order
        return PositionHeld(self._node, turn.feed, state, reached, known, left, at=at, adds=adds)

    # --- how far the program has come ---

    @property
    def asked(self) -> bool:
        """Whether the position from which rows come is fixed."""
        with self._changed:
            return self._schedule.asked

    @property
    def passes_counted(self) -> int:
        """Passes that were done or begun, including those in the restored state."""
        with self._changed:
            return self._schedule.passes_counted

    @property
    def begun(self) -> int:
        """Passes that were begun."""
        with self._changed:
            return self._schedule.begun

    @property
    def passes_done(self) -> int:
        """Passes that were done, including those in the restored state."""
        with self._changed:
            return self._schedule.passes_done

    @property
    def record(self) -> PassRecord:
        """The record of the pass that began last."""
        return self._record

    @property
    def passes_before_current(self) -> int:
        """Passes before the one that began last, including those in the restored state."""
        with self._changed:
            return self._schedule.passes_before_current

    @property
    def missed(self) -> int:
        """Passes that were asked for after the last one."""
        with self._changed:
            return self._schedule.missed

    @property
    def waiting(self) -> tuple[Turn, ...]:
        """The passes that wait to be handed out."""
        with self._changed:
            return self._schedule.waiting

    @property
    def batch(self) -> int | None:
        """The number of the micro-batch that was handed out last; None if the rows do not come from a stream."""
        with self._changed:
            current = self._schedule.current
            return current.batch if current is not None else None

    def status(self) -> FeedStatus:
        """Return the feed's status for a heartbeat."""
        with self._changed:
            feeds = self._rows.values()
            waits_for_rows = self._waits_for_rows or any(not feed.queued_bytes and feed.ended is None for feed in feeds)
            return FeedStatus(
                sum(feed.rows_in for feed in feeds) + self._forgotten_rows,
                self.rows_out,
                sum(feed.queued_bytes for feed in feeds),
                waits_for_rows,
                validated=self.validated,
            )

    # --- validation rows ---

    def validation_schema(self) -> FeedSchema | None:
        """Wait for the first announcement of a feed; return the validation rows' schema, or None without a feed.

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
                raise FeedFailed(
                    f"not all of the {rows.rows_in} validation rows could be kept on disk: free space there, or raise "
                    "spill_bytes"
                )
            batches = rows.spill.batches()  # now: the pass of a later call gives these rows up
        return Pass(self._validate(batches), rows.shares)

    def _validate(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.validated += batch.num_rows
            yield batch

    # --- within ---

    def new_spill(self) -> Spill:
        """Return a place on disk for rows, within this queue's limit."""
        return Spill(self._directory, self._spill_bytes)

    def _wait_for_rows(self, settled: Callable[[], bool]) -> None:
        """Wait for a change by the driver or by an arriving row. The lock is held."""
        self._waits_for_rows = True
        self._changed.wait_for(settled)
        self._waits_for_rows = False

    def _apply(self, event: Callable[..., tuple[Command, ...]], *given: Any) -> None:
        """Pass an event to the schedule, execute what it returns, and tell the driver without the lock."""
        with self._changed:
            self._do(event(*given))
        self._tell_due()

    def _do(self, commands: tuple[Command, ...]) -> None:
        """Execute the schedule's commands, and wake all waiting threads. The lock is held; messages are sent later."""
        for command in commands:
            match command:
                case schedule.Tell(message):
                    self._due.append(message)
                case schedule.Discard(feed):
                    self._rows[feed].discard()
                case schedule.Seal(feed):
                    self._seal(feed)
                case schedule.Free(feed):
                    self._rows[feed].free()
                    if (kept := self._kept_of(feed)) is not None:
                        kept.freed(feed)
                case schedule.ForgetOrder(feed):
                    self._rows[feed].forget_order()
                case schedule.Forget(feed):
                    self._forgotten_rows += self._rows.pop(feed).rows_in
        self._changed.notify_all()

    def _seal(self, feed: int) -> None:
        rows = self._rows[feed]
        rows.seal()
        is_whole = rows.ended is not None and rows.ended.rows == rows.rows_in and rows.spill and rows.spill.whole
        if is_whole and (kept := self._kept_of(feed)) is not None:
            kept.sealed(feed)

    def _kept_of(self, feed: int) -> KeptRows | None:
        return self._kept[self._rows[feed].validates]

    def _tell_due(self) -> None:
        """Send the queued messages to the driver, in their order.

        A pass may be collected while this thread sends a message. The outer call sends its final message.
        """
        if not self._due or self._teller == threading.get_ident():
            return
        with self._telling:
            self._teller = threading.get_ident()
            try:
                while self._due:
                    self._tell(self._due.popleft())
            finally:
                self._teller = 0


@dataclass(frozen=True)
class ValidationRows:
    """The validation rows of a node's share, which can be read any number of times.

    They are those of the call of ``train`` whose rows the node is reading.
    """

    queue: RowQueue

    def schema(self) -> FeedSchema | None:
        """Wait for the first announcement of a feed and return the schema; None if no feed will come."""
        return self.queue.validation_schema()

    def next_pass(self, readers: Readers | None = None) -> Pass | None:
        """Return all rows of the share once more."""
        return self.queue.validation_pass()
