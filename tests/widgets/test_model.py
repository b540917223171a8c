import json
import math
from dataclasses import replace

import pytest
from jupyter_client.session import json_packer

from tests.widgets.conftest import TRACEBACK, falling
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, GpuUse, LogLine, NodeState, NodeStatus
from tfos_nb.widgets.model import BUDGET, change_key, page_model

LONG = f"worker:1 on hdp-c02: ValueError: no\n{TRACEBACK}\n" + "\n".join(f"  frame {i}" for i in range(900))


def size(model):
    """Return the bytes of a message, as Jupyter encodes it."""
    return len(json_packer(model))


def nodes_of(model):
    return [dict(zip(model["fields"], node, strict=True)) for node in model["nodes"]]


@pytest.fixture
def full(running, make_node):
    """Return a function that makes a cluster of any size in which all texts are long."""

    def make(count, **changes):
        nodes = tuple(
            make_node(
                f"worker:{i}",
                number=i,
                host=f"ip-10-12-{i:03d}-{i:03d}.eu-west-1.compute.internal"[:30],
                metrics={"loss": 0.1873, "accuracy": 0.943, "val_loss": 0.2241},
                curves={name: falling() for name in ("loss", "accuracy", "val_loss")},
                gpus=("0",),
                gpu_use=(GpuUse("NVIDIA H100 80GB HBM3", 83.0, 41_100_000_000, 85_000_000_000),),
                seconds_left=5_800.0,
                **changes,
            )
            for i in range(count)
        )
        log = tuple(LogLine(1.7e9 + i, f"worker:{i % 64}", f"{i} " + "x" * 120) for i in range(500))
        return replace(running, nodes=nodes, log=log, error=LONG, plan="worker:0  1 CPU  yes\n" * count)

    return make


@pytest.mark.parametrize("count", [1, 12, 13, 64, 65, 1000])
def test_a_message_of_any_state_fits_the_budget(full, count):
    assert len(LONG) > 10_000
    model = page_model(full(count), note="n" * 1000, left=99.0, said="s" * 1000)
    assert size(model) <= BUDGET
    assert model["log"][-1][2].startswith("499 ")
    assert len(model["nodes"]) == min(count, 64)


def test_most_of_the_log_is_sent_when_64_nodes_run_well(full):
    model = page_model(replace(full(64), error="", plan=""))
    assert 2_000 < len(json.dumps(model["log"])) < 6_000


@pytest.mark.parametrize("strange", ["é" * 400, "漢" * 400, "\x01" * 400, "\ud800" * 400, '"\\' * 200])
def test_texts_of_any_characters_fit_the_budget(full, strange):
    state = full(64, executor=strange, detail=strange)
    nodes = tuple(replace(node, host=strange, node=strange + node.node) for node in state.nodes)
    log = (*state.log, LogLine(0.0, strange, strange))
    state = replace(state, nodes=nodes, name=strange, error=strange * 20, plan=strange, log=log, log_dir=strange)
    assert size(page_model(state, note=strange, said=strange)) <= BUDGET


def test_of_too_many_nodes_those_in_trouble_are_sent_and_a_letter_for_each(full):
    state = full(1000)
    nodes = list(state.nodes)
    nodes[977] = replace(nodes[977], status=NodeStatus.LOST)
    model = page_model(replace(state, nodes=tuple(nodes)))
    assert len(model["cells"]) == 1000
    assert model["states"][ord(model["cells"][977]) - ord("a")] == ("lost", "bad")
    assert nodes_of(model)[0]["name"] == "worker:977"
    assert model["roles"] == [["worker", 0, 1000]]


def test_names_are_sent_as_ranges_by_role():
    names = ("chief:0", "worker:0", "worker:1", "worker:5", "ps:0", "odd", "odd:x")
    model = page_model(ClusterState("m", nodes=tuple(NodeState(name) for name in names)))
    assert model["roles"] == [
        ["chief", 0, 1], ["worker", 0, 2], ["worker", 5, 1], ["ps", 0, 1], ["odd", None, 1], ["odd:x", None, 1],
    ]  # fmt: skip


def test_of_20_000_nodes_only_the_ranges_of_names_are_sent():
    nodes = tuple(NodeState(f"worker:{number}") for number in range(20_000))
    model = page_model(ClusterState("m", nodes=nodes))
    assert (model["nodes"], model["roles"]) == ([], [["worker", 0, 20_000]])


def test_few_nodes_keep_the_order_of_the_plan(running):
    nodes = (running.nodes[0], replace(running.nodes[1], status=NodeStatus.FAILED))
    assert [node["name"] for node in nodes_of(page_model(replace(running, nodes=nodes)))] == ["worker:0", "worker:1"]


def test_a_nodes_values_are_formatted(on_gpus):
    model = page_model(on_gpus)
    first, second, third = nodes_of(model)
    assert (first["epoch"], first["step"], first["percent"]) == ("2/3", "412/600", 69)
    assert first["metrics"] == ["0.1883", "0.9430"]
    assert (first["rate"], first["cpu"], first["memory"]) == ("21.3 k", "71%", "2.3 GB")
    assert first["gpu"] == [model["gpuNames"].index("NVIDIA H100 80GB HBM3"), (83,), "41.1 / 85.0 GB"]
    assert second["gpu"][1:] == [(), "GPU 1"]
    assert third["gpu"] is None
    assert [model["states"][node["state"]] for node in (first, third)] == [("training", "run"), ("serving", "ok")]


