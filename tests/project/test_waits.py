"""Every wait for a thread, a process, a lock or an event has a deadline, or this file lists what ends it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tfos_nb

PACKAGE = Path(tfos_nb.__file__).parent
OF_OTHERS = (
    "TaskContext",
    "BarrierTaskContext",
    "metrics[name]",
    "described",
    "removed",
    "before",
)  # methods of the same names that do not wait

_USERS = "the user waits for the end of a training, which may take days; an interrupt ends it"
_OVER = "the end of the cluster, which its own thread comes to whatever happens"
_CLOSED = "the rows' end: the driver's word, or the process is told to stop"
_KILLED = "the end of a process that was killed, or has said that it ends"
_ITS_LIFE = "a process or thread that serves until it is told to end, or ends with its parent"
_TENSORFLOW = "TensorFlow's own: a worker that is lost fails it"
_JOB = "Spark's word on a job, which the session's end brings as well"

# module: function -> the event that ends a wait without a deadline
KNOWN = {
    "cluster: Cluster.__exit__": _USERS,
    "cluster: Cluster.await_model": _OVER,
    "cluster: Cluster.results": _USERS,
    "cluster: Cluster.stop": _OVER,
    "cluster: Cluster.wait_until_up": _OVER,
    "demo: _Teller.__exit__": "a thread that looks every second whether it is over",
    "detached.process: DetachedProcess._result": _OVER,
    "detached.process: DetachedProcess._train": _OVER,
    "detached.process: DetachedProcess._wait": _OVER,
    "detached.process: DetachedProcess._wait_for_end": _OVER,
    "detached.process: DetachedProcess.run": _OVER,
    "driver.cluster_lifecycle: ClusterLifecycle._stop_politely": "a save, which the user may end",
    "driver.cluster_lifecycle: ClusterLifecycle._until_failure": _USERS,
    "driver.cluster_lifecycle: ClusterLifecycle.join": _OVER,
    "driver.feeding.training: Training.describe": _OVER,
    "driver.feeding.training_calls: TrainingCalls._await": _OVER,
    "driver.local_nodes: HostedNode._hangs": "its supervisor has been killed",
    "driver.outcome: ClusterOutcome.await_decision": _OVER,
    "driver.outcome: ClusterOutcome.raise_outcome": _OVER,
    "driver.relaying: Carrier._connect": _ITS_LIFE,
    "driver.relaying: RelayedDoor._exchange": _JOB,
    "jupyter.endpoint: Endpoint._answer": _ITS_LIFE,
    "magics.cluster: _TrainingWork.__call__": _USERS,
    "magics.lines: ClusterLines._model_of": _USERS,
    "parallel: _results": _USERS,
    "pipeline.fitting: Fit._work": _USERS,
    "pipeline.fitting: Fit.run": _USERS,
    "runtime.control.door: Door._serve": _ITS_LIFE,
    "runtime.control.door: Link._outgoing": _ITS_LIFE,
    "runtime.control.relay: Relay.asked": "done already: it was awaited with a deadline",
    "runtime.control.relay: Relay.serve": _ITS_LIFE,
    "runtime.control.reports: Reporter._keep_flushing": _ITS_LIFE,
    "runtime.control.tunnel: TunnelListener._connected": "the connection's end, or the door's",
    "runtime.feed.feed_rows: FeedRows._await_room": "a reader that takes rows, or discards them at its end",
    "runtime.feed.feed_rows: FeedRows._take": _CLOSED,
    "runtime.feed.row_queue: RowQueue._wait_for_rows": _CLOSED,
    "runtime.feed.row_queue: RowQueue.validation_schema": _CLOSED,
    "runtime.inference.requests: RequestQueue.take": _CLOSED,
    "runtime.inference.requests: Stream.put": "a reader that takes rows, or the stream's failure",
    "runtime.inference.serving: RequestExchange.exchange": "the results' end: the stream's failure, or that of main",
    "runtime.inference.serving: _Exchange.results": "the rows' end, which Spark gives before the results' end",
    "runtime.models.model_cache: _load_elsewhere": "a process of its own, whose end fails what it was given",
    "runtime.node.process: NodeProcess._await_exit": _ITS_LIFE,
    "runtime.node.process: NodeProcess.end": _KILLED,
    "runtime.node.single_program: SingleProgramTask._run": _USERS,
    "runtime.node.tensorboard: TensorBoard._listen": _ITS_LIFE,
    "runtime.node.tensorboard: TensorBoard.stop": _KILLED,
    "runtime.node.tensorboard: main": _ITS_LIFE,
    "runtime.node.tensorflow_process: TensorFlowProcess.run": "its supervisor's word; the process ends with it",
    "runtime.node.python_daemon: _wait": _ITS_LIFE,
    "runtime.node.warm_process: ForkedProcess.wait": _ITS_LIFE,
    "runtime.node.warm_process: WarmProcess._listen": _KILLED,
    "runtime.recovery.keras_state: FitKeeping.await_copy": "a thread that copies a file on the host",
    "runtime.recovery.state_rounds: StateRounds._read": _TENSORFLOW,
    "runtime.recovery.state_rounds: StateRounds.finish": "a thread that writes to memory, and sends a message",
    "runtime.node.warm_process: _Forker.run": _ITS_LIFE,
    "runtime.program.coordinator: LocalFeed.open": "the coordinator's first word, which it says before any other",
    "runtime.program.coordinator_steps: CoordinatedDataset.steps": _TENSORFLOW,
    "runtime.program.coordinator_steps: _Flight._fetch": _ITS_LIFE,
    "runtime.program.coordinator_steps: _Flight.next_done": _TENSORFLOW,
    "runtime.program.peers: Peers._watch": _ITS_LIFE,
    "runtime.program.peers: Peers.take_in": _TENSORFLOW,
    "runtime.program.tensorflow_cluster: TensorFlowCluster.serve": _TENSORFLOW,
    "runtime.storage.save_notices: NoticeReader.latest": "the notice of a save, or the loss of who would send it",
}


def waits(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Find the functions that wait without a deadline."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        inner = (*names, node.name) if named else names
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_endless(node, node.func):
            yield ".".join(names)
        yield from waits(node, inner)


def is_endless(call: ast.Call, function: ast.Attribute) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    limits = [one for one in arguments if not (isinstance(one, ast.Constant) and one.value is None)]
    if ast.unparse(function.value) in OF_OTHERS:
        return False
    if function.attr == "wait_for":
        return len(limits) < 2
    if ast.unparse(function) == "select.select":
        return len(limits) < 4
    return function.attr in ("join", "wait", "result", "get", "communicate", "acquire") and not limits


def test_every_wait_has_a_deadline_or_an_event_that_ends_it() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found |= {f"{module}: {name}" for name in waits(ast.parse(path.read_text()))}
    assert sorted(found - KNOWN.keys()) == [], "without a deadline: give it one, or say here what ends it"
    assert sorted(KNOWN.keys() - found) == [], "these wait no more, or have a deadline now"
