"""Which rows a replacement worker gives out, and how its coordinator finds it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.waiting import until
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.lifecycle import Moved
from tfos_nb.runtime.control.processes import greets
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.program import peers as peers_module
from tfos_nb.runtime.program.coordinator import LocalFeed, Wanted
from tfos_nb.runtime.program.coordinator_steps import _Flight, _result_of
from tfos_nb.runtime.program.peers import Peers, each_alone, unread

BATCH = pa.RecordBatch.from_pydict({"id": pa.array(range(8), pa.int64())})


@pytest.fixture
def served(tmp_path: Path) -> LocalFeed:
    """A worker whose predecessor has read three passes, with the rows of the fourth pass."""
    queue = RowQueue("worker:1", str(tmp_path), 1 << 20, 1 << 20, lambda message: None)
    queue.skip_passes(3)
    queue.begin(FeedBegins(1, 1, False))
    queue.describe(FeedSchema(1, BATCH.schema.serialize().to_pybytes(), {}))
    queue.feed_rows(1).accept(0, ((0, BATCH.num_rows),), BATCH)
    queue.end(FeedEnds(1, 8, 0))
    feed = LocalFeed(queue, 1, threading.Event())
    feed._learn()
    return feed


def rows_of_pass(feed: LocalFeed, turn: int) -> int:
    feed.take(turn)
    number = feed.open(wire.encode(Wanted(("id",))))
    rows = 0
    while True:
        more, ids = feed.next(number)
        if not more:
            return rows
        rows += len(ids)


def test_a_replacement_worker_has_no_rows_for_passes_its_predecessor_has_read(
    served: LocalFeed,
) -> None:
    assert [rows_of_pass(served, turn) for turn in (3, 4)] == [0, 8]


def test_a_worker_asked_without_a_pass_number_gives_its_rows(served: LocalFeed) -> None:
    assert rows_of_pass(served, 0) == 8


def test_after_a_cut_a_worker_skips_replayed_passes_and_keeps_first_passes(tmp_path: Path) -> None:
    queue = RowQueue("worker:0", str(tmp_path), 1 << 20, 1 << 20, lambda message: None)
    feed = LocalFeed(queue, 0, threading.Event())
    for number, rows in ((1, 8), (2, 4)):
        queue.begin(FeedBegins(number, 3, True))
        queue.describe(FeedSchema(number, BATCH.schema.serialize().to_pybytes(), {}))
        queue.feed_rows(number).accept(0, ((0, rows),), BATCH.slice(0, rows))
        queue.end(FeedEnds(number, rows, 2))
    feed._learn()
    assert rows_of_pass(feed, 1) == 8
    feed.cut()
    assert rows_of_pass(feed, 2) == 4
    assert queue.waiting == ()


def greet(listener: socket.socket) -> None:
    """Send the first frame of a gRPC server to every caller, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\0\0\0\4\0\0\0\0\0")


