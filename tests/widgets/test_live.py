import io
import re
import sys
import threading
from dataclasses import replace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets import Any
from traitlets.config import Config

from tfos_nb.errors import PlanError
from tfos_nb.state.cluster_state import ClusterStatus, NodeStatus
from tfos_nb.widgets.choice import choose_screen
from tfos_nb.widgets.live import LiveView, show_panel
from tfos_nb.widgets.panel import PanelScreen
from tfos_nb.widgets.plain import PlainScreen
from tfos_nb.widgets.screens import (
    ClearingScreen,
    LastLineScreen,
    LogScreen,
    NoScreen,
    NotebookScreen,
    TerminalScreen,
)

DEADLINE = 20


class Recorded:
    """A cluster with a given sequence of states; it keeps the last one."""

    def __init__(self, *states):
        self.states = list(states)
        self.seen_last = threading.Event()

    def snapshot(self):
        if len(self.states) > 1:
            return self.states.pop(0)
        self.seen_last.set()
        return self.states[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def done(state):
    return replace(
        state, status=ClusterStatus.DONE, nodes=tuple(replace(n, status=NodeStatus.DONE) for n in state.nodes)
    )


def view_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tfos-view"]


def test_a_notebook_gets_one_output_that_is_updated_and_ends_static(shell, running):
    cluster = Recorded(running, running, done(running))
    with capture_output() as captured, LiveView(cluster, screen=NotebookScreen()):
        assert cluster.seen_last.wait(DEADLINE)
    first, *updates = captured._outputs
    assert not first.get("update")
    assert updates
    assert all(output["update"] for output in updates)
    assert {output["transient"]["display_id"] for output in captured._outputs} == {first["transient"]["display_id"]}
    assert "Done in 2 min 11 s" in updates[-1]["data"]["text/html"]
    assert "Done in 2 min 11 s" in updates[-1]["data"]["text/plain"]


def test_an_unchanged_state_is_not_sent_again(shell, running):
    screen = NotebookScreen()
    with capture_output() as captured:
        for _ in range(3):
            screen.draw(running, "", None)
    assert len(captured._outputs) == 1


def test_the_thread_ends_with_the_view(running):
    with LiveView(Recorded(running), screen=NoScreen()):
        assert view_threads()
    assert not view_threads()


def test_the_thread_ends_with_the_cluster(running):
    view = LiveView(Recorded(running, done(running)), screen=NoScreen())
    with view:
        (thread,) = view_threads()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert view.closed


def test_a_failing_display_is_only_switched_off_and_logged(running, caplog):
    stream = io.StringIO()
    stream.close()
    with LiveView(Recorded(running), screen=LogScreen(stream)) as view:
        view.say("still here")
    assert "switched off" in caplog.text
    assert not view_threads()


def test_an_error_in_the_block_passes_through_the_view(running):
    with pytest.raises(ZeroDivisionError), LiveView(Recorded(running), screen=NoScreen()):
        raise ZeroDivisionError
    assert not view_threads()


def test_a_terminal_is_redrawn_in_place(running):
    stream = Terminal()
    screen = TerminalScreen(stream)
    screen.draw(running, "", None)
    height = stream.getvalue().count("\n")
    stream.truncate(0)
    screen.draw(replace(running, elapsed=140.0), "", None)
    assert stream.getvalue().lstrip("\0").startswith(f"\x1b[{height}F")
    assert stream.getvalue().count("\n") == height


def test_lines_do_not_wrap_in_a_narrow_terminal(running, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    stream = Terminal()
    TerminalScreen(stream).draw(running, "", None)
    lines = re.sub(r"\x1b\[\w*", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) < 40
    assert len([line for line in lines if line]) < 6


def test_a_log_has_lines_only_for_changes_of_state_or_epoch(running):
    stream = io.StringIO()
    screen = LogScreen(stream)
    screen.draw(running, "", None)
    before = stream.getvalue()
    faster = tuple(replace(node, step=500, rows_per_second=1.0, metrics={"loss": 0.15}) for node in running.nodes)
    screen.draw(replace(running, nodes=faster, elapsed=200.0), "", None)
    assert stream.getvalue() == before
    third = tuple(replace(node, epoch=3, step=1) for node in faster)
    screen.draw(replace(running, nodes=third, elapsed=201.0), "", None)
    assert stream.getvalue()[len(before) :] == "[3 min 21 s] worker:0, worker:1: epoch 3 of 3, loss 0.1500 so far\n"


def test_a_log_names_a_few_of_many_nodes(many):
    stream = io.StringIO()
    screen = LogScreen(stream)
    screen.draw(many, "", None)
    before = len(stream.getvalue())
    screen.draw(done(many), "", None)
    ended = stream.getvalue()[before:]
    assert "Done in" in ended
    screen.draw(done(many), "", None)
    assert stream.getvalue()[before:] == ended


def test_at_a_prompt_only_the_outcome_is_printed(running, failed):
    stream = io.StringIO()
    screen = LastLineScreen(stream)
    screen.draw(running, "", None)
    assert stream.getvalue() == ""
    screen.draw(failed, "", None)
    screen.draw(failed, "", None)
    assert stream.getvalue().strip() == "mnist: worker:1 on hdp-c02 (executor 2): ValueError: label 10 is outside 0…9"


@pytest.mark.parametrize(
    ("value", "stream", "kind"),
    [
        ("none", Terminal(), NoScreen),
        ("text", Terminal(), TerminalScreen),
        ("text", io.StringIO(), LogScreen),
        ("html", io.StringIO(), NotebookScreen),
        ("widget", io.StringIO(), PanelScreen),
        (" Widget ", Terminal(), PanelScreen),
        ("auto", Terminal(), TerminalScreen),
        ("", io.StringIO(), LogScreen),
    ],
)
def test_the_screen_is_chosen_by_the_variable_or_the_host(value, stream, kind):
    assert type(choose_screen({"TFOS_NB_PROGRESS": value}, stream)) is kind


class KernelShell(InteractiveShell):
    """A shell that has a kernel, like a notebook's."""

    kernel = Any()


class ZeppelinContext:
    pass


@pytest.fixture
def kernel_shell():
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    yield KernelShell.instance(config=config)
    KernelShell.clear_instance()


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({"JPY_SESSION_NAME": "a.ipynb"}, PanelScreen),
        ({}, NotebookScreen),
        ({"DATABRICKS_RUNTIME_VERSION": "15.4"}, PlainScreen),
        ({"DATABRICKS_RUNTIME_VERSION": "15.4", "TFOS_NB_PROGRESS": "html"}, NotebookScreen),
        ({"JPY_SESSION_NAME": "a.ipynb", "TFOS_NB_PROGRESS": "text"}, LogScreen),
    ],
)
def test_each_host_gets_a_suitable_screen(kernel_shell, environ, kind):
    assert type(choose_screen(environ, io.StringIO())) is kind


