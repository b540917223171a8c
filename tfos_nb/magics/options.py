"""The options of ``%%tfos_cluster``: what they are called, what they mean, what is wrong with a line.

The parser stands apart from the magic. It never prints and never exits: a line that cannot be understood is a
:class:`~tfos_nb.errors.PlanError` of one line, with the nearest right word.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import difflib
import inspect
import keyword
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tfos_nb.errors import PlanError
from tfos_nb.runtime.plan import ClusterPlan, InputMode

__all__ = ["LaunchOptions", "describe", "find_data", "find_variable", "is_data", "nearest", "parse_options"]

DEFAULT_VARIABLE = "cluster"
"""The variable that holds the cluster if the line names none."""

_INPUT_MODE = InputMode(ClusterPlan.input_mode)

_LAUNCH_ONLY = ("model_dir", "autolog", "env", "feed_timeout", "rendezvous_timeout")
"""What :func:`tfos_nb.launch` takes from the line beside the plan."""

_DESCRIPTION = """\
Run this cell's function on a TensorFlow cluster of Spark executors.

The cell is run in the notebook first. Its last `def` that takes (args, ctx), or the one that --fn
names, then runs on every node. The cluster becomes the variable NAME."""

_EXAMPLE = """\
Example
-------
    %%tfos_cluster mnist --workers 2 --data train_df --epochs 3
    def main(args, ctx):
        import keras, tensorflow as tf
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(ctx.dataset(batch_size=128).map(lambda row: (row["image"], row["label"])), epochs=3)
        ctx.save(model)

    mnist.result()           what the chief's main returned
    %tfos_status mnist       how it stands;  %tfos_logs worker:1 mnist;  %tfos_stop mnist"""


@dataclass(frozen=True)
class LaunchOptions:
    """A line of ``%%tfos_cluster``, understood.

    What the line does not say is what :class:`~tfos_nb.runtime.plan.ClusterPlan` has by itself, or None: then
    :func:`tfos_nb.launch` is not told either and takes its own default.
    """

    variable: str = DEFAULT_VARIABLE
    workers: int = ClusterPlan.workers
    ps: int = ClusterPlan.ps
    chief: bool | None = ClusterPlan.chief
    evaluator: bool = ClusterPlan.evaluator
    input_mode: InputMode = _INPUT_MODE
    cpus: int = ClusterPlan.cpus
    gpus: int = ClusterPlan.gpus
    name: str = ClusterPlan.name
    data: str | None = None
    epochs: int | None = None
    args: str | None = None
    fn: str | None = None
    model_dir: str | None = None
    feed_timeout: float | None = None
    rendezvous_timeout: float | None = None
    autolog: bool | None = None
    env: Mapping[str, str] | None = None
    background: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        """Check what only a line can get wrong, then let the plan check itself."""
        if self.epochs is not None and self.epochs < 1:
            raise PlanError(f"--epochs {self.epochs}: it is a whole number, 1 or more")
        if self.data is None and self.epochs is not None:
            raise PlanError(f"--epochs {self.epochs}: the passes over --data, and no --data is given")
        if self.data is not None and self.input_mode is InputMode.TENSORFLOW:
            raise PlanError(f"--data {self.data}: with --input tensorflow the nodes read files; leave one of them out")
        self.plan()

    def plan(self) -> ClusterPlan:
        """Return the plan that the line asks for; it checks itself."""
        return ClusterPlan(**{field: getattr(self, field) for field in ClusterPlan.field_names()})

    def launch_arguments(self) -> dict[str, Any]:
        """Return the keywords for :func:`tfos_nb.launch`."""
        arguments = {field: getattr(self, field) for field in ClusterPlan.field_names()}
        arguments["input_mode"] = self.input_mode.value
        given = {field: getattr(self, field) for field in _LAUNCH_ONLY}
        return arguments | {field: value for field, value in given.items() if value is not None}


def parse_options(line: str) -> LaunchOptions:
    """Understand a line.

    Raises
    ------
    PlanError
        If it cannot be understood; the message is one line.

    Examples
    --------
    >>> options = parse_options("mnist --workers 2 --data train_df")
    >>> options.variable, options.workers, options.data
    ('mnist', 2, 'train_df')
    """
    try:
        words = shlex.split(line)
    except ValueError:
        raise PlanError("the line has an opening quote or backslash without its end") from None
    parser = _build_parser()
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise PlanError(_say(error)) from None
    if rest:
        raise PlanError(_say_unknown(rest, found.variable, parser))
    given = {name: value for name, value in vars(found).items() if value is not None}
    if "variable" in given:
        _check_identifier(given["variable"])
        given.setdefault("name", given["variable"])
    if "env" in given:
        given["env"] = dict(given["env"])
    return LaunchOptions(**given)


def describe(launch: Callable[..., object] | None = None) -> str:
    """Write what ``%%tfos_cluster?`` shows.

    Parameters
    ----------
    launch : callable, optional
        :func:`tfos_nb.launch`: the defaults that are its own are read from its signature.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    if launch is not None:
        parameters = inspect.signature(launch).parameters
        defaults |= {name: parameters[name].default for name in _LAUNCH_ONLY if name in parameters}
    defaults["epochs"] = defaults["epochs"] or 1
    return f"{_build_parser(defaults).format_help()}\n{_EXAMPLE}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known word was probably meant: ``"; did you mean train_df?"``, or nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def is_data(value: object) -> bool:
    """Whether rows can be fed from this: a DataFrame (classic or Connect) or an RDD. Does not import Spark."""
    return not isinstance(value, type) and any(hasattr(value, method) for method in ("mapInArrow", "mapPartitions"))


