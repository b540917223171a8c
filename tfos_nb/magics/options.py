"""The options of ``%%tfos_cluster``: their names, their help texts, and the arguments of a launch that they set."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError, check_count, nearest
from tfos_nb.magics.arguments import LineParser, assignment, check_identifier, find_data, find_reader, seconds, whole
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode

__all__ = ["LaunchOptions", "build_parser", "describe", "parse_options"]

DEFAULT_VARIABLE = "cluster"
"""The variable that holds the cluster if the line names none."""

MAGIC = "%%tfos_cluster"

_INPUT_MODE = InputMode(ClusterPlan.input_mode)

_LAUNCH_ONLY = (
    *("model_dir", "autolog", "env", "feed_timeout", "rendezvous_timeout", "grace", "restarts", "min_workers"),
    *("checkpoint_every", "resume"),
    *("tensorboard", "log_dir", "warm", "record", "mlflow", "detach", "keep"),
)
"""Arguments of :func:`tfos_nb.launch` that come from the line and are not part of the plan."""

_SETTINGS = {field.name for field in dataclasses.fields(Settings)}

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
    """The options of a parsed line of ``%%tfos_cluster``.

    An option that the line does not have gets the default of :class:`~tfos_nb.runtime.control.plan.ClusterPlan`, or
    None. An option that is None is not passed to :func:`tfos_nb.launch`, which uses its own default.
    """

    variable: str = DEFAULT_VARIABLE
    workers: int = ClusterPlan.workers
    ps: int = ClusterPlan.ps
    chief: bool | str | None = ClusterPlan.chief
    evaluator: bool = ClusterPlan.evaluator
    input_mode: InputMode = _INPUT_MODE
    cpus: int = ClusterPlan.cpus
    gpus: int = ClusterPlan.gpus
    name: str = ClusterPlan.name
    driver_ps_nodes: bool = ClusterPlan.driver_ps_nodes
    master_node: str | None = ClusterPlan.master_node
    protocol: str = ClusterPlan.protocol
    evaluator_may_fail: bool = ClusterPlan.evaluator_may_fail
    data: str | None = None
    epochs: int | None = None
    validation: str | None = None
    args: str | None = None
    fn: str | None = None
    model_dir: str | None = None
    feed_timeout: float | None = None
    rendezvous_timeout: float | None = None
    grace: float | None = None
    restarts: int | None = None
    min_workers: int | None = None
    checkpoint_every: float | None = None
    resume: bool | str | None = None
    autolog: bool | None = None
    tensorboard: bool | None = None
    log_dir: str | None = None
    warm: bool | None = None
    record: bool | None = None
    mlflow: bool | str | None = None
    env: Mapping[str, str] | None = None
    detach: bool | str | None = None
    keep: float | None = None
    background: bool = False
    wait: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        """Check errors that only a line can have, then let the plan check itself."""
        if self.epochs is not None:
            check_count("--epochs", self.epochs, 1)
        if self.data is None and self.epochs is not None:
            raise PlanError(f"--epochs {self.epochs} counts passes over --data, and no --data is given: add --data DF")
        if self.data is None and self.validation is not None:
            raise PlanError(f"--validation {self.validation} needs --data, and no --data is given: add --data DF")
        if self.data is not None and self.input_mode is InputMode.TENSORFLOW:
            raise PlanError(f"--data {self.data}: with --input tensorflow the nodes read files; leave one of them out")
        if self.keep is not None and not self.detach:
            raise PlanError(
                f"--keep {self.keep:g} needs --detach: only a cluster with a process of its own keeps results"
            )
        self._check_settings()

    def _check_settings(self) -> None:
        """Check the settings that are not part of the plan, and whether they are compatible with the plan."""
        given = {field: getattr(self, field) for field in _LAUNCH_ONLY if field in _SETTINGS}
        Settings(**{field: value for field, value in given.items() if value is not None}).check(self.plan())

    def plan(self) -> ClusterPlan:
        """Return the plan of the line. The plan checks itself."""
        return ClusterPlan(**{field: getattr(self, field) for field in ClusterPlan.field_names()})

    def rows(self, namespace: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the values of --data and --validation: rows, or with --detach the functions that read them."""
        find = find_reader if self.detach else find_data
        data = None if self.data is None else find(self.data, namespace)
        held_out = None if self.validation is None else find(self.validation, namespace, "--validation")
        return data, held_out

    def launch_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for :func:`tfos_nb.launch`."""
        arguments = {field: getattr(self, field) for field in ClusterPlan.field_names()}
        arguments["input_mode"] = self.input_mode.value
        given = {field: getattr(self, field) for field in _LAUNCH_ONLY}
        return arguments | {field: value for field, value in given.items() if value is not None}


def parse_options(line: str, defaults: Mapping[str, Any] | None = None, *, magic: str = MAGIC) -> LaunchOptions:
    """Parse a line and return its options.

    Parameters
    ----------
    line : str
        The text after the magic.
    defaults : mapping of str to object, optional
        Values of options that the line does not have, by the fields of :class:`LaunchOptions`.
    magic : str, optional
        The magic to which the line belongs.

    Raises
    ------
    PlanError
        If the line is not valid. The message is one line.

    Examples
    --------
    >>> options = parse_options("mnist --workers 2 --data train_df")
    >>> options.variable, options.workers, options.data
    ('mnist', 2, 'train_df')
    """
    found = build_parser(magic=magic).understand(line)
    given = {**(defaults or {}), **{name: value for name, value in vars(found).items() if value is not None}}
    if "variable" in given:
        check_identifier(given["variable"])
        given.setdefault("name", given["variable"])
    if "env" in given:
        given["env"] = dict(given["env"])
    if "log_dir" in given:
        if not given["log_dir"].strip():
            raise PlanError("--logdir must not be empty; give a directory")
        given["tensorboard"] = True
    if "wait" in given or "detach" in given:  # it overrides %config
        given["background"] = False
    return LaunchOptions(**given)


def describe(launch: Callable[..., object] | None = None) -> str:
    """Return the text that ``%%tfos_cluster?`` shows.

    Parameters
    ----------
    launch : callable, optional
        :func:`tfos_nb.launch`, from whose signature its own defaults are read.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    if launch is not None:
        parameters = inspect.signature(launch).parameters
        defaults |= {name: parameters[name].default for name in _LAUNCH_ONLY if name in parameters}
    defaults["epochs"] = defaults["epochs"] or 1
    return f"{build_parser(defaults).format_help()}\n{_EXAMPLE}"