def test_without_anywidget_the_panel_uses_only_ipywidgets(kernel_shell, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "tfos_nb.widgets.panel", raising=False)
    assert type(choose_screen({"TFOS_NB_PROGRESS": "widget"})) is PlainScreen


def test_without_any_widgets_the_panel_is_html(kernel_shell, monkeypatch):
    for library in ("anywidget", "ipywidgets"):
        monkeypatch.setitem(sys.modules, library, None)
    for module in ("panel", "plain"):
        monkeypatch.delitem(sys.modules, f"tfos_nb.widgets.{module}", raising=False)
    assert type(choose_screen({"TFOS_NB_PROGRESS": "widget"})) is NotebookScreen


def test_on_zeppelin_only_the_running_cell_clears_and_rewrites_its_output(kernel_shell, running):
    kernel_shell.user_ns["z"] = ZeppelinContext()
    screen = choose_screen({})
    assert type(screen) is ClearingScreen
    assert not screen.outlives_cell
    with capture_output() as captured:
        screen.draw(running, "", None)
        (first,) = captured._outputs
        screen.draw(running, "", None)
        assert captured._outputs == [first]
        screen.draw(replace(running, elapsed=140.0), "", None)
    (second,) = captured._outputs  # the capture clears its outputs like a page
    assert "2 min 11 s" in first["data"]["text/html"]
    assert "2 min 20 s" in second["data"]["text/html"]
    assert not any(output.get("update") or output.get("transient") for output in (first, second))


def test_an_unknown_screen_is_refused_with_the_valid_ones():
    with pytest.raises(PlanError, match="TFOS_NB_PROGRESS must be one of auto, widget, html, text, none"):
        choose_screen({"TFOS_NB_PROGRESS": "fancy"})


def test_the_time_left_is_computed_from_observed_progress(running, make_node):
    def at(elapsed, step):
        node = make_node("worker:0", epoch=1, epochs=1, step=step, steps=100)
        return replace(running, nodes=(node,), elapsed=elapsed)

    shown = []

    class Screen(NoScreen):
        def draw(self, state, note, left):
            shown.append(left)

    cluster = Recorded(at(60.0, 10), at(70.0, 20), at(80.0, 30))
    view = LiveView(cluster, screen=Screen())
    for _ in range(3):
        view.say("")
    assert shown[0] is None
    assert shown[1:] == pytest.approx([80.0, 70.0])


def test_a_hint_is_removed_when_the_cluster_has_ended(running):
    stream = io.StringIO()
    view = LiveView(Recorded(running, done(running)), note="the note", screen=LogScreen(stream))
    view.hint("what to do next")
    running_text = stream.getvalue()
    assert running_text.splitlines()[-1] == "the note · what to do next"
    view.close()
    assert stream.getvalue().splitlines()[-1] == "the note"


def test_the_screen_gets_the_stop_of_the_launched_cluster(running):
    class Stoppable(Recorded):
        def request_stop(self):
            return "stopping"

    given = []

    class Screen(NoScreen):
        def stop_with(self, stop):
            given.append(stop)

    view = LiveView(Recorded(running), screen=Screen())
    view.follow(Stoppable(running))
    assert given[0] is None
    assert given[1]() == "stopping"


