"""Programs that count the rows they are fed, and faults that tests cause in them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tfos_nb import Cluster
from tfos_nb.runtime.recovery import save_schedule
from tfos_nb.state.cluster_state import ClusterState

PRIME = 1_000_003
ROWS = 3000


def sum_of_ids(passes: int, rows: int = ROWS) -> int:
    """Return the number that the counting programs must return."""
    return passes * sum(range(rows)) % PRIME


def counting_loop(args: dict[str, Any], ctx: Any) -> tuple[int, ...]:
    """Train a model that only counts rows, by a custom loop under a synchronous strategy.

    With ``args["until"]`` it ends at the end of the epoch after that time, and returns the number of its epochs.
    With ``args["apart"]`` the second worker has another disk than the first, as on another host.
    With ``args["amid"]`` it also saves its state after every so many batches, and returns how many rows it has read.
    With ``args["in_memory"]`` it keeps its state in memory alone, and returns also how many rows all replicas counted.
    """
    import time

    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        seen = tf.Variable(
            0,
            dtype=tf.int64,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    objects = {"total": total, "seen": seen} if args.get("in_memory") else {"total": total}
    dataset = strategy.experimental_distribute_dataset(ctx.dataset(32))

    @tf.function
    def step(batch: Any) -> Any:
        def on_replica(ids: Any) -> Any:
            seen.assign_add(tf.size(ids, tf.int64))
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(ids))

        return strategy.experimental_local_results(strategy.run(on_replica, (batch["id"],)))[0]

    @tf.function
    def largest(number: Any) -> Any:
        def on_replica(mine: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(mine))

        return strategy.experimental_local_results(strategy.run(on_replica, (number,)))[0]

    read = 0
    if args.get("apart") and ctx.task_index == 1:
        ctx.model_dir += "-elsewhere"
    for epoch in range(ctx.resume(**objects).epoch, args["epochs"]):
        before = read
        for number, batch in enumerate(dataset):
            total.assign((total + step(batch)) % PRIME)
            read += int(strategy.experimental_local_results(batch["id"])[0].shape[0])
            _save_amid(args, ctx, objects, epoch=epoch, step=number + 1, rows=read - before)
            exit_by_schedule(args, ctx, epoch + 1, number + 1)
            threading.Event().wait(args.get("pause", 0.02))  # gives a test time to cause a fault
            ctx.report(epoch=epoch + 1, step=number + 1, pid=os.getpid())
        if not args.get("in_memory"):
            ctx.checkpoint(total=total, epoch=epoch + 1)
        if "until" in args and int(largest(tf.constant(int(time.time() > args["until"])))):
            return int(total.numpy()), ctx.generation, epoch + 1
    also = [read, int(seen.numpy())] if args.get("in_memory") else [read] if "amid" in args else []
    return (int(total.numpy()), ctx.generation, *also)


def _save_amid(args: dict[str, Any], ctx: Any, objects: dict[str, Any], *, epoch: int, step: int, rows: int) -> None:
    if step % args.get("amid", ROWS) == 0:
        ctx.checkpoint(**objects, epoch=epoch, **({"step": step} if args.get("by_steps") else {"rows": rows}))
    if args.get("in_memory"):
        ctx.checkpoint(**objects, epoch=epoch, step=step, in_memory=True)


@dataclass(frozen=True)
class Exit:
    """A fault that a node causes by itself after a batch of an epoch, in a generation."""

    node: str
    epoch: int
    batch: int
    how: str
    generation: int = 1


def exit_by_schedule(args: dict[str, Any], ctx: Any, epoch: int, batch: int) -> None:
    """Cause the fault that the schedule has for this node and batch."""
    now = (f"{ctx.job_name}:{ctx.task_index}", epoch, batch, ctx.generation)
    for exit in args.get("schedule", ()):
        if (exit.node, exit.epoch, exit.batch, exit.generation) == now:
            if exit.how == "raise":
                raise ValueError(f"{now[0]} raises in batch {batch} of epoch {epoch}")
            if exit.how == "exit":
                os._exit(3)
            find, signal_number = HARM[exit.how]
            os.kill(find(os.getpid()), signal_number)


def slowly(seconds: float) -> Any:
    """Return a callback that waits after each epoch, which gives a test time to cause a fault."""
    import tensorflow as tf

    keras: Any = tf.keras

    class Slowly(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            threading.Event().wait(seconds)

    return Slowly()


def stepwise(args: dict[str, Any], ctx: Any) -> Any:
    """Return a callback that waits after each step, and causes the faults that the schedule has for it.

    It records which steps began, and how many the restored state had: ``count`` is its own state. In the directory
    ``args["steps"]`` it writes down each step that was done, whatever becomes of it: :func:`steps_done_again`.
    """
    import tensorflow as tf

    keras: Any = tf.keras

    class Stepwise(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.count = self.epoch = 0
            self.first: Any = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch + 1

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.first = self.first or iter([self.epoch, batch])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            if "steps" in args:
                with open(f"{args['steps']}/{ctx.node}-{ctx.generation}", "a") as file:
                    file.write(f"{self.epoch} {batch}\n")
            threading.Event().wait(args.get("pause_step", 0.0))
            exit_by_schedule(args, ctx, self.epoch, batch + 1)

    return Stepwise()


def steps_done_again(folder: Path) -> int:
    """Return how many of the steps that the chief has written down it had done before."""
    done = [line for file in folder.glob("worker:0-*") for line in file.read_text().splitlines()]
    assert done, "steps were written down"
    return len(done) - len(set(done))


def counting_fit(args: dict[str, Any], ctx: Any) -> tuple[Any, ...]:
    """Count rows by the fit of Keras 3 or tf_keras; with ``args["backup"]``, by Keras' own BackupAndRestore.

    It also returns which epochs began. With ``args["pause_step"]`` it returns the number of steps of the training, the
    first step of this generation, and the history's epochs and losses. ``args["numbers"]`` makes its state larger.
    """
    import tensorflow as tf

    keras: Any = tf.keras
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1"

    class Count(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            alike = {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA} if legacy else {}
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, **alike)
            if args.get("numbers"):
                self.add_weight(shape=(args["numbers"],), initializer="ones", trainable=False, **alike)

        def call(self, ids: Any, training: bool = False) -> Any:
            if training:
                context = tf.distribute.get_replica_context()
                seen = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(tf.cast(ids, tf.int64)))
                variable = self.total if legacy else self.total.value
                variable.assign((tf.convert_to_tensor(variable) + seen) % PRIME)
            return tf.cast(ids, tf.float32) * 0.0

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Count(), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.0))  # so that the loss does not depend on the order
    begun: list[int] = []

    def begin(epoch: int, logs: Any) -> None:
        begun.append(epoch)
        print(f"generation {ctx.generation}, epoch {epoch}", flush=True)

    callbacks = [slowly(args.get("pause", 1.0)), keras.callbacks.LambdaCallback(on_epoch_begin=begin)]
    if "pause_step" in args:
        callbacks.append(stepwise(args, ctx))
    if args.get("backup"):
        callbacks.append(keras.callbacks.BackupAndRestore(ctx.checkpoint_dir, **args.get("saving", {})))
    data = ctx.dataset(32, x="id", y="y", shuffle=args.get("shuffle", 0))
    more = {"validation_data": ctx.validation(32, x="id", y="y")} if args.get("validates") else {}
    history = model.fit(data, epochs=args["epochs"], verbose=0, callbacks=callbacks, **more)
    told: tuple[Any, ...] = ()
    if "pause_step" in args:
        told = callbacks[-1].count, list(callbacks[-1].first), history.epoch, history.history["loss"]
    return int(model.layers[0].total.numpy()), ctx.generation, begun, *told


def fit_with_callbacks(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Fit on one worker with callbacks that all have state."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.02, ema_momentum=0.9, use_ema=True, gradient_accumulation_steps=2)
    model.compile(loss="binary_crossentropy", optimizer=optimizer, metrics=["accuracy", keras.metrics.AUC(name="auc")])
    own = stepwise(args, ctx)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.05)
    stopping = keras.callbacks.EarlyStopping(monitor="auc", mode="max", patience=9, restore_best_weights=True)
    table = keras.callbacks.CSVLogger(args["table"])
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    flat = keras.callbacks.EarlyStopping(monitor="flat", mode="min", patience=9, min_delta=0.01)
    constant = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(flat=1.0))
    model.fit(
        ctx.dataset(32, x=["a", "b"], y="y").map(lambda x, y: (keras.ops.stack([x["a"], x["b"]], 1), y)),
        epochs=args["epochs"],
        verbose=0,
        callbacks=[own, decay, plateau, stopping, table, constant, flat],
    )
    first = list(own.first)
    return {
        "history": {name: [float(value) for value in values] for name, values in model.history.history.items()},
        "epoch": model.history.epoch,
        "weights": [weight.tolist() for weight in model.get_weights()],
        "optimizer": [float(keras.ops.sum(variable)) for variable in model.optimizer.variables],
        "waits": [plateau.wait, float(plateau.best), stopping.wait, float(stopping.best), flat.wait, flat.min_delta],
        "count": own.count,
        "first": first if ctx.generation > 1 else [],
    }


def regression(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Fit a linear regression with few large steps, so that its loss hardly depends on which worker has which rows."""
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(args["rate"], momentum=args["momentum"]))
    callbacks = [slowly(0.4), keras.callbacks.BackupAndRestore(ctx.checkpoint_dir)]
    data = ctx.dataset(4 * ROWS, x="x", y="y")
    history = model.fit(data, epochs=args["epochs"], verbose=0, callbacks=callbacks)
    weights = [float(weight.ravel()[0]) for weight in model.get_weights()]
    return {"loss": history.history["loss"], "weights": weights, "generation": ctx.generation}


