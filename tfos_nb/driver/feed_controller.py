"""Driver's side of feeding: answer the tasks' questions, and track the progress of each feed.

The driver never carries a row. It knows how many rows exist, and which node has which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tfos_nb.driver.ledger import FeedLedger, HeldPositions
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.errors import FeedFailed, PlanError, with_article
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.feed_task import DESCRIBED_SCHEMA, SUMMARY_SCHEMA, DescribeTask, FeedTask
from tfos_nb.runtime.feed.messages import BATCHES_KNOWN
from tfos_nb.runtime.feed.positions import PositionHeld, RowsOfState
from tfos_nb.runtime.rows.fingerprint import KEEP_ROWS_ALIKE
from tfos_nb.spark.feedable import feedable, read_schema, refuse_ended, unlike_schemas
from tfos_nb.spark.session import places_beside_exchanges
from tfos_nb.state.cluster_state import FeedProgress

__all__ = ["Feed", "FeedController", "FeedOf", "check_feedable", "describe_job", "feed_job"]

Send = Callable[..., None]

_ALL_TOLD = 16  # up to so many nodes, a task receives all places; with a certificate each, more would be megabytes

_MANY = (messages.ClaimRows, messages.WherePlaces)
_CLOSED_KNOWN = 16  # feeds whose ledgers are closed, about which late tasks may still ask


@dataclass(frozen=True)
class FeedOf:
    """Call of ``train`` that a feed belongs to, and its place in it.

    ``call`` numbers the calls of ``train``, from 1. ``validates`` says that the feed brings validation rows.
    ``validation`` is the number of the feed that brought the validation rows of this one. ``batch`` is a stream's
    micro-batch; ``consecutive`` says whether these are numbered without gaps. ``queue`` is the nodes' named queue that
    the rows go to.
    """

    call: int = 0
    validates: bool = False
    validation: int = 0
    batch: int | None = None
    consecutive: bool = False
    queue: str = "input"


@dataclass
class Feed:
    """State of one feed: a DataFrame's rows, sent through Spark once, and the passes over them."""

    number: int
    passes: int
    spill: bool
    epoch: int
    epochs: int
    ledger: FeedLedger
    place: FeedOf = field(default_factory=lambda: FeedOf())
    schema: bytes = b""
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    error: FeedFailed | None = None
    passes_done: dict[str, int] = field(default_factory=dict)
    partitions: int = 0
    moved: int = 0
    told: set[str] = field(default_factory=set)  # the nodes to which it was announced
    rendezvous: int = 1  # of the cluster's members, for which it is valid
    before: int = 0  # passes before its first one, over all calls of train
    replays: int | None = None  # once it is delivered: how often the nodes repeat it
    skipped: dict[str, int] = field(default_factory=dict)  # passes that a node's predecessor has finished
    again: dict[str, int] = field(default_factory=dict)  # by node: the rendezvous for which it was announced again
    resumed: int = 0  # passes that the state includes from which the newest generation continues
    lacking: set[str] = field(default_factory=set)  # the nodes of that generation that have not kept its rows
    held: messages.HeldRows = field(default_factory=messages.HeldRows)  # rows of the next pass in that state
    delivered: int = 0  # rows of the first delivery
    sent_again: set[int] = field(default_factory=set)  # partitions that an attempt has finished since
    is_kept: bool = True  # all rows that were sent again are on disk
    shares: dict[str, int] = field(default_factory=dict)  # of validation rows, once they are delivered

    @property
    def progress(self) -> FeedProgress:
        """Its progress, as shown to the user."""
        return FeedProgress(self.ledger.partitions_done, self.partitions, self.ledger.rows, self.epochs)


