"""Decide which pass over which feed a node's program gets next, from the messages of the driver and of ``main``.

::

    train(df, validation=df2) ──▶ validation rows: no pass; kept, and read by each ctx.validation() ──┐
                              └─▶ 1 + replays passes, one after another ─────────────────────────────┴─▶ fit
    train(stream) ──▶ one pass a micro-batch; ``main`` asks for the one after it ──▶ it is done (PassDone)

A :class:`PassSchedule` is only state: it never waits, holds no lock and touches no row. Each event returns commands,
which its owner (:class:`~tfos_nb.runtime.feed.row_queue.RowQueue`) executes.

A micro-batch is done when ``main`` asks for the next one, not when its last row was handed out. So whatever ``main``
saves in between is saved before Spark notes the batch as done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import BATCHES_KNOWN, FeedBegins, FeedEnds, FeedFrom, FeedSchema, HeldRows, PassDone
from tfos_nb.runtime.feed.positions import PositionHeld

__all__ = [
    "Command",
    "Discard",
    "FeedState",
    "Forget",
    "ForgetOrder",
    "Free",
    "PassSchedule",
    "Seal",
    "Tell",
    "Told",
    "Turn",
]


Told = PassDone | FeedFrom | PositionHeld
"""Messages to the driver."""


@dataclass(frozen=True)
class Tell:
    """Send a message to the driver."""

    message: Told


@dataclass(frozen=True)
class Discard:
    """Drop a feed's rows that wait for its first pass, and those that still come. Rows on disk stay."""

    feed: int


@dataclass(frozen=True)
class Seal:
    """End a feed's file on disk: all rows are in it."""

    feed: int


@dataclass(frozen=True)
class Free:
    """Release the disk space of a feed's rows: no later pass reads them."""

    feed: int


@dataclass(frozen=True)
class ForgetOrder:
    """Forget the order of a feed's rows: the program is past them, so no state will be saved in their middle."""

    feed: int


@dataclass(frozen=True)
class Forget:
    """Forget a feed, which is over."""

    feed: int


Command = Tell | Discard | Seal | Free | ForgetOrder | Forget


class Turn(NamedTuple):
    """One pass over one feed; the first is 1."""

    feed: int
    number: int


@dataclass
class FeedState:
    """State of one feed.

    Attributes
    ----------
    begins : FeedBegins
        The driver's announcement.
    ended : FeedEnds or None
        The driver's message at the end of the share.
    through : int
        The last pass that was done.
    lined_up : bool
        For a micro-batch: whether its pass was put in the queue.
    past : bool
        Whether the program reads a later feed now, and this one no more.
    schema : FeedSchema or None
        For validation rows: their schema.
    """

    begins: FeedBegins
    ended: FeedEnds | None = None
    through: int = 0
    lined_up: bool = False
    past: bool = False
    schema: FeedSchema | None = None

    @property
    def is_over(self) -> bool:
        """Whether every pass over it has been done."""
        return self.ended is not None and self.through > self.ended.replays


