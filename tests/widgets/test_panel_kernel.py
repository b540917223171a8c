"""The panel in a real kernel: its Stop button reaches the kernel while a cell runs, and the output ends as HTML."""

import os
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

SECONDS = 60
ROOT = str(Path(__file__).parents[2])

SHOW = """
import threading
from dataclasses import replace
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState, NodeStatus
from tfos_nb.widgets.panel import PanelScreen

pressed = threading.Event()
nodes = (NodeState("worker:0", NodeStatus.TRAINING),)
running = ClusterState("mnist", id="a1", status=ClusterStatus.RUNNING, nodes=nodes)
screen = PanelScreen()
screen.stop_with(lambda: pressed.set() or "stopping")
screen.draw_curves_with(lambda metric, by, node: {"metrics": [metric], "by": by, "node": node})
screen.draw(running, "", None)
"""

# The cell draws and then blocks the main shell, like a training in the foreground.
BLOCK = f"""
screen.draw(replace(running, generation=2), "", None)
print("blocked", end="", flush=True)
print("pressed" if pressed.wait({SECONDS / 2}) else "never", end="", flush=True)
"""

END = "screen.draw(replace(running, status=ClusterStatus.STOPPED), '', None)"


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A client of a new kernel."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    manager = KernelManager()
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=SECONDS)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def message(kernel, kind, **wanted):
    """Wait for the kernel's next message of a kind."""
    while True:
        got = kernel.get_iopub_msg(timeout=SECONDS)
        assert got["msg_type"] != "error", "\n".join(got["content"]["traceback"])
        if got["msg_type"] == kind and all(got["content"].get(key) == value for key, value in wanted.items()):
            return got["content"]


def run(kernel, code):
    """Run a cell to its end."""
    reply_to(kernel.execute(code), kernel.shell_channel)


def reply_to(request, channel):
    """Wait for the reply to a request, and return it; the tests send each shell request after the previous reply.

    ipykernel 7.0 to 7.3 may never read a request that arrives while they send a reply:
    https://github.com/ipython/ipykernel/pull/1529, https://github.com/ipython/ipykernel/issues/1554.
    """
    while True:
        reply = channel.get_msg(timeout=SECONDS)
        if reply["parent_header"].get("msg_id") == request:
            return reply


def subshell(kernel):
    """Create a subshell, as JupyterLab does for the messages of widgets."""
    request = kernel.session.msg("create_subshell_request")
    kernel.control_channel.send(request)
    reply = reply_to(request["header"]["msg_id"], kernel.control_channel)
    if "subshell_id" not in reply["content"]:
        pytest.skip("this ipykernel has no subshells")
    return reply["content"]["subshell_id"]


def press_of(kernel, comm, content, other):
    """Make a widget's message for a subshell."""
    press = kernel.session.msg("comm_msg", {"comm_id": comm, "data": {"method": "custom", "content": content}})
    press["header"]["subshell_id"] = other
    return press


def press_while_blocked(kernel, comm, content, other):
    """Press a widget's button while a cell runs; return what the cell prints about it."""
    cell = kernel.execute(BLOCK)
    message(kernel, "stream", text="blocked")
    kernel.shell_channel.send(press_of(kernel, comm, content, other))
    said = message(kernel, "stream")["text"]
    reply_to(cell, kernel.shell_channel)
    return said


def test_stop_reaches_the_cluster_while_a_cell_runs_and_the_output_ends_as_html(kernel):
    other = subshell(kernel)
    run(kernel, SHOW)
    shown = message(kernel, "display_data")
    comm = shown["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert press_while_blocked(kernel, comm, {"kind": "stop"}, other) == "pressed"
    run(kernel, END)
    ended = message(kernel, "update_display_data")
    assert ended["transient"] == shown["transient"]
    assert set(ended["data"]) == {"text/html", "text/plain"}


def test_a_charts_numbers_are_sent_while_a_cell_runs(kernel):
    other = subshell(kernel)
    run(kernel, SHOW)
    comm = message(kernel, "display_data")["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    cell = kernel.execute(BLOCK)
    message(kernel, "stream", text="blocked")
    for asked in (1, 2):  # the answer must not make the next request go to the busy shell
        question = {"kind": "curves", "asked": asked, "metric": "loss", "by": "step", "node": "worker:0"}
        kernel.shell_channel.send(press_of(kernel, comm, question, other))
        answer = message(kernel, "comm_msg", comm_id=comm)["data"]
        while answer["method"] != "custom":
            answer = message(kernel, "comm_msg", comm_id=comm)["data"]
        assert answer["content"]["asked"] == asked
        assert answer["content"]["data"] == {"metrics": ["loss"], "by": "step", "node": "worker:0"}
    kernel.shell_channel.send(press_of(kernel, comm, {"kind": "stop"}, other))
    assert message(kernel, "stream")["text"] == "pressed"
    reply_to(cell, kernel.shell_channel)


def test_the_plain_panels_button_reaches_the_cluster_while_a_cell_runs(kernel):
    other = subshell(kernel)
    run(kernel, SHOW.replace("widgets.panel import PanelScreen", "widgets.plain import PlainScreen as PanelScreen"))
    message(kernel, "display_data")
    run(kernel, "print(next(one for one in screen.widgets if hasattr(one, 'on_click')).model_id, end='')")
    button = message(kernel, "stream")["text"]
    assert press_while_blocked(kernel, button, {"event": "click"}, other) == "pressed"
