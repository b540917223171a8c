"""Messages of the feed between driver, Spark's tasks and nodes: what is fed, and which node gets which rows.

The driver's :class:`~tfos_nb.driver.ledger.FeedLedger` answers the tasks' questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfos_nb.errors import FeedFailed, TfosError, either
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.rows.spans import Spans

__all__ = [
    "BATCHES_KNOWN",
    "SAME_VERSION",
    "ClaimRows",
    "Claimed",
    "FeedAgain",
    "FeedBegins",
    "FeedEnds",
    "FeedFrom",
    "FeedSchema",
    "HeldRows",
    "KnownRows",
    "MakeRoom",
    "NoMoreFeeds",
    "OpenPartition",
    "PartitionDone",
    "PartitionFailed",
    "PassDone",
    "PassPosition",
    "Places",
    "Reached",
    "RowsMoved",
    "StillFed",
    "WherePlaces",
    "WorkerThrough",
    "check_queue",
]

SAME_VERSION = "Use the same version of tfos_nb on the driver and on the executors"
"""Remedy for a message that no task of this version sends."""

BATCHES_KNOWN = 16  # micro-batches that are remembered, here and by the ledgers; a stream has no end


@message
@dataclass(frozen=True)
class PassPosition:
    """How a node has cut a pass, and how many of its batches and rows a state includes that was saved in it.

    With them, the next generation can cut the same batches, and go on with the one after these. ``streamed``: the pass
    began before the number of its rows was known. ``seed`` is that of its order, if its rows are shuffled.
    """

    batches: int = 0
    rows: int = 0
    streamed: bool = False
    seed: int | None = None


@message
@dataclass(frozen=True)
class FeedAgain:
    """To a node of a later generation: a feed goes on that was delivered to its predecessor.

    ``position`` is that of the restored state in the first pass that is left. ``rows``, ``total`` and ``most`` are as
    in :class:`FeedEnds`. ``kept``: the node has its rows on its disk, so none will come. Otherwise all will, and
    ``held`` are those by partition that the restored state includes: they are for the later passes only.
    """

    position: PassPosition
    rows: int
    total: int
    most: int
    kept: bool
    held: dict[int, Spans] = field(default_factory=dict)


@message
@dataclass(frozen=True)
class FeedBegins:
    """To the nodes: rows of a new feed will come. ``spill`` says to keep them for ``passes - 1`` replays.

    ``call`` numbers the calls of ``train``. ``validates`` marks validation rows, which are kept until the node ends and
    do not count as a pass. ``validation`` is the feed with the validation rows of this one, 0 if none. ``batch`` is the
    number of a stream's micro-batch. ``consecutive`` says that these numbers have no gaps. ``queue`` is the named queue
    that gets the rows. ``again`` says that the feed was delivered before.
    """

    feed: int
    passes: int
    spill: bool
    call: int = 0
    validates: bool = False
    validation: int = 0
    batch: int | None = None
    consecutive: bool = False
    queue: str = "input"
    again: FeedAgain | None = None


@message
@dataclass(frozen=True)
class FeedSchema:
    """To the nodes: the schema of the rows, so that a node without rows knows it too.

    ``schema`` is in Arrow's encoding. ``lengths`` has the lengths of list columns in the first row, outermost first.
    """

    feed: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]


@message
@dataclass(frozen=True)
class FeedEnds:
    """To a node: its share of the feed is complete with ``rows`` rows; repeat it ``replays`` times.

    ``total`` is the number of rows of all fed nodes, ``least`` and ``most`` are the smallest and the largest share.
    """

    feed: int
    rows: int
    replays: int
    total: int = 0
    least: int = 0
    most: int = 0


@message
@dataclass(frozen=True)
class MakeRoom:
    """To a node with a full queue: take more rows of a feed, because another node waits for rows after them."""

    feed: int


@message
@dataclass(frozen=True)
class NoMoreFeeds:
    """To the nodes: no feed will come any more; a dataset ends after its last pass."""


@message
@dataclass(frozen=True)
class FeedFrom:
    """From a node of a later generation that wants its first row: its restored state includes ``passes`` passes.

    They are counted over all calls of ``train`` after the first ``refused`` ones, of which no more rows are wanted. All
    later rows are fed again. If ``state`` was saved in the middle of a pass, the rows of that pass that it includes are
    not. ``rows`` are these rows, if the state is of an earlier cluster, so that the driver does not know them.
    """

    node: str
    passes: int
    state: str = ""
    rows: HeldRows | None = None
    refused: int = 0


@message
@dataclass(frozen=True)
class PassDone:
    """From a node: its dataset has finished one pass (1 is the first) of a feed.

    ``enough``: the node wants no more rows of the call of ``train`` to which the feed belongs.
    """

    node: str
    feed: int
    number: int
    rows: int
    enough: bool = False


@message
@dataclass(frozen=True)
class WorkerThrough:
    """From a coordinator: all rows of ``passes`` passes of a worker, in this generation, were used in a step."""

    node: str
    passes: int


@message
@dataclass(frozen=True)
class OpenPartition:
    """Question of a task on ``host`` that has read a partition's first row. Answer: :class:`Places`."""

    feed: int
    partition: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]
    host: str = ""


