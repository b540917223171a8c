from dataclasses import replace

import pytest

from tfos_nb.state.cluster_state import (
    ClusterState,
    ClusterStatus,
    FeedProgress,
    NodeState,
    NodeStatus,
)
from tfos_nb.widgets import render_text


def test_each_node_has_role_host_state_epoch_step_loss_and_rate(running):
    lines = render_text(running).splitlines()
    row = next(line for line in lines if line.startswith("worker:1"))
    assert row.split() == ["worker:1", "hdp-c02", "·", "2", "training", "2/3", "412/600", "0.1893", "21.1", "k"]


def test_columns_do_not_move_when_numbers_grow(running, make_node):
    early = make_node("worker:0", epoch=1, step=1, steps=None, metrics={"loss": 1.5e-7}, rows_per_second=3.0)
    late = make_node("worker:0", epoch=12, epochs=12, step=100_000, metrics={"loss": 99_999.5}, rows_per_second=2e6)
    endings = []
    for node in (early, late):
        lines = render_text(replace(running, nodes=(node,))).splitlines()
        title = next(line for line in lines if line.startswith("node "))
        row = lines[lines.index(title) + 1]
        endings.append([title.index(word) + len(word) for word in ("epoch", "step", "loss")])
        # a right-aligned number ends below the end of its title and is followed by a space
        assert all(row[end - 1] != " " and row[end] == " " for end in endings[-1])
        assert row.index("training") == title.index("state")
    assert endings[0] == endings[1]


def test_no_line_is_wider_than_a_hundred_characters(running, make_node):
    node = make_node(
        "worker:12345", host="a-very-long-host-name.in.some.data.centre.example", executor="123", detail="x" * 300
    )
    state = replace(running, nodes=(node,), error="e" * 400, name="n" * 64, spark_master="m" * 99)
    for status in ClusterStatus:
        text = render_text(replace(state, status=status), note="o" * 300)
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [40, 59, 60, 79, 80, 100])
def test_no_line_is_wider_than_the_terminal_and_columns_are_complete(running, on_gpus, failed, width):
    for state in (running, on_gpus, failed):
        assert (
            max(map(len, render_text(state, width=width, note="several words that go on " * 8).splitlines())) <= width
        )
    lines = render_text(running, width=width).splitlines()
    title = next(line for line in lines if line.startswith("node "))
    loss = lines[lines.index(title) + 1].split()
    assert "0.1883" in loss
    assert "loss" in title.split(), "the loss is never left out"


def test_in_80_columns_the_loss_and_the_rate_are_shown(running):
    lines = render_text(running, width=79).splitlines()
    title = next(line for line in lines if line.startswith("node "))
    assert title.split() == ["node", "host", "state", "epoch", "step", "loss", "rows/s"]
    row = next(line for line in lines if line.startswith("worker:1 "))
    assert row.split() == ["worker:1", "hdp-c02", "·", "2", "training", "2/3", "412/600", "0.1893", "21.1", "k"]


def test_in_60_columns_host_and_rate_are_omitted_and_sentences_are_wrapped(running, failed):
    title = next(line for line in render_text(running, width=59).splitlines() if line.startswith("node "))
    assert title.split() == ["node", "state", "epoch", "step", "loss"]
    whole, narrow = (render_text(failed, width=width).splitlines() for width in (100, 50))
    sentence = " ".join(whole[1:]).partition(" node ")[0]
    assert " ".join(narrow[1:]).startswith(sentence[:80])


def test_a_text_longer_than_four_lines_ends_with_dots(failed):
    shown = render_text(replace(failed, error="worker:0: " + "word " * 400)).splitlines()
    assert sum("word word" in line for line in shown) == 4
    assert [line for line in shown if "word word" in line][-1].endswith(" …")


def test_a_main_without_requests_for_rows_or_reports_is_shown_as_running(running, make_node):
    def state(*statuses: NodeStatus) -> ClusterState:
        nodes = tuple(NodeState(f"worker:{i}", status) for i, status in enumerate(statuses))
        return replace(running, nodes=nodes, feed=None)

    quiet = render_text(state(NodeStatus.TRAINING, NodeStatus.TRAINING))
    assert " · Running · " in quiet
    assert "main runs on worker:0 and worker:1." in quiet
    assert quiet.count(" running ") + quiet.count(" running\n") >= 1
    mixed = render_text(state(NodeStatus.FEEDING, NodeStatus.TRAINING))
    assert " · Waiting for rows · " in mixed
    assert "main runs on worker:1; worker:0 waits for rows." in mixed


def test_the_errors_first_line_is_shown_once_without_the_traceback(failed):
    text = render_text(failed)
    assert text.count("ValueError: label 10 is outside 0…9") == 1
    assert "model.fit" not in text