class FeedController:
    """Answer all questions about feeds that come to the door.

    Parameters
    ----------
    changed : threading.Condition
        The cluster's.
    membership : Membership
        Knows which nodes are fed, where they take rows, and how often nodes were started: a feed is valid for one
        rendezvous. It is only read.
    send : callable
        Sends a message to nodes.
    """

    def __init__(self, changed: threading.Condition, membership: Membership, send: Send) -> None:
        self.current: Feed | None = None
        self._changed = changed
        self._membership = membership
        self._send = send
        self._feeds: dict[int, Feed] = {}
        self._count = self._calls = 0
        self._enough: dict[int, set[str]] = {}
        self._hosts_of: tuple[object, ...] = ()  # the rendezvous and nodes of which these are the hosts
        self._by_host: dict[str, list[str]] = {}
        self._described: messages.FeedSchema | None = None
        self.parallelism = 0  # by which Spark cuts files into partitions
        self.closed = ""
        self._is_new = False  # this generation was not fed yet: what its nodes had kept is still there
        self.wanted_from: dict[str, messages.FeedFrom] = {}
        self.held = HeldPositions()
        self._answers: dict[type, Callable[[Feed, Any], Any]] = {
            messages.OpenPartition: self._open,
            messages.WherePlaces: self._where,
            messages.ClaimRows: self._claim,
            messages.PartitionDone: self._done,
            messages.PartitionFailed: self._failed,
        }

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes among which the rows are shared."""
        return self._membership.present.fed_names

    def begin(
        self,
        passes: int,
        spill: bool,
        epoch: int,
        epochs: int,
        place: FeedOf | None = None,
        *,
        held: messages.HeldRows | None = None,
        before: int = 0,
    ) -> Feed:
        """Announce a feed to the nodes, ``before`` passes after the first one of all calls.

        Rows that their saved state already includes are not sent.
        """
        with self._changed:
            self._count = number = self._count + 1
            book = FeedLedger(number, self.nodes, held)
            now = self._membership.rendezvous
            self._is_new &= place is not None and place.validates
            feed = Feed(number, passes, spill, epoch, epochs, book, place or FeedOf(), rendezvous=now, before=before)
            if feed.place.batch is not None:
                self._feeds.pop(number - BATCHES_KNOWN, None)
            self._forget_old(keep=feed.place.validation)
            feed.told.update(self.nodes)
            self._feeds[number] = self.current = feed
            self._send(messages.FeedBegins(number, passes, spill, **vars(feed.place)), self.nodes)
            self._changed.notify_all()
            return feed

    def start_again(self) -> None:
        """Forget the nodes' progress: each will report again from which position it wants rows."""
        with self._changed:
            self._is_new = True
            self.wanted_from.clear()
            self.held.forget_parts()
            for enough in self._enough.values():
                enough.clear()

    def go_on(self, feeds: Iterable[Feed], rendezvous: int) -> None:
        """Continue feeds after a rendezvous in which some nodes were replaced."""
        with self._changed:
            for feed in feeds:
                feed.rendezvous = rendezvous

    def can_resume(self, feed: Feed, passes: int, *, by_all: bool) -> bool:
        """Whether a new generation can go on with a delivered feed after so many passes: nodes have kept its rows.

        They must be the same nodes, since each has the rows of its share only. ``by_all``: all must have kept theirs.
        """
        with self._changed:
            known = feed.replays is not None and not feed.ledger.closed and feed.ledger.spilled
            if not self._is_new or not known or feed.ledger.claimed.keys() != set(self.nodes):
                return False
            assert feed.replays is not None, "it is delivered"
            kept = [self._has_kept(node, feed) for node in self.nodes]
            return 0 <= passes <= feed.replays and (all(kept) if by_all else any(kept))

    def _has_kept(self, node: str, feed: Feed) -> bool:
        place = self._membership.feed_places.get(node)
        return place is not None and place.kept == feed.number

    def resume(
        self,
        feed: Feed,
        passes: int,
        place: FeedOf,
        *,
        held: messages.HeldRows,
        positions: Mapping[str, messages.PassPosition],
    ) -> None:
        """Go on with a delivered feed in a new generation, after so many passes.

        The rows of the nodes in :attr:`Feed.lacking` are still to be sent.

        Parameters
        ----------
        feed : Feed
            The feed, for which :meth:`can_resume` is true.
        passes : int
            How many passes over it the restored state includes.
        place : FeedOf
            Its call of ``train``, as it is numbered now.
        held : HeldRows
            Which rows of the next pass the state includes.
        positions : mapping of str to PassPosition
            How each node begins that pass once more; empty if the state includes none of its rows.
        """
        with self._changed:
            assert feed.replays is not None, "it is delivered"
            self._is_new = False
            feed.rendezvous, feed.place, feed.error, self.current = self._membership.rendezvous, place, None, feed
            feed.resumed, feed.held, feed.told = passes, held, set(self.nodes)
            feed.skipped, feed.passes_done = dict.fromkeys(self.nodes, passes), dict.fromkeys(self.nodes, passes)
            feed.again.clear()
            feed.lacking = {node for node in self.nodes if not self._has_kept(node, feed)}
            feed.delivered, feed.is_kept = feed.ledger.rows, True
            feed.sent_again.clear()
            self.held.forget_order(feed.number, feed.lacking)
            left, shares = feed.replays - passes, feed.ledger.shares()
            for node in self.nodes:
                kept = node not in feed.lacking
                of_node = positions.get(node, messages.PassPosition())
                counts = shares[node], sum(shares.values()), max(shares.values())
                again = messages.FeedAgain(of_node, *counts, kept, {} if kept else dict(held.spans))
                spill = left > 0 and not kept
                self._send(messages.FeedBegins(feed.number, 1 + left, spill, **vars(place), again=again), [node])
            if not feed.lacking:
                self._end(feed, self.nodes)
            self._changed.notify_all()

    def resume_validation(self, number: int, place: FeedOf) -> bool:
        """Tell a new generation that it has the validation rows of this feed; return False if a node has not kept them.

        Parameters
        ----------
        number : int
            The feed.
        place : FeedOf
            Its call of ``train``, as it is numbered now.
        """
        with self._changed:
            feed, places = self._feeds.get(number), self._membership.feed_places
            kept = {node for node in self.nodes if node in places and places[node].kept_validation == number}
            if feed is None or not kept == feed.shares.keys() == set(self.nodes):
                return False
            feed.rendezvous, feed.place, feed.told = self._membership.rendezvous, place, set(self.nodes)
            counts = feed.shares.values()
            total, least, most = sum(counts), min(counts), max(counts)
            for node, rows in feed.shares.items():
                again = messages.FeedAgain(messages.PassPosition(), rows, total, most, kept=True)
                self._send(messages.FeedBegins(number, feed.passes, feed.spill, **vars(place), again=again), [node])
                self._send(messages.FeedSchema(number, feed.schema, feed.lengths), [node])
                self._send(messages.FeedEnds(number, rows, 0, total, least, most), [node])
            self._changed.notify_all()
            return True

    def end_resumed(self, feed: Feed) -> None:
        """Tell the nodes that all rows have been sent to those that lacked them, and how often to repeat them.

        Raises
        ------
        FeedFailed
            If these are more rows than before.
        """
        with self._changed:
            if feed.ledger.rows != feed.delivered:
                now, before = feed.ledger.rows, feed.delivered
                raise FeedFailed(f"Spark read {now} rows, and {before} when they were fed first. {KEEP_ROWS_ALIKE}")
            feed.lacking.clear()
            if not feed.is_kept:
                feed.replays = feed.resumed
            self._end(feed, self.nodes)

    def set_partitions(self, feed: Feed, partitions: int) -> None:
        """Record how many partitions the data of a feed have."""
        with self._changed:
            feed.partitions = partitions

    def begin_again(self, feed: Feed, node: str, skipped: int, since: int) -> None:
        """Announce a feed to a replacement node, whose predecessor has finished ``skipped`` of the passes.

        It is announced once for rendezvous ``since``, in which the node joined, even if another loss follows.
        """
        with self._changed:
            if feed.again.get(node) == since:
                return
            feed.again[node] = since
            self.held.forget_order(feed.number, [node])
            passes = (feed.passes if feed.replays is None else 1 + feed.replays) - skipped
            feed.skipped[node] = feed.passes_done[node] = skipped
            feed.told.add(node)
            self._send(messages.FeedBegins(feed.number, passes, feed.spill and passes > 1, **vars(feed.place)), [node])

    def end_again(self, feed: Feed, node: str) -> None:
        """Tell a replacement node that its share is complete."""
        with self._changed:
            feed.lacking.discard(node)
            self._end(feed, [node])

    def cut(self, feed: Feed, made: int) -> None:
        """End a delivered feed after ``made`` passes; the remaining passes are fed again, to more nodes."""
        with self._changed:
            left = max(0, made - 1)
            if feed.replays is not None and left < feed.replays:
                self.end(feed, left)

    def _forget_old(self, keep: int) -> None:
        """Drop feeds that were closed long ago, except the validation feed ``keep`` of the feed that begins."""
        closed = [one for one, feed in self._feeds.items() if feed.ledger.closed and one != keep]
        for one in closed[:-_CLOSED_KNOWN]:
            del self._feeds[one]

    def describe(self, schema: messages.FeedSchema) -> None:
        """Send the schema of rows that are not fed yet: the nodes restore a state first, and may need it for that."""
        with self._changed:
            self._described = schema
            self._send(schema, self.nodes)

    def describe_again(self, nodes: Iterable[str]) -> None:
        """Send the rows' schema, if known, to nodes that have just started: some need it before any row."""
        with self._changed:
            known = [feed for feed in self._feeds.values() if feed.schema and not feed.place.validates]
            if known:
                schema = messages.FeedSchema(known[-1].number, known[-1].schema, known[-1].lengths)
                self._send(schema, nodes)
            elif self._described is not None:
                self._send(self._described, nodes)

    def wants_from(self, message: messages.FeedFrom) -> None:
        """Record from which position a node of a later generation wants rows; all must want the same."""
        with self._changed:
            self.wanted_from[message.node] = message
            if message.rows is not None:
                self.held.give(message.state, message.rows)
            error = self.disagreement
            if error is not None and self.current is not None and self._is_valid(self.current):
                self.current.error = error
            self._changed.notify_all()

    @property
    def is_position_known(self) -> bool:
        """Whether a node has said from which position it wants rows, and which rows its state includes is known.

        Of an earlier cluster's state only the node that has read it can say that. If the nodes disagree, nothing more
        is to be known.
        """
        with self._changed:
            wanted = {one.state for one in self.wanted_from.values()}
            return bool(wanted) and (len(wanted) > 1 or self.held.knows(next(iter(wanted))))

    @property
    def disagreement(self) -> FeedFailed | None:
        """The error to raise if this generation's nodes want to continue from different states, else None."""
        unlike: dict[tuple[int, int, str], messages.FeedFrom] = {}
        with self._changed:
            for one in self.wanted_from.values():
                unlike.setdefault((one.refused, one.passes, one.state), one)
        return FeedFailed(_unlike_states(*unlike.values())) if len(unlike) > 1 else None

    def position_held(self, message: PositionHeld) -> bool:
        """Record which rows a state includes that a node saved in the middle of a pass.

        Return whether training can continue from the state now. The node that writes it to the ``model_dir`` is told
        which rows it includes.
        """
        with self._changed:
            feed = self._feeds.get(message.feed)
            if feed is None or feed.ledger.closed or not self.held.take(message, self.nodes, feed.ledger, feed.held):
                return False
            if writer := self.held.writer_of(message.state):
                rows = replace(self.held.rows_of(message.state), parallelism=self.parallelism)
                self._send(RowsOfState(message.state, rows), [writer])
            return True

    def begin_call(self, number: int | None = None) -> int:
        """Number a call of ``train``, as before if its rows are fed again: saved states know the number."""
        with self._changed:
            self._calls = number = self._calls + 1 if number is None else number
            self._enough[number] = set()
            return number

    def has_enough(self, node: str, call: int) -> bool:
        """Whether a node has said that it wants no more rows of this call of ``train``."""
        return node in self._enough.get(call, ())

    def is_through(self, node: str, call: int) -> bool:
        """Whether a node takes no more rows of this call of ``train``: it wants none, or its main has ended."""
        with self._changed:
            return self.has_enough(node, call) or self._membership.members[node].status.ended

    def has_made(self, feed: Feed, passes: int) -> bool:
        """Whether each node that was told of a feed has made so many passes over it, or takes no more rows."""
        nodes = feed.told.intersection(self.nodes)
        return all(feed.passes_done.get(node, 0) >= passes or self.is_through(node, feed.place.call) for node in nodes)

    def end(self, feed: Feed, replays: int) -> None:
        """Tell each node that its share is complete, how many rows it has, and how often to repeat it."""
        with self._changed:
            feed.replays = replays
            if feed.place.validates:
                feed.shares = feed.ledger.shares()
            told = dict.fromkeys([*feed.ledger.claimed, *feed.skipped])  # a node that came late has no share
            self._end(feed, [node for node in told if node not in feed.lacking])

    def _end(self, feed: Feed, nodes: Iterable[str]) -> None:
        assert feed.replays is not None, "it is delivered"
        shares = feed.ledger.shares()
        counts = shares.values() or [0]
        total, least, most = sum(counts), min(counts), max(counts)
        for node in nodes:
            left = feed.replays - feed.skipped.get(node, 0)
            self._send(messages.FeedEnds(feed.number, shares.get(node, 0), left, total, least, most), [node])

    def close(self, reason: str) -> None:
        """Record that no feed will come any more, and tell the nodes."""
        with self._changed:
            if not self.closed:
                self.closed = reason
                self.announce_end()

    def announce_end(self) -> None:
        """Tell the nodes that no feed will come any more."""
        self._send(messages.NoMoreFeeds(), self.nodes)

    def asked(self, message: Any) -> Any:
        """Answer a task's question."""
        with self._changed:
            feed = self._feeds.get(message.feed)
            if isinstance(message, messages.StillFed):
                return feed is not None and self._goes_on(feed)
            if isinstance(message, messages.RowsMoved):
                return feed.moved if feed is not None and self._goes_on(feed) else None
            if feed is None:
                raise FeedFailed(
                    f"feed {message.feed} has ended, but a Spark task still asks for it; cancel the task's job"
                )
            feed.moved += 1
            answer = self._answers[type(message)](feed, message)
            if not isinstance(message, _MANY):  # no thread waits for those
                self._changed.notify_all()
            return answer

    def pass_done(self, message: messages.PassDone) -> None:
        """Record that a node's dataset has finished a pass."""
        with self._changed:
            feed = self._feeds.get(message.feed)
            if feed is None:
                return
            number = message.number + feed.skipped.get(message.node, 0)
            feed.passes_done[message.node] = max(number, feed.passes_done.get(message.node, 0))
            feed.moved += 1
            if message.enough:
                self._enough.setdefault(feed.place.call, set()).add(message.node)

    def _goes_on(self, feed: Feed) -> bool:
        return self._is_valid(feed) and not feed.ledger.closed and not self._membership.dismissed

    def _is_valid(self, feed: Feed) -> bool:
        return feed.rendezvous == self._membership.rendezvous

    @property
    def has_rows_left(self) -> bool:
        """Whether a node has not finished the passes that were announced to it."""
        feed = self.current
        return feed is not None and (feed.replays is None or not self.has_made(feed, feed.replays + 1))

    @property
    def is_half_fed(self) -> bool:
        """Whether a feed was announced to the nodes, but its end was not: they still wait for its rows."""
        return self.current is not None and self.current.replays is None

    def forget(self) -> None:
        """Drop the ledgers: the cluster has ended.

        Tasks of an interrupted feed may still ask, while the door stays open to tell them the reason.
        """
        with self._changed:
            self.held = HeldPositions()
            self.close_ledgers(feed for feed in self._feeds.values() if feed.replays is not None)

    def close_ledgers(self, feeds: Iterable[Feed]) -> None:
        """Drop the ledgers of these feeds, whose rows will not be requested again."""
        with self._changed:
            for feed in feeds:
                self.held.keep_rows_of(feed.ledger)
                feed.ledger.close()

    def _open(self, feed: Feed, question: messages.OpenPartition) -> messages.Places:
        if not self._goes_on(feed):
            return messages.Places()
        if not feed.schema:
            read_schema(question.schema)  # an invalid schema must not become the feed's: it would refuse all others
            if told := self._unlike_validation(feed, question):
                return messages.Places(refused=told)
            feed.schema, feed.lengths = question.schema, question.lengths
            self._send(messages.FeedSchema(feed.number, question.schema, question.lengths), self.nodes)
        elif feed.schema != question.schema and (told := unlike_schemas(feed.schema, question.schema)):
            return messages.Places(
                refused=f"its rows have other types than those of another partition: {told}. Give all rows the same "
                "types where they are made, such as float(x)"
            )
        places = self._membership.feed_places
        if not all(name in places for name in self.nodes):
            gone = ", ".join(name for name in self.nodes if name not in places)
            return messages.Places(refused=f"no rows are taken by {gone}")
        if not self._membership.cut_links.reaches_all(question.host, [places[name].host for name in self.nodes]):
            is_sent = not feed.lacking or question.partition in feed.sent_again
            sent = feed.ledger.sent(question.partition) if is_sent else None
            return messages.Places(nodes=len(self.nodes), elsewhere=True, sent=sent)
        near = self.nodes if len(self.nodes) <= _ALL_TOLD else self._on_host(question.host)
        skip = feed.ledger.skip.get(question.partition, ())
        known = (feed.held.known or feed.ledger.known).get(question.partition, ())
        return messages.Places({name: places[name] for name in near}, nodes=len(self.nodes), skip=skip, known=known)

    def _on_host(self, host: str) -> list[str]:
        """Return the nodes at an address. The addresses are collected again when the nodes have changed."""
        now = (self._membership.rendezvous, *self.nodes)
        if self._hosts_of != now:
            self._hosts_of, self._by_host = now, {}
            for name in self.nodes:
                if name in self._membership.feed_places:
                    self._by_host.setdefault(self._membership.feed_places[name].host, []).append(name)
        return self._by_host.get(host, [])

    def _where(self, feed: Feed, question: messages.WherePlaces) -> messages.Places:
        if not self._goes_on(feed):
            return messages.Places()
        places = self._membership.feed_places
        gone = [name for name in question.nodes if name not in places]
        if gone:
            return messages.Places(refused=f"no rows are taken by {', '.join(gone)}")
        return messages.Places({name: places[name] for name in question.nodes}, nodes=len(self.nodes))

    def _unlike_validation(self, feed: Feed, question: messages.OpenPartition) -> str:
        """Describe the columns in which the rows differ from the validation rows that were fed before."""
        kept = self._feeds.get(feed.place.validation)
        if kept is None or not kept.schema:
            return ""
        told = unlike_schemas(kept.schema, question.schema, common=True)
        for name in sorted(kept.lengths.keys() & question.lengths.keys()):
            if kept.lengths[name] != question.lengths[name]:
                ours, theirs = ("x".join(map(str, lengths[name])) for lengths in (question.lengths, kept.lengths))
                told = told or f"{name!r} holds lists of {ours}, not {theirs}"
        return f"its rows differ from the validation rows: {told}" if told else ""

    def _claim(self, feed: Feed, question: messages.ClaimRows) -> messages.Claimed:
        return feed.ledger.claim(question)

    def _done(self, feed: Feed, statement: messages.PartitionDone) -> None:
        feed.ledger.finish(statement.partition, statement.rows, statement.spilled)
        if feed.lacking and feed.replays is not None:
            feed.sent_again.add(statement.partition)
            feed.is_kept &= statement.spilled or feed.replays == feed.resumed

    def _failed(self, feed: Feed, statement: messages.PartitionFailed) -> None:
        if feed.error is None and self._goes_on(feed):  # a cancelled task may still report rows of a lost feed
            feed.error = FeedFailed(f"partition {statement.partition}: {statement.text}")


