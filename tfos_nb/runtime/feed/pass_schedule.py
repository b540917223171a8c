"""Which pass over which feed a node's program gets next: decided from what the driver and ``main`` have said.

::

    train(df, validation=df2) ──▶ validation rows: no pass; kept, and read by each ctx.validation() ──┐
                              └─▶ 1 + replays passes, one after another ─────────────────────────────┴─▶ fit
    train(stream) ──▶ one pass a micro-batch; ``main`` asks for the one after it ──▶ it is done (PassDone)

A :class:`PassSchedule` is state alone: it waits for nothing, holds no lock and touches no row. Each event returns the
commands that follow from it, which its owner (:class:`~tfos_nb.runtime.feed.row_queue.RowQueue`) carries out.

A micro-batch is done when ``main`` asks for the one after it, not when its last row has left: what ``main`` saves in
between is saved before Spark notes the batch as done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.ledger import FeedBegins, FeedEnds, FeedFrom, FeedSchema, PassDone
from tfos_nb.runtime.feed.positions import PositionHeld

__all__ = ["Command", "Discard", "FeedState", "Forget", "Free", "LeaveBehind", "PassSchedule", "Seal", "Tell", "Turn"]

_BATCHES_KNOWN = 16  # micro-batches that are remembered; a stream has no end


@dataclass(frozen=True)
class Tell:
    """Tell the driver."""

    message: PassDone | FeedFrom | PositionHeld


@dataclass(frozen=True)
class Discard:
    """Drop the rows of a feed that wait for its first pass, and those that still come. What is kept on disk stays."""

    feed: int


@dataclass(frozen=True)
class Seal:
    """Write no more of a feed's rows to disk: all are there."""

    feed: int


@dataclass(frozen=True)
class Free:
    """Give back the disk space of a feed's rows: no pass that begins from now on reads them."""

    feed: int


@dataclass(frozen=True)
class LeaveBehind:
    """Forget the order of a feed's rows: the program is past them, and no state is saved that holds some of them."""

    feed: int


@dataclass(frozen=True)
class Forget:
    """Keep nothing of a feed, which is over."""

    feed: int


Command = Tell | Discard | Seal | Free | LeaveBehind | Forget


class Turn(NamedTuple):
    """One pass over one feed; 1 is its first."""

    feed: int
    number: int


