import os
import signal
import threading
from functools import partial

import pytest

import tfos_nb.magics
from tests.magics.conftest import DEADLINE, interrupt_when
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.magics.cell_work import StoppedByUser
from tfos_nb.magics.cluster import TfosMagics
from tfos_nb.state.cluster_state import ClusterStatus

MAIN = "def main(args, ctx):\n    return args\n"


def test_a_cell_is_launched_fed_and_waited_for(run, shell, launcher):
    shell.user_ns["options"] = {"lr": 0.1}
    result, shown = run(f"%%tfos_cluster mnist --workers 2 --data train_df --epochs 3 --args options\n{MAIN}")
    assert result.success
    cluster = shell.user_ns["mnist"]
    assert cluster is launcher.last
    assert cluster.calls == ["wait_until_up", "train", "wait"]
    assert cluster.fed == (shell.user_ns["train_df"], 3)
    assert cluster.returned == {"lr": 0.1}
    assert shown.index("mnist · Planned · 2 workers") < shown.index("mnist · Done · 2 workers")


def test_variables_in_the_line_are_expanded(run, shell, launcher):
    shell.user_ns["n"] = 3
    run(f"%%tfos_cluster --workers {{n}} --input tensorflow\n{MAIN}")
    assert launcher.last.plan.workers == 3
    assert shell.user_ns["cluster"] is launcher.last


def test_without_data_the_cell_returns_when_the_nodes_are_up(run, launcher):
    result, shown = run(f"%%tfos_cluster mnist --workers 2\n{MAIN}")
    assert result.success
    assert launcher.last.calls == ["wait_until_up"]
    launcher.last.stop()
    assert "mnist is up: mnist.train(df) feeds it, mnist.wait() waits for its end." in shown


@pytest.mark.parametrize("configured", [False, True])
def test_with_wait_the_cell_waits_for_every_main_even_without_data(run, launcher, configured):
    run(f"%config TfosMagics.background = {configured}")
    result, shown = run(f"%%tfos_cluster mnist --workers 2 --wait\n{MAIN}")
    assert result.success
    assert launcher.last.calls == ["wait_until_up", "wait"]
    assert "mnist · Done · 2 workers" in shown


def test_with_wait_a_failure_of_main_is_raised_in_the_cell(run):
    result, _ = run("%%tfos_cluster mnist --wait\ndef main(args, ctx): raise ValueError('label 10')\n")
    assert isinstance(result.error_in_exec, ValueError)


@pytest.mark.parametrize("background", ["", " --background"])
def test_a_feed_ended_by_the_users_stop_is_not_an_error(run, launcher, shell, background):
    launcher.cut_short = True
    result, shown = run(f"%%tfos_cluster mnist --data train_df{background}\n{MAIN}")
    end_of("tfos-mnist", "tfos-view")
    assert result.success
    assert launcher.last.snapshot().status is ClusterStatus.STOPPED
    assert "ClusterClosed" not in shown
    assert launcher.last.calls == ["wait_until_up", "train"]


def test_nodes_that_read_files_are_waited_for(run, launcher):
    run(f"%%tfos_cluster mnist --input tensorflow\n{MAIN}")
    assert launcher.last.calls == ["wait_until_up", "wait"]


def test_in_the_background_the_cell_returns_at_once(run, launcher):
    launcher.hold = threading.Event()
    result, shown = run(f"%%tfos_cluster mnist --data train_df --background\n{MAIN}")
    assert result.success
    assert launcher.last.snapshot().status in (ClusterStatus.STARTING, ClusterStatus.RUNNING)
    assert "mnist runs in the background: mnist.wait() waits for it" in shown
    launcher.hold.set()
    end_of("tfos-mnist", "tfos-view")
    assert launcher.last.snapshot().status is ClusterStatus.DONE


def test_an_error_in_the_background_is_printed_and_frees_the_slots(run, launcher, capsys):
    launcher.hold = threading.Event()
    run("%%tfos_cluster mnist --data train_df --background\ndef main(args, ctx): 1 / 0\n")
    launcher.hold.set()
    end_of("tfos-mnist", "tfos-view")
    assert launcher.last.stopped.is_set()
    assert "mnist: division by zero" in capsys.readouterr().out


def test_the_chosen_function_is_printed(run):
    _, shown = run("%%tfos_cluster m --data train_df\ndef build(args, ctx): pass\ndef train(args, ctx): pass\n")
    assert "runs train, the last of build, train" in shown


def test_quiet_shows_nothing(run):
    result, shown = run(f"%%tfos_cluster mnist --data train_df --quiet\n{MAIN}")
    assert result.success
    assert shown == ""