def _unlike_states(*wanted: messages.FeedFrom) -> str:
    places = " and ".join(
        f"{one.node} after {one.passes} epochs" + (f" and a part ({one.state})" if one.state else "") for one in wanted
    )
    return (
        f"the nodes have restored different states: {places}. Each node must call ctx.resume and find the same "
        "checkpoints: on several hosts, model_dir must be a directory that all of them share, or a URL"
    )


def check_feedable(data: Any) -> None:
    """Refuse data that :func:`feed_job` would refuse, before a feed is announced to the nodes.

    Raises
    ------
    PlanError
        As there.
    """
    refuse_ended(data)
    feed_job(data, Feed(0, 1, False, 1, 1, FeedLedger(0, ())), DoorAddress("", 0, b"", ""))


def describe_job(data: Any) -> Callable[[], list[Any]]:
    """Return the Spark action that looks at the first rows of a DataFrame or an RDD; they were checked before.

    It returns one row with one field, the encoded :class:`~tfos_nb.runtime.feed.messages.FeedSchema`; none if there
    are no rows.
    """
    if hasattr(data, "mapInArrow"):
        return partial(feedable(data).mapInArrow(DescribeTask(), DESCRIBED_SCHEMA).take, 1)
    return partial(data.mapPartitions(DescribeTask(rows=True)).take, 1)


def feed_job(data: Any, feed: Feed, door: DoorAddress) -> Callable[[], Any]:
    """Return the Spark action that sends the rows of a DataFrame or an RDD to the nodes.

    Raises
    ------
    PlanError
        If it is neither, or has a column without a tensor.
    """
    task = FeedTask(feed.number, door)
    if hasattr(data, "mapInArrow"):
        frame = feedable(data)
        if door.relayed:  # its tasks wait for answers that other tasks bring, and those need a slot
            frame = frame.coalesce(places_beside_exchanges(frame.sparkSession))
        collect: Callable[[], Any] = frame.mapInArrow(task, SUMMARY_SCHEMA).collect
        return collect
    from pyspark import RDD

    if isinstance(data, RDD):
        rdd_collect: Callable[[], Any] = data.mapPartitions(replace(task, rows=True)).collect
        return rdd_collect
    raise PlanError(
        f"{with_article(type(data).__name__)} cannot be fed: give a Spark DataFrame or an RDD, such as "
        "spark.createDataFrame(…)"
    )
