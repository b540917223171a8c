"""What a node takes beside its passes: validation rows, a stream's micro-batches, and the word that it has enough.

::

    train(df, validation=df2) ──▶ Kept: on disk, replayed by each ctx.validation() ──┐
                              └─▶ passes ────────────────────────────────────────────┴─▶ fit
    train(stream) ──▶ one pass a micro-batch; the next one is asked for ──▶ the last one is done (PassDone)

A micro-batch counts as done when ``main`` asks for the one after it, not when its last row has left: what ``main``
saves in between is saved before Spark notes the batch as done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed.batching import Pass
from tfos_nb.runtime.feed.ledger import FeedBegins, FeedEnds, FeedFrom, FeedSchema, PassDone
from tfos_nb.runtime.feed.passes import Passes, Tell, _Pass
from tfos_nb.runtime.feed.positions import PositionHeld

__all__ = ["Supply"]

logger = logging.getLogger(__name__)

_BATCHES_KNOWN = 16  # micro-batches of which the books are kept; a stream has no end


class Supply(Passes):
    """All rows of this node, and how far it has come with them.

    Parameters
    ----------
    node : str
        This node.
    directory : str
        Where to spill.
    buffer_bytes, spill_bytes : int
        The most bytes that wait in memory, and that are kept on disk.
    tell : callable
        Called with a :class:`PassDone` after each pass.
    """

    def __init__(
        self,
        node: str,
        directory: str,
        buffer_bytes: int,
        spill_bytes: int,
        tell: Tell,
    ) -> None:
        super().__init__(node, directory, buffer_bytes, spill_bytes, tell)
        self._asked = True  # the first generation is fed from the start
        self.passes_done = self.passes_before = 0
        self._begins: dict[int, FeedBegins] = {}
        self._first_batch: FeedBegins | None = None
        self._forgotten_rows = 0
        self._kept_schemas: dict[int, FeedSchema] = {}
        self._latest: FeedBegins | None = None
        self._current: FeedBegins | None = None
        self._enough = 0  # of this call of train and those before it, no row is wanted any more
        self._owed: PassDone | None = None
        self._stopped = False
        self._validating = 0
        self._let_go = False  # the loop over batches is to end, once
        self._described: set[int] = set()
        self.begun = 0
        self._state = ""  # that was put back, if it was saved in the middle of a pass
        self._first = 0  # passes that the state held from which this generation went on
        self.shuffled = False
        self._repeats = False

    # --- what the driver says ---

    def begin(self, begins: FeedBegins) -> None:
        """Prepare for a feed that the driver announced."""
        with self._changed:
            super().begin(begins)
            intake = self._intakes[begins.feed]
            self._begins[begins.feed] = begins
            if begins.validates:
                intake.discarding = True  # to the spill alone, and no pass by itself
                self._queue.pop()
                return
            self._latest = begins
            if begins.batch is not None:
                self._queue.pop()  # lined up when there is a row, or none is known to come
                self._first_batch = self._first_batch or begins
                self._forget(begins.feed - _BATCHES_KNOWN)
            if self._is_unwanted(begins):
                self._queue = deque(turn for turn in self._queue if turn.intake is not intake)
                self._want_no_more(begins)
            else:
                self._let_go = False
            self._changed.notify_all()

    def describe(self, schema: FeedSchema) -> None:
        """Learn what the rows look like."""
        with self._changed:
            begins = self._begins.get(schema.feed)
            if begins is not None and begins.validates:
                self._kept_schemas[schema.feed] = schema
                self._changed.notify_all()
                return
            super().describe(schema)
            if begins is not None and begins.batch is not None:
                self._line_up(begins)

    def end(self, ends: FeedEnds) -> None:
        """Learn that the share is complete, and how often to go through it again."""
        with self._changed:
            begins, intake = self._begins[ends.feed], self._intakes[ends.feed]
            if begins.validates:
                if intake.spill is not None:
                    intake.spill.seal()
                intake.ended = ends
                self._changed.notify_all()
                return
            if self._is_unwanted(begins):
                ends = FeedEnds(ends.feed, ends.rows, 0)
            super().end(ends)
            if self._repeats:
                self._tell_there(ends)
            if begins.batch is not None and ends.feed not in self._described:
                self._take_empty(begins)

    def _take_empty(self, begins: FeedBegins) -> None:
        """Give out a micro-batch without a row, if it is known what rows look like; it is done at once otherwise."""
        if self._schema is not None:
            self._line_up(begins)
        else:
            self._tell(PassDone(self._node, begins.feed, 1, 0))

    def _line_up(self, begins: FeedBegins) -> None:
        self._described.add(begins.feed)
        if not self._is_unwanted(begins):
            self._queue.append(_Pass(self._intakes[begins.feed], 1))
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out nothing more and let every sender go."""
        with self._changed:
            self._stopped = True
            super().stop()

    # --- what main says ---

    def come_again(self) -> None:
        """Learn that this is a later generation: the driver feeds when it hears from where on."""
        with self._changed:
            self._asked = False

    def resume(self, passes: int, state: str = "") -> None:
        """Learn that the state holds so many passes already: those that follow are fed.

        ``state`` is its name if it holds rows of the next pass, too.

        Raises
        ------
        FeedFailed
            If rows have been asked for already.
        """
        with self._changed:
            if self._asked and passes != self.passes_done:
                raise FeedFailed(
                    f"the state that was put back holds {passes} passes, but rows were read after {self.passes_done}: "
                    "call ctx.resume before the dataset is iterated over, and before ctx.coordinator_dataset"
                )
            self.passes_done, self._state = passes, state

    def repeat(self) -> None:
        """Learn that the rows are gone through again for as long as there are steps.

        From then on a pass counts as made when its rows are here. How far each worker goes through them is up to the
        coordinator, which may give the last step of an epoch to one that waits for more rows, while the driver waits
        for another to be through, which gets no step any more.
        """
        with self._changed:
            if not self._repeats:
                self._repeats = True
                for intake in self._intakes.values():
                    if intake.ended is not None and not self._begins[intake.feed].validates:
                        self._tell_there(intake.ended)

    def _tell_there(self, ends: FeedEnds) -> None:
        self._tell(PassDone(self._node, ends.feed, 1 + ends.replays, ends.rows))

    def hold(self, state: str, epoch: int, rows: int) -> None:
        """Tell the driver which rows a state holds that is saved in the middle of a pass.

        Raises
        ------
        ValueError
            If it is another pass than that after ``epoch`` passes, or nobody knows which rows were the first ones.
        """
        said = f"ctx.checkpoint(epoch={epoch}, rows={rows})"
        with self._changed:
            turn, passes = self._turn, self._first + self.begun - 1
            if turn is None or self._begins[turn.intake.feed].batch is not None:
                raise ValueError(f"{said}: rows are those of a pass over what train() feeds, and none has begun")
            if passes != epoch:
                raise ValueError(f"{said}: main goes through the rows after {passes} epochs")
        if self.shuffled:
            raise ValueError(
                f"{said}: with shuffle= the first rows of a pass may be any. Shuffle in Spark, df.orderBy(rand()), or "
                "save after whole epochs"
            )
        try:
            reached, known = turn.intake.reached(rows)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        self._tell(PositionHeld(self._node, turn.intake.feed, state, reached, known))

    @property
    def asked(self) -> bool:
        """Whether it is settled from where on rows come."""
        with self._changed:
            return self._asked

    def take_place(self, passes: int) -> None:
        """Begin behind so many passes, which the node that was here before has been through."""
        with self._changed:
            self.passes_before = passes

    def cut(self) -> None:
        """Leave out the passes over rows that are here already, and have not begun: they are fed anew, to more nodes.

        The driver says so too, when it hears of the others; the coordinator's next pass must find it done.
        """
        with self._changed:
            next_of: dict[int, int] = {}
            for turn in self._queue:
                next_of.setdefault(turn.intake.feed, turn.number)
            for feed, number in next_of.items():
                if (ended := self._intakes[feed].ended) is not None:
                    self._cut(self._intakes[feed], replace(ended, replays=max(0, number - 2)))

    def leave_to_another(self) -> None:
        """Have another node say from where on rows are fed: it knows the state, and this one does not."""
        with self._changed:
            self._asked = True

    def ask(self) -> None:
        """Ask for rows, once; from then on it is settled from where on they come."""
        with self._changed:
            asked, self._asked = self._asked, True
            if not asked:
                self._first = self.passes_done
        if not asked:
            self._tell(FeedFrom(self._node, self.passes_done, self._state))

    def schema(self) -> FeedSchema | None:
        """Wait for the first row anywhere; None if no feed will come."""
        if self._schema is None:
            self.ask()
        return super().schema()

    def next_pass(self) -> Pass | None:
        """Wait for the next pass and return its batches; None if there is none any more."""
        self.ask()
        with self._changed:
            self._settle()
        return super().next_pass()

    def enough(self) -> None:
        """Want no more rows of the latest call of ``train``, nor of those before it.

        What waits is dropped, and the driver is told. Rows that a dataset is giving out just now end early. Without a
        feed, nothing happens.
        """
        with self._changed:
            self._refuse(self._latest)

    def enough_of_pass(self) -> None:
        """Want no more of the call of ``train`` whose rows were given out last: the next one may have been made."""
        with self._changed:
            self._refuse(self._current or self._latest)

    def _refuse(self, last: FeedBegins | None) -> None:
        self._settle()
        if last is None or last.call <= self._enough:
            return
        self._enough, self._let_go = last.call, True
        refused = [begins for begins in self._begins.values() if not begins.validates and self._is_unwanted(begins)]
        feeds = {begins.feed for begins in refused}
        self._queue = deque(turn for turn in self._queue if turn.intake.feed not in feeds)
        for begins in refused[:-1]:
            self._drop(begins.feed)
        self._want_no_more(refused[-1])

    def next_batch(self, after: int) -> int | None:
        """Wait for the next micro-batch behind ``after`` and return its number; None if the stream is over.

        Raises
        ------
        FeedFailed
            If the rows come from no stream, or the stream goes on behind a batch that was never given out.
        """
        with self._changed:
            self._settle()
            while True:
                self.hungry = True
                self._changed.wait_for(lambda: self._queue or self._closed or self._let_go)
                self.hungry = self._let_go = False
                if not self._queue:
                    return None
                begins = self._begins[self._queue[0].intake.feed]
                if begins.batch is None:
                    raise FeedFailed(
                        "ctx.batches() goes through the micro-batches of a stream, and these rows come from none: "
                        "iterate over ctx.dataset() once for each epoch"
                    )
                if begins.batch > after:
                    self._refuse_gap(after)
                    return begins.batch
                self._skip(begins)

    def _skip(self, begins: FeedBegins) -> None:
        logger.info("batch %s of the stream is in the state already, and is left out", begins.batch)
        turn = self._queue.popleft()
        turn.intake.discard()
        self._tell(PassDone(self._node, begins.feed, 1, 0))

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

    @property
    def batch(self) -> int | None:
        """The number of the micro-batch that is given out, or was last; None if the rows come from no stream."""
        with self._changed:
            return self._current.batch if self._current is not None else None

    def _is_unwanted(self, begins: FeedBegins) -> bool:
        return 0 < begins.call <= self._enough

    # --- within ---

    def _run(self, turn: _Pass) -> Iterator[pa.RecordBatch]:
        with self._changed:
            self._current = self._begins.get(turn.intake.feed)
            self.begun += 1
            for feed, begins in self._begins.items():
                if begins.validates and self._current is not None and feed < self._current.validation:
                    self._drop(feed)  # nobody will validate with it any more
        return super()._run(turn)

    def _done(self, turn: _Pass, rows: int) -> None:
        begins = self._begins.get(turn.intake.feed)
        self.passes_done += 1
        if begins is None or begins.batch is None:
            super()._done(turn, rows)
            return
        with self._changed:
            if not self._stopped and not self._is_unwanted(begins):  # otherwise it was cut, and is not done
                self._owed = PassDone(self._node, begins.feed, 1, rows)

    def _settle(self) -> None:
        """Tell that the last micro-batch is done: ``main`` is through with it."""
        owed, self._owed = self._owed, None
        if owed is not None:
            self._tell(owed)

    def _want_no_more(self, begins: FeedBegins) -> None:
        self._drop(begins.feed)
        self._tell(PassDone(self._node, begins.feed, 0, 0, enough=True))
        self._changed.notify_all()

    def _drop(self, feed: int) -> None:
        intake = self._intakes.get(feed)
        if intake is not None:
            intake.discard()
            if intake.spill is not None:
                intake.spill.close()

    def _forget(self, feed: int) -> None:
        begins = self._begins.get(feed)
        if begins is not None and begins.batch is not None:
            self._forgotten_rows += self._intakes.pop(feed).rows_in
            del self._begins[feed]
            self._described.discard(feed)

    def status(self) -> FeedStatus:
        """Return what a heartbeat says of the feed."""
        status = super().status()
        status = replace(status, rows_in=status.rows_in + self._forgotten_rows)
        return replace(status, hungry=True) if self._validating else status  # then it takes none for a good reason