@contextlib.contextmanager
def a_worker() -> Iterator[str]:
    """Yield the address of a worker that runs until the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_is_running_only_if_it_greets_and_not_if_it_just_accepts() -> None:
    import tensorflow as tf

    target = tf.distribute.Server.create_local_server().target
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert greets(target.removeprefix("grpc://"))
        assert not greets(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("listens", [True, False], ids=["its process is just ending", "its process has ended"])
def test_an_unresponsive_worker_is_waited_for_until_its_new_address_is_known(listens: bool) -> None:
    with a_worker() as here, a_worker() as there, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:  # connections are still accepted, but not served
            held.listen()
        workers = {0: here, 1: f"127.0.0.1:{held.getsockname()[1]}"}
        peers = Peers()
        search = threading.Thread(target=peers.find, args=(workers,), daemon=True)
        search.start()
        peers.moved(Moved("worker:0", "elsewhere:1"))  # from an earlier loss: this worker answers at its known address
        search.join(0.2)
        assert search.is_alive()
        peers.moved(Moved("worker:1", there))
        search.join(10)
        assert not search.is_alive()
    assert workers == {0: here, 1: there}


def test_a_worker_lost_while_another_is_waited_for_is_waited_for_too() -> None:
    peers = Peers()
    with socket.socket() as held, a_worker() as there, contextlib.ExitStack() as first:
        held.bind(("127.0.0.1", 0))
        workers = {0: first.enter_context(a_worker()), 1: f"127.0.0.1:{held.getsockname()[1]}"}
        search = threading.Thread(target=peers.find, args=(workers,), daemon=True)
        search.start()
        search.join(0.2)  # by now it has found the first worker
        first.close()
        peers.moved(Moved("worker:1", there))
        search.join(0.2)
        assert search.is_alive(), "of the first one TensorFlow would wait for an answer for ever"
        with a_worker() as elsewhere:
            peers.moved(Moved("worker:0", elsewhere))
            search.join(10)
            assert not search.is_alive()
    assert workers == {0: elsewhere, 1: there}


def test_a_worker_whose_network_recovers_is_found_at_its_old_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_LOOKED_FOR_EVERY", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        workers = {0: here}
        search = threading.Thread(target=Peers().find, args=(workers,), daemon=True)
        search.start()
        search.join(0.2)
        assert search.is_alive()
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        search.join(10)
        assert not search.is_alive()
        listener.shutdown(socket.SHUT_RDWR)
    assert workers == {0: here}


ASKING = """
import sys, threading, time
from tfos_nb.runtime.program import peers
from tfos_nb.runtime.control.lifecycle import Moved

peers._NO_ANSWER = 0.5
known, comes = peers.Peers(), threading.Event()
known.moved(Moved("worker:0", "of an earlier loss:1"))
ask = comes.wait if sys.argv[1] == "waits" else lambda: comes.wait(0.1)
if sys.argv[2] == "moves":
    threading.Timer(0.05, known.moved, [Moved("worker:1", "elsewhere:1")]).start()
else:
    threading.Timer(1.5, comes.set).start()  # it only takes long
with known.watched():
    ask()
time.sleep(1)
"""


@pytest.mark.parametrize(
    ("answer", "worker", "code"),
    [("waits", "moves", -signal.SIGKILL), ("comes", "moves", 0), ("waits", "stays", 0)],
)
def test_a_process_ends_if_its_tensorflow_waits_for_a_lost_worker(answer: str, worker: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", ASKING, answer, worker], capture_output=True, check=False, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert (b"a new generation begins" in ended.stderr) == (code != 0)


# as observed on a live worker while another one was replaced
UNREAD = """2 root error(s) found.
  (0) INTERNAL: {{function_node __wrapped__Identity_device_/job:chief/replica:0/task:0/device:CPU:0}} Unable to parse \
request
Additional GRPC error information from remote target /job:worker/replica:0/task:0/device:CPU:0 while calling \
/tensorflow.eager.EagerService/RunComponentFunction:
:UNKNOWN:Error received from peer  {grpc_status:13, grpc_message:"Unable to parse request"}
  (1) CANCELLED: {{function_node __wrapped__Identity_device_/job:chief/replica:0/task:0/device:CPU:0}} \
RecvFromRemoteAsync is cancelled."""

COORDINATING = """
import json, os, socket, sys
import tensorflow as tf
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl
from tests.runtime.program.test_peers import UNREAD
from tfos_nb.runtime.program.peers import Peers

def free():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"

spec = {"chief": [free()], "worker": [free()], "ps": [free()]}
servers = [tf.distribute.Server(spec, job, 0) for job in ("worker", "ps")]
os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": "chief", "index": 0}})
strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
assert Peers().followed_by(coordinator)

copy, left = RemoteValueImpl._copy_to_local, [int(sys.argv[1])]
def copy_later(self):
    if left[0]:
        left[0] -= 1
        raise tf.errors.InternalError(None, None, UNREAD)
    return copy(self)
RemoteValueImpl._copy_to_local = copy_later

rows = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(100)))
coordinator.join()
again, put_back = [], coordinator._cluster.closure_queue.put_back
coordinator._cluster.closure_queue.put_back = lambda closure: (again.append(closure), put_back(closure))
value = coordinator.schedule(tf.function(lambda it: next(it)), args=(rows,))
try:
    coordinator.join()
    print("got", value._values.numpy(), "after", len(again))