def test_the_line_magic_runs_an_existing_function(run, shell, launcher):
    run("def train(args, ctx): return 5")
    result, _ = run("%tfos_cluster mnist --fn train --input tensorflow")
    assert result.success
    assert launcher.last.returned == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mnist --worker 2", "--worker: no such option; did you mean --workers?"),
        ("mnist --data trian_df", "--data trian_df: no such variable; did you mean train_df?"),
        ("mnist --args opts", "--args opts: no such variable; did you mean options?"),
        ("train_df", "train_df: NAME would overwrite your Rows train_df; take another"),
        ("math", "math: NAME would overwrite your module math; take another"),
        ("helper", "helper: NAME would overwrite your function helper; take another"),
        ("main", "main: the cell defines it; give the cluster another NAME"),
    ],
)
def test_a_wrong_line_is_refused_in_one_line_and_starts_nothing(run, launcher, line, message):
    run("import math\noptions = 1\ndef helper(): pass")
    result, shown = run(f"%%tfos_cluster {line}\n{MAIN}")
    assert isinstance(result.error_in_exec, PlanError)
    assert shown.strip() == f"PlanError: {message}"
    assert launcher.clusters == []


def test_with_only_spark_connect_the_cell_is_refused_before_it_runs(run, shell, launcher, monkeypatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    monkeypatch.setenv("IS_SERVERLESS", "TRUE")
    _, shown = run(f"%%tfos_cluster mnist --workers 2\nran = True\n{MAIN}")
    assert "PlanError: this compute of Databricks (Serverless) gives notebooks Spark Connect" in shown
    assert "ran" not in shell.user_ns
    assert launcher.clusters == []
    assert "Spark would refuse it: this compute of Databricks" in run("%tfos_plan --workers 2")[1]


def test_a_running_cluster_is_not_overwritten(run, launcher):
    run(f"%%tfos_cluster mnist --workers 2\n{MAIN}")
    _, shown = run(f"%%tfos_cluster mnist --workers 2\n{MAIN}")
    assert shown.strip() == "PlanError: mnist: this cluster still runs (2 nodes); mnist.stop() ends it"
    launcher.last.stop()
    result, _ = run(f"%%tfos_cluster mnist --data train_df\n{MAIN}")
    assert result.success
    assert len(launcher.clusters) == 2


def test_a_failure_is_displayed_then_raised_and_printed_once(run, shell):
    shell.user_ns["failure"] = failure = NodeFailed(
        "main raised ValueError", node="worker:0", remote_traceback="Traceback: line 3\nValueError: label 10"
    )
    result, shown = run("%%tfos_cluster mnist --data train_df\ndef main(args, ctx): raise failure\n")
    assert result.error_in_exec is failure
    assert shown.count("ValueError: label 10") == 1
    assert shown.index("mnist · Failed") < shown.index("NodeFailed: worker:0: main raised ValueError")
    assert "test_cluster.py" not in shown


def test_a_refused_plan_is_shown_with_a_one_line_error(run, launcher):
    launcher.raises = PlanError("2 slots are free and 3 are needed")
    result, shown = run(f"%%tfos_cluster mnist --workers 3 --data train_df\n{MAIN}")
    assert result.error_in_exec is launcher.raises
    assert "worker:2      1 CPU, fed from Spark" in shown
    assert shown.splitlines()[-1] == "PlanError: 2 slots are free and 3 are needed"


def test_an_error_of_main_fails_the_cell_after_the_final_display(run, launcher):
    result, shown = run("%%tfos_cluster mnist --data train_df\ndef main(args, ctx): raise ValueError('label 10')\n")
    assert isinstance(result.error_in_exec, ValueError)
    assert shown.index("mnist · Failed") < shown.rindex("ValueError: label 10")
    assert launcher.last.stopped.is_set()


def test_an_exception_of_the_cell_shows_only_the_users_traceback(run, launcher):
    result, shown = run("%%tfos_cluster mnist\nimport json\n\njson.loads('{')\ndef main(args, ctx): pass\n")
    assert result.error_in_exec.__class__.__name__ == "JSONDecodeError"
    assert "json.loads('{')" in shown
    assert "Cell In[1], line 4" in shown
    assert "tfos_nb" not in shown
    assert "interactiveshell.py" not in shown
    assert launcher.clusters == []


def test_a_syntax_error_is_shown_without_our_frames(run):
    result, shown = run("%%tfos_cluster mnist\ndef main(args, ctx)\n    pass\n")
    assert not result.success
    assert "SyntaxError: expected ':'" in shown
    assert "tfos_nb" not in shown


def test_the_kernels_interrupt_stops_the_cluster_with_one_line(run, launcher):
    launcher.hold = threading.Event()
    thread = interrupt_when(partial(launcher.waited_for.wait, DEADLINE))
    result, shown = run(f"%%tfos_cluster mnist --workers 2 --data train_df\n{MAIN}")
    thread.join(DEADLINE)
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert launcher.last.calls[-1] == "request_stop"
    assert launcher.last.snapshot().status is ClusterStatus.STOPPED
    assert shown.splitlines()[-1] == "stopped by you: 2 nodes ended, their slots are free"
    assert "stopping" in shown
    assert "mnist · Stopped" in shown
    assert "Traceback" not in shown
    launcher.hold = None
    result, _ = run(f"%%tfos_cluster mnist --data train_df\n{MAIN}")
    assert result.success


def test_the_second_interrupt_ends_the_nodes_at_once(run, launcher):
    launcher.hold, launcher.stubborn = threading.Event(), 2
    asked = []
    thread = interrupt_when(
        partial(launcher.waited_for.wait, DEADLINE), lambda: asked.append(launcher.last.asked.get(timeout=DEADLINE))
    )
    result, shown = run(f"%%tfos_cluster mnist --workers 2 --data train_df\n{MAIN}")
    thread.join(DEADLINE)
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert asked == [1]
    assert launcher.last.requests == 2
    assert shown.index("stopping") < shown.index("ending at once")
    assert "Traceback" not in shown


def test_the_third_interrupt_ends_the_cell_even_if_nodes_still_run(run, launcher):
    launcher.hold, launcher.stubborn = threading.Event(), 99

    def asked():
        return launcher.last.asked.get(timeout=DEADLINE)

    thread = interrupt_when(partial(launcher.waited_for.wait, DEADLINE), asked, asked)
    result, shown = run(f"%%tfos_cluster mnist --workers 2 --data train_df\n{MAIN}")
    thread.join(DEADLINE)
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert shown.splitlines()[-1] == "stopped by you: 0 of 2 nodes ended so far"
    launcher.last.stop()
    end_of("tfos-mnist", "tfos-view")


def test_an_interrupt_while_a_cell_waits_does_not_reach_sparks_handler(run, launcher):
    """PySpark's handler would cancel every job of the session before the nodes can stop."""
    launcher.hold = threading.Event()
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("cancelAllJobs"))
    try:
        thread = interrupt_when(partial(launcher.waited_for.wait, DEADLINE))
        result, _ = run(f"%%tfos_cluster mnist --data train_df\n{MAIN}")
        thread.join(DEADLINE)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert seen == ["cancelAllJobs"]  # only by the interrupt after the cell: the handler was restored


