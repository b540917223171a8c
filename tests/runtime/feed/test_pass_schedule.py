"""For any order of events, each pass is given out once, in order, and over rows that exist."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema, PassDone
from tfos_nb.runtime.feed.pass_schedule import (
    Command,
    Discard,
    Forget,
    ForgetOrder,
    Free,
    PassSchedule,
    Seal,
    Tell,
    Turn,
)

SMALL = st.integers(0, 3)


class Schedules(RuleBasedStateMachine):
    """A node's queue without the rows: records the commands of its schedule and checks them."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = PassSchedule("worker:0")
        self.begun: list[FeedBegins] = []
        self.ends: dict[int, FeedEnds] = {}
        self.kept: dict[int, str] = {}  # feed: "open", "sealed" or "freed"
        self.given: list[Turn] = []
        self.running: Turn | None = None
        self.told: list[PassDone] = []
        self.refused = 0
        self.cut = self.is_stream = False

    def do(self, commands: tuple[Command, ...]) -> None:
        """Record the schedule's commands; none may concern a feed that is forgotten."""
        for command in commands:
            match command:
                case Tell(PassDone() as message):
                    self.told.append(message)
                case Seal(feed):
                    assert self.kept[feed] != "freed"
                    self.kept[feed] = "sealed"
                case Free(feed):
                    self.kept[feed] = "freed"
                case Forget(feed):
                    assert self.running is None or self.running.feed != feed
                    del self.kept[feed]
                case Discard(feed):
                    assert feed in self.kept
                case ForgetOrder(feed):
                    assert self.running is not None
                    assert feed < self.running.feed, "its positions may be asked for"

    def begins_of(self, feed: int) -> FeedBegins:
        return self.begun[feed - 1]

    def all_have_ended(self) -> bool:
        """Whether every training feed has all its rows."""
        return all(begins.validates or begins.feed in self.ends for begins in self.begun)

    # --- the driver ---

    @precondition(lambda self: not self.schedule.closed and not self.is_stream and self.all_have_ended())
    @rule(passes=st.integers(1, 4), validates=st.booleans())
    def begin(self, passes: int, validates: bool) -> None:
        """The driver feeds one call of ``train`` after another, each with its validation rows first."""
        feed, call = len(self.begun) + 1, len(self.begun) + 1
        if validates:
            self.announce(FeedBegins(feed, 1, True, call=call, validates=True))
            self.do(self.schedule.end(FeedEnds(feed, 5, 0)))
        self.announce(FeedBegins(len(self.begun) + 1, passes, passes > 1, call, validation=feed if validates else 0))

    @precondition(
        lambda self: not self.schedule.closed and self.all_have_ended() and all(b.batch is not None for b in self.begun)
    )
    @rule(described=st.booleans())
    def begin_batch(self, described: bool) -> None:
        self.is_stream = True
        feed = len(self.begun) + 1
        self.announce(FeedBegins(feed, 1, False, call=1, batch=feed + 10, consecutive=True))
        if described:
            self.schedule.describe(FeedSchema(feed, b"", {}))

    def announce(self, begins: FeedBegins) -> None:
        self.begun.append(begins)
        self.kept[begins.feed] = "open"
        self.do(self.schedule.begin(begins))

    @precondition(lambda self: any(b.feed not in self.ends and not b.validates for b in self.begun))
    @rule(rows=SMALL, kept=st.booleans())
    def end(self, rows: int, kept: bool) -> None:
        begins = next(one for one in self.begun if one.feed not in self.ends and not one.validates)
        ends = self.ends[begins.feed] = FeedEnds(begins.feed, rows, begins.passes - 1 if kept else 0)
        self.do(self.schedule.end(ends))

    @precondition(lambda self: bool(self.ends))
    @rule(data=st.data())
    def end_earlier(self, data: st.DataObject) -> None:
        """The driver cancels passes that have not begun."""
        feed = data.draw(st.sampled_from(sorted(self.ends)))
        if feed not in self.schedule.feeds:
            return
        before = self.ends[feed]
        ends = FeedEnds(feed, before.rows, data.draw(st.integers(0, before.replays)))
        if self.begins_of(feed).batch is None:
            self.do(self.schedule.end(ends))
            self.ends[feed] = ends

    @rule()
    def close(self) -> None:
        self.schedule.close()

    @rule()
    def stop(self) -> None:
        self.do(self.schedule.stop())

    # --- the program ---

    @precondition(lambda self: self.running is None)
    @rule()
    def take(self) -> None:
        waited = self.schedule.waiting
        turn, commands = self.schedule.take()
        self.running = turn
        self.do(commands)
        if turn is None:
            assert waited == ()
            return
        assert turn == waited[0]
        begins = self.begins_of(turn.feed)
        assert not begins.validates
        assert begins.call > self.refused, "nobody wants it"
        assert not self.schedule.stopped
        if turn.number > 1:
            assert self.kept[turn.feed] == "sealed", "its rows are gone, or not all there"
            assert turn.number <= 1 + self.ends[turn.feed].replays
        if self.given:
            assert turn > self.given[-1], "each pass once, one after the other"
        self.given.append(turn)

    @precondition(lambda self: self.running is not None)
    @rule(rows=SMALL)
    def done(self, rows: int) -> None:
        turn, self.running = self.running, None
        assert turn is not None
        self.do(self.schedule.done(turn, rows))
        if self.begins_of(turn.feed).batch is None:
            assert self.told[-1] == PassDone("worker:0", turn.feed, turn.number, rows)

    @precondition(lambda self: self.running is None and self.is_stream)
    @rule(after=st.integers(-1, 14))
    def next_batch(self, after: int) -> None:
        self.do(self.schedule.settle())
        while self.schedule.is_batch_settled():
            try:
                number, is_left_out, commands = self.schedule.next_batch(after)
            except FeedFailed as error:
                assert "would be lost" in str(error)  # noqa: PT017 - the error's text is part of the rule
                return
            self.do(commands)
            if not is_left_out:
                assert number is None or number > after
                return

    @rule(latest=st.booleans())
    def refuse(self, latest: bool) -> None:
        """``terminate``, or a ``fit`` that ended early: drop the waiting passes of this call and earlier ones."""
        current = self.schedule.current
        training = [begins for begins in self.begun if not begins.validates]
        last = training[-1] if training and (latest or current is None) else current
        before = len(self.told)
        self.do(self.schedule.refuse_latest() if latest else self.schedule.refuse_current())
        if last is not None and last.call > self.refused:
            self.refused = last.call
            assert [done.enough for done in self.told[before:]].count(True) == 1, "the driver hears it once"

    @rule()
    def take_back(self) -> None:
        """More nodes have joined, and the passes that have not begun are fed to them as well."""
        begun = {turn.feed: turn.number for turn in self.given}
        self.cut = True
        self.do(self.schedule.cut())
        for turn in self.schedule.waiting:
            assert turn.number == 1 or begun.get(turn.feed, 1) >= turn.number - 1
        for feed in list(self.ends):
            if feed in self.schedule.feeds and (now := self.schedule.feeds[feed].ended) is not None:
                self.ends[feed] = now

    # --- always ---

    @invariant()
    def each_is_told_once(self) -> None:
        made = [(done.feed, done.number) for done in self.told if not done.enough]
        assert len(made) == len(set(made))

    @invariant()
    def what_is_not_refused_is_given_or_waits(self) -> None:
        if self.schedule.stopped or self.is_stream:
            return
        here = {*self.given, *self.schedule.waiting}
        for begins in self.begun:
            if begins.validates or begins.call <= self.refused:
                continue
            assert Turn(begins.feed, 1) in here
            ended = self.schedule.feeds[begins.feed].ended
            for number in range(2, 2 + ended.replays if ended is not None else 2):
                assert Turn(begins.feed, number) in here

    @invariant()
    def few_micro_batches_are_remembered(self) -> None:
        waiting = len(self.schedule.waiting)
        assert not self.is_stream or len(self.schedule.feeds) <= 18 + waiting


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def two_calls(**second: int) -> PassSchedule:
    """Return a schedule of two calls of ``train``, each with validation rows and three passes."""
    schedule = PassSchedule("worker:0")
    for call in (1, 2):
        rows, training = 2 * call - 1, 2 * call
        schedule.begin(FeedBegins(rows, 1, True, call, validates=True))
        schedule.end(FeedEnds(rows, 3, 0))
        schedule.begin(FeedBegins(training, 3, True, call, validation=rows))
        schedule.end(FeedEnds(training, 10, 2))
    return schedule


