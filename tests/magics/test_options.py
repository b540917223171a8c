import contextlib

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.magics.arguments import find_data, is_data
from tfos_nb.magics.options import LaunchOptions, describe, parse_options
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode


def test_a_line_becomes_the_arguments_of_launch():
    options = parse_options(
        "mnist --workers 2 --ps 1 --chief --evaluator --cpus 3 --gpus 1 --name 'my run' --model-dir s3://b/m "
        "--timeout 90 --feed-timeout 30.5 --grace 0 --logdir hdfs://logs --no-autolog --env A=1 B=x=y "
        "--driver-ps-nodes --master-node master --protocol grpc+verbs --evaluator-may-fail --no-record"
    )
    assert options.variable == "mnist"
    assert options.launch_arguments() == {
        "workers": 2,
        "ps": 1,
        "chief": True,
        "evaluator": True,
        "input_mode": "spark",
        "cpus": 3,
        "gpus": 1,
        "name": "my run",
        "driver_ps_nodes": True,
        "master_node": "master",
        "protocol": "grpc+verbs",
        "evaluator_may_fail": True,
        "model_dir": "s3://b/m",
        "rendezvous_timeout": 90.0,
        "feed_timeout": 30.5,
        "grace": 0.0,
        "tensorboard": True,
        "log_dir": "hdfs://logs",
        "autolog": False,
        "env": {"A": "1", "B": "x=y"},
        "record": False,
    }


def test_options_left_out_keep_the_defaults_of_plan_and_launch():
    assert parse_options("").plan() == ClusterPlan()
    assert set(parse_options("").launch_arguments()) == set(ClusterPlan.field_names())


def test_the_line_sets_the_mlflow_option():
    said = {line: parse_options(line).launch_arguments().get("mlflow") for line in ("", "--mlflow", "--no-mlflow")}
    assert said == {"": None, "--mlflow": True, "--no-mlflow": False}
    assert parse_options("mnist --mlflow digits --quiet").launch_arguments()["mlflow"] == "digits"
    with pytest.raises(PlanError, match="--no-mlflow: not together with --mlflow"):
        parse_options("--mlflow digits --no-mlflow")


def test_the_cluster_has_the_name_of_its_variable_unless_named():
    assert parse_options("mnist").plan().name == "mnist"
    assert parse_options("mnist --name other").plan().name == "other"


def test_input_tensorflow_and_background_are_parsed():
    options = parse_options("--input tensorflow --background")
    assert (options.input_mode, options.background) == (InputMode.TENSORFLOW, True)
    assert parse_options("--wait").background is False


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--worker 2", "--worker: no such option; did you mean --workers?"),
        ("--worker=2", "--worker: no such option; did you mean --workers?"),
        ("-workers 2", "-workers: no such option; did you mean --workers?"),
        ("mnist --backgruond", "--backgruond: no such option; did you mean --background?"),
        ("--zzz", "--zzz: no such option"),
        ("--workers two", "--workers two: must be a whole number"),
        ("--workers 1.5", "--workers 1.5: must be a whole number"),
        ("--workers", "--workers: a value is missing"),
        ("--quiet=yes", "--quiet: it takes no value"),
        ("--timeout soon", "--timeout soon: must be a number of seconds, more than 0"),
        ("--timeout nan", "--timeout nan: must be a number of seconds, more than 0"),
        ("--grace -1", "--grace -1: must be a number of seconds, 0 or more"),
        ("--feed-timeout -3", "--feed-timeout -3: must be a number of seconds, more than 0"),
        ("--logdir ''", "--logdir must not be empty; give a directory"),
        ("--input sprak", "--input sprak: must be spark or tensorflow; did you mean spark?"),
        ("--env A", "--env A: must be KEY=VALUE; the cluster's NAME comes first on the line"),
        ("--wait --background", "--background: not together with --wait; leave one of them out"),
        ("\N{EM DASH}workers 2", "\N{EM DASH}workers: options begin with --; did you mean --workers?"),
        ("a \N{EN DASH}\N{EN DASH}quiet", "\N{EN DASH}\N{EN DASH}quiet: options begin with --; did you mean --quiet?"),
        ("--workers 2 # two", "#: a magic's line cannot have a comment; write it below"),
        ("one two", "two: the line has a NAME already (one); options begin with --"),
        ("my-model", "my-model: NAME must be a valid variable name; my_model is one"),
        ("2nd", "2nd: NAME must be a valid variable name"),
        ("class", "class: NAME must be a valid variable name"),
        ("list", "list: NAME would hide Python's own list; use another name"),
        ("--name 'open", "the line has an opening quote or backslash without its end: add the end"),
        ("--epochs 3", "--epochs 3 counts passes over --data, and no --data is given: add --data DF"),
        (
            "--data df --input tensorflow",
            "--data df: with --input tensorflow the nodes read files; leave one of them out",
        ),
        ("--workers -1", "workers must be a whole number, 0 or more, got -1"),
        ("--restarts -1", "restarts must be a whole number, 0 or more, got -1"),
        ("--min-workers 1", "min_workers= needs restarts=: without restarts the first loss ends the cluster"),
        ("--checkpoint-every 9", "checkpoint_every= needs restarts=: without restarts the first loss ends the cluster"),
        (
            "--restarts 1 --ps 1 --checkpoint-every 60",
            "checkpoint_every= is not for parameter servers: leave it out, and call ctx.checkpoint in main",
        ),
        (
            "--resume",
            "resume= needs restarts=: without restarts no state is kept that could be continued from",
        ),
        (
            "--restarts 1 --resume yesterday",
            (
                "resume='yesterday' is no run: give its directory, MODEL_DIR/checkpoints/RUN, a checkpoint in it, or "
                "RUN with model_dir="
            ),
        ),
        (
            "--restarts 1 --model-dir /a --resume /b/checkpoints/0123456789ab/fit/00000002",
            "resume= names a run of model_dir='/b', but model_dir is '/a': leave model_dir out",
        ),
        ("--restarts 1 --min-workers 9", "min_workers must be at most 1, the number of workers, got 9"),
        ("--model-dir hdfs:/x", "model_dir: hdfs:/…: a URL has two slashes after its scheme, as in hdfs:///models"),
    ],
)
def test_mistakes_are_reported_in_one_line(line, message):
    with pytest.raises(PlanError) as caught:
        parse_options(line)
    assert str(caught.value) == message