def find_variable(option: str, name: str, namespace: Mapping[str, Any], known: Iterable[str] | None = None) -> Any:
    """Look a variable of the user up.

    Raises
    ------
    PlanError
        If there is none of that name.
    """
    if name not in namespace:
        names = [other for other in namespace if not other.startswith("_")] if known is None else list(known)
        raise PlanError(f"{option} {name}: no such variable{nearest(name, names)}")
    return namespace[name]


def find_data(name: str, namespace: Mapping[str, Any]) -> Any:
    """Look the DataFrame or RDD up that ``--data`` names."""
    sources = [other for other, value in namespace.items() if is_data(value) and not other.startswith("_")]
    value = find_variable("--data", name, namespace, sources)
    if is_data(value):
        return value
    kind = type(value)
    if kind.__module__.startswith("pandas") and kind.__name__ == "DataFrame":
        raise PlanError(f"--data {name}: a pandas DataFrame; spark.createDataFrame({name}) makes one of Spark's")
    raise PlanError(f"--data {name}: it takes a Spark DataFrame or RDD, this is {_a(kind.__name__)}")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises where argparse prints and exits."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise PlanError(message or f"the line ended with {status}")


def _build_parser(defaults: Mapping[str, Any] | None = None) -> _Parser:
    """Make the parser; with defaults, its help tells them."""

    def told(field: str, text: str) -> str:
        value = (defaults or {}).get(field)
        if value is None or isinstance(value, bool) or value is inspect.Parameter.empty:
            return text
        return f"{text} (default: {getattr(value, 'value', value)})"

    parser = _Parser(
        prog="%%tfos_cluster",
        usage="%%%%tfos_cluster [NAME] [options]",  # argparse writes %% as %
        description=_DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=100),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument_group("the cluster").add_argument(
        "variable", metavar="NAME", nargs="?", help=told("variable", "the variable that becomes the cluster")
    )
    _add_nodes(parser.add_argument_group("the nodes"), told)
    _add_program(parser.add_argument_group("the program and its rows"), told)
    _add_course(parser.add_argument_group("how it runs"), told)
    return parser


_Told = Callable[[str, str], str]


