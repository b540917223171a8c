import threading
from collections import deque
from dataclasses import replace

import pytest
from comm.base_comm import BaseComm
from IPython.utils.capture import capture_output

from tfos_nb.errors import ClusterClosed
from tfos_nb.state.cluster_state import ClusterStatus, NodeStatus
from tfos_nb.widgets import output
from tfos_nb.widgets.live import LiveView
from tfos_nb.widgets.output import KEPT, answer_on_any_shell
from tfos_nb.widgets.panel import PanelScreen
from tfos_nb.widgets.plain import PlainScreen

WIDGET = "application/vnd.jupyter.widget-view+json"


class Wire(BaseComm):
    """A comm that records its messages for the test."""

    messages: list[tuple[str, str, dict]] = []  # noqa: RUF012 - the fixture replaces it

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        self.messages.append((self.comm_id, msg_type, data or {}))


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def wire(monkeypatch):
    """Every message that widgets send to the page: (comm, type, data)."""
    monkeypatch.setattr("comm.create_comm", Wire)
    monkeypatch.setattr(Wire, "messages", [])
    return Wire.messages


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def panel(wire, shell, clock):
    return PanelScreen(clock)


@pytest.fixture(params=["panel", "plain"])
def screen(request, wire, shell, clock):
    return PanelScreen(clock) if request.param == "panel" else PlainScreen()


def updates(wire):
    return [data["state"]["cluster"] for _, kind, data in wire if kind == "comm_msg" and "cluster" in data["state"]]


def later(state, **changes):
    return replace(state, nodes=tuple(replace(node, **changes) for node in state.nodes))


def press(screen):
    """Send the page's message for Stop through the widget's own handling of messages."""
    if isinstance(screen, PanelScreen):
        target, content = screen.widgets[0], {"kind": "stop"}
    else:
        target = next(widget for widget in screen.widgets if hasattr(widget, "on_click"))
        content = {"event": "click"}
    target._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def test_the_output_has_the_widget_the_html_and_the_text(screen, running):
    with capture_output() as captured:
        screen.draw(running, "a note", None)
        screen.draw(later(running, step=500), "a note", None)
    (output,) = captured._outputs
    assert set(output["data"]) == {WIDGET, "text/html", "text/plain"}
    assert output["data"][WIDGET]["model_id"] == screen.widgets[0].model_id
    assert output["transient"]["display_id"]
    assert "a note" in output["data"]["text/html"]


def test_the_synced_state_is_sufficient_after_a_reload(panel, running):
    with capture_output():
        panel.draw(running, "", None)
    state = panel.widgets[0].get_state()
    assert state["cluster"]["name"] == "mnist"
    assert len(state["cluster"]["nodes"]) == 2
    assert "export default { initialize, render }" in state["_esm"]
    assert ".tfos-panel" in state["_css"]
    assert state["cluster"]["widget"] == panel.widgets[0].model_id, "by which the page finds its output"
    assert not state["outcome"]


def test_the_outcome_is_also_sent_to_the_widget(panel, wire, running):
    with capture_output() as captured:
        panel.draw(running, "", None)
        shown = panel.widgets[0]
        panel.draw(replace(running, status=ClusterStatus.DONE), "", None)
    assert shown.outcome == captured._outputs[-1]["data"]
    assert set(shown.outcome) == {"text/html", "text/plain"}


def test_only_changed_states_are_sent(panel, wire, clock, running):
    with capture_output():
        panel.draw(running, "", None)
        for _ in range(5):
            clock.now += 0.5
            panel.draw(running, "", None)
        assert len(updates(wire)) == 1
        panel.draw(later(running, step=500), "", None)
    assert [cluster["nodes"][0][5] for cluster in updates(wire)] == ["412/600", "500/600"]


def test_passing_time_alone_is_sent_once_in_five_seconds(panel, wire, clock, running):
    with capture_output():
        for half in range(25):
            clock.now = 100.0 + half / 2
            panel.draw(replace(later(running, heartbeat_age=half / 6), elapsed=131.0 + half / 2), "", 60.0 - half)
    assert [cluster["elapsed"] for cluster in updates(wire)] == [131.0, 136.0, 141.0]