def test_feeds_that_a_later_call_does_not_need_are_freed_when_it_is_read() -> None:
    schedule = two_calls()
    for number in (1, 2, 3):
        turn, commands = schedule.take()
        assert (turn, commands) == (Turn(2, number), ())
        assert turn is not None
        schedule.done(turn, 10)
    assert schedule.take() == (Turn(4, 1), (Discard(1), Free(1), ForgetOrder(2)))
    assert schedule.take() == (Turn(4, 2), ())


def test_refused_rows_are_freed_with_their_replays() -> None:
    schedule = two_calls()
    schedule.take()
    enough = Tell(PassDone("worker:0", 4, 0, 0, enough=True))
    assert schedule.refuse_latest() == (Discard(2), Free(2), Discard(4), Free(4), enough)
    assert schedule.waiting == ()
    schedule.begin(FeedBegins(5, 2, True, 2, validation=3))
    assert schedule.end(FeedEnds(5, 7, 1)) == (Free(5),), "it is not replayed"
    assert schedule.waiting == ()


def test_no_pass_is_given_out_after_a_stop() -> None:
    schedule = PassSchedule("worker:0")
    schedule.begin(FeedBegins(1, 3, True, 1))
    assert schedule.stop() == (Discard(1),)
    assert schedule.end(FeedEnds(1, 3, 2)) == (Free(1),)
    assert schedule.begin(FeedBegins(2, 1, False, 2)) == (Discard(2),)
    assert schedule.waiting == ()