class Killer(threading.Thread):
    """Sends one signal to a process of a node, once the node has read so many rows."""

    def __init__(
        self, cluster: Cluster, node: str, rows: int, what: Callable[[int], int], how: int = signal.SIGKILL
    ) -> None:
        super().__init__(daemon=True)
        self.cluster, self.node, self.rows, self.what, self.how = cluster, node, rows, what, how
        self.statuses: set[str] = set()
        self.causes: set[str] = set()
        self.killed: int | None = None
        self.start()

    def look(self, snapshot: ClusterState) -> None:
        """Record more of a snapshot; a subclass of a test overrides this."""

    def run(self) -> None:
        while not self.cluster.state.ended:
            snapshot = self.cluster.snapshot()
            self.statuses.add(snapshot.status.value)
            self.causes.add(snapshot.error)
            self.look(snapshot)
            state = next(node for node in snapshot.nodes if node.node == self.node)
            if self.killed is None and state.pid and state.rows >= self.rows:
                self.killed = self.what(state.pid)
                os.kill(self.killed, self.how)
            threading.Event().wait(0.05)


def itself(pid: int) -> int:
    """Return the process of a node itself."""
    return pid


def itself_for_good(pid: int) -> int:
    """Keep the process stopped from now on: its supervisor continues one that was stopped once."""

    def keep_stopped() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                process.suspend()
                threading.Event().wait(0.02)

    threading.Thread(target=keep_stopped, daemon=True).start()
    return pid