@message
@dataclass(frozen=True)
class Reached:
    """Position of a node in one partition.

    Parameters
    ----------
    row : int
        The row after the last one that it has.
    rows, fingerprint : int
        The number of rows that the fingerprint covers, and the fingerprint. These rows end at ``row``.
    """

    row: int = 0
    rows: int = 0
    fingerprint: int = 0


@message
@dataclass(frozen=True)
class KnownRows:
    """Fingerprint of a partition's rows in some spans, from when they were fed."""

    spans: Spans
    fingerprint: int


@message
@dataclass(frozen=True)
class HeldRows:
    """Rows of one pass that a saved state was trained on, by partition, with fingerprints to compare them.

    A fingerprint may also cover some later rows, which came in the same batch. ``parallelism`` is the number of cores
    by which Spark had cut the files into these partitions; 0 if it is not known.
    """

    spans: dict[int, Spans] = field(default_factory=dict)
    known: dict[int, tuple[KnownRows, ...]] = field(default_factory=dict)
    parallelism: int = 0

    def __bool__(self) -> bool:
        return bool(self.spans)


@message
@dataclass(frozen=True)
class Places:
    """Addresses at which nodes take rows.

    With few nodes, all of them. With many, those on the task's host, or those that it asked for. ``nodes`` is the
    number of nodes that are fed, 0 if the feed is over. ``refused`` is the reason if the rows are refused. ``skip`` are
    rows of the partition that no node wants. ``known`` are rows that must be the same as before.
    ``elsewhere`` says that the task's host does not reach all nodes, so that a task on another host must send the
    partition; ``sent`` is its number of rows if that has happened, else None.
    """

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""
    nodes: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    known: tuple[KnownRows, ...] = ()
    elsewhere: bool = False
    sent: int | None = None


@message
@dataclass(frozen=True)
class WherePlaces:
    """Question of a task for the addresses of nodes that it knows by name only. Answer: :class:`Places`."""

    feed: int
    nodes: tuple[str, ...]


@message
@dataclass(frozen=True)
class ClaimRows:
    """Question of a task: which nodes get the ``rows`` rows that begin at ``start``? Answer: :class:`Claimed`.

    All rows before them must have been claimed. The task has ``held`` more rows after them. ``fitting`` is the most
    rows that a node takes in one piece. ``local`` are the nodes on the task's host.
    """

    feed: int
    partition: int
    start: int
    rows: int
    held: int = 0
    fitting: int = 1 << 20
    local: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Claimed:
    """Answer: the rows before each of these ``ends``, in order, belong to the node at the same index."""

    ends: list[int]
    nodes: list[str]


@message
@dataclass(frozen=True)
class PartitionDone:
    """Statement: the nodes have acknowledged all ``rows`` that this attempt read; ``spilled``: all are on disk."""

    feed: int
    partition: int
    rows: int
    spilled: bool


@message
@dataclass(frozen=True)
class PartitionFailed:
    """Statement: a row cannot be fed, and a retry would not help."""

    feed: int
    partition: int
    text: str


@message
@dataclass(frozen=True)
class RowsMoved:
    """Question of a task that sends no rows: a number that changes while other tasks send some; None: it is over."""

    feed: int


@message
@dataclass(frozen=True)
class StillFed:
    """Question of a task that cannot reach a node any more: whether the driver wants the feed to continue."""

    feed: int


def check_fed(call: str, node: str, fed: bool, input_mode: InputMode) -> None:
    """Raise FeedFailed if a node gets no rows from Spark, so that a call for rows would wait forever.

    Examples
    --------
    >>> check_fed("ctx.dataset", "worker:0", True, InputMode.SPARK)
    """
    if fed:
        return
    if input_mode is InputMode.TENSORFLOW:
        raise FeedFailed(
            f"{call}: {node} gets no rows from Spark, since the cluster was launched with input_mode='tensorflow': its "
            "nodes read files themselves. Read the rows with ctx.read(…), or launch with input_mode='spark' and feed "
            "them"
        )
    raise FeedFailed(
        f"{call}: {node} gets no rows from Spark: it is a parameter server, an evaluator, or a chief that coordinates "
        "the workers. Call it on the workers only, or launch with chief='trains' to have the chief train like them"
    )


def check_queue(name: str, known: Sequence[str], error: type[TfosError] = FeedFailed) -> None:
    """Raise an error that names the existing queues, if the cluster has no queue ``name``."""
    if name not in known:
        raise error(
            f"the queue must be {either(known)}, got {name!r}; correct it, or start the cluster with "
            f"queues=[{name!r}, …]"
        )
