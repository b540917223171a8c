"""Parsers of the line magics, one for each, from which its ``?`` and its completion are made too.

An argument's name in the parser gives its meaning, which is the same in all magics: ``df`` is a DataFrame, ``cluster``
is a cluster, and so on.
"""

from __future__ import annotations

import argparse

from tfos_nb.magics.arguments import LineParser, assignment, whole
from tfos_nb.magics.options import build_parser

__all__ = [
    "ALL",
    "ATTACH",
    "CLUSTER_LINES",
    "DOCTOR",
    "INFERENCE",
    "LOGS",
    "PANEL",
    "PLAN",
    "RUNS",
    "SPARK",
    "STATUS",
    "STOP",
    "TENSORBOARD",
    "TRAIN",
]


_METAVARS = {"cluster": "NAME", "detached": "NAME", "variable": "VAR"}


def _parser(magic: str, usage: str, description: str, *arguments: tuple[str, str]) -> LineParser:
    """Make a parser with optional positional arguments."""
    parser = LineParser(magic, usage, description)
    for name, text in arguments:
        metavar = _METAVARS.get(name, name.upper())
        parser.add_argument(name, metavar=metavar, nargs="?", help=text)
    return parser


_WHICH = ("cluster", "the cluster; may be left out if only one runs")


def _whole_from_1(text: str) -> int:
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


STATUS = _parser("%tfos_status", "[NAME]", "Show the status of a cluster.", _WHICH)

PANEL = _parser("%tfos_panel", "[NAME]", "Show the panel of a cluster once more, here.", _WHICH)

ATTACH = _parser(
    "%tfos_attach",
    "[NAME] [VAR]",
    "Show a detached cluster, which this or another kernel has launched, and make it a variable.",
    ("detached", "its name or id; may be left out if there is only one"),
    ("variable", "the variable (default: the cluster's name)"),
)

STOP = _parser("%tfos_stop", "[NAME] [--now]", "Stop a cluster and free its slots.", _WHICH)
STOP.add_argument("--now", action="store_true", help="end the nodes at once, without the time to save")

LOGS = _parser(
    "%tfos_logs",
    "NODE [NAME] [-f] [-n N]",
    "Show what a node wrote, as in %tfos_logs worker:1 mnist.",
    ("node", "the node, as worker:1"),
    _WHICH,
)
LOGS.add_argument("-f", "--follow", action="store_true", help="continue until the cluster ends, or an interrupt")
LOGS.add_argument("-n", "--lines", metavar="N", type=_whole_from_1, help="only the last N lines")

TRAIN = _parser(
    "%tfos_train",
    "DF [NAME] [--epochs E] [--validation VAR]",
    "Feed a DataFrame, RDD or stream to a cluster that was launched without --data.\n\n"
    "The magic returns when the rows are delivered. An interrupt stops the cluster, a second one cancels it.",
    ("df", "the variable with the rows"),
    _WHICH,
)
TRAIN.add_argument("--epochs", metavar="E", type=whole, help="passes over DF (default: 1)")
TRAIN.add_argument("--validation", metavar="VAR", help="the DataFrame or RDD for ctx.validation(...)")

INFERENCE = _parser(
    "%tfos_inference",
    "DF -o OUT [NAME] [--model PATH] [options]",
    "Apply a model to a DataFrame on Spark's executors.",
    ("df", "the variable with the rows"),
    ("cluster", "the cluster whose chief returned the model's path; may be left out if there is one"),
)
INFERENCE.add_argument("-o", "--out", metavar="OUT", help="the variable for the DataFrame with the predictions")
INFERENCE.add_argument("--model", metavar="PATH", help="the model: a path or a URL that the executors can read")
INFERENCE.add_argument("--inputs", metavar="COL,COL", help="the columns that the model takes (default: by their names)")
INFERENCE.add_argument(
    "--output", metavar="COL", default="prediction", help="the column of the predictions (default: prediction)"
)
INFERENCE.add_argument(
    "--batch-size", metavar="N", type=_whole_from_1, default=1024, help="rows at a time (default: 1024)"
)

TENSORBOARD = _parser(
    "%tfos_tensorboard",
    "[NAME] [--logdir DIR] [--height N] [--no-frame]",
    "Show TensorBoard: of a cluster, while it trains and after, or of a directory.",
    _WHICH,
)
TENSORBOARD.add_argument("--logdir", dest="log_dir", metavar="DIR", help="the directory to show: a path or a URL")
TENSORBOARD.add_argument("--height", metavar="N", type=_whole_from_1, help="pixels of the frame (default: 800)")
TENSORBOARD.add_argument("--no-frame", dest="frame", action="store_false", help="only a link")

RUNS = _parser(
    "%tfos_runs",
    "[DIR]",
    "List the runs that clusters have recorded, to compare their curves and arguments.",
)
RUNS.add_argument(
    "directory",
    metavar="DIR",
    nargs="?",
    help="a model_dir, or a directory one or two levels above: a path or a URL (default: the model_dir of %%config "
    "TfosMagics, or else tfos_models)",
)

DOCTOR = _parser("%tfos_doctor", "", "Check the requirements of tfos_nb, and say how to install what is missing.")

SPARK = _parser(
    "%tfos_spark",
    "[--stop] [--slots N] [--name TEXT] [--conf K=V ...]",
    "Show the Spark session; start an embedded one if none exists.",
)
SPARK.add_argument("--stop", action="store_true", help="stop the session, unless a cluster still runs on it")
SPARK.add_argument("--slots", metavar="N", type=_whole_from_1, help="tasks that a new session runs at once")
SPARK.add_argument("--name", metavar="TEXT", help="the name of a new session in Spark's UI")
SPARK.add_argument(
    "--conf", metavar="K=V", type=assignment, nargs="+", action="extend", help="configuration of a new session"
)

PLAN = build_parser(
    magic="%tfos_plan",
    description="Show the nodes that %%tfos_cluster would start with these options, and check them with Spark.\n\n"
    "Nothing is started. With the NAME of a cluster alone: the plan that it was launched with.",
)

CLUSTER_LINES = {
    "tfos_status": STATUS,
    "tfos_panel": PANEL,
    "tfos_attach": ATTACH,
    "tfos_stop": STOP,
    "tfos_logs": LOGS,
    "tfos_train": TRAIN,
    "tfos_inference": INFERENCE,
    "tfos_tensorboard": TENSORBOARD,
    "tfos_plan": PLAN,
    "tfos_runs": RUNS,
}

ALL = {
    "%%tfos_cluster": build_parser(),
    "%tfos_cluster": build_parser(),
    **{f"%{name}": parser for name, parser in CLUSTER_LINES.items()},
    "%tfos_doctor": DOCTOR,
    "%tfos_spark": SPARK,
}
"""The parser of every magic, by the magic as the user writes it."""