def build_parser(
    defaults: Mapping[str, Any] | None = None, *, magic: str = MAGIC, description: str = _DESCRIPTION
) -> LineParser:
    """Make the parser. If defaults are given, its help shows them."""

    def told(field: str, text: str) -> str:
        value = (defaults or {}).get(field)
        if value is None or isinstance(value, bool) or value is inspect.Parameter.empty:
            return text
        return f"{text} (default: {getattr(value, 'value', value)})"

    parser = LineParser(magic, "[NAME] [options]", description)
    parser.add_argument_group("the cluster").add_argument(
        "variable", metavar="NAME", nargs="?", help=told("variable", "the variable that becomes the cluster")
    )
    _add_nodes(parser.add_argument_group("the nodes"), told)
    _add_program(parser.add_argument_group("the program and its rows"), told)
    _add_execution(parser.add_argument_group("how it runs"), told)
    return parser


_Told = Callable[[str, str], str]


def _add_nodes(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument("--workers", metavar="N", type=whole, help=told("workers", "how many workers"))
    group.add_argument("--ps", metavar="N", type=whole, help=told("ps", "how many parameter servers"))
    group.add_argument(
        "--chief",
        action="store_true",
        default=None,
        help="a chief in addition to the workers; with --ps there is one anyway",
    )
    group.add_argument(
        "--evaluator", action="store_true", default=None, help="a node that evaluates checkpoints during the training"
    )
    _add_kinds_of_nodes(group, told)
    group.add_argument("--cpus", metavar="N", type=whole, help=told("cpus", "Spark CPUs of each node"))
    group.add_argument("--gpus", metavar="N", type=whole, help=told("gpus", "GPUs of each worker and of the chief"))
    group.add_argument(
        "--name",
        metavar="TEXT",
        help="the cluster's name in the Spark UI and the logs (default: NAME)",
    )


def _add_kinds_of_nodes(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument(
        "--evaluator-may-fail", action="store_true", default=None, help="continue training when the evaluator fails"
    )
    group.add_argument(
        "--driver-ps-nodes",
        action="store_true",
        default=None,
        help="run the parameter servers on the driver's host: they take no slot of Spark's",
    )
    group.add_argument(
        "--master-node", metavar="ROLE", help="chief, or master, which means the same: TensorFlowOnSpark's --chief"
    )
    group.add_argument(
        "--protocol",
        metavar="NAME",
        help=told("protocol", "the protocol between the nodes; one that TensorFlow was built with"),
    )


def _add_program(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument("--fn", metavar="NAME", help="the function that runs on the nodes, in the cell or outside it")
    group.add_argument("--args", metavar="VAR", help="the variable that it gets as args")
    group.add_argument("--data", metavar="VAR", help="the DataFrame, RDD or stream whose rows are fed to the nodes")
    group.add_argument("--validation", metavar="VAR", help="the DataFrame or RDD for ctx.validation(...)")
    group.add_argument("--epochs", metavar="E", type=whole, help=told("epochs", "passes over --data"))
    group.add_argument(
        "--input",
        dest="input_mode",
        metavar="MODE",
        type=_input_mode,
        help=told("input_mode", "spark (rows are fed) or tensorflow (the nodes read files)"),
    )
    group.add_argument("--model-dir", metavar="PATH", help="where checkpoints and models go: a shared path or a URL")
    group.add_argument("--tensorboard", action="store_true", default=None, help="run TensorBoard on the chief's host")
    group.add_argument(
        "--logdir",
        dest="log_dir",
        metavar="DIR",
        help="the logs that TensorBoard shows, a path or a URL; means --tensorboard",
    )


def _add_limits(group: argparse._ArgumentGroup, told: _Told) -> None:
    group.add_argument(
        "--timeout",
        dest="rendezvous_timeout",
        metavar="SECONDS",
        type=seconds,
        help=told("rendezvous_timeout", "how long all nodes may take to come to the rendezvous"),
    )
    group.add_argument(
        "--feed-timeout",
        metavar="SECONDS",
        type=seconds,
        help=told("feed_timeout", "how long a node may take no row while rows wait for it"),
    )
    group.add_argument(
        "--grace",
        metavar="SECONDS",
        type=partial(_from_0, "seconds"),
        help=told("grace", "how long the nodes may take to end when they are stopped"),
    )
    group.add_argument(
        "--restarts",
        metavar="N",
        type=whole,
        help=told("restarts", "how often the nodes start again when one was lost"),
    )
    group.add_argument(
        "--min-workers",
        metavar="N",
        type=whole,
        help=told(
            "min_workers", "with how many workers to continue while a lost one is replaced; without it, all wait"
        ),
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="S",
        type=seconds,
        help=told("checkpoint_every", "every how many seconds the state of fit is also written to --model-dir"),
    )
    group.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const=True,
        help=told("resume", "continue the training that was saved last in --model-dir, or that of RUN"),
    )


def _add_execution(group: argparse._ArgumentGroup, told: _Told) -> None:
    _add_limits(group, told)
    group.add_argument(
        "--no-autolog",
        dest="autolog",
        action="store_false",
        default=None,
        help="do not let Keras' fit report its steps by itself",
    )
    group.add_argument(
        "--no-warm",
        dest="warm",
        action="store_false",
        default=None,
        help="import TensorFlow in each node, and keep no process for the next cluster",
    )
    group.add_argument(
        "--no-record",
        dest="record",
        action="store_false",
        default=None,
        help="leave no record of the run for %%tfos_runs",
    )
    _add_mlflow(group.add_mutually_exclusive_group())
    group.add_argument(
        "--env", metavar="K=V", type=_variable, nargs="+", action="extend", help="environment variables of the nodes"
    )
    returning = group.add_mutually_exclusive_group()
    returning.add_argument(
        "--detach",
        action="store_true",
        default=None,
        help="return at once, and continue when this kernel has ended: %%tfos_attach NAME shows it in any kernel. "
        "--data and --validation are then functions of a SparkSession that return the rows",
    )
    returning.add_argument(
        "--detach-on-executor",
        dest="detach",
        action="store_const",
        const="executor",
        default=None,
        help="with Spark Connect: the same, and continue when this host has ended or sleeps",
    )
    returning.add_argument("--background", action="store_true", default=None, help="return at once; NAME.wait() waits")
    returning.add_argument(
        "--wait",
        action="store_true",
        default=None,
        help="return when every main has; the default with --data and with --input tensorflow. Without "
        "these the cell returns when the nodes are up",
    )
    group.add_argument(
        "--keep",
        metavar="HOURS",
        type=partial(_from_0, "hours"),
        help=told("keep", "with --detach: how long to keep the results"),
    )
    group.add_argument("--quiet", action="store_true", default=None, help="show nothing while it runs")


def _add_mlflow(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--mlflow",
        metavar="EXPERIMENT",
        nargs="?",
        const=True,
        default=None,
        help="log the run to MLflow: in this experiment, or else in the active run",
    )
    group.add_argument(
        "--no-mlflow", dest="mlflow", action="store_false", default=None, help="log nothing to MLflow's active run"
    )


def _input_mode(text: str) -> InputMode:
    modes = [mode.value for mode in InputMode]
    if text not in modes:
        raise argparse.ArgumentTypeError(f"{text}: must be {' or '.join(modes)}{nearest(text, modes)}")
    return InputMode(text)


def _variable(text: str) -> tuple[str, str]:
    try:
        return assignment(text)
    except argparse.ArgumentTypeError as error:  # --env takes all words up to the next option, also a NAME
        raise argparse.ArgumentTypeError(f"{error}; the cluster's NAME comes first on the line") from None


def _from_0(unit: str, text: str) -> float:
    try:
        return 0.0 if text in ("0", "0.0") else seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of {unit}, 0 or more") from None