def its_supervisor(pid: int) -> int:
    """Find its supervisor: its parent, the parent of the warm process, or the pid in its parent's name."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    if (named := parent.name()).startswith("tfos_nb "):
        return int(named.split()[1])
    return parent.ppid() if "tfos_nb.runtime.node.warm_process" in parent.cmdline() else parent.pid


def its_warm_process(pid: int) -> int:
    """Find the warm process that forked it."""
    return psutil.Process(pid).ppid()


def its_executor(pid: int) -> int:
    """Find the executor's JVM among the supervisor's ancestors."""
    supervisor = psutil.Process(its_supervisor(pid))
    return next(parent.pid for parent in supervisor.parents() if parent.name() == "java")


def its_host(pid: int) -> int:
    """Kill its supervisor with Spark's task, which has its rows, and find the JVM: another executor starts the node."""
    supervisor = psutil.Process(its_supervisor(pid))
    executor = its_executor(pid)
    for process in itertools.takewhile(lambda one: one.pid != executor, supervisor.parents()):
        process.kill()
    supervisor.kill()
    return executor


HARM: dict[str, tuple[Callable[[int], int], int]] = {
    "kill": (itself, signal.SIGKILL),
    "freeze": (itself_for_good, signal.SIGSTOP),
    "kill the supervisor": (its_supervisor, signal.SIGKILL),
    "kill the executor": (its_executor, signal.SIGKILL),
    "kill the host": (its_host, signal.SIGKILL),
}