def test_a_micro_batch_interrupted_by_a_stop_is_not_reported_as_done() -> None:
    schedule = PassSchedule("worker:0")
    schedule.begin(FeedBegins(1, 1, False, 1, batch=0))
    schedule.describe(FeedSchema(1, b"", {}))
    turn, _ = schedule.take()
    assert turn is not None
    schedule.stop()
    assert schedule.done(turn, 5) == ()
    assert schedule.settle() == ()


def test_a_loop_over_batches_ends_once_and_continues_with_the_next_call() -> None:
    schedule = PassSchedule("worker:0")
    schedule.begin(FeedBegins(1, 1, False, 1, batch=0))
    schedule.refuse_latest()
    assert schedule.is_batch_settled()
    assert schedule.next_batch(-1) == (None, False, ())
    assert not schedule.is_batch_settled(), "it has ended, once"
    schedule.refuse_latest()
    schedule.begin(FeedBegins(2, 1, False, 2, batch=0))
    assert not schedule.is_batch_settled()


def test_a_micro_batch_is_kept_while_it_waits() -> None:
    schedule = PassSchedule("worker:0")
    for feed in range(1, 41):
        schedule.begin(FeedBegins(feed, 1, False, call=1, batch=feed))
        schedule.describe(FeedSchema(feed, b"", {}))
    assert [turn.feed for turn in schedule.waiting] == list(range(1, 41))
    assert len(schedule.feeds) == 40
    for _ in range(40):
        schedule.take()
    schedule.begin(FeedBegins(41, 1, False, call=1, batch=41))
    assert sorted(schedule.feeds) == list(range(26, 42))
