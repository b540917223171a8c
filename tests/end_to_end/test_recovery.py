"""Recovery from lost nodes: no row is lost, no saved step is lost, and the cluster continues."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession

from tests.faults import (
    ROWS,
    Exit,
    Killer,
    counting_fit,
    counting_loop,
    fit_with_callbacks,
    its_executor,
    its_host,
    its_supervisor,
    its_warm_process,
    itself,
    itself_for_good,
    order_of_steps,
    regression,
    several_fits,
    sum_of_ids,
)
from tests.waiting import until
from tfos_nb import errors, launch


def rows(spark: SparkSession) -> Any:
    return spark.range(0, ROWS, 1, 4)


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ("worker:1", itself),
        pytest.param("worker:0", its_supervisor, marks=pytest.mark.faults),
        pytest.param("worker:1", its_warm_process, marks=pytest.mark.faults),
    ],
)
def test_a_loop_that_loses_a_node_counts_every_row_once_per_epoch(
    spark: SparkSession, tmp_path: Path, node: str, what: Callable[[int], int]
) -> None:
    args = {"epochs": 3}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path)) as cluster:
        killer = Killer(cluster, node, ROWS * 3 // 4, what)  # about ROWS / 2 an epoch, so this is in the second one
        cluster.train(rows(spark), epochs=3)
    assert cluster.result() == (sum_of_ids(3), 2)
    assert cluster.results()["worker:1"] == cluster.results()["worker:0"]
    assert "RECOVERING" in killer.statuses
    assert cluster.snapshot().generation == 2


@pytest.mark.parametrize(
    ("passes", "restarts"),
    [([0], 1), pytest.param([1, 0], 2, marks=pytest.mark.faults)],
    ids=["while it is fed", "while it reads again, and once more in what is left"],
)
def test_a_state_saved_within_an_epoch_skips_the_rows_that_it_includes(
    spark: SparkSession, tmp_path: Path, passes: list[int], restarts: int
) -> None:
    exits = [
        Exit("worker:1", 1 + passes[0], 25, "kill"),
        *(Exit("worker:0", 1 + passes[0] + more, 15, "kill", 2) for more in passes[1:]),
    ]
    args = {"epochs": 3, "amid": 10, "by_steps": restarts == 1, "schedule": exits}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=restarts, model_dir=str(tmp_path)) as cluster:
        cluster.train(rows(spark), epochs=3)
    found = cluster.results().values()
    assert {one[:2] for one in found} == {(sum_of_ids(3), 1 + restarts)}
    spared = (3 - passes[0]) * ROWS - sum(one[2] for one in found)
    steps = [20 + 10 * (restarts - 1) - 10 * lost for lost in range(restarts + 1)]
    assert any(30 * some <= spared <= 32 * some for some in steps), (
        "a step has 30 to 32 rows, and ten are saved at once"
    )


def test_a_loop_goes_on_from_memory_within_an_epoch(spark: SparkSession, tmp_path: Path) -> None:
    exits = [Exit("worker:1", 1, 60, "kill"), Exit("worker:0", 2, 40, "kill", 2)]
    args = {"epochs": 2, "in_memory": True, "schedule": exits}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path)) as cluster:
        cluster.train(rows(spark), epochs=2)
    results = list(cluster.results().values())
    assert {(total, generation, seen) for total, generation, _, seen in results} == {(sum_of_ids(2), 3, 2 * ROWS)}
    # The rows of the first generations are not in what the last one has read: 60 steps, less those done again.
    assert sum(read for _, _, read, _ in results) <= 2 * ROWS - 32 * 40
    assert not list(tmp_path.glob("checkpoints/*/0*")), "nothing was written to the disk"


def adam_loop(args: dict[str, Any], ctx: Any) -> tuple[list[Any], int, int]:
    """Train a layer by Adam, with shuffled rows; return its weights, the generation, and the steps done here."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = ctx.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        generator = tf.random.Generator.from_seed(7)

    @tf.function
    def step(ids: Any) -> None:
        strategy.run(on_replica, (ids,))

    def on_replica(ids: Any) -> None:
        with tf.GradientTape() as tape:
            inputs = tf.cast(ids[:, None] % 100, tf.float32) / 100 + generator.normal((1, 1))
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - 1.0))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    objects = {"optimizer": optimizer, "generator": generator}
    dataset, count = ctx.dataset(32, x="id", shuffle=100, seed=3), 0
    for epoch in range(ctx.resume(model, **objects).epoch, args["epochs"]):
        for number, ids in enumerate(dataset, 1):
            step(ids)
            count += 1
            ctx.checkpoint(model, **objects, epoch=epoch, step=number, in_memory=True)
            if (epoch, number, ctx.generation) == args.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
    return [weight.tolist() for weight in model.get_weights()], ctx.generation, count