def test_the_page_gets_two_messages_a_second_at_most_and_the_last_state(panel, wire, clock, running):
    with capture_output():
        for tenth in range(21):
            clock.now = 100.0 + tenth / 10
            panel.draw(later(running, step=tenth), "", None)
        assert len(updates(wire)) <= 6
        clock.now += 0.5
        panel.draw(later(running, step=20), "", None)
    assert updates(wire)[-1]["nodes"][0][5] == "20/600"


def test_at_the_end_the_same_output_has_only_html(screen, wire, running):
    ended = replace(later(running, status=NodeStatus.DONE), status=ClusterStatus.DONE)
    with capture_output() as captured:
        screen.draw(running, "", None)
        screen.draw(ended, "", None)
        screen.draw(ended, "a late note", None)
    first, last, noted = captured._outputs
    assert set(last["data"]) == {"text/html", "text/plain"}
    assert last["update"]
    assert first["transient"] == last["transient"] == noted["transient"]
    assert "Done in 2 min 11 s" in last["data"]["text/html"]
    assert "a late note" in noted["data"]["text/html"]
    assert not screen.widgets


def test_a_reloaded_page_sees_the_end_in_the_widget(panel, wire, running):
    """It does not know the output, so the HTML does not reach it, but its widget is updated at once."""
    ended = replace(later(running, status=NodeStatus.DONE), status=ClusterStatus.DONE)
    with capture_output():
        panel.draw(running, "", None)
        panel.draw(ended, "", None)
    assert updates(wire)[-1]["ended"]
    assert not [comm for comm, kind, _ in wire if kind == "comm_close"]


