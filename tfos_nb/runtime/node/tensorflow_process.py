"""A node's process: imports TensorFlow and calls the user's ``main``.

A warm process forks it for its supervisor (:mod:`tfos_nb.runtime.node.supervisor`), or the supervisor starts it as
``python -m tfos_nb.runtime.node.tensorflow_process``. It has one socket for messages and one for reports. If TensorFlow
is not imported yet, it is imported while the other nodes of the cluster still start.

The process stays after ``main`` has returned, until the driver sends ``EndNode``: its peers may still need its server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from tfos_nb.errors import FeedFailed, TfosError
from tfos_nb.redaction import without_password
from tfos_nb.runtime.code.on_import import spare_scikit_learn
from tfos_nb.runtime.code.payload import unpack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.admission import raise_descriptors
from tfos_nb.runtime.control.lifecycle import (
    Coordinating,
    EndNode,
    FeedPlace,
    Following,
    MainRaised,
    MainReturned,
    MainStarted,
    ModelSaved,
    Moved,
    NodeJob,
    NodeUp,
    Saving,
    Serving,
    Start,
    StateHeld,
    StateWanted,
    Stop,
)
from tfos_nb.runtime.control.plan import InputMode, Node, Role
from tfos_nb.runtime.control.processes import (
    Channel,
    answers,
    die_with_parent,
    may_be_read_by_peer,
    name_this_process,
)
from tfos_nb.runtime.control.reports import Reporter
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.kept_rows import KeptRows
from tfos_nb.runtime.feed.positions import RowsOfState
from tfos_nb.runtime.feed.row_queues import DEFAULT_QUEUE, RowQueues
from tfos_nb.runtime.feed.transfer import FeedServer
from tfos_nb.runtime.inference.serving import RequestExchange
from tfos_nb.runtime.keras.fit import NODE_VARIABLE
from tfos_nb.runtime.node.stacks import write_stacks_when_asked
from tfos_nb.runtime.node.tensorboard import make_log_dir
from tfos_nb.runtime.program.context import ContextCalls, ContextSettings, NodeContext
from tfos_nb.runtime.program.peers import Peers
from tfos_nb.runtime.program.strategies import ClusterTask
from tfos_nb.runtime.program.tensorflow_cluster import CoordinatorCalls
from tfos_nb.runtime.recovery.checkpointing import CheckpointCalls
from tfos_nb.runtime.recovery.memory_state import FinishedFits, LastState
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.recovery.stored_states import StoredStates
from tfos_nb.runtime.storage.log_mirror import mirrored
from tfos_nb.runtime.storage.one_writer import mark_of
from tfos_nb.runtime.storage.paths import spill_directory
from tfos_nb.runtime.storage.remote import check_places
from tfos_nb.runtime.storage.shared_directory import PlaceSeen
from tfos_nb.runtime.storage.uploads import SavingFlag

logger = logging.getLogger("tfos_nb")  # not __name__: this module is __main__

_COLLATERAL = re.compile(
    r"Collective ops is aborted|tasks are unhealthy|Cancelled by peer|coordination service|CoordinationService"
    r"|remote target"
)
# Workers that met in a collective operation, each with another one.
_DIFFERS = re.compile(r"(?:Collective instance \d+ expected type|Shape mismatch in the collective)[^\n]*")
# Only for TensorFlow's own errors: another lost connection, for example to a database, has the same text.
_DISCONNECTED = re.compile(r"Connection reset by peer|failed to connect to all addresses|Socket closed")
_FEED_STATUS_EVERY = 0.5
_OURS = str(Path(__file__).parents[2])


@dataclass
class _Signals:
    """Events and values that the message thread sets for the main thread."""

    start: threading.Event
    may_end: threading.Event
    stopping: threading.Event
    cluster_spec: dict[str, list[str]]
    generation: int = 1
    workers: tuple[int, ...] = ()
    held: tuple[str, ...] = ()


class TensorFlowProcess:
    """The node that this process runs.

    Parameters
    ----------
    channel : Channel
        The connection to the supervisor.
    reporter : Reporter
        Sends the metrics of steps and the feed's status.
    job : NodeJob
        The job to run.
    directory : str
        Directory of the node's sockets.
    host : str
        The address by which the other nodes reach this one.
    """

    def __init__(self, channel: Channel, reporter: Reporter, job: NodeJob, directory: str, host: str) -> None:
        self._channel = channel
        self._reporter = reporter
        self._job = job
        self._host = host
        self._node = Node.parse(job.node)
        self._signals = _Signals(threading.Event(), threading.Event(), threading.Event(), {})
        self._save_request = SaveRequest()
        self._saving = SavingFlag(lambda going_on: channel.send(Saving(job.node, going_on)))
        self._stored: StoredStates | None = None
        self._stored_rows: StoredRows | None = None
        self._feed_error: FeedFailed | None = None
        settings: dict[str, Any] = job.settings
        limits = settings["buffer_bytes"], settings["spill_bytes"]
        queues = tuple(settings.get("queues", (DEFAULT_QUEUE,)))
        self._kept, self._kept_validation = _kept_at(settings, "kept_rows"), _kept_at(settings, "kept_validation")
        self._queues = RowQueues(
            job.node,
            spill_directory(),
            *limits,
            channel.send,
            names=queues,
            kept=self._kept,
            kept_validation=self._kept_validation,
        )
        self._requests = RequestExchange(job.node, queues, settings["buffer_bytes"])
        self._peers = Peers()
        self._directory = directory
        self._log_dir = str(settings.get("log_dir", ""))
        self._logs = mirrored(self._log_dir, directory)
        if self._logs is not None:
            self._log_dir = self._logs.path
        self._serves = self._called = False
        self._feed: FeedServer | None = None
        self._handlers: dict[type, Callable[[Any], object]] = {
            Start: self._start,
            Moved: self._peers.moved,
            StateWanted: lambda message: self._save_request.change(message.wanted),
            RowsOfState: self._keep_rows,
            messages.FeedBegins: self._queues.begin,
            messages.FeedSchema: self._queues.describe,
            messages.FeedEnds: self._queues.end,
            messages.MakeRoom: self._queues.make_room,
            messages.NoMoreFeeds: self._hear_the_last,
            Stop: self._stop,
            EndNode: self._leave,
        }

    def run(self) -> None:
        """Run the node from the first message to ``EndNode``."""
        outcome: MainReturned | MainRaised
        threading.Thread(target=self._listen, name="tfos_nb messages", daemon=True).start()
        threading.Thread(target=self._tell_feed, name="tfos_nb feed status", daemon=True).start()
        try:
            self._prepare()
            self._signals.start.wait()
            outcome = self._run_main()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the cell must show it
            outcome = self._raised(error)
        if self._logs is not None:
            self._logs.stop()
        self._reporter.flush_all()  # EndNode may arrive before the last report would have been sent
        self._say_feed()
        self._channel.send(outcome)
        self._queues.stop()
        self._requests.stop(getattr(outcome, "summary", ""))
        self._signals.may_end.wait()

    def _prepare(self) -> None:
        place = self._open_feed()
        spare_scikit_learn()
        import keras
        import tensorflow as tf

        from tfos_nb.runtime.program import setup

        note = setup.patch_keras_fit()
        self._reporter.waited = setup.waited
        if self._job.settings.get("autolog", True):
            log_dir = self._log_dir if self._is_board_node else ""
            setup.autolog(self._reporter.step, self._signals.stopping, log_dir)
        if note:
            logger.info(note)
        self._channel.send(NodeUp(self._job.node, os.getpid(), tf.__version__, keras.__version__, place, note))

    @property
    def _is_board_node(self) -> bool:
        return self._job.settings.get("board") == self._job.node

    def _open_feed(self) -> FeedPlace | None:
        if not self._job.settings.get("fed"):
            return None
        self._feed = FeedServer(self._queues, directory=self._directory, host=self._host, token=self._job.token)
        self._feed.answer_with(self._requests.exchange)
        kept, validation = (rows.feed if rows is not None else 0 for rows in (self._kept, self._kept_validation))
        return replace(self._feed.place, kept=kept, kept_validation=validation)

    def _run_main(self) -> MainReturned:
        spec = self._signals.cluster_spec
        main, args = unpack(self._job.payload)
        self._node = self._ranked(self._signals.workers)
        os.environ[NODE_VARIABLE] = self._job.node
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": spec, "task": {"type": self._node.role.value, "index": self._node.index}}
        )
        ctx = self._context(spec, args)
        self._stored_rows = ctx.stored_rows
        is_given = bool(self._job.settings.get("place_given"))
        log_dir = str(self._job.settings.get("log_dir", ""))
        check_places(ctx.model_dir if is_given else "", log_dir, writes=ctx.is_chief)
        if (is_given and _hosts_of(spec) > 1) or self._keeps_states:
            ctx.look_at_place()
        if ctx.log_dir and ctx.is_chief:
            make_log_dir(ctx.log_dir)
        if kept := self._job.settings.get("kept"):
            self._keep_fits(cast("list[str]", kept), cast("list[str]", self._job.settings["finished"]), ctx)
        self._called = True
        self._channel.send(MainStarted(self._job.node))
        result = main(args, ctx)
        ctx.finish_saving()
        if self._stored is not None:
            self._stored.finish()
        return MainReturned(self._job.node, wire.encode_result(result), self._has_server(spec), ctx.has_read)

    @property
    def _keeps_states(self) -> bool:
        """Whether states are written to the ``model_dir``, or read from there."""
        return bool(self._job.settings.get("checkpoint_every")) or self._first_generation > 1

    @property
    def _tells_past_epochs(self) -> bool:
        """Whether an earlier cluster has done epochs of which the driver may not know."""
        return self._first_generation > 1 and bool(self._job.settings.get("autolog", True))

    @property
    def _first_generation(self) -> int:
        """The generation with which the cluster has begun: above 1 if it continues an earlier one's training."""
        return int(str(self._job.settings.get("first_generation", 1)))

    def _context(self, spec: dict[str, list[str]], args: Any) -> NodeContext:
        given: dict[str, Any] = self._job.settings
        settings = ContextSettings(
            self._job.node,
            ClusterTask(self._node, spec, self._job.gpus, bool(given.get("chief_trains"))),
            self._job.cluster,
            str(given["model_dir"]),
            self._log_dir,
            bool(given.get("fed")),
            self._signals.generation,
            int(str(given.get("restarts", 0))),
            self._signals.held,
            str(given.get("run", "")),
            InputMode(str(given.get("input_mode", InputMode.SPARK.value))),
            self._first_generation,
        )
        coordinator = CoordinatorCalls(
            coordinating=lambda: self._channel.send(Coordinating(self._job.node)),
            coordinated=self._coordinated,
            late=self._peers.take_in,
            serving=self._tell_serving,
        )
        places = cast("list[str]", given.get("kept_loop"))
        memory = LastState(places) if places else None
        calls = ContextCalls(
            failed=self._remember,
            saving=self._saving,
            saved=self._tell_saved,
            checkpoint=CheckpointCalls(self._tell_held, self._tell_seen, self._save_request, memory),
            coordinator=coordinator,
        )
        return NodeContext(
            settings,
            queues=self._queues,
            requests=self._requests,
            reporter=self._reporter,
            stopping=self._signals.stopping,
            calls=calls,
            args=args,
        )

    def _ranked(self, workers: tuple[int, ...]) -> Node:
        """Return this node's role and index for TensorFlow, which counts only the present ``workers``."""
        if not workers or self._node.role is not Role.WORKER:
            return self._node
        return Node(Role.WORKER, workers.index(self._node.index))

    def _keep_fits(self, places: list[str], finished: list[str], ctx: NodeContext) -> None:
        from tfos_nb.runtime.program import setup

        every, resumes = self._job.settings.get("checkpoint_every"), self._first_generation > 1
        if (every or resumes) and ctx.is_chief:
            seconds = float(str(every)) if every else math.inf  # it only reads what the earlier cluster has written
            self._stored = StoredStates(ctx.checkpoint_dir, seconds, self._saving)
        past_epoch = {"tell_epoch": setup.PastEpoch(self._reporter.step)} if self._tells_past_epochs else {}
        keeping = setup.FitKeeping(
            LastState(places),
            FinishedFits(finished),
            self._queues.default,
            self._tell_held,
            self._save_request,
            generation=self._signals.generation,
            workers=ctx.num_workers,
            held_states=self._signals.held,
            hooks=setup.FIT_HOOKS,
            stored=self._stored,
            is_stored=bool(every),
            rows=ctx.stored_rows,
            **past_epoch,
        )
        keeping.begin()

    def _keep_rows(self, message: RowsOfState) -> None:
        if self._stored_rows is not None:
            self._stored_rows.keep_soon(message)

    def _tell_held(self) -> None:
        if self._job.settings.get("restarts"):
            self._channel.send(StateHeld(self._job.node, self._save_request.asked))

    def _tell_saved(self, path: str) -> None:
        self._channel.send(ModelSaved(self._job.node, without_password(path), *mark_of(path)))

    def _tell_seen(self, place: str, mark: str) -> None:
        self._channel.send(PlaceSeen(self._job.node, socket.gethostname(), place, mark))

    def _has_server(self, spec: dict[str, list[str]]) -> bool:
        """Return whether a server listens on this node's port. Its supervisor only binds the port."""
        port = spec[self._node.role.value][self._node.index].rpartition(":")[2]
        return answers("localhost", int(port))

    def _coordinated(self, coordinator: Any) -> Callable[[int, int], object]:
        """Follow the workers if they may be replaced; return the callback that reports each worker's passes."""
        if self._job.settings.get("restarts") and self._peers.followed_by(coordinator):
            self._channel.send(Following(self._job.node))
        return lambda worker, passes: self._channel.send(messages.WorkerThrough(f"worker:{worker}", passes))

    def _tell_serving(self) -> None:
        self._serves = True
        self._channel.send(Serving(self._job.node))

    def _remember(self, error: FeedFailed) -> None:
        self._feed_error = error

    def _raised(self, error: BaseException) -> MainRaised:
        """Return a description of an error. TensorFlow wraps an error of the feed in its own; the cause is shown."""
        root = self._feed_error if self._feed_error is not None else error
        if isinstance(root, wire.NotData):
            return MainRaised(self._job.node, f"the value that main returned cannot be sent: {root}", "")
        if isinstance(root, TfosError):
            frames = _users_frames(error)  # empty if main was not called yet: then only the message is shown
            return MainRaised(self._job.node, str(root), frames and f"{frames}{type(root).__name__}: {root}")
        summary = _headline(root)
        differs = _DIFFERS.search(str(root))
        if differs is not None:
            summary = (
                "this worker made another call than the others, or one with another model or other shapes. Make the "
                "same models on all workers, and call fit, evaluate and predict on all of them, in the same order. "
                f"TensorFlow's reason: {differs.group()}"
            )
        text = "".join(traceback.format_exception(type(error), error, _users_part(error)))
        return MainRaised(self._job.node, summary, text, _is_collateral(error))

    def _tell_feed(self) -> None:
        while not self._signals.may_end.wait(_FEED_STATUS_EVERY):
            self._say_feed()
            if self._feed is not None:
                self._feed.look(time.monotonic())

    def _say_feed(self) -> None:
        self._reporter.send(replace(self._queues.status(), dropped=self._reporter.dropped))

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self._hear(message)
        except Exception:  # without this thread the node would silently receive no Stop and no EndNode
            logger.exception("a message from the supervisor could not be processed")
        os._exit(1)  # this is also reached if the supervisor is gone, so no message can be sent any more

    def _hear(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _start(self, message: Start) -> None:
        self._signals.cluster_spec, self._signals.generation = message.cluster_spec, message.generation
        self._signals.workers, self._signals.held = message.workers, message.held
        if message.generation > 1:
            self._queues.default.begin_generation(self._first_generation > 1)
        self._queues.default.skip_passes(message.passes)
        self._signals.start.set()

    def _stop(self, message: Stop) -> None:
        """Tell ``main`` to stop. The process stays until ``EndNode``, since a peer that saves may need its server."""
        self._signals.stopping.set()
        self._save_request.change(False)
        self._queues.stop()
        self._requests.stop()
        if not self._called:
            os._exit(0)  # main will not be called

    def _hear_the_last(self, message: messages.NoMoreFeeds) -> None:
        self._queues.close()
        self._requests.close()

    def _leave(self, message: EndNode) -> None:
        self._signals.may_end.set()
        if self._serves:
            self._say_feed()
            os._exit(0)  # TensorFlow's server joins forever and cannot be stopped


def _headline(error: BaseException) -> str:
    """Return an error's type and reason in one line, without TensorFlow's preamble and node names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith("[[")]
    preamble = bool(lines) and lines[0].startswith(("Graph execution error", "in user code:"))
    reason = (lines[-1] if preamble else lines[0]) if lines else ""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{name}: {reason}" if reason else name


def _users_part(error: BaseException) -> Any:
    """Return an error's traceback without this file's frames, so that it begins with the user's ``main``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame or error.__traceback__


def _kept_at(settings: Mapping[str, Any], name: str) -> KeptRows | None:
    """Return the rows that an earlier process of the node may have left; None if no files are held for it."""
    return KeptRows(settings[name]) if settings.get(name) else None


def _hosts_of(spec: dict[str, list[str]]) -> int:
    return len({place.rpartition(":")[0] for places in spec.values() for place in places})


def _is_collateral(error: BaseException) -> bool:
    """Return whether an error only says that a peer has gone."""
    text = str(error)
    if _DIFFERS.search(text):
        return False
    tensorflows = any(kind.__module__.startswith("tensorflow.") for kind in type(error).__mro__)
    return bool(_COLLATERAL.search(text) or (tensorflows and _DISCONNECTED.search(text)))


def _users_frames(error: BaseException) -> str:
    """Format only the user's own frames: the frames of installed packages and of tfos_nb do not explain a bad row.

    Return an empty string if there are none.
    """
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith((_OURS, "<frozen"))
    ]
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(own)) if own else ""