except tf.errors.InternalError:
    print("given up after", len(again))
os._exit(0)
"""


@pytest.mark.parametrize(("times", "outcome"), [(3, "got 3 after 3"), (4, "given up after 3")])
def test_a_request_that_a_worker_could_not_read_is_repeated_without_losing_rows(times: int, outcome: str) -> None:
    run = [sys.executable, "-c", COORDINATING, str(times)]
    ended = subprocess.run(run, capture_output=True, check=False, timeout=120, text=True)
    assert ended.stdout.strip() == outcome, ended.stderr


def test_only_a_workers_parse_error_counts_as_an_unread_request() -> None:
    import tensorflow as tf

    assert unread(tf.errors.InternalError(None, None, UNREAD))
    assert not unread(tf.errors.UnavailableError(None, None, UNREAD))
    assert not unread(tf.errors.InternalError(None, None, UNREAD.replace("/job:worker", "/job:ps")))
    assert not unread(tf.errors.InternalError(None, None, "Unable to parse request"))


class Moving:
    """A step whose worker is lost before its result is copied; another worker repeats it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def fetch(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_result_lost_with_its_worker_is_fetched_after_the_step_is_repeated() -> None:
    import tensorflow as tf

    gone = tf.errors.UnavailableError(None, None, "Connection reset: /job:worker/replica:0/task:1")
    unknown = "Unable to find the relevant tensor remote_handle: remote target /job:worker/replica:0/task:1"
    replaced = tf.errors.InvalidArgumentError(None, None, unknown)
    over = threading.Event()
    assert _result_of(Moving(gone, replaced, tf.errors.InternalError(None, None, UNREAD)), over) == "done"
    with pytest.raises(tf.errors.InternalError):
        _result_of(Moving(*[tf.errors.InternalError(None, None, UNREAD)] * 4), over)
    for own in (
        tf.errors.UnavailableError(None, None, "remote target /job:ps/task:0"),
        tf.errors.InvalidArgumentError(None, None, "a mistake: remote target /job:worker/replica:0/task:1"),
        tf.errors.InternalError(None, None, "a mistake: remote target /job:worker/replica:0/task:1"),
    ):
        with pytest.raises(type(own)):
            _result_of(Moving(own), over)
    over.set()
    with pytest.raises(tf.errors.UnavailableError):
        _result_of(Moving(gone), over)


class Standing:
    """A step that ends when its event is set."""

    def __init__(self, result: str) -> None:
        self.result = result
        self.done = threading.Event()

    def fetch(self) -> str:
        assert self.done.wait(20)
        return self.result


def test_results_come_in_the_order_of_completion_even_if_a_step_stalls() -> None:
    flight, steps = _Flight(3), [Standing(name) for name in "abc"]
    for step in steps:
        assert flight.has_room
        flight.add(step)
    assert not flight.has_room
    for step in (steps[2], steps[1]):
        step.done.set()
        assert flight.next_done() == step.result
    assert flight.steps == 1
    flight.end()
    steps[0].done.set()
    assert until(lambda: not [one for one in threading.enumerate() if one.name.startswith("tfos_nb step")])


def test_each_thread_of_a_coordinator_has_its_own_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.distribute.coordinator.cluster_coordinator import Worker
    from tensorflow.python.eager import context, executor

    made: list[object] = []
    set_by: list[object] = []
    kept = type(context.context()).executor
    noted = kept.setter(lambda self, e: (set_by.append(e), kept.__set__(self, e)))
    new_executor = executor.new_executor
    monkeypatch.setattr(executor, "new_executor", lambda **how: made.append(how) or new_executor(**how))
    monkeypatch.setattr(type(context.context()), "executor", noted)
    monkeypatch.setattr(Worker, "_process_queue", lambda self: self.append(len(set_by)))
    for _ in range(2):
        each_alone()
    seen: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=Worker._process_queue, args=(seen,))
        thread.start()
        thread.join()
    assert made == [{"enable_async": False}] * 2, "one a thread, however often it was asked for"
    assert seen == [1, 2], "set before the first step"
    assert len({id(one) for one in set_by}) == 2
    set_by.clear()