def test_an_interrupt_before_the_nodes_says_that_none_was_started(run, shell, launcher):
    launcher.raises = KeyboardInterrupt()
    result, shown = run(f"%%tfos_cluster mnist\n{MAIN}")
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert shown.splitlines()[-1] == "stopped by you before any node was started"
    assert "mnist" not in shell.user_ns


def test_the_question_mark_shows_all_options_and_an_example(shell):
    told = shell.object_inspect_mime("%%tfos_cluster")
    text = told["text/plain"]
    assert "--workers N" in text
    assert "Example" in text
    assert "Run this cell's function" in text


def test_loading_twice_and_unloading_restore_the_shell(shell):
    tfos_nb.magics.load(shell)
    tfos_nb.magics.load(shell)
    assert "tfos_stop" in shell.magics_manager.magics["line"]
    assert len([one for one in shell.configurables if isinstance(one, TfosMagics)]) == 1
    assert len(shell.Completer.custom_matchers) == 1
    tfos_nb.magics.unload(shell)
    tfos_nb.magics.unload(shell)
    left = {name for kind in shell.magics_manager.magics.values() for name in kind}
    assert not {name for name in left if name.startswith("tfos")}
    assert TfosMagics.__name__ not in shell.magics_manager.registry
    assert not [one for one in shell.configurables if isinstance(one, TfosMagics)]
    assert shell.Completer.custom_matchers == []


def end_of(*names):
    """Wait until the threads of these names have ended."""
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(DEADLINE)
            assert not thread.is_alive()


# --- detached

READER = "def rows(spark): return spark.range(3)\n"


def test_a_detached_cluster_gets_the_functions_that_read_its_rows_and_the_cell_returns(run, launcher, shell):
    line = "%%tfos_cluster mnist --detach --keep 2 --data rows --validation rows --epochs 3"
    result, shown = run(f"{line}\n{READER}{MAIN}")
    assert result.success
    options = launcher.last.options
    assert options["data"] is options["validation"] is shell.user_ns["rows"]
    assert (options["detach"], options["keep"], options["epochs"]) == (True, 2.0, 3)
    assert launcher.last.calls == [], "its process feeds it and waits"
    assert "mnist outlives this kernel: %tfos_attach mnist shows it in another; mnist.stop() stops it." in shown
    launcher.last.stop()
    end_of("tfos-view")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--detach --data train_df", "--data train_df: with --detach a function that reads the rows, such as def"),
        ("--detach --data trian", "--data trian: no such variable"),
        ("--detach --wait", "--wait: not together with --detach"),
        ("--keep 2", "--keep 2 needs --detach"),
        ("--detach --keep soon", "--keep soon: must be a number of hours, 0 or more"),
    ],
)
def test_what_cannot_be_detached_is_refused_before_anything_starts(run, launcher, line, message):
    assert message in run(f"%%tfos_cluster mnist {line}\n{MAIN}")[1]
    assert launcher.clusters == []