def test_terminal_codes_in_an_error_do_not_reach_the_terminal(failed):
    assert "\x1b" not in render_text(replace(failed, error="worker:0: \x1b[2J\x07gone"))


def test_the_feed_and_the_whole_cluster_have_a_line(running):
    text = render_text(running)
    assert "feed     30,720 rows, 5 of 7 partitions, 3 passes" in text
    assert "cluster  loss 0.1883, accuracy 0.9430, 42.4 k rows/s" in text


def test_of_many_nodes_those_in_trouble_come_first(many):
    lines = render_text(many).splitlines()
    names = [line.split()[0] for line in lines if line.startswith("worker:") and "hdp" in line]
    assert names[:3] == ["worker:37", "worker:11", "worker:52"]
    assert len(names) == 6
    assert "the 6 furthest behind of 64 nodes" in lines


def test_every_node_is_shown_on_request(many):
    text = render_text(many, every_node=True)
    assert all(f"worker:{i} " in text for i in range(64))


def test_the_plan_shows_the_slot_of_each_node(planned):
    text = render_text(planned)
    assert "worker:1      1 CPU, fed from Spark" in text
    assert "None is started yet" in text
    assert "rows/s" not in text


def test_nodes_missing_from_the_rendezvous_are_named():
    nodes = (NodeState("worker:0", NodeStatus.RESERVED), NodeState("worker:1"), NodeState("worker:2"))
    text = render_text(ClusterState("mnist", status=ClusterStatus.STARTING, nodes=nodes))
    assert "1 of 3 nodes came to the rendezvous; worker:1 and worker:2 not yet." in text


def test_a_silent_node_is_named(running):
    nodes = (running.nodes[0], replace(running.nodes[1], heartbeat_age=12.0))
    assert "worker:1 is silent 12 s" in render_text(replace(running, nodes=nodes))


def test_the_stuck_node_is_named_when_nothing_moves(running):
    stuck = replace(running.nodes[1], stuck=True, detail="is in your program, line 31 of clicks.py, in load")
    text = render_text(replace(running, nodes=(running.nodes[0], stuck)))
    assert "Nothing moves: worker:1 is in your program, line 31 of clicks.py, in load." in " ".join(text.split())
    assert " stuck " in text


def test_the_node_with_a_nan_loss_is_named(running):
    nodes = (running.nodes[0], replace(running.nodes[1], metrics={"loss": float("nan")}))
    text = render_text(replace(running, nodes=nodes))
    assert "The loss of worker:1 is NaN." in text
    assert text.count("loss is NaN") == 1, "the other's is a number"


@pytest.mark.parametrize("status", list(ClusterStatus))
def test_an_empty_cluster_in_any_state_can_be_rendered(status):
    assert render_text(ClusterState("tfos", status=status)).startswith("tfos · ")


def test_a_nan_loss_is_shown_as_such(running, make_node):
    nodes = (make_node("worker:0", metrics={"loss": float("nan")}),)
    assert " nan " in render_text(replace(running, nodes=nodes, feed=FeedProgress()))


def test_the_use_of_gpus_is_shown_only_if_nodes_have_any(running, on_gpus):
    assert "GPU" not in render_text(running)
    lines = render_text(on_gpus).splitlines()
    assert next(line for line in lines if line.startswith("node ")).endswith("  GPU")
    assert [line.split()[-1] for line in lines if " training " in line] == ["83%", "1"]
    assert max(map(len, lines)) <= 100


def test_a_generation_and_an_evaluation_are_shown(running):
    nodes = (replace(running.nodes[0], phase="evaluate"),)
    text = render_text(replace(running, nodes=nodes, generation=2))
    assert "generation 2" in text.splitlines()[0]
    assert " evaluating " in text


def test_epochs_without_rows_are_reported_but_an_early_end_is_not(running, make_node):
    def told(epoch: int, fed: int) -> str:
        node = make_node("worker:0", status=NodeStatus.DONE, epoch=epoch, epochs=4)
        feed = FeedProgress(4, 4, 400, fed)
        return " ".join(render_text(replace(running, status=ClusterStatus.DONE, nodes=(node,), feed=feed)).split())

    assert "Rows were fed for 1 of its 4 epochs (--epochs)." in told(epoch=1, fed=1)
    assert "Rows were fed for 2 of its 4 epochs (--epochs)." in told(epoch=2, fed=1)  # with two calls of train
    assert "Rows were fed" not in told(epoch=4, fed=4)
    assert "Rows were fed" not in told(epoch=2, fed=4)
    assert "Rows were fed" not in told(epoch=4, fed=1)
