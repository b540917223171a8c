"""Messages about a node's lifecycle, between its TensorFlow process, its supervisor and the driver.

::

    TF process ──NodeUp, MainStarted, MainReturned, MainRaised──▶ supervisor ──these, Reservation, NodeEnded──▶ driver
    TF process ◀──Start, Moved, StateWanted, Stop, EndNode,
                  feed messages───────────────────────────────── supervisor ◀──these, StartAgain────────────── driver
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tfos_nb.runtime.control.wire import message

__all__ = [
    "EndNode",
    "FeedPlace",
    "Following",
    "MainRaised",
    "MainReturned",
    "MainStarted",
    "ModelSaved",
    "Moved",
    "NodeEnded",
    "NodeJob",
    "NodeUp",
    "Refused",
    "Reservation",
    "Saving",
    "Serving",
    "Start",
    "StartAgain",
    "StateHeld",
    "StateWanted",
    "Stop",
]


@message
@dataclass(frozen=True)
class NodeJob:
    """All that a supervisor and its TF process need. Comes from Spark's task closure through a pipe, never a socket.

    ``gpus`` are the GPUs that Spark gave its task; ``claim`` is how many more the node must claim on its host.
    ``payload`` is the pickled function and its arguments (:mod:`tfos_nb.runtime.code.payload`). ``host`` is the address
    by which other nodes reach this one, if it is not the address of the route to the driver. ``relayed`` says that the
    door is reached through a relay. ``warm_token`` and ``anchor`` are for the application's warm server, which is not
    used without a token (:class:`tfos_nb.runtime.node.warm_process.ServerTerms`). ``files`` are open files of the task
    that the supervisor inherits (:attr:`tfos_nb.runtime.node.node_files.NodeFiles.descriptors`).
    """

    node: str
    cluster: str
    attempt: int
    executor: str
    door_host: str
    door_port: int
    gpus: tuple[str, ...] = ()
    claim: int = 0
    env: dict[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    certificate: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    payload: bytes = field(default=b"", repr=False)
    host: str = ""
    relayed: bool = False
    warm_token: str = field(default="", repr=False)
    anchor: int = 0
    files: tuple[tuple[int, ...], ...] = ()


@message
@dataclass(frozen=True)
class Reservation:
    """A supervisor's reservation: TensorFlow will listen on ``host:port``; the supervisor keeps the port reserved.

    ``generation`` is the one that it was asked to reserve for; 0 at its first reservation. ``pid`` is the supervisor's
    process id on ``machine``; another container may use the same id. ``warm`` says that its process was forked from one
    that has imported TensorFlow.
    """

    node: str
    host: str
    port: int
    executor: str
    attempt: int
    pid: int
    gpus: tuple[str, ...] = ()
    generation: int = 0
    machine: str = ""
    warm: bool = False


@message
@dataclass(frozen=True)
class Refused:
    """This executor cannot run a node; ``reason`` says what to change."""

    node: str
    host: str
    reason: str


@message
@dataclass(frozen=True)
class Start:
    """The rendezvous is complete: ``cluster_spec`` maps each role to its addresses.

    ``generation`` counts how often the cluster's nodes were started, from 1. A node that replaces a lost one in a
    running generation begins after the ``passes`` that the lost one finished. If some workers are absent, ``workers``
    are the indices of the others; a worker's rank is its place among them. ``held`` are the states saved in the middle
    of a pass from which training can continue.
    """

    cluster_spec: dict[str, list[str]]
    generation: int = 1
    passes: int = 0
    workers: tuple[int, ...] = ()
    held: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class StateWanted:
    """To nodes: others are about to join or to leave. Save a state after one of the next steps, and wait there.

    ``wanted=False``: nobody joins or leaves any more, so go on.
    """

    wanted: bool = True


@message
@dataclass(frozen=True)
class StateHeld:
    """A state was saved from which training can continue. ``waits``: the node runs no further step.

    The driver starts the nodes again only after such a state, so that no step is done twice.
    """

    node: str
    waits: bool = False


@message
@dataclass(frozen=True)
class StartAgain:
    """To supervisors: end the process, start another, and reserve for this generation, which may be the same one."""

    generation: int
    cause: str


@message
@dataclass(frozen=True)
class FeedPlace:
    """Addresses where a node takes rows: a unix socket for its own host, TLS over TCP for others.

    ``boot`` identifies its host among hosts that share its directories
    (:func:`tfos_nb.runtime.control.processes.boot`). ``kept`` is the feed whose rows an earlier process of the node has
    left on its host's disk, and ``kept_validation`` that of validation rows; 0 if there is none.
    """

    socket: str
    host: str
    port: int
    certificate: bytes = field(repr=False)
    boot: str = ""
    kept: int = 0
    kept_validation: int = 0


@message
@dataclass(frozen=True)
class NodeUp:
    """The process has imported TensorFlow and takes rows."""

    node: str
    pid: int
    tensorflow: str
    keras: str
    feed: FeedPlace | None
    note: str = ""


@message
@dataclass(frozen=True)
class MainStarted:
    """``main`` has been called."""

    node: str


@message
@dataclass(frozen=True)
class Serving:
    """``main`` serves the other nodes and does not return: the cluster does not wait for it."""

    node: str


@message
@dataclass(frozen=True)
class Coordinating:
    """``main`` now waits for the other nodes' servers, to give them their steps."""

    node: str


@message
@dataclass(frozen=True)
class Following:
    """``main`` coordinates, and can continue with a worker that comes back at another address."""

    node: str


@message
@dataclass(frozen=True)
class Moved:
    """To a coordinator: a worker's server is now at this address."""

    node: str
    address: str


@message
@dataclass(frozen=True)
class Saving:
    """Whether ``main`` is writing a model: a polite stop waits until it is written."""

    node: str
    going_on: bool


@message
@dataclass(frozen=True)
class ModelSaved:
    """``ctx.save`` has written a model: its path or URL, and size and modification time (ns) of a local file."""

    node: str
    path: str
    size: int = -1
    changed: int = 0


@message
@dataclass(frozen=True)
class MainReturned:
    """``main`` has returned; ``result`` is encoded by :func:`tfos_nb.runtime.control.wire.encode_result`.

    ``serves`` says that it left a server on the node's address, which peers may use until :class:`EndNode`. ``read``
    says that it asked for rows that ``train`` feeds.
    """

    node: str
    result: bytes = field(repr=False)
    serves: bool = True
    read: bool = True


@message
@dataclass(frozen=True)
class MainRaised:
    """``main`` has raised. ``collateral`` says that it failed only because a peer was lost."""

    node: str
    summary: str
    traceback: str
    collateral: bool = False


@message
@dataclass(frozen=True)
class NodeEnded:
    """The process is gone. ``signal`` is the name of the signal that ended it; ``log_tail`` its last lines.

    ``note`` gives the reason if its supervisor ended it.
    """

    node: str
    exit_code: int | None
    signal: str | None
    log_tail: str
    memory_bytes: int | None = None
    note: str = ""


@message
@dataclass(frozen=True)
class Stop:
    """End: politely at first, then with SIGKILL after ``grace`` seconds, or later once a model is written."""

    reason: str
    grace: float


@message
@dataclass(frozen=True)
class EndNode:
    """All is done; the process may end. Until then it stays, since its peers may still need it."""