def test_a_closed_view_closes_its_screen(running):
    closed = []

    class Screen(NoScreen):
        def close(self):
            closed.append(True)

    with LiveView(Recorded(running), screen=Screen()):
        assert not closed
    assert closed == [True]


def test_the_panel_of_a_running_cluster_is_shown_again_and_updated(shell, running, monkeypatch):
    monkeypatch.setenv("TFOS_NB_PROGRESS", "html")
    cluster = Recorded(running, running, running, done(running))
    with capture_output() as captured:
        assert show_panel(cluster) is None
        (thread,) = view_threads()
        thread.join(DEADLINE)
    assert "train, epoch 2 of 3" in captured._outputs[0]["data"]["text/html"]
    assert "Done in" in captured._outputs[-1]["data"]["text/html"]


def test_an_ended_clusters_panel_has_all_nodes_and_the_log_and_no_thread(shell, many, monkeypatch):
    monkeypatch.setenv("TFOS_NB_PROGRESS", "widget")
    with capture_output() as captured:
        show_panel(Recorded(done(many)))
    assert not view_threads()
    (output,) = captured._outputs
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert all(f">worker:{i}<" in output["data"]["text/html"] for i in range(64))
    assert "line 7 of the log" in output["data"]["text/html"]


def test_an_end_caused_by_a_cell_is_drawn_before_the_cell_ends(shell, running, monkeypatch):
    """A headless run reads nothing after its last cell; in this test the view's own thread never draws."""
    monkeypatch.setattr("tfos_nb.widgets.live.PERIOD", 3600.0)
    cluster = Recorded(running)
    shell.user_ns["stop"] = lambda: cluster.states.__setitem__(0, done(running))
    before = list(shell.events.callbacks["post_run_cell"])
    with LiveView(cluster, screen=NotebookScreen()) as view:
        view.leave()
    with capture_output() as captured:
        shell.run_cell("1 + 1")
    assert not any("text/html" in output["data"] for output in captured._outputs)
    assert not view.closed
    with capture_output() as captured:
        shell.run_cell("stop()")
    assert "Done in" in captured._outputs[-1]["data"]["text/html"]
    assert view.closed
    assert not view_threads()
    assert shell.events.callbacks["post_run_cell"] == before


def test_without_updates_the_panel_is_shown_once(running, capsys, monkeypatch):
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    show_panel(Recorded(running))
    assert not view_threads()
    assert "worker:1" in capsys.readouterr().out


def test_the_stop_button_appears_only_once_it_works(running):
    """The view's thread draws in the meantime; an early press would have no effect."""

    class Slow(NoScreen):
        def __init__(self):
            self.drawn = []
            self.again = threading.Event()
            self.wired = False

        def draw(self, state, note, left):
            self.drawn.append((state.id, self.wired))
            self.again.set()

        def stop_with(self, stop):
            if stop is None:
                return
            for _ in range(2):  # the first drawing may have begun before
                self.again.clear()
                assert self.again.wait(DEADLINE)
            self.wired = True

    cluster, screen = Recorded(running), Slow()
    cluster.request_stop = lambda: "stopping"
    with LiveView(Recorded(replace(running, id="")), screen=screen) as view:
        view.follow(cluster)
    assert (running.id, True) in screen.drawn
    assert (running.id, False) not in screen.drawn


def shown_widths(text):
    """Return how many columns of a terminal each line takes."""
    wide = {"日", "本", "語", "の"}
    return [sum(2 if char in wide else 1 for char in line) for line in re.sub(r"\x1b\[\w*", "", text).splitlines()]


def test_wide_characters_do_not_wrap_the_terminals_lines(failed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    state = replace(failed, error="worker:0: " + "日本語の" * 40, name="日本語")
    TerminalScreen(stream).draw(state, "日本語" * 40, None)
    assert "日本語" in stream.getvalue()
    assert max(shown_widths(stream.getvalue())) < 60


@pytest.mark.parametrize("screen", [TerminalScreen, LogScreen, LastLineScreen])
def test_output_of_a_program_cannot_control_the_terminal(running, failed, screen):
    nasty = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m"
    stream = Terminal()
    shown = screen(stream)
    for state in (running, replace(failed, error=f"worker:0: {nasty} gone", name=f"m{nasty}")):
        shown.draw(state, f"note {nasty}", None)
        moved = tuple(replace(node, epoch=3, host=nasty) for node in state.nodes)
        shown.draw(replace(running, nodes=moved), f"other {nasty}", None)
    text = re.sub(r"\x1b\[(\d+F|K|J)", "", stream.getvalue())  # remove the redraw's own codes
    assert all(char == "\n" or char.isprintable() for char in text)


def test_the_outcome_at_a_prompt_is_short(failed):
    stream = io.StringIO()
    LastLineScreen(stream).draw(replace(failed, error="worker:0: " + "x" * 100_000), "", None)
    assert len(stream.getvalue()) < 700