def counting_steps(args: dict[str, Any], ctx: Any) -> Any:
    """Train asynchronously; count on a parameter server how often each row was in a step."""
    if not ctx.is_chief:
        return ctx.serve()
    import tensorflow as tf

    coordinator = ctx.coordinator()
    with coordinator.strategy.scope():
        seen = tf.Variable(tf.zeros([args["rows"]], tf.int64))
    rows = ctx.coordinator_dataset(16)

    def step(batch: Any) -> Any:
        seen.scatter_add(tf.IndexedSlices(tf.ones_like(batch["id"]), batch["id"]))
        return tf.size(batch["id"])

    steps = 0
    for epoch in range(args["epochs"]):
        for _ in rows.steps(step):
            steps += 1
            threading.Event().wait(args.get("pause", 0.02))
            ctx.report(epoch=epoch + 1, step=steps)
    return {"seen": seen.numpy(), "generation": ctx.generation, "pid": os.getpid(), "steps": steps}


def order_of_steps(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train by ``fit``, and return the sum of the rows' numbers in each step, and the weights."""
    if args.get("saves_each_step"):
        save_after_each_step()
    import keras
    import tensorflow as tf

    class Order(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.sums = self.add_weight(shape=(args["most"],), dtype="int64", initializer="zeros", trainable=False)
            self.step = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids: Any, training: bool = False) -> Any:
            if training:
                context = tf.distribute.get_replica_context()
                total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(ids))
                self.sums.value.assign_add(total * tf.one_hot(self.step.value, args["most"], dtype=tf.int64))
                self.step.value.assign_add(1)
            return tf.cast(ids, tf.float32) / ROWS

    keras.utils.set_random_seed(1)
    with ctx.strategy().scope():
        model = keras.Sequential(
            [keras.Input((1,), dtype="int64"), Order(), keras.layers.Dense(4), keras.layers.Dense(1)]
        )
        model.compile(loss="mse", optimizer="adam")
    data = ctx.dataset(32, x="id", y="y", shuffle=args.get("shuffle", 0))
    own = stepwise(args, ctx)
    history = model.fit(data, epochs=args["epochs"], verbose=0, callbacks=[own])
    sums, steps, *weights = model.get_weights()
    return {
        "generation": ctx.generation,
        "first": own.first and list(own.first),
        "sums": sums[: int(steps)].tolist(),
        "weights": [weight.tolist() for weight in weights],
        "loss": history.history["loss"],
    }


def saving_each_step(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Call ``fit`` as :func:`several_fits`, and save the state after each step."""
    save_after_each_step()
    return several_fits(args, ctx)


def save_after_each_step() -> None:
    """Save the state of ``fit`` after each step, whatever that costs: how often it is else depends on the machine."""
    save_schedule._MOST = save_schedule._LITTLE = math.inf
    save_schedule._SECONDS = save_schedule._SECONDS_A_WORKER = 0.0


def stop_after(model: Any, epochs: int | None, epoch: int, logs: Any = None) -> None:
    """Stop a fit after so many epochs."""
    if epoch + 1 == epochs:
        model.stop_training = True


def several_fits(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Call ``fit`` for each of ``args["fits"]``, and count how often each row was in a step.

    A fit has its epochs, a schedule of faults, and perhaps ``steps`` for ``steps_per_epoch``, over repeated rows, or
    the number of epochs after which a callback stops it.
    """
    import keras
    import tensorflow as tf

    class Count(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(ROWS,), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids: Any, training: bool = False) -> Any:
            if training:
                mine = tf.reduce_sum(tf.one_hot(tf.reshape(ids, [-1]), ROWS, dtype=tf.int64), 0)
                context = tf.distribute.get_replica_context()
                self.seen.value.assign_add(context.all_reduce(tf.distribute.ReduceOp.SUM, mine))
            return tf.cast(ids, tf.float32) * 0.0

    strategy = ctx.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Count(), keras.layers.Dense(1)])
    found: dict[str, Any] = {"steps": [], "first": [], "epochs": [], "after": [], "generation": ctx.generation}
    for number, one in enumerate(args["fits"]):
        with strategy.scope():
            model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01 / (number + 1)))
        own = stepwise({**args, "schedule": one.get("schedule", ())}, ctx)
        data = ctx.dataset(32, x="id", y="y", shuffle=args.get("shuffle", 0))
        steps = one.get("steps")
        history = model.fit(
            data if steps is None else data.repeat(),
            epochs=one["epochs"],
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[own, keras.callbacks.LambdaCallback(on_epoch_end=partial(stop_after, model, one.get("stop")))],
        )
        seen = model.layers[0].seen.numpy()
        found["steps"].append(own.count)
        found["first"].append(own.first and list(own.first))
        found["epochs"].append(history.epoch)
        found["after"].append((int(seen.min()), int(seen.max()), int(seen.sum())))
    return found
