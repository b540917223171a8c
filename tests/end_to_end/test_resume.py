"""The driver of a cluster is killed: a later launch continues its training within the epoch."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.conftest import RunScript
from tests.end_to_end.executors import SPARK
from tests.faults import (
    ROWS,
    Exit,
    counting_fit,
    counting_loop,
    fit_with_callbacks,
    saving_each_step,
    several_fits,
    sum_of_ids,
)
from tests.waiting import until
from tfos_nb import launch
from tfos_nb.errors import ClusterClosed, FeedFailed, NodeFailed, PlanError

FIRST = """
import os, signal, subprocess, sys

if __name__ == "__main__" and not sys.argv[1:]:
    ended = subprocess.run([sys.executable, sys.argv[0], "first"], timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended
"""

KILLED_AND_RESUMED = """
    folder = Path(sys.argv[0]).parent / "steps"
    folder.mkdir(exist_ok=True)
    model_dir = str(Path(sys.argv[0]).parent / "model")

    def done():
        return [tuple(line.split()) for file in folder.iterdir() for line in file.read_text().splitlines()]

    def trained(**options):
        args = {"folder": str(folder), "pause": 0.05, "shuffle": int(os.environ["SHUFFLE"])}
        more = {"restarts": 2, "checkpoint_every": 0.5, "model_dir": model_dir, **options}
        with launch(fit, args, workers=2, spark=spark, **more) as cluster:
            if "resume" not in options:
                threading.Thread(target=kill_amid_epoch, daemon=True).start()
            calls = [1, 2] if os.environ["CALLS"] == "2" else [3]
            for epochs in calls:
                cluster.train(rows, epochs)
        return cluster

    def kill_amid_epoch():
        assert until(lambda: any(epoch == "1" and int(batch) > 40 for _, epoch, batch, _ in done()))
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[1:] == ["first"]:
        trained()
    else:
        cluster = trained(resume=True)
        steps = Counter(step[:3] for step in done())
        repeated = sum(number - 1 for (node, *_), number in steps.items() if node == "worker:0")
        total, generation, epochs = cluster.results()["worker:0"]
        print("SAID", "sum right" if total == EPOCHS * sum(range(ROWS)) else f"sum {total}", f"{epochs} epochs",
              f"generation {generation}", f"{repeated} repeated",
              len({step for step in steps if step[0] == "worker:0"}), "steps")
    spark.stop()
"""


@pytest.mark.parametrize(
    ("shuffle", "calls"),
    [(0, 2), pytest.param(300, 1, marks=pytest.mark.faults)],
)
def test_a_fit_whose_driver_was_killed_continues_within_its_epoch(
    run_script: RunScript, shuffle: int, calls: int
) -> None:
    script = f"{FIRST}{SPARK}\n{textwrap.indent(textwrap.dedent(KILLED_AND_RESUMED), '    ')}"
    output = run_script(script, CORES="3", SETTINGS="{}", SHUFFLE=str(shuffle), CALLS=str(calls)).stdout
    told = next(line for line in output.splitlines() if line.startswith("SAID "))
    found = re.fullmatch(r"SAID sum right 3 epochs generation 2 (\d+) repeated 150 steps", told)
    assert found, told
    assert 0 < int(found[1]) <= 40, "from the epoch's beginning they would be more than 40"


def lost(main: Any, args: dict[str, Any], data: Any, epochs: int, **options: Any) -> None:
    """Train until more nodes were lost than may start again."""
    with pytest.raises(NodeFailed, match="killed by SIGKILL"), launch(main, args, restarts=1, **options) as cluster:
        cluster.train(data, epochs=epochs)


KILLS = [Exit("worker:1", 2, 25, "kill"), Exit("worker:0", 2, 35, "kill", generation=2)]


def test_a_loop_of_its_own_continues_within_its_epoch_with_other_workers(spark: SparkSession, tmp_path: Path) -> None:
    rows, args, home = spark.range(0, ROWS, 1, 4), {"epochs": 3, "amid": 10}, str(tmp_path)
    lost(counting_loop, {**args, "schedule": KILLS}, rows, 3, spark=spark, workers=2, model_dir=home)
    with pytest.raises(PlanError, match="no run in .*tmp has a state|there is no run"):
        launch(counting_loop, args, spark=spark, model_dir=home, restarts=1, resume="0123456789ab")
    kill = [Exit("worker:2", 3, 2, "kill", generation=3)]
    options = {"spark": spark, "model_dir": home, "restarts": 1, "resume": True}
    with launch(counting_loop, {**args, "schedule": kill}, workers=3, **options) as cluster:
        cluster.train(rows, epochs=2)  # its second epoch is continued
        cluster.train(rows)
    assert cluster.result()[:2] == (sum_of_ids(3), 4), "in the second generation of this cluster"
    assert cluster.checkpoint_run != cluster.id
    with launch(counting_loop, args, workers=2, **{**options, "resume": cluster.checkpoint_run}) as ended:
        ended.train(rows, epochs=3)
    assert ended.result() == (sum_of_ids(3), 5, 0), "it was trained to its end, and reads no row"


AT_FIRST = 47 * 32  # rows, so that no part of a step is left when the others are waited for


@dataclass(frozen=True)
class Wait:
    """Return rows; wait after the first ones until a file exists."""

    file: str

    def __call__(self, number: int) -> tuple[int]:
        while number >= AT_FIRST and not os.path.exists(self.file):
            threading.Event().wait(0.05)
        return (number,)


@pytest.mark.parametrize("autolog", [True, pytest.param(False, marks=pytest.mark.faults)])
def test_a_fit_that_is_stopped_while_it_waits_for_rows_continues_with_its_next_step(
    spark: SparkSession, tmp_path: Path, autolog: bool
) -> None:
    parts = [spark.sparkContext.parallelize(ids, 1) for ids in (range(AT_FIRST), range(AT_FIRST, ROWS))]
    slow = parts[0].union(parts[1]).map(Wait(str(tmp_path / "come")))
    rows = spark.createDataFrame(slow, "id long").selectExpr("id", "double(id) as y")
    held_out = spark.range(96).selectExpr("id", "double(0) as y")
    args = {"epochs": 3, "pause": 0.0, "pause_step": 0.0, "validates": True}
    options: dict[str, Any] = {"spark": spark, "model_dir": str(tmp_path), "restarts": 1, "checkpoint_every": 3600}
    with launch(counting_fit, args, autolog=autolog, **options) as cluster:
        feeding = threading.Thread(target=feed, args=(cluster, rows), kwargs={"validation": held_out})
        feeding.start()
        assert until(lambda: cluster.snapshot().nodes[0].rows >= AT_FIRST and "epoch 0" in cluster.logs(), 60)
        threading.Event().wait(4)  # it does the steps for which it has rows
        cluster.stop()
        feeding.join()
    (tmp_path / "come").touch()
    with launch(counting_fit, args, resume=True, **options) as resumed:
        resumed.train(rows, epochs=3, validation=held_out)
    total, generation, begun, count, (epoch, step), epochs, losses = resumed.result()
    assert (total, generation, begun, epochs) == (sum_of_ids(3), 2, [0, 1, 2], [0, 1, 2])
    assert (epoch, 1 <= step <= 47) == (1, True)
    assert 3 * 94 <= count <= 3 * 94 + 1, "each step is counted once; a rest may have a step more"
    squares = sum(number**2 for number in range(ROWS)) / ROWS
    assert losses == pytest.approx([squares] * 3, rel=1e-5), "of all rows of the epoch, and not of validation"


def test_a_fit_that_has_come_to_its_end_continues_with_more_epochs(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y")
    options: dict[str, Any] = {"spark": spark, "workers": 2, "restarts": 1, "model_dir": str(tmp_path)}
    options["checkpoint_every"] = 3600
    found = []
    for epochs in (2, 2, 3):
        args = {"fits": [{"epochs": epochs}]}
        with launch(several_fits, args, resume=bool(found), **options) as cluster:
            cluster.train(rows, epochs=epochs)
        found.append(cluster.result())
    assert [one["generation"] for one in found] == [1, 2, 2], "the second one has saved nothing"
    assert [one["epochs"] for one in found] == [[[0, 1]], [[0, 1]], [[0, 1, 2]]]
    assert [one["first"] for one in found[1:]] == [[None], [[3, 0]]]
    assert [one["after"][0][:2] for one in found] == [(2, 2), (2, 2), (3, 3)]


def test_a_fit_with_callbacks_continues_as_if_nothing_had_happened(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, 1600, 1, 1).selectExpr("sin(id) as a", "cos(id * 3) as b", "int(id % 3 = 0) as y")
    args = {"epochs": 5, "pause_step": 0.01, "table": f"{tmp_path}/table.csv"}
    schedule = [Exit("worker:0", 2, 25, "kill"), Exit("worker:0", 3, 25, "kill", generation=2)]
    options = {"spark": spark, "model_dir": f"{tmp_path}/model", "checkpoint_every": 0.05}
    lost(fit_with_callbacks, {**args, "schedule": schedule}, rows, 5, **options)
    with launch(fit_with_callbacks, args, restarts=1, resume=True, **options) as cluster:
        cluster.train(rows, epochs=5)
    table = Path(args["table"]).read_text()
    with launch(fit_with_callbacks, {**args, "table": f"{tmp_path}/whole.csv"}, spark=spark) as undisturbed:
        undisturbed.train(rows, epochs=5)
    found, expected = cluster.result(), undisturbed.result()
    epoch, step = found.pop("first")
    assert epoch == 3
    assert step <= 25, "it may be the epoch's first one, if no state within it had been written"
    assert expected.pop("first") == []
    assert found == expected
    assert cluster.history.epochs == undisturbed.history.epochs, "with those of the first cluster"
    ends = [[(one.epoch, one.step) for one in of.history.points() if one.ends_epoch] for of in (cluster, undisturbed)]
    assert ends[0] == ends[1] == [(epoch, 50 * epoch) for epoch in range(1, 6)]
    assert table == Path(tmp_path, "whole.csv").read_text()


def nothing_restored(args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.dataset(32))


def another_model(args: Any, ctx: Any) -> Any:
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3)])
        model.compile(loss="mse", optimizer="sgd")
    return model.fit(ctx.dataset(32, x="id", y="y"), epochs=3, verbose=0).history


def test_what_cannot_be_continued_is_refused_and_nothing_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    rows, home = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(0) as y"), f"{tmp_path}/model"
    options: dict[str, Any] = {"spark": spark, "restarts": 1, "resume": True, "model_dir": home}
    with pytest.raises(PlanError, match=rf"no run in {home}/checkpoints on .* has a state"):
        launch(counting_fit, {"epochs": 1}, **options)
    schedule = [Exit("worker:0", 2, 25, "kill"), Exit("worker:0", 2, 30, "kill", generation=2)]
    args = {"epochs": 3, "pause": 0.0, "pause_step": 0.01}
    lost(counting_fit, {**args, "schedule": schedule}, rows, 3, spark=spark, model_dir=home, checkpoint_every=0.05)
    before = sorted(Path(home).glob("checkpoints/*/fit/*"))
    assert before
    with pytest.raises(FeedFailed, match="main has restored no state"), launch(nothing_restored, **options) as cluster:
        cluster.train(rows, epochs=3)
    with pytest.raises(NodeFailed, match="the saved state is not of this model"):
        with launch(another_model, **options) as cluster:
            cluster.train(rows, epochs=3)
    with pytest.raises(FeedFailed, match="the data have no rows"), launch(counting_fit, args, **options) as cluster:
        cluster.train(rows.where("id < 0"), epochs=3)
    assert sorted(Path(home).glob("checkpoints/*/fit/*")) == before
    with launch(counting_fit, args, **options) as cluster:
        with pytest.raises(PlanError, match=f"the cluster of run {cluster.checkpoint_run} still runs"):
            launch(counting_fit, args, **options)
        cluster.train(rows, epochs=3)
    total, generation, _, count, *_ = cluster.result()
    assert (total, generation, count) == (sum_of_ids(3), 3, 3 * -(-ROWS // 32))


def counting_steps_that_fail(args: dict[str, Any], ctx: Any) -> Any:
    """Count on a parameter server how often each row was in a step; save after each epoch, and fail within one."""
    if not ctx.is_chief:
        return ctx.serve()
    import tensorflow as tf

    coordinator = ctx.coordinator()
    with coordinator.strategy.scope():
        seen = tf.Variable(tf.zeros([ROWS], tf.int64))
    start = ctx.resume(seen=seen).epoch
    rows = ctx.coordinator_dataset(16)

    def step(batch: Any) -> Any:
        seen.scatter_add(tf.IndexedSlices(tf.ones_like(batch["id"]), batch["id"]))
        return tf.size(batch["id"])

    for epoch in range(start, args["epochs"]):
        for number, _ in enumerate(rows.steps(step)):
            if (epoch, number) == args["fails"]:
                raise RuntimeError("it fails here")
        ctx.checkpoint(epoch=epoch + 1, seen=seen)
    return {"seen": seen.numpy(), "generation": ctx.generation, "start": start}


def test_a_training_with_parameter_servers_continues_after_its_last_whole_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, options = spark.range(0, ROWS, 1, 4), {"spark": spark, "restarts": 1, "model_dir": str(tmp_path)}
    options |= {"chief": True, "workers": 1, "ps": 1}
    with pytest.raises(NodeFailed, match="it fails here"):
        with launch(counting_steps_that_fail, {"epochs": 3, "fails": (1, 20)}, **options) as cluster:
            cluster.train(rows, epochs=3)
    with launch(counting_steps_that_fail, {"epochs": 3, "fails": None}, resume=True, **options) as cluster:
        cluster.train(rows, epochs=3)
    found = cluster.result()
    assert (found["start"], found["generation"]) == (1, 2)
    assert set(found["seen"]) == {3}, "the steps of the epoch that failed are not in the state"


def feed(cluster: Any, rows: Any, **options: Any) -> None:
    """Feed the rows of two fits, unless the cluster is stopped meanwhile."""
    with contextlib.suppress(ClusterClosed):
        cluster.train(rows, **options)
        cluster.train(rows, epochs=3)


@pytest.mark.parametrize(
    ("main", "shuffle", "last"),
    [
        pytest.param(several_fits, 0, {"epochs": 3}, marks=pytest.mark.faults),
        (saving_each_step, 0, {"epochs": 3}),
        pytest.param(several_fits, 0, {"epochs": 14, "steps": 20}, marks=pytest.mark.faults),
        pytest.param(several_fits, 500, {"epochs": 3}, marks=pytest.mark.faults),
    ],
)
def test_a_fit_that_was_stopped_continues_with_its_next_step(
    spark: SparkSession, tmp_path: Path, main: Callable[..., Any], shuffle: int, last: dict[str, int]
) -> None:
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y")
    args = {"fits": [{"epochs": 1}, last], "pause_step": 0.02, "shuffle": shuffle}
    options: dict[str, Any] = {"spark": spark, "workers": 2, "restarts": 1, "checkpoint_every": 3600}
    options["model_dir"] = str(tmp_path)
    with launch(main, args, **options) as cluster:
        feeding = threading.Thread(target=feed, args=(cluster, rows))
        feeding.start()
        assert until(lambda: cluster.snapshot().nodes[0].rows > ROWS * 3 // 4), "in the second fit"
        cluster.stop()
        feeding.join()
    with launch(several_fits, args, resume=True, **options) as resumed:
        feed(resumed, rows)
    found = resumed.result()
    assert found["generation"] == 2
    assert found["epochs"] == [[0], list(range(last["epochs"]))]
    assert found["first"][0] is None
    assert found["first"][1] > [1, 0]
    if "steps" in last:  # two steps fewer than three passes have
        assert [one[:2] for one in found["after"]] == [(1, 1), (3, 4)]
        assert found["steps"][1] == 14 * 20
        return
    assert [one[:2] for one in found["after"]] == [(1, 1), (4, 4)]
    assert 3 * 94 <= found["steps"][1] <= 3 * 94 + 2, "no step was done twice; a rest may have a step more"