def test_values_without_a_json_form_become_words(running, make_node):
    odd = make_node("worker:0", metrics={"loss": math.nan}, curves={"loss": (1.0, math.nan, math.inf, 0.5)})
    model = page_model(replace(running, nodes=(odd,)))
    json_packer(model)
    (node,) = nodes_of(model)
    assert node["metrics"] == ["nan"]
    assert node["curves"][0][0] == "_~~0"


def test_passing_time_alone_is_not_a_change(running):
    later = replace(
        running,
        elapsed=140.0,
        nodes=tuple(replace(node, heartbeat_age=3.0, seconds_left=12.0) for node in running.nodes),
    )
    assert change_key(later) == change_key(running)


def test_a_node_falling_silent_is_a_change_but_longer_silence_is_not(running):
    def silent(age):
        nodes = (running.nodes[0], replace(running.nodes[1], heartbeat_age=age))
        return change_key(replace(running, nodes=nodes))

    assert silent(4.9) != silent(5.1)
    assert silent(6.0) == silent(60.0)


@pytest.mark.parametrize(
    "change", [{"status": ClusterStatus.STOPPING}, {"generation": 2}, {"log": ()}, {"error": "worker:0: no"}]
)
def test_visible_differences_are_changes(running, change):
    assert change_key(replace(running, **change)) != change_key(running)


def test_the_users_line_is_extracted_from_the_traceback(failed):
    model = page_model(failed)
    assert model["own"] == ["cell 4, line 12, in main", "model.fit(ctx.dataset(batch_size=128), epochs=3)"]


def test_the_users_line_is_the_innermost_outside_libraries(failed):
    rest = """
  File "Cell In[7]", line 3, in main
    train(model)
  File "/home/me/training.py", line 40, in train
    model.fit(rows)
  File "/venv/lib/python3.11/site-packages/keras/src/trainer.py", line 9, in fit
    raise error"""
    model = page_model(replace(failed, error=f"worker:1: ValueError: no\nTraceback:{rest}"))
    assert model["own"] == ["/home/me/training.py, line 40, in train", "model.fit(rows)"]


def test_a_long_traceback_keeps_its_end(full):
    assert page_model(full(64))["trace"].splitlines()[0] == "…"
    assert page_model(full(64))["trace"].splitlines()[-1] == "  frame 899"


def test_the_button_is_shown_only_while_nodes_can_be_stopped(running, planned):
    shown = {status: page_model(replace(running, status=status))["stoppable"] for status in ClusterStatus}
    assert {status.value for status, can in shown.items() if can} == {"STARTING", "RUNNING", "RECOVERING", "STOPPING"}
    assert not page_model(running, stoppable=False)["stoppable"]


def test_the_time_left_is_the_slowest_nodes(running):
    nodes = (replace(running.nodes[0], seconds_left=20.0), replace(running.nodes[1], seconds_left=70.0))
    assert page_model(replace(running, nodes=nodes), left=5.0)["left"] == 70
    assert page_model(running, left=5.0)["left"] == 5
    assert page_model(replace(running, status=ClusterStatus.DONE), left=5.0)["left"] is None


@pytest.mark.parametrize("count", [2, 64, 1000])
def test_the_loss_and_three_metrics_are_each_sent_with_a_curve(full, count):
    names = ("val_loss", "auc", "loss", "val_auc", "lr")
    state = full(count, detail="")
    nodes = tuple(
        replace(node, metrics=dict.fromkeys(names, 0.5), curves=dict.fromkeys(names, falling())) for node in state.nodes
    )
    model = page_model(replace(state, nodes=nodes))
    assert model["metrics"] == ["Loss", "Auc", "Val loss", "Val auc"]
    assert len(model["nodes"]) == min(count, 64)
    for node in nodes_of(model):
        assert len(node["metrics"]) == 4
        curves = (
            node["curves"].split(" ") if isinstance(node["curves"], str) else [curve[0] for curve in node["curves"]]
        )
        assert [curve[0] + curve[-1] for curve in curves] == ["_0"] * 4
        assert min(map(len, curves)) >= 8
    assert size(model) <= BUDGET


def test_the_order_of_metrics_does_not_depend_on_arrival(running):
    def columns(*names):
        nodes = (replace(running.nodes[0], metrics=dict.fromkeys(names, 1.0)), running.nodes[1])
        return page_model(replace(running, nodes=nodes))["metrics"]

    assert columns("val_loss", "f1", "auc", "loss") == columns("loss", "auc", "f1", "val_loss")
    assert columns("val_loss", "f1", "auc", "loss") == ["Loss", "Accuracy", "Auc", "F1"]


def test_the_common_domain_of_hosts_is_sent_once(full):
    state = full(64)
    nodes = tuple(replace(node, host=f"node-{i}.data.example") for i, node in enumerate(state.nodes))
    model = page_model(replace(state, nodes=nodes))
    assert model["domain"] == ".data.example"
    assert {node["host"] for node in nodes_of(model)} == {f"node-{i}" for i in range(64)}
    addresses = tuple(replace(node, host=f"10.0.{i}.7") for i, node in enumerate(state.nodes))
    assert page_model(replace(state, nodes=addresses))["domain"] == ""


def test_a_shortened_line_of_the_log_says_how_much_is_missing(running):
    model = page_model(replace(running, log=(LogLine(0.0, "worker:0", "x" * 1000),)))
    [[_, _, text]] = model["log"]
    kept, _, missing = text.partition("… (")
    assert missing == f"{1000 - len(kept)} more characters)"
    assert len(text) <= 402
