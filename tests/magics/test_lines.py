import threading
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql.types import ArrayType, FloatType, StructField

from tests.magics.conftest import DEADLINE, Rows, interrupt_when
from tests.magics.test_cluster import MAIN, end_of
from tfos_nb.errors import PlanError
from tfos_nb.inference.column_matching import LINE, feeds_of, fields_added
from tfos_nb.magics.cell_work import StoppedByUser
from tfos_nb.magics.lines import _overlap
from tfos_nb.records.run import Run, to_json
from tfos_nb.runtime.models.signature import Tensor
from tfos_nb.state.cluster_state import ClusterStatus


@pytest.fixture
def mnist(run, launcher):
    """A cluster of two workers that waits for rows."""
    run(f"%%tfos_cluster mnist --workers 2\n{MAIN}")
    yield launcher.last
    launcher.last.stop()
    end_of("tfos-mnist", "tfos-view")


def test_stop_status_and_logs_find_the_only_cluster(run, mnist):
    assert "mnist · Running · 2 workers" in run("%tfos_status")[1]
    assert run("%tfos_logs worker:1")[1] == "what worker:1 wrote\n"
    assert run("%tfos_stop")[1] == "mnist: stopped: 2 nodes ended, their slots are free\n"
    assert mnist.graces == [None]
    assert run("%tfos_stop mnist")[1] == "mnist: it was stopped already\n"