def _add_nodes(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument("--workers", metavar="N", type=_whole, help=told("workers", "how many workers"))
    group.add_argument("--ps", metavar="N", type=_whole, help=told("ps", "how many parameter servers"))
    group.add_argument(
        "--chief", action="store_true", default=None, help="a chief beside the workers; with --ps there is one anyway"
    )
    group.add_argument(
        "--evaluator", action="store_true", default=None, help="a node that evaluates checkpoints beside the training"
    )
    group.add_argument("--cpus", metavar="N", type=_whole, help=told("cpus", "Spark CPUs of each node"))
    group.add_argument("--gpus", metavar="N", type=_whole, help=told("gpus", "GPUs of each worker and of the chief"))
    group.add_argument(
        "--name",
        metavar="TEXT",
        help="what the cluster is called in the Spark UI and the logs (default: NAME)",
    )


def _add_program(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument("--fn", metavar="NAME", help="the function that runs on the nodes, in the cell or outside it")
    group.add_argument("--args", metavar="VAR", help="the variable that it gets as args")
    group.add_argument("--data", metavar="VAR", help="the DataFrame or RDD whose rows are fed to the nodes")
    group.add_argument("--epochs", metavar="E", type=_whole, help=told("epochs", "passes over --data"))
    group.add_argument(
        "--input",
        dest="input_mode",
        metavar="MODE",
        type=_input_mode,
        help=told("input_mode", "spark (rows are fed) or tensorflow (the nodes read files)"),
    )
    group.add_argument("--model-dir", metavar="PATH", help="where checkpoints and models go: a shared path or a URL")


def _add_course(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument(
        "--timeout",
        dest="rendezvous_timeout",
        metavar="SECONDS",
        type=_seconds,
        help=told("rendezvous_timeout", "how long all nodes may take to come to the rendezvous"),
    )
    group.add_argument(
        "--feed-timeout",
        metavar="SECONDS",
        type=_seconds,
        help=told("feed_timeout", "how long a node may take no row while rows wait for it"),
    )
    group.add_argument(
        "--no-autolog",
        dest="autolog",
        action="store_false",
        default=None,
        help="let Keras' fit not report its steps by itself",
    )
    group.add_argument(
        "--env", metavar="K=V", type=_assignment, nargs="+", action="extend", help="environment variables of the nodes"
    )
    course = group.add_mutually_exclusive_group()
    course.add_argument("--background", action="store_true", default=None, help="return at once; NAME.wait() waits")
    course.add_argument(
        "--wait", dest="background", action="store_false", default=None, help="return when it is done (default)"
    )
    group.add_argument("--quiet", action="store_true", default=None, help="show nothing while it runs")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: a whole number") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds, more than 0")
    return seconds


def _input_mode(text: str) -> InputMode:
    modes = [mode.value for mode in InputMode]
    if text not in modes:
        raise argparse.ArgumentTypeError(f"{text}: {' or '.join(modes)}{nearest(text, modes)}")
    return InputMode(text)


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text}: it is KEY=VALUE; the cluster's NAME comes first on the line")
    return key, value


def _say(error: argparse.ArgumentError) -> str:
    """Say argparse's error in our words: the option, what was given, what it takes."""
    option = error.argument_name or ""
    message = error.message or "it cannot be understood"
    if message.startswith("expected"):
        return f"{option}: a value is missing"
    if message.startswith("ignored explicit argument"):
        return f"{option}: it takes no value"
    joint = ": " if message.startswith("not allowed") else " "
    return f"{option}{joint}{message}"


def _say_unknown(rest: list[str], variable: str | None, parser: argparse.ArgumentParser) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    for word in rest:
        if word.startswith("-"):
            option = word.partition("=")[0]
            return f"{option}: no such option{nearest('--' + option.lstrip('-'), options)}"
    return f"{rest[0]}: the line has a NAME already ({variable}); options begin with --"


def _check_identifier(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        better = "".join(char if char.isalnum() else "_" for char in name)
        hint = f"; {better} is one" if better.isidentifier() and not keyword.iskeyword(better) else ""
        raise PlanError(f"{name}: NAME becomes a variable, and this is no name for one{hint}")
    if hasattr(builtins, name):
        raise PlanError(f"{name}: NAME would hide Python's own {name}; take another")


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