class PassSchedule:
    """The passes of one queue of a node.

    Parameters
    ----------
    node : str
        This node's name, for messages to the driver.

    Attributes
    ----------
    feeds : dict of int to FeedState
        The state of each feed, in the order of their announcements.
    closed, stopped : bool
        Whether no feed will come any more; whether also no pass is handed out any more.
    asked : bool
        Whether the position from which rows come is fixed.
    schema : FeedSchema or None
        The schema of the newest rows, validation rows not counted.
    begun, passes_done : int
        Passes of this generation that were begun; passes that were done, including those in the restored state.
    missed : int
        Passes that were asked for after the last one.

    Examples
    --------
    >>> schedule = PassSchedule("worker:0")
    >>> schedule.begin(FeedBegins(1, 2, True))
    ()
    >>> schedule.end(FeedEnds(1, 10, replays=1))
    (Seal(feed=1),)
    >>> schedule.take(), schedule.take(), schedule.take()
    ((Turn(feed=1, number=1), ()), (Turn(feed=1, number=2), ()), (None, ()))
    >>> schedule.done(Turn(1, 2), 10)
    (Free(feed=1), Tell(message=PassDone(node='worker:0', feed=1, number=2, rows=10, enough=False)))
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self.feeds: dict[int, FeedState] = {}
        self.closed = self.stopped = False
        self.asked = True  # the first generation is fed from the start
        self.schema: FeedSchema | None = None
        self.is_described = False  # the driver sends the schema before it is asked for rows
        self.begun = self.passes_done = self.missed = 0
        self._waiting: deque[Turn] = deque()
        self._turn: Turn | None = None  # the pass that was begun last
        self._latest: FeedBegins | None = None  # of the training feeds
        self._current: FeedBegins | None = None  # whose pass was begun last
        self._first_batch: FeedBegins | None = None
        self._refused = 0  # no rows of this call of train, or of earlier ones, are wanted any more
        self._refused_passes = 0  # that were begun of those calls
        self._owed: PassDone | None = None  # for a micro-batch that main has not finished
        self._batches_end = False  # the loop over batches must end once
        self._state = ""  # the restored state, if it was saved in the middle of a pass
        self._held: HeldRows | None = None  # rows that the restored state includes
        self._resumed = 0  # passes in the state from which this generation continued
        self._repeats = False

    # --- what the driver says ---

    def begin(self, begins: FeedBegins) -> tuple[Command, ...]:
        """Know of a feed that the driver announced."""
        self.feeds[begins.feed] = FeedState(begins)
        commands: list[Command] = [Discard(begins.feed)] if self.closed or begins.validates else []
        if begins.validates:
            return tuple(commands)
        self._latest = begins
        if begins.batch is not None:
            self._first_batch = self._first_batch or begins
            commands += self._forget_batches(begins.feed - BATCHES_KNOWN)
        if self._is_unwanted(begins):
            return (*commands, *self._refuse(begins))
        self._batches_end = False
        if (
            begins.batch is None and not self.stopped
        ):  # a micro-batch is queued only once it has a row, or is known to be empty
            self._waiting.append(Turn(begins.feed, 1))
        return tuple(commands)

    def describe(self, schema: FeedSchema) -> None:
        """Record the schema of a feed's rows."""
        feed = self.feeds.get(schema.feed)
        if feed is not None and feed.begins.validates:
            feed.schema = schema
            return
        self.schema = schema
        if feed is not None and feed.begins.batch is not None:
            self._line_up(feed)

    def end(self, ends: FeedEnds) -> tuple[Command, ...]:
        """Record that a share is complete, and how often to repeat it; a second message may reduce the repeats."""
        feed = self.feeds.get(ends.feed)
        if feed is None:  # a micro-batch that is long past
            return ()
        if feed.begins.validates:
            feed.ended = ends
            return (Seal(ends.feed),)
        if self.stopped or self._is_unwanted(feed.begins):
            ends = FeedEnds(ends.feed, ends.rows, 0)
        if feed.ended is not None:
            commands = self._cut(feed, ends)
        else:
            feed.ended = ends
            self._waiting.extend(Turn(ends.feed, number + 2) for number in range(ends.replays))
            # no replays although some were wanted: another node could not keep its rows
            is_read_later = ends.replays or (feed.begins.again is not None and feed.begins.again.kept)
            commands = (Seal(ends.feed) if is_read_later else Free(ends.feed),)
            if is_read_later and feed.is_over:  # a kept share may be read before its end is known
                commands = (*commands, Free(ends.feed))
        if self._repeats:
            commands = (*commands, self._all_here(ends))
        if feed.begins.batch is not None and not feed.lined_up and not self.stopped:
            commands = (*commands, *self._take_empty(feed))
        return commands

    def close(self) -> None:
        """Record that no feed will come any more; waiting passes are still handed out."""
        self.closed = True

    def stop(self) -> tuple[Command, ...]:
        """Hand out no more passes."""
        self.closed = self.stopped = True
        self._waiting.clear()
        return tuple(Discard(feed) for feed in self.feeds)

    def _take_empty(self, feed: FeedState) -> tuple[Command, ...]:
        """Queue an empty micro-batch, if the rows' schema is known; otherwise it is done at once."""
        if self.schema is None:
            return (Tell(PassDone(self._node, feed.begins.feed, 1, 0)),)
        self._line_up(feed)
        return ()

    def _line_up(self, feed: FeedState) -> None:
        feed.lined_up = True
        if not (self.stopped or self._is_unwanted(feed.begins)):
            self._waiting.append(Turn(feed.begins.feed, 1))

    def _forget_batches(self, last: int) -> list[Command]:
        """Forget the micro-batches up to feed ``last`` that the program has finished."""
        needed = {turn.feed for turn in self._waiting} | {self._turn.feed if self._turn is not None else 0}
        batches = [number for number, feed in self.feeds.items() if feed.begins.batch is not None]
        done = {number for number in batches if self.feeds[number].lined_up or self.feeds[number].ended is not None}
        old = [number for number in batches if number <= last and number in done and number not in needed]
        for number in old:
            del self.feeds[number]
        return [Forget(number) for number in old]

    def _cut(self, feed: FeedState, ends: FeedEnds) -> tuple[Command, ...]:
        feed.ended, most = ends, 1 + ends.replays
        self._waiting = deque(turn for turn in self._waiting if turn.feed != ends.feed or turn.number <= most)
        return (Free(ends.feed),) if feed.is_over else ()

    # --- the position at which a generation begins ---

    def begin_generation(self, continues_earlier: bool = False) -> None:
        """Record that this is a later generation: the driver feeds it once it knows the position.

        ``continues_earlier``: an earlier cluster's training is continued, so the driver describes the rows by itself.
        """
        self.asked, self.is_described = False, continues_earlier

    @property
    def current_call(self) -> int:
        """Number of the call of ``train`` whose rows are read now; 0 if there is none."""
        begins = self._current or self._latest
        return begins.call if begins is not None else 0

    def resume(self, passes: int, state: str, refused: tuple[int, int] = (0, 0), rows: HeldRows | None = None) -> None:
        """Record that the restored state includes ``passes`` passes: only later passes are fed.

        ``rows`` are those of the next pass that it includes, if it is of an earlier cluster. ``refused`` is as
        :attr:`refused` was.

        Raises
        ------
        FeedFailed
            If rows were asked for already.
        """
        if self.asked and passes != self.passes_done:
            raise FeedFailed(
                f"the restored state includes {passes} passes, but rows were read already after {self.passes_done}: "
                "call ctx.resume before the dataset is iterated over, and before ctx.coordinator_dataset"
            )
        self.passes_done, self._state, self._held = passes, state, rows
        self._refused, self._refused_passes = refused

    def ask(self) -> tuple[Command, ...]:
        """Ask the driver for rows, once; from then on the position is fixed."""
        if self.asked:
            return ()
        self.asked, self._resumed = True, self.passes_done
        wanted = self.passes_done - self._refused_passes
        return (Tell(FeedFrom(self._node, wanted, self._state, self._held, self._refused)),)

    def leave_to_another(self) -> None:
        """Leave the question of the position to another node, which knows the restored state."""
        self.asked = True

    # --- passes ---

    @property
    def has_turn(self) -> bool:
        """Whether a pass waits to be handed out."""
        return bool(self._waiting)

    @property
    def waiting(self) -> tuple[Turn, ...]:
        """The passes that wait to be handed out, in order."""
        return tuple(self._waiting)

    @property
    def current(self) -> FeedBegins | None:
        """The feed whose pass was begun last."""
        return self._current

    @property
    def passes_before_current(self) -> int:
        """Passes before the one that was begun last, including those in the restored state."""
        return self._resumed + self.begun - 1

    @property
    def passes_counted(self) -> int:
        """Passes that were done or begun, including those in the restored state."""
        return max(self.passes_done, self._resumed + self.begun)

    def take(self) -> tuple[Turn | None, tuple[Command, ...]]:
        """Begin the next pass and return it, or None. Called when a pass waits, or none will come."""
        if not self._waiting:
            self.missed += 1
            return None, ()
        self._turn = turn = self._waiting.popleft()
        self._current = self.feeds[turn.feed].begins
        self.begun += 1
        return turn, tuple(self._leave_behind(turn.feed, self._current.validation))

    def _leave_behind(self, current: int, validation: int) -> Iterator[Command]:
        """Drop the data that only earlier passes needed, such as an earlier call's validation rows."""
        for number, feed in self.feeds.items():
            if feed.past:
                continue
            if feed.begins.validates and number < validation:
                feed.past = True
                yield from _drop(number)
            elif not feed.begins.validates and number != current and (feed.is_over or self._is_unwanted(feed.begins)):
                feed.past = True
                yield ForgetOrder(number)

    def done(self, turn: Turn, rows: int) -> tuple[Command, ...]:
        """Record that a pass was finished, or was left after ``rows`` rows."""
        self.passes_done += 1
        feed, made = self.feeds.get(turn.feed), PassDone(self._node, turn.feed, turn.number, rows)
        if feed is None:
            return (Tell(made),)
        if feed.begins.batch is not None:
            if not self.stopped and not self._is_unwanted(feed.begins):  # otherwise it was interrupted, and is not done
                self._owed = made
            return ()
        feed.through = turn.number
        return (*([Free(turn.feed)] if feed.is_over else []), Tell(made))

    def settle(self) -> tuple[Command, ...]:
        """Report the last micro-batch as done: ``main`` has finished it."""
        owed, self._owed = self._owed, None
        return () if owed is None else (Tell(owed),)

    def repeat(self) -> tuple[Command, ...]:
        """Count a pass as done when all its rows have come: they are repeated for as long as there are steps.

        The coordinator decides how far each worker goes through its rows. It may give the last step of an epoch to a
        worker that waits for more rows. The driver would then wait for another worker to finish, and that one gets no
        more steps.
        """
        if self._repeats:
            return ()
        self._repeats = True
        known = [feed for feed in self.feeds.values() if not feed.begins.validates]
        return tuple(self._all_here(feed.ended) for feed in known if feed.ended is not None)

    def _all_here(self, ends: FeedEnds) -> Command:
        return Tell(PassDone(self._node, ends.feed, 1 + ends.replays, ends.rows))

    def cut(self) -> tuple[Command, ...]:
        """Drop the passes over delivered rows that have not begun: they are fed again, to more nodes.

        The driver sends the same, once it knows of the new nodes. It must be done here before the coordinator's next
        pass.
        """
        next_of: dict[int, int] = {}
        for turn in self._waiting:
            next_of.setdefault(turn.feed, turn.number)
        commands: list[Command] = []
        for number, following in next_of.items():
            feed = self.feeds[number]
            if feed.ended is not None:
                commands += self._cut(feed, replace(feed.ended, replays=max(0, following - 2)))
        return tuple(commands)

    def turn_after(self, epoch: int) -> Turn:
        """Return the program's current pass, which must be the one after ``epoch`` passes.

        Raises
        ------
        ValueError
            If it is another, or none has begun.
        """
        turn, passes = self._turn, self.passes_before_current
        if turn is None or self.feeds[turn.feed].begins.batch is not None:  # the current feed is never forgotten
            raise ValueError("rows= counts rows of a pass over rows that train() feeds, and no pass has begun")
        if passes != epoch:
            raise ValueError(f"epoch must be {passes}, the number of finished passes, got {epoch}")
        return turn

    # --- rows that are not wanted ---

    @property
    def refused(self) -> tuple[int, int]:
        """The last call of ``train`` of which no more rows are wanted, and how many passes were its and earlier ones'.

        Such a call may have more passes than that: the driver knows how many.
        """
        return self._refused, self._refused_passes

    @property
    def refused_with_current(self) -> tuple[int, int]:
        """The same after :meth:`refuse_current`; as it is now if no rows are fed."""
        call = self.current_call
        return (call, self.passes_counted) if call > self._refused else self.refused

    def refuse_latest(self) -> tuple[Command, ...]:
        """Refuse further rows of the latest call of ``train`` and of all earlier calls."""
        return self._refuse_to(self._latest)

    def refuse_current(self) -> tuple[Command, ...]:
        """Refuse further rows of the current call of ``train``, even if the next call was already made."""
        return self._refuse_to(self._current or self._latest)

    def _refuse_to(self, last: FeedBegins | None) -> tuple[Command, ...]:
        settled = self.settle()
        if last is None or last.call <= self._refused:
            return settled
        self._refused, self._batches_end = last.call, True
        self._refused_passes = self.passes_counted
        refused = [feed.begins for feed in self.feeds.values() if self._is_unwanted(feed.begins)]
        feeds = {begins.feed for begins in refused}
        self._waiting = deque(turn for turn in self._waiting if turn.feed not in feeds)
        earlier = [command for begins in refused[:-1] for command in _drop(begins.feed)]
        return (*settled, *earlier, *self._refuse(refused[-1]))

    def _refuse(self, begins: FeedBegins) -> tuple[Command, ...]:
        return (*_drop(begins.feed), Tell(PassDone(self._node, begins.feed, 0, 0, enough=True)))

    def _is_unwanted(self, begins: FeedBegins) -> bool:
        return not begins.validates and 0 < begins.call <= self._refused

    # --- a stream's micro-batches ---

    def is_batch_settled(self) -> bool:
        """Whether the loop over batches need not wait: a batch waits, none will come, or the loop must end."""
        return self.has_turn or self.closed or self._batches_end

    def next_batch(self, after: int) -> tuple[int | None, bool, tuple[Command, ...]]:
        """Return the number of the waiting micro-batch, whether to wait for another one, and commands.

        A batch up to ``after`` is skipped: the state includes it.

        Raises
        ------
        FeedFailed
            If the rows do not come from a stream, or the stream continues after a batch that was never handed out.
        """
        self._batches_end = False
        if not self._waiting:
            return None, False, ()
        begins = self.feeds[self._waiting[0].feed].begins
        if begins.batch is None:
            raise FeedFailed(
                "ctx.batches() iterates over the micro-batches of a stream, and these rows do not come from a stream: "
                "iterate over ctx.dataset() once for each epoch"
            )
        if begins.batch > after:
            self._refuse_gap(after)
            return begins.batch, False, ()
        self._waiting.popleft()
        return begins.batch, True, (Discard(begins.feed), Tell(PassDone(self._node, begins.feed, 1, 0)))

    def _refuse_gap(self, after: int) -> None:
        first = self._first_batch
        assert first is not None
        assert first.batch is not None
        if after >= 0 and first.consecutive and first.batch > after + 1:
            raise FeedFailed(
                f"the state includes the stream's batches up to {after}, but the stream's checkpoint continues with "
                f"{first.batch}: batches {after + 1} to {first.batch - 1} would be lost. Save the state in each "
                "iteration of ctx.batches(), before the next batch is asked for; or start with a new state and a new "
                "checkpoint"
            )

    # --- validation rows ---

    @property
    def knows_validation(self) -> bool:
        """Whether the driver has announced a feed, so that it is known whether validation rows exist."""
        return self._latest is not None or next(self._validation_schemas(), None) is not None

    def validation_schema(self) -> FeedSchema | None:
        """Return the schema of the validation rows; None if nothing is fed."""
        if self._latest is None:  # validation rows come before the first call's training rows
            return next(self._validation_schemas(), None)
        return self.feeds[self._validation_feed()].schema

    def validation_feed(self) -> FeedState | None:
        """Return the feed with the validation rows of the current call of ``train``; None if all calls are over.

        Raises
        ------
        FeedFailed
            If that call has no validation rows.
        """
        if self._latest is None or self.stopped:
            return None
        return self.feeds[self._validation_feed()]

    def _validation_feed(self) -> int:
        begins = self._current or self._latest
        if begins is None or not begins.validation:
            raise FeedFailed(
                "no validation rows were given: use cluster.train(df, validation=df2), or --validation VAR in the cell"
            )
        return begins.validation

    def _validation_schemas(self) -> Iterator[FeedSchema]:
        return (feed.schema for feed in self.feeds.values() if feed.begins.validates and feed.schema is not None)


def _drop(feed: int) -> tuple[Command, ...]:
    return Discard(feed), Free(feed)
