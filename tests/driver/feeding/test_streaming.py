"""Feeding from streams: one micro-batch after another, every way to stop, and a restart that loses no row."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.end_to_end.test_stop import interrupt_when
from tfos_nb import errors, launch
from tfos_nb.runtime.control import wire

ROWS = 40  # in each file of the stream


def add_up(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Count the rows of a stream and add their ids up, on two workers; the chief saves after each batch.

    With ``die_before_saving`` or ``die_after_saving`` the process dies at that batch, as if by the OOM killer.
    """
    import os
    import signal

    import numpy as np
    import tensorflow as tf

    state = {"batch": -1, "rows": 0, "ids": 0, "given": []}
    if os.path.exists(args["state"]):
        with np.load(args["state"]) as saved:
            state.update({name: int(saved[name]) for name in ("batch", "rows", "ids")})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = ctx.dataset(16, columns=["id"])

    def die(at: Any) -> None:
        if at == batch and ctx.is_chief:
            os.kill(os.getpid(), signal.SIGKILL)

    for batch in ctx.batches(after=state["batch"]):
        state["given"].append(batch)
        ids = [int(i) for part in rows for i in part["id"].numpy()]
        mine = tf.constant([len(ids), sum(ids)], tf.float32)
        both = strategy.reduce("SUM", mine, axis=None).numpy()
        die(args.get("die_before_saving"))
        state.update(batch=batch, rows=state["rows"] + int(both[0]), ids=state["ids"] + int(both[1]))
        if ctx.is_chief:
            part = f"{args['state']}.part.npz"
            np.savez(part, **{name: state[name] for name in ("batch", "rows", "ids")})
            os.replace(part, args["state"])
        die(args.get("die_after_saving"))
    return state


@pytest.mark.slow
def test_a_restart_from_both_checkpoints_loses_no_row_and_repeats_none(spark: SparkSession, tmp_path: Path) -> None:
    source, checkpoint, state = (str(tmp_path / name) for name in ("source", "checkpoint", "state.npz"))
    for number in range(5):
        file = spark.range(number * ROWS, (number + 1) * ROWS).coalesce(1)
        file.write.mode("append").parquet(source)
    stream = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(source)

    def run(**more: Any) -> dict[str, Any]:
        writer = stream.writeStream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
        with launch(add_up, {"state": state, **more}, workers=2, spark=spark, name="restarted") as cluster:
            cluster.train(writer)
        result: dict[str, Any] = cluster.result()
        return result

    with pytest.raises(errors.NodeFailed, match="SIGKILL"):
        run(die_after_saving=1)  # the saved state includes batch 1, Spark's checkpoint does not
    with pytest.raises(errors.NodeFailed, match="SIGKILL"):
        run(die_before_saving=3)  # neither includes batch 3
    ended = run()
    assert ended["given"] == [3, 4]
    count = 5 * ROWS
    assert (ended["batch"], ended["rows"], ended["ids"]) == (4, count, count * (count - 1) // 2)

    Path(state).unlink()
    with pytest.raises(errors.NodeFailed, match="batches up to 0, but the stream's checkpoint continues with 5"):
        spark.range(7).coalesce(1).write.mode("append").parquet(source)
        with launch(after_zero, workers=1, spark=spark) as cluster:
            cluster.train(stream.writeStream.trigger(availableNow=True).option("checkpointLocation", checkpoint))


def after_zero(args: Any, ctx: Any) -> list[int]:
    return list(ctx.batches(after=0))


def until(args: Any, ctx: Any) -> list[Any]:
    """Read several streams, one call of train after another; return what each batch held."""
    told: list[Any] = []
    rows = ctx.dataset(1000)
    while not ctx.should_stop:
        for number in ctx.batches():
            held = sum(int(next(iter(part.values())).shape[0]) for part in rows)
            told.append([number, held])
            print(f"batch {number} held {held} rows", flush=True)
            if len(told) == args["enough"]:
                ctx.stop_feeding()
        if ctx.should_stop or args["streams"] == 0:
            break
        args["streams"] -= 1
    return told


def test_a_stream_can_be_ended_by_main_by_its_query_and_by_stop(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 50).load().select("value")
    cluster = launch(until, {"enough": 3, "streams": 10}, workers=2, spark=spark, name="stopping")
    try:
        cluster.train(rate)  # until main has enough
        assert not spark.streams.active

        outside = threading.Timer(0.1, stop_when_fed, [spark, cluster])
        outside.start()
        cluster.train(rate)
        outside.join()
        assert not spark.streams.active

        stopper = threading.Timer(0.1, stop_when_fed, [spark, cluster, cluster.stop])
        stopper.start()
        with pytest.raises(errors.ClusterClosed):
            cluster.train(rate)
        stopper.join()
        assert not spark.streams.active
    finally:
        cluster.close()
    assert cluster.state.value in ("STOPPED", "DONE")


def stop_when_fed(spark: SparkSession, cluster: Any, stop: Any = None) -> None:
    """Wait until another batch has reached the nodes; then call ``stop``, by default stop all queries."""
    before = cluster.logs().count("batch ")
    with cluster._changed:
        assert cluster._changed.wait_for(lambda: cluster.logs().count("batch ") > before, 60)
    if stop is not None:
        stop()
        return
    for query in spark.streams.active:
        query.stop()


def test_a_dstream_is_fed_and_stopped_by_main(spark: SparkSession) -> None:
    from pyspark.streaming import StreamingContext

    with pytest.warns(FutureWarning, match="DStream is deprecated"):
        context = StreamingContext(spark.sparkContext, 1)
    rdds = [spark.sparkContext.parallelize([{"value": 10 * n + i} for i in range(10)], 2) for n in range(3)]
    with launch(until, {"enough": 3, "streams": 0}, workers=2, spark=spark, name="dstream") as cluster:
        cluster.train(context.queueStream(rdds))
    held = [dict(result) for result in cluster.results().values()]
    assert sum(count for one in held for count in one.values()) == 30
    assert held[0].keys() == held[1].keys()
    with pytest.raises(errors.PlanError, match="has been started"):
        with launch(until, {"enough": 3, "streams": 0}, workers=1, spark=spark) as cluster:
            with pytest.warns(FutureWarning, match="DStream is deprecated"):
                started = StreamingContext(spark.sparkContext, 1)
            stream = started.queueStream(rdds)
            stream.pprint()
            started.start()
            try:
                cluster.train(stream)
            finally:
                started.stop(stopSparkContext=False)


def compute_on_a_batch(args: Any, ctx: Any) -> bool:
    rows = ctx.dataset(1000)
    for number in ctx.batches():
        for _ in rows:
            pass
        if number == 1:
            print("computes", flush=True)
            ended = time.monotonic() + 120
            while not ctx.should_stop and time.monotonic() < ended:
                time.sleep(0.1)
            return bool(ctx.should_stop)
    return False


def test_main_learns_of_an_interrupt_while_it_computes_on_a_batch(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 50).load().select("value")
    cluster = launch(compute_on_a_batch, spark=spark, workers=1, name="interrupted", grace=60)
    interrupt_when(lambda: "computes" in cluster.logs())
    with pytest.raises(KeyboardInterrupt):
        cluster.train(rate)
    cluster._lifecycle.join()
    assert wire.decode(cluster._controller.results()["worker:0"]) is True