def test_widgets_of_clusters_that_ended_long_ago_are_closed(wire, shell, clock, running, monkeypatch):
    monkeypatch.setattr(output, "_ended", deque())
    ended = replace(later(running, status=NodeStatus.DONE), status=ClusterStatus.DONE)
    with capture_output():
        for _ in range(KEPT + 1):
            screen = PanelScreen(clock)
            screen.draw(running, "", None)
            screen.draw(ended, "", None)
    opened = [comm for comm, kind, _ in wire if kind == "comm_open"]
    closed = {comm for comm, kind, _ in wire if kind == "comm_close"}
    assert closed == set(opened[: len(opened) // (KEPT + 1)]), "the first one's, and no other"


def test_a_view_closed_before_the_end_leaves_html(screen, running):
    class Running:
        def snapshot(self):
            return running

    with capture_output() as captured, LiveView(Running(), screen=screen):
        pass
    assert WIDGET in captured._outputs[0]["data"]
    assert set(captured._outputs[-1]["data"]) == {"text/html", "text/plain"}


def test_an_ended_cluster_is_shown_without_a_widget(screen, wire, failed):
    with capture_output() as captured:
        screen.draw(failed, "", None)
    assert [set(output["data"]) for output in captured._outputs] == [{"text/html", "text/plain"}]
    assert not wire


def test_the_button_calls_the_cluster_and_its_answer_is_shown(screen, clock, running):
    pressed = []
    screen.stop_with(lambda: pressed.append(threading.current_thread()) or "stopping: 10 s to save")
    with capture_output():
        screen.draw(running, "", None)
        press(screen)
        clock.now += 1
        screen.draw(running, "", None)
    assert len(pressed) == 1
    assert screen.said == "stopping: 10 s to save"
    if isinstance(screen, PanelScreen):
        assert screen.widgets[0].cluster["said"] == screen.said


def test_a_failed_stop_is_shown_to_the_user(screen, running, caplog):
    def stop():
        raise OSError("the door is shut")

    screen.stop_with(stop)
    with capture_output():
        screen.draw(running, "", None)
        press(screen)
    assert screen.said == "The cluster could not be asked to stop: OSError: the door is shut"
    assert "could not be asked" in caplog.text


def test_a_cluster_without_a_stop_function_says_what_to_do_instead(screen, running):
    with capture_output():
        screen.draw(running, "", None)
        press(screen)
    assert "%tfos_stop" in screen.said


def test_other_messages_of_a_page_are_ignored(panel, running):
    pressed = []
    panel.stop_with(lambda: pressed.append(1) or "")
    with capture_output():
        panel.draw(running, "", None)
    for content in ({"kind": "start"}, {}, "stop", ["stop"], None):
        message = {"content": {"data": {"method": "custom", "content": content}}, "buffers": []}
        panel.widgets[0]._handle_msg(message)
    assert not pressed


def ask(panel, wire, kind="curves", **question):
    """Send the page's request for a chart or for stacks; return the answer."""
    content = {"kind": kind, **question}
    message = {"content": {"data": {"method": "custom", "content": content}}, "buffers": []}
    panel.widgets[0]._handle_msg(message)
    return [data["content"] for _, kind, data in wire if kind == "comm_msg" and data["method"] == "custom"][-1]


def test_a_page_without_a_server_gets_a_charts_numbers_by_message(panel, wire, running):
    asked = []
    panel.draw_curves_with(lambda **question: asked.append(question) or {"metrics": ["loss"]})
    with capture_output():
        panel.draw(running, "", None)
    answer = ask(panel, wire, asked=7, metric="loss", by=None, node="worker:1", more="x")
    assert answer == {"kind": "curves", "asked": 7, "data": {"metrics": ["loss"]}}
    assert asked == [{"metric": "loss", "by": "", "node": "worker:1"}]


def test_a_failed_chart_shows_the_reason(panel, wire, running):
    def no_such_node(metric, by, node):
        raise ValueError(f"no node {node!r}")

    with capture_output():
        panel.draw(running, "", None)
    assert ask(panel, wire, asked=1)["data"] == {"message": "This cluster has no curves."}
    panel.draw_curves_with(no_such_node)
    answer = ask(panel, wire, asked=2, node="ps:9")
    assert answer["data"] == {"message": "The chart could not be made: ValueError: no node 'ps:9'"}


def test_a_page_without_a_server_gets_stacks_by_message(panel, wire, running):
    def ended():
        raise ClusterClosed("cluster mnist has ended")

    with capture_output():
        panel.draw(running, "", None)
    assert ask(panel, wire, "stacks", asked=1)["data"] == {"message": "This cluster has no stacks."}
    panel.show_stacks_with(lambda: {"worker:0": "Thread (main)"})
    answer = ask(panel, wire, "stacks", asked=2)
    assert answer == {"kind": "stacks", "asked": 2, "data": {"stacks": {"worker:0": "Thread (main)"}}}
    panel.show_stacks_with(ended)
    assert ask(panel, wire, "stacks", asked=3)["data"] == {"message": "cluster mnist has ended"}


def test_the_plan_becomes_a_cluster_in_the_same_panel(panel, wire, clock, planned, running):
    with capture_output() as captured:
        panel.draw(planned, "", None)
        panel.stop_with(lambda: "")
        clock.now += 1
        panel.draw(running, "", None)
    assert len(captured._outputs) == 1
    assert [(cluster["id"], cluster["stoppable"]) for cluster in updates(wire)] == [("", False), ("k3f9a2b7c1", True)]


def test_the_plain_panel_has_a_button_only_while_nodes_can_be_stopped(wire, shell, planned, running):
    screen = PlainScreen()
    with capture_output():
        screen.draw(planned, "", None)
        button = next(widget for widget in screen.widgets if hasattr(widget, "on_click"))
        assert button.layout.display == "none"
        screen.stop_with(lambda: "stopping")
        screen.draw(running, "", None)
        assert button.layout.display is None
        press(screen)
    assert button.description == "Cancel now"


def test_a_message_of_the_page_is_handled_by_its_target_shell():
    comm = pytest.importorskip("ipykernel.comm.comm").BaseComm(target_name="test", comm_id="1")
    if not hasattr(comm, "_reply_subshell_for"):
        pytest.skip("this ipykernel leaves messages on the shell that they were sent to")
    comm._reply_subshell_id = None  # its state after a publication from the main shell
    assert comm._reply_subshell_for({}, "subshell") is None
    answer_on_any_shell(comm)
    assert comm._reply_subshell_for({}, "subshell") == "subshell"
    answer_on_any_shell(comm)
    answer_on_any_shell(None)