@dataclass
class FeedState:
    """What is known of a feed.

    Attributes
    ----------
    begins : FeedBegins
        What the driver announced.
    ended : FeedEnds or None
        What it said at the end of the share.
    through : int
        The pass that was done last.
    lined_up : bool
        Of a micro-batch: whether its pass has been put in the queue.
    past : bool
        Whether the program has gone on to a later feed, and reads this one no more.
    schema : FeedSchema or None
        Of validation rows: what they look like.
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
        This node, for what the driver is told.

    Attributes
    ----------
    feeds : dict of int to FeedState
        What is known of each feed, in the order in which they were announced.
    closed, stopped : bool
        Whether no feed comes any more; whether nothing more is given out besides.
    asked : bool
        Whether it is settled from where on rows come.
    schema : FeedSchema or None
        What the newest rows look like that are no validation rows.
    begun, passes_done : int
        Passes of this generation that were begun; passes that were done, with those that the state held.
    missed : int
        Passes that were asked for when no more were to come.

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
        self.begun = self.passes_done = self.missed = 0
        self._waiting: deque[Turn] = deque()
        self._turn: Turn | None = None  # that was begun last
        self._latest: FeedBegins | None = None  # of the training feeds
        self._current: FeedBegins | None = None  # whose pass was begun last
        self._first_batch: FeedBegins | None = None
        self._refused = 0  # of this call of train and those before it, no row is wanted any more
        self._owed: PassDone | None = None  # a micro-batch that main is not through with
        self._let_go = False  # the loop over batches is to end, once
        self._state = ""  # that was put back, if it was saved in the middle of a pass
        self._resumed = 0  # passes that the state held from which this generation went on
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
            commands += self._forget_batches(begins.feed - _BATCHES_KNOWN)
        if self._is_unwanted(begins):
            return (*commands, *self._refuse(begins))
        self._let_go = False
        if begins.batch is None:  # a micro-batch is lined up when there is a row, or none is known to come
            self._waiting.append(Turn(begins.feed, 1))
        return tuple(commands)

    def describe(self, schema: FeedSchema) -> None:
        """Know what the rows of a feed look like."""
        feed = self.feeds.get(schema.feed)
        if feed is not None and feed.begins.validates:
            feed.schema = schema
            return
        self.schema = schema
        if feed is not None and feed.begins.batch is not None:
            self._line_up(feed)

    def end(self, ends: FeedEnds) -> tuple[Command, ...]:
        """Know that a share is complete, and how often to go through it again, which a second word may make fewer."""
        feed = self.feeds[ends.feed]
        if feed.begins.validates:
            feed.ended = ends
            return (Seal(ends.feed),)
        if self._is_unwanted(feed.begins):
            ends = FeedEnds(ends.feed, ends.rows, 0)
        if feed.ended is not None:
            commands = self._cut(feed, ends)
        else:
            feed.ended = ends
            self._waiting.extend(Turn(ends.feed, number + 2) for number in range(ends.replays))
            # without replays although some were wanted: another node could not keep its rows
            commands = (Seal(ends.feed) if ends.replays else Free(ends.feed),)
        if self._repeats:
            commands = (*commands, self._all_here(ends))
        if feed.begins.batch is not None and not feed.lined_up:
            commands = (*commands, *self._take_empty(feed))
        return commands

    def close(self) -> None:
        """Know that no feed comes any more; the passes that wait are still given out."""
        self.closed = True

    def stop(self) -> tuple[Command, ...]:
        """Give out nothing more."""
        self.closed = self.stopped = True
        self._waiting.clear()
        return tuple(Discard(feed) for feed in self.feeds)

    def _take_empty(self, feed: FeedState) -> tuple[Command, ...]:
        """Line up a micro-batch without a row, if it is known what rows look like; it is done at once otherwise."""
        if self.schema is None:
            return (Tell(PassDone(self._node, feed.begins.feed, 1, 0)),)
        self._line_up(feed)
        return ()

    def _line_up(self, feed: FeedState) -> None:
        feed.lined_up = True
        if not self._is_unwanted(feed.begins):
            self._waiting.append(Turn(feed.begins.feed, 1))

    def _forget_batches(self, last: int) -> list[Command]:
        """Forget the micro-batches to a feed of this number that the program is through with."""
        needed = {turn.feed for turn in self._waiting} | {self._turn.feed if self._turn is not None else 0}
        batches = [number for number, feed in self.feeds.items() if feed.begins.batch is not None]
        old = [number for number in batches if number <= last and number not in needed]
        for number in old:
            del self.feeds[number]
        return [Forget(number) for number in old]

    def _cut(self, feed: FeedState, ends: FeedEnds) -> tuple[Command, ...]:
        feed.ended, most = ends, 1 + ends.replays
        self._waiting = deque(turn for turn in self._waiting if turn.feed != ends.feed or turn.number <= most)
        return (Free(ends.feed),) if feed.is_over else ()

    # --- where a generation begins ---

    def come_again(self) -> None:
        """Know that this is a later generation: the driver feeds when it hears from where on."""
        self.asked = False

    def resume(self, passes: int, state: str) -> None:
        """Know that the state holds so many passes already: those that follow are fed.

        Raises
        ------
        FeedFailed
            If rows have been asked for already.
        """
        if self.asked and passes != self.passes_done:
            raise FeedFailed(
                f"the state that was put back holds {passes} passes, but rows were read after {self.passes_done}: "
                "call ctx.resume before the dataset is iterated over, and before ctx.coordinator_dataset"
            )
        self.passes_done, self._state = passes, state

    def ask(self) -> tuple[Command, ...]:
        """Ask for rows, once; from then on it is settled from where on they come."""
        if self.asked:
            return ()
        self.asked, self._resumed = True, self.passes_done
        return (Tell(FeedFrom(self._node, self.passes_done, self._state)),)

    def leave_to_another(self) -> None:
        """Have another node say from where on rows are fed: it knows the state, and this one does not."""
        self.asked = True

    # --- passes ---

    @property
    def has_turn(self) -> bool:
        """Whether a pass waits to be given out."""
        return bool(self._waiting)

    @property
    def waiting(self) -> tuple[Turn, ...]:
        """The passes that wait to be given out, in their order."""
        return tuple(self._waiting)

    @property
    def current(self) -> FeedBegins | None:
        """The feed whose pass was begun last."""
        return self._current

    def take(self) -> tuple[Turn | None, tuple[Command, ...]]:
        """Begin the next pass, if there is one: the program asks for it when there is, or none will come."""
        if not self._waiting:
            self.missed += 1
            return None, ()
        self._turn = turn = self._waiting.popleft()
        self._current = self.feeds[turn.feed].begins
        self.begun += 1
        return turn, tuple(self._leave_behind(turn.feed, self._current.validation))

    def _leave_behind(self, current: int, validation: int) -> Iterator[Command]:
        """Give up what passes before the current one needed: nobody validates with an earlier call's rows any more."""
        for number, feed in self.feeds.items():
            if feed.past:
                continue
            if feed.begins.validates and number < validation:
                feed.past = True
                yield from _drop(number)
            elif not feed.begins.validates and feed.is_over and number != current:
                feed.past = True
                yield LeaveBehind(number)

    def done(self, turn: Turn, rows: int) -> tuple[Command, ...]:
        """Know that a pass has been gone through, or was left after so many rows."""
        self.passes_done += 1
        feed, made = self.feeds.get(turn.feed), PassDone(self._node, turn.feed, turn.number, rows)
        if feed is None:
            return (Tell(made),)
        if feed.begins.batch is not None:
            if not self.stopped and not self._is_unwanted(feed.begins):  # otherwise it was cut, and is not done
                self._owed = made
            return ()
        feed.through = turn.number
        return (*([Free(turn.feed)] if feed.is_over else []), Tell(made))

    def settle(self) -> tuple[Command, ...]:
        """Have the last micro-batch done: ``main`` is through with it."""
        owed, self._owed = self._owed, None
        return () if owed is None else (Tell(owed),)

    def repeat(self) -> tuple[Command, ...]:
        """Count a pass as made when its rows are here: they are gone through again for as long as there are steps.

        How far each worker goes through them is up to the coordinator, which may give the last step of an epoch to one
        that waits for more rows, while the driver waits for another to be through, which gets no step any more.
        """
        if self._repeats:
            return ()
        self._repeats = True
        known = [feed for feed in self.feeds.values() if not feed.begins.validates]
        return tuple(self._all_here(feed.ended) for feed in known if feed.ended is not None)

    def _all_here(self, ends: FeedEnds) -> Command:
        return Tell(PassDone(self._node, ends.feed, 1 + ends.replays, ends.rows))

    def cut(self) -> tuple[Command, ...]:
        """Leave out the passes over rows that are here already, and have not begun: they are fed anew, to more nodes.

        The driver says so too, when it hears of the others; the coordinator's next pass must find it done.
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
        """Return the pass that the program goes through, which has to be the one after ``epoch`` passes.

        Raises
        ------
        ValueError
            If it is another, or none has begun.
        """
        turn, passes = self._turn, self._resumed + self.begun - 1
        if turn is None or self.feeds[turn.feed].begins.batch is not None:  # the current feed is never forgotten
            raise ValueError("rows are those of a pass over what train() feeds, and none has begun")
        if passes != epoch:
            raise ValueError(f"main goes through the rows after {passes} epochs")
        return turn

    # --- rows that nobody wants ---

    def refuse_latest(self) -> tuple[Command, ...]:
        """Want no more rows of the latest call of ``train``, nor of those before it."""
        return self._refuse_to(self._latest)

    def refuse_current(self) -> tuple[Command, ...]:
        """Want no more of the call of ``train`` whose rows were given out last: the next one may have been made."""
        return self._refuse_to(self._current or self._latest)

    def _refuse_to(self, last: FeedBegins | None) -> tuple[Command, ...]:
        settled = self.settle()
        if last is None or last.call <= self._refused:
            return settled
        self._refused, self._let_go = last.call, True
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
        """Whether the loop over batches need not wait: there is one, or none will come, or it is to end."""
        return self.has_turn or self.closed or self._let_go

    def next_batch(self, after: int) -> tuple[int | None, bool, tuple[Command, ...]]:
        """Return the number of the micro-batch that waits, whether to wait for another one, and commands.

        A batch that is not behind ``after`` is left out: the state has it.

        Raises
        ------
        FeedFailed
            If the rows come from no stream, or the stream goes on behind a batch that was never given out.
        """
        self._let_go = False
        if not self._waiting:
            return None, False, ()
        begins = self.feeds[self._waiting[0].feed].begins
        if begins.batch is None:
            raise FeedFailed(
                "ctx.batches() goes through the micro-batches of a stream, and these rows come from none: "
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
                f"the state holds the stream's batches to {after}, but its checkpoint goes on with {first.batch}: "
                f"those from {after + 1} to {first.batch - 1} would be in neither. Save the state in each turn of "
                "ctx.batches(), before the next batch is asked for; or start both anew"
            )

    # --- validation rows ---

    @property
    def knows_validation(self) -> bool:
        """Whether the driver has said what is fed, so that it is known whether there are validation rows."""
        return self._latest is not None or next(self._validation_schemas(), None) is not None

    def validation_schema(self) -> FeedSchema | None:
        """Return what the validation rows look like; None where nothing is fed."""
        if self._latest is None:  # they come before the first call's training rows
            return next(self._validation_schemas(), None)
        return self.feeds[self._validation_feed()].schema

    def validation_feed(self) -> FeedState | None:
        """Return the feed of the validation rows of the call of ``train`` that is trained on; None if all is over.

        Raises
        ------
        FeedFailed
            If none were given.
        """
        if self._latest is None or self.stopped:
            return None
        return self.feeds[self._validation_feed()]

    def _validation_feed(self) -> int:
        begins = self._current or self._latest
        if begins is None or not begins.validation:
            raise FeedFailed(
                "no validation rows were given: cluster.train(df, validation=df2), or --validation VAR in the cell"
            )
        return begins.validation

    def _validation_schemas(self) -> Iterator[FeedSchema]:
        return (feed.schema for feed in self.feeds.values() if feed.begins.validates and feed.schema is not None)


def _drop(feed: int) -> tuple[Command, ...]:
    return Discard(feed), Free(feed)
