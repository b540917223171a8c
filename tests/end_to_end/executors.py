"""A program whose executors get signals while it trains, and that counts every step and every row."""

from __future__ import annotations

import json
import textwrap

from tests.conftest import RunScript

__all__ = ["trained"]

SPARK = """
import contextlib, json, os, signal, sys, threading
from collections import Counter
from pathlib import Path

import psutil
import pyspark

from tests.local_cluster import builder, environment
from tests.waiting import until
from tfos_nb import launch

ROWS, EPOCHS, BATCH = 1600, 3, 32


def fit(args, ctx):
    "Fit a model that sums the rows' ids, and write down each step that was done, whatever became of it."
    import time

    import keras
    import tensorflow as tf

    class Count(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids, training=False):
            if training:
                context = tf.distribute.get_replica_context()
                seen = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(tf.cast(ids, tf.int64)))
                self.total.value.assign(self.total.value + seen)
            return tf.cast(ids, tf.float32) * 0.0

    class WriteDown(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            with open(f"{args['folder']}/{os.getpid()}", "a") as file:
                print(os.environ["TFOS_NB_NODE"], self.epoch, batch, ctx.generation, file=file)
            time.sleep(args["pause"])

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Count(), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.0))
    data = ctx.dataset(BATCH, x="id", y="y", shuffle=args["shuffle"])
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[WriteDown()])
    return int(model.layers[0].total.numpy()), ctx.generation, len(history.history["loss"])


def executor(name):
    "Find the JVM of an executor of this application."
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a short one that has just ended
            line = process.cmdline()
            if process.name() == "java" and "--executor-id" in line and line[line.index("--executor-id") + 1] == name:
                return process
    raise LookupError(f"no executor {name}")


def train(name, victims, signal_number, after=10, with_nodes=False, **options):
    "Train, signal the executors of some nodes after a step of the second epoch, and print what became of it."
    folder = Path(sys.argv[0]).parent / name
    folder.mkdir()

    def done():
        return [tuple(line.split()) for file in folder.iterdir() for line in file.read_text().splitlines()]

    args = {"folder": str(folder), "pause": 0.05, "shuffle": options.pop("shuffle", 0)}
    with launch(fit, args, name=name, workers=options.pop("workers", 2), spark=spark, restarts=2, **options) as cluster:
        feeding = threading.Thread(target=cluster.train, args=(rows, EPOCHS))
        feeding.start()
        assert until(lambda: any(epoch == "1" and int(batch) > after for _, epoch, batch, _ in done()))
        before = {one.node: one.executor for one in cluster.snapshot().nodes}
        processes = [executor(before[node]) for node in victims]
        for process in set(processes):
            below = process.children(recursive=True) if with_nodes else []
            for one in [process, *below]:
                one.send_signal(signal_number)
        gone = psutil.wait_procs(processes, 60)[1] == []
        feeding.join()
        after = {one.node: one.executor for one in cluster.snapshot().nodes}
        left = cluster._controller.restarts_left
    steps = Counter(step[:3] for step in done())
    of_each = {node: len({step for step in steps if step[0] == node}) for node in before}
    repeated = sum(number - 1 for (node, *_), number in steps.items() if node == "worker:0")
    total, generation, epochs = cluster.results()["worker:0"]
    print("SAID", name, "gone" if gone else "stays", f"{left} restarts left", f"{epochs} epochs",
          "sum right" if total == EPOCHS * sum(range(ROWS)) else f"sum {total}",
          f"{repeated} repeated", f"{of_each['worker:0']} steps",
          "moved" if all(after[node] not in (before[node], "") for node in victims) else f"{before} {after}")


if __name__ == "__main__":
    os.environ.update(environment(Path(pyspark.__file__).parent))
    settings = {"spark.decommission.enabled": "true", **json.loads(os.environ["SETTINGS"])}
    spark = builder(executors=2, cores=int(os.environ["CORES"])).config(map=settings).getOrCreate()
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(0) as y")
"""


def trained(run_script: RunScript, calls: str, cores: int, settings: dict[str, str]) -> list[str]:
    """Run these calls of ``train`` with two executors of ``cores`` cores each; return the printed results."""
    script = f"{SPARK}\n{textwrap.indent(textwrap.dedent(calls), '    ')}\n    spark.stop()\n"
    output = run_script(script, CORES=str(cores), SETTINGS=json.dumps(settings)).stdout
    return [line.removeprefix("SAID ") for line in output.splitlines() if line.startswith("SAID ")]
