"""The process of a detached cluster: its driver, its Spark application, and the server that kernels ask.

``python -m tfos_nb.detached.process FD`` reads a :class:`~tfos_nb.detached.starting.DetachedLaunch` from its standard
input, which is a pipe of the kernel's. It writes to FD when the nodes are submitted, or why they are not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from tfos_nb.cluster import Cluster, follower_of
from tfos_nb.detached import places
from tfos_nb.detached.messages import Answer, HistoryParts, raised, reports_of
from tfos_nb.detached.on_executor import door_in_place, log_on_executor
from tfos_nb.detached.places import DetachedPlace
from tfos_nb.detached.server import CallDesk, CallServer, StopRequests
from tfos_nb.detached.starting import DetachedLaunch
from tfos_nb.driver.launching import open_door
from tfos_nb.errors import ClusterClosed, FeedFailed, TfosError
from tfos_nb.records.run import this_process
from tfos_nb.runtime.code.payload import name_of, unpack
from tfos_nb.runtime.control.door import Door
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import private_directory, remove_directory, write_frame
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.spark.session import end_jvm, session_with, spark_session
from tfos_nb.version import __version__

logger = logging.getLogger("tfos_nb")

_HOUR = 3600.0  # seconds
_REFUSAL_KEPT = 600.0  # seconds
_MET_WITHIN, _SUBMITTED_WITHIN = 120.0, 3600.0  # seconds


class DetachedProcess:
    """A cluster, and the answers about it, until its results are no longer kept.

    Parameters
    ----------
    launch : DetachedLaunch
        What the kernel has handed over.
    """

    def __init__(self, launch: DetachedLaunch) -> None:
        self._launch = launch
        slots = len(launch.plan.spark_nodes) + 2
        self._session = spark_session(slots) if launch.spark is None else session_with(launch.spark)
        self._cluster = Cluster(
            launch.plan,
            launch.settings,
            launch.payload,
            self._session,
            arguments=launch.arguments,
            follower=follower_of(launch.mlflow),
            id=launch.id,
        )
        self._stops = StopRequests(self._cluster)
        self._door: Door | None = None
        self._met = threading.Event()
        self._submitted: Future[dict[str, Any]] = Future()
        self._directory = private_directory(places.SOCKETS)
        self._dismissed = threading.Event()
        self._ended = threading.Event()
        self._feeding = threading.Lock()
        self._fed = time.monotonic()  # when a kernel has fed it last
        self._models = threading.Thread(target=self._publish_models, name="tfos_nb models", daemon=True)
        self._place = DetachedPlace(
            id=launch.id,
            name=launch.plan.name,
            process=this_process(),
            socket=os.path.join(self._directory, "calls"),
            version=__version__,
            launched=time.time(),
            model_dir=absolute(self._cluster.model_dir) if self._cluster.model_dir else "",
        )

    def start(self) -> None:
        """Answer from now on. On the kernel's host the nodes are submitted before, so that this raises what is wrong.

        On an executor, the task that has started this process must end first: the nodes may need its slot.
        """
        server = CallServer(self._place.socket, self._methods(), self._stops)
        if self._launch.on_executor:
            self._door, address = open_door(self._session, CallDesk(server))
            self._door.forward(lambda: self._cluster.tensorboard_socket)
            self._place = replace(self._place, door=door_in_place(address))
            return
        self._submit()
        server.start()
        places.publish(self._place)
        self._models.start()
        self._serve_pages()

    def _submit(self) -> None:
        self._cluster.start()
        self._place = replace(self._place, run=self._cluster.checkpoint_run)

    def _submit_on_executor(self) -> bool:
        """Submit the nodes when the kernel has come; return False if that was refused, once it had the time to ask why.

        A launch may be interrupted before the kernel knows of this process.
        """
        if not self._met.wait(_MET_WITHIN):
            logger.error("no kernel has come within %g s: the launch was interrupted", _MET_WITHIN)
            return False
        try:
            self._submit()
            self._submitted.set_result(asdict(self._place))
            self._models.start()
        except Exception as error:
            logger.exception("the nodes of %s were not submitted", self._place.name)
            self._submitted.set_exception(error)
            self._dismissed.wait(_REFUSAL_KEPT)
            return False
        return True

    @property
    def place(self) -> DetachedPlace:
        """Where it answers."""
        return self._place

    def _publish(self, place: DetachedPlace) -> None:
        if not self._launch.on_executor:  # else the kernel does that, on its own host
            places.publish(place)

    def run(self) -> None:
        """Train, keep the results for a while, and forget them."""
        if self._launch.on_executor and not self._submit_on_executor():
            return
        try:
            self._train()
        except Exception as error:
            logger.exception("the training of %s has ended early", self._place.name)
            if not self._cluster.snapshot().status.ended:  # else it is the cluster's own error
                self._cluster.end_with(error if isinstance(error, TfosError) else FeedFailed(_text_of(error)))
            self._cluster.await_end()
        self._models.join()  # the cluster has ended, so it publishes nothing more
        if not self._dismissed.is_set():
            self._publish(replace(self._place, status=self._cluster.snapshot().status.value))
        self._ended.set()
        with contextlib.suppress(Exception):  # Spark may have ended by itself
            self._session.stop()
            end_jvm()
        self._dismissed.wait(self._launch.keep * _HOUR)

    def close(self) -> None:
        """Remove what the process has written about itself."""
        self._cluster.close()
        if self._door is not None:
            self._door.close()
        if self._launch.on_executor:
            with contextlib.suppress(OSError):
                os.unlink(log_on_executor(self._place.id))
        else:
            places.forget(self._place.id)
        remove_directory(self._directory)

    def end(self, *_: object) -> None:
        """Stop the cluster and end the process; called when a signal asks for it."""
        self._dismissed.set()
        threading.Thread(target=self._cluster.stop, name="tfos_nb stop", daemon=True).start()

    def _train(self) -> None:
        """Feed the rows that were given with the launch, and wait for the end.

        Without rows, a cluster that is fed waits for a kernel that feeds it. If none does for as long as results are
        kept, no more rows come, and the slots are for others.
        """
        launch = self._launch
        if launch.data:
            validation = self._rows(launch.validation) if launch.validation else None
            self._cluster.train(self._rows(launch.data), launch.epochs, validation=validation)
        if launch.data or launch.plan.input_mode is InputMode.TENSORFLOW or self._is_left_alone():
            with contextlib.suppress(TfosError):  # it is the cluster's own, and is kept there
                self._cluster.wait()
        self._cluster.await_end()

    def _is_left_alone(self) -> bool:
        """Wait until no kernel has fed the cluster for :attr:`DetachedLaunch.keep` hours; False if it has ended."""
        patience = self._launch.keep * _HOUR
        while not self._cluster.await_end(max(0.0, self._fed + patience - time.monotonic()) if patience else None):
            with self._feeding:  # a train() that has begun is through
                if time.monotonic() - self._fed >= patience:
                    logger.warning("no kernel has called train() for %g hours: no more rows come", self._launch.keep)
                    return True
        return False

    def _publish_models(self) -> None:
        """Note each model that ``ctx.save`` has written, for a kernel that attaches when this process has gone."""
        known = None
        while (known := self._cluster.await_model(known)) is not None:
            self._place = replace(self._place, model=known.path, model_size=known.size, model_changed=known.changed)
            if not self._dismissed.is_set():
                self._publish(self._place)

    def _rows(self, reader: bytes) -> Any:
        read, _ = unpack(reader)
        try:
            return read(self._session)
        except Exception as error:
            raise FeedFailed(f"{name_of(read)} could not read the rows: {_text_of(error)}") from error

    def _serve_pages(self) -> None:
        """Let the Jupyter server's pages ask this process: Stop, logs, curves, stacks and TensorBoard."""
        try:
            from tfos_nb.jupyter.endpoint import the_endpoint  # here, since it imports aiohttp

            the_endpoint().serve(_OfPages(self._cluster, self._stops))
        except (ImportError, OSError, RuntimeError, TfosError):
            logger.warning(
                "the web endpoint did not start: notebook pages get Stop and logs through their kernels instead",
                exc_info=True,
            )

    # --- the calls of kernels ---

    def _methods(self) -> dict[str, Callable[..., Any]]:
        cluster = self._cluster
        return {
            "close": self._close,
            "curves": cluster.curves,
            "end_feed": self._end_feed,
            "history": self._history,
            "log_lines": self._log_lines,
            "logs": cluster.logs,
            "place": lambda: asdict(self._place),
            "plan": lambda: {name: getattr(cluster.plan, name) for name in ClusterPlan.field_names()},
            "result": self._result,
            "reports": lambda node: reports_of(cluster.history, node),
            "results": self._results,
            "scale": cluster.scale,
            "snapshot": cluster.snapshot,
            "stacks": cluster.stacks,
            "stop": cluster.stop,
            "submitted": self._await_submission,
            "tensorboard_socket": lambda: cluster.tensorboard_socket,
            "train": self._train_more,
            "wait": self._wait,
            "wait_until_up": cluster.wait_until_up,
        }

    def _await_submission(self) -> dict[str, Any]:
        """Let the nodes be submitted; return the place, or raise what is wrong."""
        self._met.set()
        return self._submitted.result(_SUBMITTED_WITHIN)

    def _train_more(self, data: bytes, validation: bytes = b"", **options: Any) -> None:
        state = self._cluster.snapshot().status
        if state.ended:
            raise ClusterClosed(f"cluster {self._place.name} is {state.value}: train needs a running one")
        with self._feeding:  # also while the rows are read: an end of the feed must not overtake them
            try:
                held_out = self._rows(validation) if validation else None
                self._cluster.train(self._rows(data), validation=held_out, **options)
            finally:
                self._fed = time.monotonic()

    def _end_feed(self) -> None:
        """Tell the nodes that no more rows come, once those of a running ``train`` are delivered; return at once.

        If the rows were given with the launch, this process tells the nodes when they are delivered.
        """
        if not self._launch.data:
            threading.Thread(target=self._wait_for_end, name="tfos_nb end of feed", daemon=True).start()

    def _wait_for_end(self) -> None:
        with self._feeding:
            pass  # train() calls that came before are through
        with contextlib.suppress(TfosError):  # it is the cluster's own, and is kept there
            self._cluster.wait()

    def _wait(self, timeout: float | None) -> None:
        if self._launch.data:  # this process feeds it, and then waits itself
            if not self._ended.wait(timeout):
                raise TimeoutError(
                    f"cluster {self._place.name} still runs after {timeout:g} s: it continues; call wait() again, or "
                    "stop()"
                )
        else:
            self._cluster.wait(timeout)
        self._cluster.wait()

    def _results(self) -> dict[str, Any]:
        self._wait(None)
        return self._cluster.results()

    def _result(self) -> Any:
        self._wait(None)
        return self._cluster.result()

    def _log_lines(self, node: str, limit: int) -> Sequence[Any]:
        return list(self._cluster.log_lines(node, limit))

    def _history(self) -> HistoryParts:
        return HistoryParts.of(self._cluster.history)

    def _close(self) -> None:
        self._dismissed.set()
        self._cluster.close()


class _OfPages:
    """The cluster as pages ask for it: their Stop counts with those of the kernels."""

    def __init__(self, cluster: Cluster, stops: StopRequests) -> None:
        self._cluster, self._stops = cluster, stops

    def request_stop(self) -> str:
        """Ask for a stop."""
        return self._stops.ask("")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


def _text_of(error: Exception) -> str:
    """Return an error with the first line of the user's code that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    at = f" (line {frames[0].lineno} of {frames[0].filename})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def main() -> None:
    """Run the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    for chatty in ("py4j", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Unpickling is safe here: the bytes come from the kernel through an inherited pipe, never from a socket.
    launch: DetachedLaunch = pickle.load(sys.stdin.buffer)  # noqa: S301
    with os.fdopen(int(sys.argv[1]), "wb") as ready:
        try:
            process = DetachedProcess(launch)
            process.start()
        except Exception as error:
            write_frame(ready, raised(error))
            raise
        write_frame(ready, Answer(asdict(process.place)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, process.end)
    try:
        process.run()
    finally:
        process.close()


if __name__ == "__main__":
    main()