def _remove_generated_files() -> None:
    """Remove the source files that AutoGraph wrote. It would remove them at interpreter exit, which is skipped here."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and getattr(module, "__file__", None):
            with contextlib.suppress(OSError):
                os.unlink(str(module.__file__))


def main() -> None:
    """Run as the node's process."""
    die_with_parent()
    raise_descriptors()
    faulthandler.enable()  # so that the node's log has the stack of a crash in TensorFlow
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")  # no other code configures this process
    for chatty in ("absl", "tensorflow"):  # they log a line for each compiled collective
        logging.getLogger(chatty).setLevel(logging.WARNING)
    messages, reports, directory, host = sys.argv[1:5]
    write_stacks_when_asked(directory)
    channel = Channel.of_fd(int(messages))
    to_supervisor = socket.socket(fileno=int(reports))
    may_be_read_by_peer(to_supervisor)
    reporter = Reporter(to_supervisor)
    job = next(iter(channel))
    sys.path += [entry for entry in job.python_path if entry not in sys.path and os.path.isdir(entry)]
    sys.argv = [f"tfos_nb {job.node}"]
    name_this_process(f"tfos_nb {job.node}")
    TensorFlowProcess(channel, reporter, job, directory, host).run()
    _remove_generated_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not exit: TensorFlow's servers have no clean shutdown and may hang in it


if __name__ == "__main__":
    main()