@pytest.mark.parametrize("line", ["--worker 2", "--workers two", "--help", "-h", ""])
def test_the_parser_neither_prints_nor_exits(line, capsys):
    with contextlib.suppress(PlanError):
        parse_options(line)
    assert capsys.readouterr() == ("", "")


def launch(main, args=None, *, feed_timeout=600.0, rendezvous_timeout=120.0, model_dir=None):
    raise AssertionError("only its signature is read")


def test_the_description_shows_every_option_with_its_default():
    text = describe(launch)
    for option in ("--workers N", "--ps N", "--data VAR", "--env K=V", "--no-autolog", "--background", "--quiet"):
        assert option in text
    assert "how many workers (default: 1)" in text
    assert "spark (rows are fed) or tensorflow (the nodes read files) (default: spark)" in text
    told = " ".join(text.split())
    assert "to the rendezvous (default: 120.0)" in told
    assert "rows wait for it (default: 600.0)" in told
    assert text.startswith("usage: %%tfos_cluster [NAME] [options]")
    assert "def main(args, ctx):" in text


def test_a_frame_with_a_similar_name_is_suggested_before_other_variables():
    frame = type("DataFrame", (), {"mapInArrow": lambda self: None})()
    with pytest.raises(PlanError) as caught:
        find_data("trian_df", {"train_df": frame, "trian_dg": 3})
    assert str(caught.value) == "--data trian_df: no such variable; did you mean train_df?"


def test_a_value_that_is_not_spark_data_is_refused_with_its_type():
    with pytest.raises(PlanError, match="--data rows: must be a Spark DataFrame or RDD, got a list"):
        find_data("rows", {"rows": [1, 2]})


def test_the_error_for_a_pandas_frame_says_how_to_convert_it():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(PlanError, match=r"--data pdf: a pandas DataFrame; spark.createDataFrame\(pdf\) makes one"):
        find_data("pdf", {"pdf": pandas.DataFrame({"a": [1]})})


def test_sparks_classes_are_data():
    from pyspark import RDD
    from pyspark.sql import DataFrame

    assert all(is_data(object.__new__(kind)) for kind in (DataFrame, RDD))
    assert not is_data(DataFrame)


def test_an_object_with_every_attribute_is_not_data():
    class Column:
        def __getattr__(self, name):
            return self

    assert not is_data(Column())


def test_the_line_overrides_config_and_config_overrides_builtin_defaults():
    defaults = {"workers": 4, "background": True, "model_dir": "s3://b"}
    options = parse_options("--workers 2 --wait", defaults)
    assert (options.workers, options.background, options.model_dir) == (2, False, "s3://b")
    assert parse_options("").workers == ClusterPlan.workers


def test_either_tensorboard_option_turns_it_on():
    assert parse_options("--tensorboard").launch_arguments()["tensorboard"] is True
    assert "log_dir" not in parse_options("--tensorboard").launch_arguments()
    assert "tensorboard" not in parse_options("").launch_arguments()


def test_equal_lines_give_equal_options():
    assert parse_options("mnist --workers 2") == LaunchOptions("mnist", workers=2, name="mnist")