def test_stop_now_gives_the_nodes_no_grace(run, mnist):
    run("%tfos_stop --now mnist")
    assert mnist.graces == [0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%tfos_stop", "%tfos_stop: several clusters are possible (one, two); name one: %tfos_stop one"),
        ("%tfos_stop tow", "%tfos_stop tow: no such variable; did you mean two?"),
        ("%tfos_stop one --nwo", "--nwo: no such option; did you mean --now?"),
        ("%tfos_stop one two", "two: %tfos_stop does not take this argument; write %tfos_stop [NAME] [--now]"),
        ("%tfos_stop 'one", "the line has an opening quote or backslash without its end: add the end"),
        ("%tfos_status train_df", "%tfos_status train_df: not a cluster but of type Rows"),
        ("%tfos_panel tow", "%tfos_panel tow: no such variable; did you mean two?"),
        ("%tfos_logs wroker:0 one", "%tfos_logs wroker:0: one has no such node; did you mean worker:0?"),
        ("%tfos_logs one", "%tfos_logs one: name a node before the cluster: %tfos_logs worker:0 one"),
        ("%tfos_logs", "%tfos_logs: NODE is missing; write %tfos_logs NODE [NAME] [-f] [-n N]"),
        ("%tfos_logs worker:0 one -n 0", "-n/--lines 0: must be 1 or more"),
        ("%tfos_train", "%tfos_train: DF is missing; write %tfos_train DF [NAME] [--epochs E] [--validation VAR]"),
        ("%tfos_train trian_df one", "%tfos_train trian_df: no such variable; did you mean train_df?"),
        ("%tfos_train train_df one --epochs 0", "--epochs must be a whole number, 1 or more, got 0"),
        ("%tfos_train train_df one --epoch 2", "--epoch: no such option; did you mean --epochs?"),
        ("%tfos_inference train_df",
         "%tfos_inference: -o OUT is missing; write %tfos_inference DF -o OUT [NAME] [--model PATH] [options]"),
        ("%tfos_inference train_df -o list", "list: OUT would hide Python's own list; use another name"),
        ("%tfos_inference train_df -o one", "one: OUT would overwrite your LocalCluster one; take another"),
        ("%tfos_inference train_df -o out one",
         "%tfos_inference: one still runs, so it has no model yet; name one with --model PATH"),
        ("%tfos_tensorboard --hieght 3", "--hieght: no such option; did you mean --height?"),
        ("%tfos_plan --worker 2", "--worker: no such option; did you mean --workers?"),
        ("%tfos_plan --data trian_df", "--data trian_df: no such variable; did you mean train_df?"),
        ("%tfos_doctor now", "now: %tfos_doctor does not take this argument; write %tfos_doctor"),
        ("%tfos_runs a b", "b: %tfos_runs does not take this argument; write %tfos_runs [DIR]"),
        ("%tfos_runs /nowhere",
         "/nowhere does not exist: give the model_dir of a cluster, or a directory that has some"),
        ("%tfos_spark --stop --slots 2", "--stop cannot be combined with --slots; start a session in another line"),
        ("%tfos_spark --stop", "--stop: one still runs on this session; %tfos_stop one ends it first"),
        ("%tfos_spark --conf a", "--conf a: must be KEY=VALUE"),
        ("%tfos_logs 1 one", "%tfos_logs 1: one has no such node; it has worker:0"),
        ("%tfos_status ONE", "%tfos_status ONE: no such variable; did you mean one?"),
        ("%tfos_status --help", "--help: no such option; %tfos_status? shows them all"),
        ("%tfos_spark -h", "-h: no such option; %tfos_spark? shows them all"),
        ("%tfos_tensorboard one --logdir /tmp", "give a cluster or --logdir, got one and --logdir /tmp; leave one out"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_in_one_line_with_the_right_form(run, launcher, line, message):
    for name in ("one", "two"):
        run(f"%%tfos_cluster {name}\n{MAIN}")
    assert run(line)[1].strip() == f"PlanError: {message}"
    for cluster in launcher.clusters:
        cluster.stop()
    end_of("tfos-view")


def test_without_a_cluster_the_line_magics_say_how_to_start_one(run):
    for magic in ("%tfos_stop", "%tfos_status", "%tfos_panel", "%tfos_tensorboard"):
        assert run(magic)[1].strip() == f"PlanError: {magic}: no cluster exists yet; %%tfos_cluster starts one"


@pytest.mark.parametrize(
    ("magic", "told"),
    [
        ("tfos_status", "usage: %tfos_status [NAME]"),
        ("tfos_logs", "-f, --follow"),
        ("tfos_stop", "--now"),
        ("tfos_train", "--epochs E"),
        ("tfos_inference", "--batch-size N"),
        ("tfos_tensorboard", "--logdir DIR"),
        ("tfos_plan", "usage: %tfos_plan [NAME] [options]"),
        ("tfos_plan", "Nothing is started."),
        ("tfos_spark", "--slots N"),
        ("tfos_doctor", "say how to install what is missing"),
        ("tfos_panel", "usage: %tfos_panel [NAME]"),
        ("tfos_runs", "usage: %tfos_runs [DIR]"),
        ("tfos_attach", "usage: %tfos_attach [NAME] [VAR]"),
    ],
)
def test_the_question_mark_shows_the_options_of_every_line_magic(shell, magic, told):
    assert told in shell.object_inspect_mime(f"%{magic}")["text/plain"]


# --- logs


def test_logs_shows_the_last_lines_only_if_asked(run, mnist):
    mnist.written["worker:0"] = ["one", "two", "three"]
    assert run("%tfos_logs worker:0 -n 2")[1] == "two\nthree\n"
    assert run("%tfos_logs worker:0 -n 9 mnist")[1] == "one\ntwo\nthree\n"
    mnist.written["worker:0"] = []
    assert run("%tfos_logs worker:0")[1] == "worker:0 has written nothing yet\n"


def test_logs_follows_until_the_cluster_ends(run, mnist):
    mnist.written["worker:0"] = ["one"]
    read = mnist.logs
    reads = []

    def logs(node):
        reads.append(node)
        if len(reads) == 2:
            mnist.written[node] = ["one", "two"]
        if len(reads) == 3:
            mnist.written[node] = ["two", "three"]  # the oldest was dropped
            mnist.stop()
        return read(node)

    mnist.logs = logs
    result, shown = run("%tfos_logs worker:0 -f")
    assert result.success
    assert shown == "one\ntwo\nthree\n"


def test_an_interrupt_ends_following_the_log_but_not_the_cluster(run, mnist):
    followed = threading.Event()
    read = mnist.snapshot

    def snapshot():
        followed.set()
        return read()

    mnist.snapshot = snapshot
    followed.clear()
    thread = interrupt_when(partial(followed.wait, DEADLINE))
    result, shown = run("%tfos_logs worker:0 mnist --follow")
    thread.join(DEADLINE)
    assert result.success
    assert shown.splitlines()[-1] == "worker:0 is no longer followed; its cluster continues"
    assert not mnist.stopped.is_set()
    assert mnist.requests == 0


@pytest.mark.parametrize(
    ("before", "now", "known"),
    [
        ([], ["a"], 0),
        (["a"], ["a", "b"], 1),
        (["a", "b"], ["b", "c"], 1),
        (["a", "a"], ["a", "a", "a"], 2),
        (["a", "b"], ["c", "d"], 0),
        (["a"], [], 0),
    ],
)
def test_lines_that_were_shown_are_not_shown_again(before, now, known):
    assert _overlap(before, now) == known


# --- plan


def test_plan_shows_the_plan_and_starts_nothing(run, launcher, run_nothing_of_spark):
    result, shown = run("%tfos_plan mnist --workers 2 --ps 1 --data train_df --epochs 2")
    assert result.success
    assert "cluster mnist: 4 nodes, input from spark" in shown
    assert "ps:0" in shown
    assert "there is no session yet" in shown
    assert launcher.clusters == []


def test_plan_of_a_cluster_shows_its_launch_plan(run, mnist):
    assert run("%tfos_plan mnist")[1] == f"{mnist.plan}\n"


@pytest.fixture
def run_nothing_of_spark(monkeypatch):
    import tfos_nb.spark.session

    monkeypatch.setattr(tfos_nb.spark.session, "active_session", lambda: None)


# --- train


def test_train_feeds_the_rows_and_says_what_comes_next(run, shell, mnist):
    result, shown = run("%tfos_train train_df --epochs 3 mnist")
    assert result.success
    assert mnist.fed == (shell.user_ns["train_df"], 3)
    assert "mnist has these rows: %tfos_train feeds it more, mnist.wait() waits for its end." in shown
    run("%tfos_train train_df")
    assert mnist.fed == (shell.user_ns["train_df"], 1)


def test_an_interrupt_of_train_stops_the_cluster(run, mnist):
    feeding = threading.Event()

    def train(data, epochs=1):
        feeding.set()
        mnist.wait()

    mnist.train, mnist.hold = train, threading.Event()
    thread = interrupt_when(partial(feeding.wait, DEADLINE))
    result, shown = run("%tfos_train train_df mnist")
    thread.join(DEADLINE)
    assert isinstance(result.error_in_exec, StoppedByUser)
    assert mnist.requests == 1
    assert shown.splitlines()[-1] == "stopped by you: 2 nodes ended, their slots are free"


def test_an_error_of_train_is_raised_and_does_not_stop_the_cluster(run, mnist):
    def train(data, epochs=1):
        raise ValueError("no rows")

    mnist.train = train
    result, _ = run("%tfos_train train_df mnist")
    assert str(result.error_in_exec) == "no rows"
    assert mnist.graces == []


# --- inference


def test_inference_uses_the_model_that_the_chief_returned(run, shell, provided, tmp_path):
    shell.user_ns["path"] = tmp_path
    run("%%tfos_cluster mnist --data train_df --args path\ndef main(args, ctx): return args\n")
    provided.returns = scored = Rows()
    result, shown = run("%tfos_inference train_df -o scored mnist")
    assert result.success
    assert shell.user_ns["scored"] is scored
    assert provided.calls == [
        (
            "predict",
            (shell.user_ns["train_df"], str(tmp_path)),
            {"inputs": None, "output": "prediction", "batch_size": 1024},
        )
    ]
    assert shown.startswith("scored: train_df with prediction, by ")
    assert run("%tfos_inference train_df -o scored")[0].success  # the variable may be assigned again


def test_inference_passes_its_options_on(run, shell, provided):
    provided.returns = Rows()
    run("%tfos_inference train_df --model s3://b/m.keras --inputs x,y --output p --batch-size 32 -o scored")
    assert provided.calls[0][1][1] == "s3://b/m.keras"
    assert provided.calls[0][2] == {"inputs": ["x", "y"], "output": "p", "batch_size": 32}


@pytest.mark.parametrize(
    ("shapes", "inputs", "told"),
    [
        ([4], None, "2 columns fit (a, b). The model takes x"),
        ([4], None, "Say which: --inputs COLUMN, or several numeric ones, side by side: --inputs a,b,…"),
        ([4, 4], None, "Say which: --inputs COLUMN,COLUMN, in the order of the inputs"),
        ([4], ["c"], "--inputs: no column 'c'"),
        ([4, 4], ["a"], "--inputs names 1 column, and must name one for each input"),
    ],
)
def test_errors_about_columns_name_the_options_of_inference(shapes, inputs, told):
    tensors = [Tensor(name, "float32", (shape,)) for name, shape in zip("xy", shapes, strict=False)]
    columns = [StructField(name, ArrayType(FloatType())) for name in "ab"]
    with pytest.raises(PlanError) as refused:
        feeds_of(tensors, columns, inputs, words=LINE)
    assert told in str(refused.value)


def test_an_error_about_the_output_names_the_option_of_inference():
    with pytest.raises(PlanError, match="take another name with --output …, or drop it"):
        fields_added([Tensor("y", "float32", ())], "a", ["a"], False, LINE)


def test_inference_says_what_main_must_return(run):
    run("%%tfos_cluster mnist --data train_df\ndef main(args, ctx): return 5\n")
    shown = run("%tfos_inference train_df -o scored")[1]
    assert shown.strip() == (
        "PlanError: %tfos_inference: the chief of mnist returned a value of type int, not the path of a model: "
        "let main return ctx.save(model), or name one with --model PATH"
    )


def test_inference_of_a_failed_cluster_is_refused(run):
    run("%%tfos_cluster mnist --data train_df\ndef main(args, ctx): 1 / 0\n")
    assert "mnist failed, so it has no model" in run("%tfos_inference train_df -o scored")[1]


# --- panel and TensorBoard


def test_panel_and_tensorboard_receive_the_cluster(run, mnist, provided):
    run("%tfos_panel")
    run("%tfos_tensorboard mnist --height 400 --no-frame")
    assert provided.calls == [
        ("show_panel", (mnist,), {}),
        ("show_tensorboard", (mnist,), {"log_dir": None, "height": 400, "frame": False}),
    ]


def test_tensorboard_of_a_directory_needs_no_cluster(run, provided, tmp_path: Path):
    run(f"%tfos_tensorboard --logdir {tmp_path}")
    assert provided.calls == [
        ("show_tensorboard", (None,), {"log_dir": str(tmp_path), "height": 800, "frame": True}),
    ]


def test_attach_makes_a_detached_cluster_a_variable_and_shows_it(run, mnist, shell, provided):
    mnist.id = "abcdef000001"
    provided.returns = mnist
    assert run("%tfos_attach abcdef000001 night")[0].success
    assert shell.user_ns["night"] is mnist
    assert run("%tfos_attach")[0].success, "its name is the variable that it has already"
    assert provided.calls == [
        ("attach", ("abcdef000001",), {}),
        ("show_panel", (mnist,), {}),
        ("attach", ("",), {}),
        ("show_panel", (mnist,), {}),
    ]
    assert run("%tfos_attach mnist train_df")[1].strip() == (
        "PlanError: train_df: NAME would overwrite your Rows train_df; take another"
    )
    assert "VAR" in run("%tfos_attach mnist 1x")[1]


def test_showing_a_cluster_does_not_change_its_status(run, mnist):
    for line in ("%tfos_status", "%tfos_plan mnist", "%tfos_panel", "%tfos_logs worker:0"):
        assert run(line)[0].success
    assert mnist.snapshot().status is ClusterStatus.RUNNING


# --- recorded runs


def test_runs_lists_the_records_of_a_directory(run, tmp_path):
    (tmp_path / "my models/tfos_runs").mkdir(parents=True)
    (tmp_path / "my models/tfos_runs/1.json").write_text(to_json(Run("6f2c", "digits", "DONE", 0.0, 9.0, 9.0)))
    shown = run(f"%tfos_runs '{tmp_path}/my models'")[1]
    assert shown.startswith(f"Runs: 1 run in {tmp_path}/my models\n")
    assert "digits 6f2c" in shown


def test_runs_searches_the_directories_of_models(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "No runs here yet" in run("%tfos_runs")[1]
    (tmp_path / "mine/tfos_runs").mkdir(parents=True)
    (tmp_path / "mine/tfos_runs/1.json").write_text(to_json(Run("6f2c", "digits", "DONE", 0.0, 9.0, 9.0)))
    run("%config TfosMagics.model_dir = 'mine'")
    assert "digits 6f2c" in run("%tfos_runs")[1]