def test_a_loop_that_goes_on_from_memory_ends_with_the_weights_of_an_undisturbed_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    ended = []
    for kill in (None, (1, 60, 1)):
        args = {"epochs": 2, "kill": kill}
        with launch(adam_loop, args, workers=1, spark=spark, restarts=1, model_dir=str(tmp_path)) as cluster:
            cluster.train(spark.range(0, ROWS, 1, 1), epochs=2)  # one partition, so that the rows come in one order
        ended.append(cluster.result())
    (whole, *_), (continued, generation, count) = ended
    assert generation == 2
    steps = -(-ROWS // 32)
    assert steps - 60 <= count < steps, "it goes on within the second epoch"
    assert continued == whole


def in_any_order(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        yield frame.sample(frac=1)


def test_rows_in_another_order_are_refused_after_a_state_saved_within_an_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    args = {"epochs": 2, "amid": 10, "schedule": [Exit("worker:1", 1, 25, "kill")]}
    shuffled = rows(spark).mapInPandas(in_any_order, "id long")
    with pytest.raises(errors.FeedFailed, match=r"gave other rows when Spark read it again.*[Cc]ache"):
        with launch(counting_loop, args, workers=2, spark=spark, restarts=1, model_dir=str(tmp_path)) as cluster:
            cluster.train(shuffled, epochs=2)


def test_a_model_dir_that_hosts_do_not_share_fails_before_a_state_is_saved(spark: SparkSession, tmp_path: Path) -> None:
    args = {"epochs": 3, "apart": True}
    with pytest.raises(errors.PlanError, match=r"worker:. on .* see different directories.*that all hosts share"):
        with launch(counting_loop, args, workers=2, spark=spark, restarts=1, model_dir=f"{tmp_path}/m") as cluster:
            cluster.train(rows(spark), epochs=3)
    assert cluster.state.value == "FAILED"


def test_a_killed_executor_loses_no_row(spark: SparkSession, tmp_path: Path) -> None:
    args = {"epochs": 3}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path)) as cluster:
        killer = Killer(cluster, "worker:1", ROWS * 3 // 4, its_executor)
        cluster.train(rows(spark), epochs=3)
    assert killer.killed
    assert cluster.result()[0] == sum_of_ids(3)


def test_a_process_that_was_stopped_once_is_continued_and_trains_on(spark: SparkSession, tmp_path: Path) -> None:
    options: dict[str, Any] = {"restarts": 1, "heartbeat_timeout": 4.0, "model_dir": str(tmp_path)}
    with launch(counting_loop, {"epochs": 2}, workers=2, spark=spark, **options) as cluster:
        killer = Killer(cluster, "worker:1", ROWS // 4, itself, signal.SIGSTOP)
        cluster.train(rows(spark), epochs=2)
    assert killer.killed
    assert cluster.result() == (sum_of_ids(2), 1), "in its first generation"
    told = r"a signal had stopped this process for 1\.\d s: its supervisor has continued it"
    assert len(re.findall(told, cluster.logs("worker:1"))) == 1


@pytest.mark.parametrize("what", [itself_for_good, pytest.param(its_supervisor, marks=pytest.mark.faults)])
def test_a_frozen_node_is_given_up_and_replaced(
    spark: SparkSession, tmp_path: Path, what: Callable[[int], int]
) -> None:
    options: dict[str, Any] = {"restarts": 1, "heartbeat_timeout": 4.0, "model_dir": str(tmp_path)}
    with launch(counting_loop, {"epochs": 2}, workers=2, spark=spark, **options) as cluster:
        killer = Killer(cluster, "worker:1", ROWS // 4, what, signal.SIGSTOP)
        cluster.train(rows(spark), epochs=2)
    assert cluster.result() == (sum_of_ids(2), 2)
    assert killer.killed
    assert until(lambda: not psutil.pid_exists(killer.killed or 0))


@pytest.mark.faults
@pytest.mark.parametrize("saving", [{}, {"save_freq": 3}], ids=["each epoch", "which it is told to do more often"])
def test_keras_fit_continues_from_its_backup_and_gets_the_missing_rows(
    spark: SparkSession, tmp_path: Path, saving: dict[str, int]
) -> None:
    data = rows(spark).selectExpr("id", "double(0) as y")
    args = {"epochs": 3, "backup": True, "saving": saving}
    with launch(counting_fit, args, workers=2, spark=spark, restarts=1, model_dir=str(tmp_path)) as cluster:
        Killer(cluster, "worker:0", ROWS * 3 // 4, itself)
        cluster.train(data, epochs=3)
    total, generation, epochs = cluster.result()
    assert (total, generation) == (sum_of_ids(3), 2)
    assert epochs in ([1, 2], [2]), "it goes on behind the last epoch that was saved"


@pytest.mark.parametrize(
    ("node", "what", "legacy"),
    [
        pytest.param("worker:0", itself, "0", marks=pytest.mark.faults),
        ("worker:0", its_supervisor, "0"),
        pytest.param("worker:1", itself, "1", marks=pytest.mark.faults),
    ],
)
def test_keras_fit_goes_on_from_memory_without_a_line_of_ones_own(
    spark: SparkSession, tmp_path: Path, node: str, what: Callable[[int], int], legacy: str
) -> None:
    data = rows(spark).selectExpr("id", "double(0) as y")
    options: dict[str, Any] = {"env": {"TF_USE_LEGACY_KERAS": legacy}, "model_dir": str(tmp_path / "models")}
    with launch(counting_fit, {"epochs": 3}, workers=2, spark=spark, restarts=1, **options) as cluster:
        Killer(cluster, node, ROWS * 3 // 4, what)
        cluster.train(data, epochs=3)
    total, generation, epochs = cluster.result()
    assert (total, generation) == (sum_of_ids(3), 2)
    assert epochs in ([1, 2], [2]), "it goes on behind the last epoch that was through"
    assert cluster.results()["worker:1"] == cluster.results()["worker:0"]
    assert not (tmp_path / "models").exists(), "nothing was written for it"


@pytest.mark.parametrize(
    ("shuffle", "validates"),
    [pytest.param(0, False, marks=pytest.mark.faults), (500, True)],
    ids=["in order", "shuffled, with validation rows"],
)
def test_keras_fit_continues_in_the_middle_of_an_epoch(
    spark: SparkSession, tmp_path: Path, shuffle: int, validates: bool
) -> None:
    data = rows(spark).selectExpr("id", "double(id) as y")
    # A state is saved after the steps 2, 10 and 42 of a generation at the latest. Later ones depend on the machine.
    last = (2, 70) if validates else (1, 90)
    exits = [Exit("worker:1", 1, 60, "kill"), Exit("worker:0", *last, "kill", 2)]
    args = {
        "epochs": 3,
        "pause": 0.0,
        "pause_step": 0.02,
        "schedule": exits,
        "shuffle": shuffle,
        "validates": validates,
    }
    read = spark.sparkContext.accumulator(0)
    validation = spark.createDataFrame(spark.sparkContext.parallelize(range(100), 2).map(Read(read)), data.schema)
    with launch(counting_fit, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path / "m")) as cluster:
        cluster.train(data, epochs=3, validation=validation if validates else None)
    total, generation, begun, count, first, epochs, losses = cluster.result()
    assert read.value == 100 * validates, "Spark reads the validation rows once"
    assert (total, generation) == (sum_of_ids(3), 3)
    assert begun == list(range(last[0] - 1, 3))
    steps = -(-ROWS // 32)
    assert first[0] == last[0]
    assert (not validates) <= first[1] <= last[1], "it goes on with a step of that epoch"
    assert 3 * steps <= count <= 3 * steps + 4, "each step is counted once; a rest may have a step more"
    assert epochs == [0, 1, 2]
    squares = float((np.arange(ROWS, dtype=float) ** 2).mean())
    np.testing.assert_allclose(losses, [squares] * 3, rtol=1e-5)
    assert cluster.results()["worker:1"] == cluster.results()["worker:0"]
    assert not (tmp_path / "m").exists(), "nothing was written for it"


@pytest.mark.parametrize(("shuffle", "workers"), [(0, 2), pytest.param(500, 2, marks=pytest.mark.faults), (300, 1)])
def test_a_fit_by_steps_continues_within_an_epoch_and_within_a_pass(
    spark: SparkSession, shuffle: int, workers: int
) -> None:
    data = rows(spark).selectExpr("id", "double(id) as y")
    exits = [Exit(f"worker:{workers - 1}", 1, 60, "kill"), Exit("worker:0", 3, 30, "kill", 2)]
    fits = [{"epochs": 4, "steps": 62, "schedule": exits}]
    args = {"fits": fits, "pause_step": 0.02, "shuffle": shuffle}
    with launch(several_fits, args, workers=workers, spark=spark, restarts=2) as cluster:
        cluster.train(data, epochs=3)
    found = cluster.result()
    assert (found["generation"], found["epochs"]) == (3, [[0, 1, 2, 3]])
    assert found["steps"] == [4 * 62], "each step is counted once"
    # A state is saved after the steps 2, 10 and 42 of a generation at the latest.
    assert found["first"][0][0] in (2, 3), "not with the first epoch"
    least, most, total = found["after"][0]
    assert (least, most) == (2, 3), "in two passes and a part of the third, each row is used once in a pass"
    assert 4 * 62 * 32 - 3 * 32 * workers <= total <= 4 * 62 * 32


def test_a_fit_of_epochs_of_one_step_continues_after_one_of_the_last_ones(spark: SparkSession) -> None:
    data = rows(spark).selectExpr("id", "double(id) as y")
    fits = [{"epochs": 150, "steps": 1, "schedule": [Exit("worker:1", 60, 1, "kill")]}]
    with launch(several_fits, {"fits": fits, "pause_step": 0.02}, workers=2, spark=spark, restarts=1) as cluster:
        cluster.train(data, epochs=2)
    found = cluster.result()
    assert (found["generation"], found["epochs"]) == (2, [list(range(150))])
    assert found["steps"] == [150], "each step is counted once"
    # From a state to the next one it is at most four times as far as from the one before, and at first 2 steps: if the
    # next one after this was not before step 61, this one was not before step 16.
    assert 16 <= found["first"][0][0] <= 60
    least, most, total = found["after"][0]
    assert (least, most) == (1, 2)
    assert 148 * 32 <= total <= 150 * 32, "the last steps of a pass have fewer rows"


@pytest.mark.parametrize(
    ("first", "then", "how"),
    [
        ("worker:1", ["worker:0"], "kill"),
        pytest.param("worker:1", ["worker:0", "worker:1"], "kill the supervisor", marks=pytest.mark.faults),
        pytest.param("worker:0", ["worker:0"], "kill", marks=pytest.mark.faults),
    ],
)
def test_a_later_fit_continues_within_its_epoch_and_those_before_it_are_not_repeated(
    spark: SparkSession, first: str, then: list[str], how: str
) -> None:
    data = rows(spark).selectExpr("id", "double(id) as y")
    last = [Exit(first, 2, 60, how), *(Exit(node, 3, 70, how, 2) for node in then)]
    fits = [{"epochs": 9, "stop": 2}, {"epochs": 1, "steps": 94}, {"epochs": 3, "schedule": last}]
    with launch(several_fits, {"fits": fits, "pause_step": 0.01}, workers=2, spark=spark, restarts=2) as cluster:
        cluster.train(data, epochs=9)
        cluster.train(data)
        cluster.train(data, epochs=3)
    found = cluster.result()
    assert (found["generation"], found["epochs"]) == (3, [[0, 1], [0], [0, 1, 2]])
    assert found["first"][:2] == [None, None], "they are done"
    assert found["first"][2][0] == 3
    assert [one[:2] for one in found["after"]] == [(2, 2), (3, 3), (6, 6)]
    assert found["steps"][:2] == [188, 94]
    assert 3 * 94 <= found["steps"][2] <= 3 * 94 + 4, "each step is counted once; a rest may have a step more"


def test_a_fit_interrupted_within_an_epoch_ends_like_an_uninterrupted_one(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.range(0, 1000, 1, 1).selectExpr("sin(id) as a", "cos(id * 3) as b", "int(sin(id) > cos(id)) as y")
    found, tables = [], []
    for name, exits in (
        ("whole", []),
        ("broken", [Exit("worker:0", 2, 20, "kill"), Exit("worker:0", 3, 1, "kill", 2)]),
    ):
        table = tmp_path / f"{name}.csv"
        args = {"epochs": 4, "pause_step": 0.02, "schedule": exits, "table": str(table)}
        with launch(fit_with_callbacks, args, workers=1, spark=spark, restarts=2) as cluster:
            cluster.train(data, epochs=4)
        found.append(cluster.result())
        tables.append(
            [[float(cell) for cell in line.split(",") if cell != "NA"] for line in table.read_text().splitlines()[1:]]
        )
    whole, broken = found
    assert broken.pop("first")[0] == 3
    whole.pop("first")
    assert broken.keys() == whole.keys()
    for name, value in whole.items():
        keys = sorted(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else [None]
        for key in keys:
            wanted, got = (one[name] if key is None else one[name][key] for one in (whole, broken))
            np.testing.assert_allclose(got, wanted, rtol=1e-5, err_msg=f"{name} {key}")
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-5)


@dataclass(frozen=True)
class Read:
    """Count the rows that Spark reads, and return each as a row of the table."""

    count: Any

    def __call__(self, number: int) -> tuple[int, float]:
        self.count.add(1)
        return number, number / ROWS


@pytest.mark.parametrize(
    ("how", "reads"),
    [
        pytest.param("kill the supervisor", 1, marks=pytest.mark.faults),
        pytest.param("kill", 1, marks=pytest.mark.faults),
        ("kill the host", 2),
    ],
)
def test_rows_that_nodes_have_kept_are_not_sent_again_and_keep_their_batches(
    spark: SparkSession, how: str, reads: int
) -> None:
    count = spark.sparkContext.accumulator(0)
    data = spark.createDataFrame(spark.sparkContext.parallelize(range(ROWS), 4).map(Read(count)), "id long, y double")
    exits = [Exit("worker:1", 3, 40, how)]
    args = {"epochs": 5, "pause_step": 0.01, "schedule": exits, "most": 600, "saves_each_step": True}
    with launch(order_of_steps, args, workers=2, spark=spark, restarts=1) as cluster:
        cluster.train(data, epochs=5)
    found = cluster.result()
    assert found["generation"] == 2
    assert found["first"][0] == 3
    assert found["first"][1] > 1, "it continues within the epoch"
    steps = -(-ROWS // 32)
    later = [found["sums"][-(1 + number) * steps :][:steps] for number in range(4)]
    assert [sum(one) for one in later] == [sum(range(ROWS))] * 4
    if reads == 1:
        assert all(one == later[0] for one in later), "the rows of each step are the same in each epoch after the first"
    assert count.value == reads * ROWS, "of a lost host's node, Spark reads the rows once more"


@pytest.mark.parametrize("shuffle", [0, pytest.param(300, marks=pytest.mark.faults)])
def test_losses_within_one_epoch_use_each_row_once_whoever_has_kept_it(spark: SparkSession, shuffle: int) -> None:
    data = rows(spark).selectExpr("id", "id / 3000 as y")
    exits = [
        Exit("worker:1", 3, 25, "kill the supervisor"),
        Exit("worker:0", 3, 50, "kill", 2),  # now worker:1 has its rows in another order
        Exit("worker:0", 3, 70, "kill the supervisor", 3),
        Exit("worker:1", 4, 30, "kill", 4),
    ]
    args = {"epochs": 6, "pause_step": 0.02, "schedule": exits, "shuffle": shuffle, "most": 700}
    with launch(order_of_steps, args, workers=2, spark=spark, restarts=4) as cluster:
        cluster.train(data, epochs=6)
    found = cluster.result()
    assert (found["generation"], found["first"][0]) == (5, 4)
    steps = -(-ROWS // 32)
    assert sum(found["sums"]) == 6 * sum(range(ROWS))
    assert sum(found["sums"][-2 * steps :]) == 2 * sum(range(ROWS))


def test_a_shuffled_epoch_goes_on_after_a_loss_in_the_order_that_it_would_have_had(spark: SparkSession) -> None:
    data = spark.range(0, ROWS, 1, 1).selectExpr("id", "id / 3000 as y")
    found = []
    for exits in ([], [Exit("worker:0", 1, 70, "kill"), Exit("worker:0", 3, 30, "kill the supervisor", 2)]):
        args = {
            "epochs": 4,
            "pause_step": 0.02,
            "schedule": exits,
            "shuffle": 500,
            "most": 600,
            "saves_each_step": True,
        }
        with launch(order_of_steps, args, workers=1, spark=spark, restarts=2) as cluster:
            cluster.train(data, epochs=4)
        found.append(cluster.result())
    whole, broken = found
    assert (broken.pop("generation"), whole.pop("generation")) == (3, 1)
    epoch, step = broken.pop("first")
    assert epoch == 3
    assert step > 1, "the state outlives the only supervisor, in Spark's task"
    whole.pop("first")
    assert broken == whole, "not one weight differs"


@pytest.mark.faults
@pytest.mark.parametrize("seed", [1, 2])
def test_a_training_that_lost_a_node_reaches_the_loss_of_an_undisturbed_one(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    moment = random.Random(seed).randrange(ROWS // 2, ROWS * 5)
    args = {"epochs": 12, "rate": 0.1, "momentum": 0.5}
    # Half of the rows are of one kind, so that the loss does not depend on which worker gets which rows.
    data = rows(spark).selectExpr("double(id % 2) as x", "3 * double(id % 2) + 1 as y")
    found = {}
    for name in ("undisturbed", "disturbed"):
        options: dict[str, Any] = {"restarts": 1, "model_dir": str(tmp_path / name)}
        with launch(regression, args, workers=2, spark=spark, **options) as cluster:
            if name == "disturbed":
                Killer(cluster, "worker:1", moment, itself)
            cluster.train(data, epochs=args["epochs"])
        found[name] = cluster.result()
    before, after = found["undisturbed"], found["disturbed"]
    assert (before["generation"], after["generation"]) == (1, 2)
    assert 0 < len(after["loss"]) < args["epochs"], "the epochs before the loss of the node are not trained again"
    np.testing.assert_allclose(after["loss"], before["loss"][-len(after["loss"]) :], atol=1e-3)
    np.testing.assert_allclose(after["weights"], before["weights"], atol=1e-3)
    np.testing.assert_allclose(cluster.history["loss"], before["loss"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backup", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_the_worker_of_a_lost_host_starts_at_once_on_another(spark: SparkSession, tmp_path: Path, backup: bool) -> None:
    """Though the others may continue without it, they wait for it, since Spark has a slot: nobody starts twice."""
    data = rows(spark).selectExpr("id", "double(0) as y")
    options: dict[str, Any] = {"restarts": 1, "min_workers": 1, "model_dir": str(tmp_path)}
    args = {"epochs": 12, "backup": backup}
    with launch(counting_fit, args, workers=2, spark=spark, **options) as cluster:
        killer = Killer(cluster, "worker:0", ROWS * 3 // 4, its_host)
        cluster.train(data, epochs=12)
    total, generation, epochs = cluster.result()
    assert killer.killed
    assert total == sum_of_ids(12)
    assert generation == 2
    assert cluster.results().keys() == {"worker:0", "worker:1"}
    assert epochs[-1] == 11
    assert not any("continue without" in cause or "joined" in cause for cause in killer.causes), killer.causes
    if backup:
        assert "generation 2, epoch 0" not in cluster.logs("worker:1"), "the first one was saved"
    else:
        for node in ("worker:0", "worker:1"):
            assert re.search(r"fit continues after epoch \d+(, step \d+)?$", cluster.logs(node), re.MULTILINE)


def raising_later(args: Any, ctx: Any) -> None:
    import builtins

    for batch in ctx.dataset(16):
        raise getattr(builtins, args["error"])(f"{args['words']}: {int(batch['id'][0])}")


@pytest.mark.parametrize(
    ("error", "words"),
    [("ValueError", "no good"), ("ConnectionResetError", "Connection reset by peer, which is no node: Socket closed")],
)
def test_an_exception_of_the_program_causes_no_restart(spark: SparkSession, error: str, words: str) -> None:
    args = {"error": error, "words": words}
    with pytest.raises(errors.NodeFailed, match=words) as caught:
        with launch(raising_later, args, workers=2, spark=spark, restarts=3) as cluster:
            cluster.train(rows(spark))
    assert "raise getattr" in caught.value.remote_traceback
    assert cluster.snapshot().generation == 1


def dying(args: Any, ctx: Any) -> None:
    if ctx.task_index == 1:
        os._exit(3)
    ctx.report(step=1)
    threading.Event().wait()


def test_a_node_that_dies_each_time_fails_the_cluster_when_the_restarts_are_used_up(spark: SparkSession) -> None:
    cluster = launch(dying, workers=2, spark=spark, restarts=1, wait_until_up=False)
    with pytest.raises(errors.NodeFailed, match="exited with code 3"), cluster:
        pass
    assert cluster.snapshot().generation == 2
    assert until(lambda: cluster.state.ended)


def test_a_directory_in_the_memory_of_each_process_is_refused(spark: SparkSession) -> None:
    for name in ("model_dir", "log_dir"):
        with pytest.raises(errors.PlanError, match=f"{name}='memory://models' cannot be shared: a memory: URL"):
            launch(dying, spark=spark, **{name: "memory://models"})


def counting_apart(args: dict[str, Any], ctx: Any) -> tuple[int, int]:
    """Count rows in nodes that do not wait for each other; the second one looks late for a state to continue from."""
    import tensorflow as tf

    seen = tf.Variable(0, dtype=tf.int64)
    if ctx.task_index == 1:
        ahead = Path(ctx.checkpoint_dir, "00000002" if ctx.generation == 1 else "00000005", "place.json")
        assert until(ahead.exists, 120), "the chief waits for nobody"
    start, read = ctx.resume(seen=seen).epoch, 0
    for epoch in range(start, args["epochs"]):
        for batch in ctx.dataset(32):
            read += len(batch["id"])
        ctx.checkpoint(seen=seen, epoch=epoch + 1)
        if ctx.generation == 1 and ctx.is_chief and epoch == 1:
            until(Path(args["late"]).exists, 120)
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.generation == 1 and not ctx.is_chief:
            Path(args["late"]).touch()
    return start, read


@pytest.mark.faults
def test_a_late_node_continues_from_the_same_state_as_the_others(spark: SparkSession, tmp_path: Path) -> None:
    args = {"epochs": 6, "late": str(tmp_path / "late")}
    with launch(counting_apart, args, workers=2, spark=spark, restarts=1, model_dir=tmp_path / "models") as cluster:
        cluster.train(rows(spark), epochs=6)
    (first, chiefs), (second, its) = cluster.results().values()
    assert (first, second) == (2, 2)
    assert chiefs + its == (6 - 2) * ROWS, "both have been through their share of every pass"
    assert cluster.snapshot().generation == 2


@pytest.mark.parametrize("what", ["below a file", "where nobody may"])
def test_a_model_dir_that_cannot_be_written_is_refused_before_main(
    spark: SparkSession, tmp_path: Path, what: str
) -> None:
    def main(args: str, ctx: Any) -> None:
        Path(args).touch()

    (tmp_path / "file").touch()
    place = {"below a file": tmp_path / "file" / "models", "where nobody may": "/proc/no"}
    with pytest.raises(errors.NodeFailed, match=f"{place[what]} cannot be written on .*Give a model_dir"):
        with launch(main, str(tmp_path / "called"), spark=spark, model_dir=place[what]) as cluster:
            cluster.wait()
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("name", ["model_dir", "log_dir"])
def test_a_directory_on_a_server_that_does_not_answer_is_refused_before_main(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    def main(args: str, ctx: Any) -> None:
        Path(args).touch()

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but does not listen
        place = f"hdfs://127.0.0.1:{held.getsockname()[1]}/models"
        with pytest.raises(errors.NodeFailed, match="no server answers at 127.0.0.1"):
            with launch(main, str(tmp_path / "called"), workers=1, spark=spark, **{name: place}) as cluster:
                cluster.wait()
    assert not (tmp_path / "called").exists()


def test_invalid_restarts_are_refused(spark: SparkSession) -> None:
    with pytest.raises(errors.PlanError, match="restarts must be a whole number"):
        launch(dying, spark=spark, restarts=-1)
    with pytest.raises(errors.PlanError, match="single queue"):
        launch(dying, spark=spark, restarts=1, queues=["input", "valid"])


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"min_workers": 0, "restarts": 1}, "min_workers must be a whole number, 1 or more"),
        ({"min_workers": 1}, "min_workers= needs restarts="),
        ({"min_workers": 3, "restarts": 1}, "min_workers must be at most 2, the number of workers, got 3"),
        ({"min_workers": 1, "restarts": 1, "ps": 1}, "without parameter servers or an evaluator"),
    ],
)
def test_invalid_min_workers_are_refused(spark: SparkSession, wish: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.PlanError, match=said):
        launch(dying, workers=2, spark=spark, **wish)


def wait_for_the_next_generation(args: Any, ctx: Any) -> int:
    ended = time.monotonic() + 120
    while ctx.generation == 1 and time.monotonic() < ended and not ctx.should_stop:
        time.sleep(0.1)
    return int(ctx.generation)


def test_a_parameter_server_on_the_drivers_host_with_a_hung_supervisor_is_replaced(spark: SparkSession) -> None:
    options: dict[str, Any] = {"workers": 1, "ps": 1, "driver_ps_nodes": True, "restarts": 1, "heartbeat_timeout": 4.0}
    with launch(
        wait_for_the_next_generation, spark=spark, input_mode="tensorflow", name="hosted", **options
    ) as cluster:
        (ps,) = (node for node in cluster.snapshot().nodes if node.node == "ps:0")
        stopped = psutil.Process(its_supervisor(ps.pid or 0))
        stopped.suspend()
        cluster.wait()
    assert cluster.results()["worker:0"] == 2
    assert not stopped.is_running()


def fit_that_ends_early(args: Any, ctx: Any) -> dict[str, Any]:
    """Fit until a callback ends it, lose a worker after that, and read the rows of another call of ``train``."""
    import keras

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begun.append(epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    begun: list[int] = []
    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    rows = ctx.dataset(32, x="id", y="y").map(lambda x, y: (x / ROWS, y))
    history = model.fit(rows, epochs=6, verbose=0, callbacks=[Stop()])
    if ctx.generation == 1 and ctx.task_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    read = sum(int(np.sum(batch["id"])) for batch in ctx.dataset(32, columns=["id"]))
    return {"begun": begun, "epochs": history.epoch, "read": read, "weights": float(model.get_weights()[0].sum())}


def test_a_fit_that_was_ended_early_is_not_repeated_after_a_loss(spark: SparkSession) -> None:
    data = rows(spark).selectExpr("id", "double(id) as y")
    with launch(fit_that_ends_early, workers=2, spark=spark, restarts=1) as cluster:
        cluster.train(data, epochs=6)
        cluster.train(data, epochs=1)
    results = list(cluster.results().values())
    assert cluster.snapshot().generation == 2
    assert [one["begun"] for one in results] == [[], []], "no epoch is trained again"
    assert [one["epochs"] for one in results] == [[0, 1], [0, 1]]
    assert sum(one["read"] for one in results) == sum(range(ROWS))
    assert results[0]["weights"] == results[1]["weights"]
