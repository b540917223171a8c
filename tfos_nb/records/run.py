"""Record of one cluster's run, and the JSON file that keeps it.

:class:`tfos_nb.records.recorder.RunRecorder` writes the file while the cluster runs, and :func:`tfos_nb.runs` reads
it, maybe much later and in another process. Both ends of the format are in this module. The file has the run's facts
and numbers only: no rows, no code, and no argument that may be a secret.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import json
import math
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from tfos_nb.redaction import HIDDEN, hides, hides_number, is_secret, without_secrets
from tfos_nb.rich import Rich
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import this_system, ticks_at_start
from tfos_nb.state import figure, training_curve
from tfos_nb.state.cluster_state import ClusterStatus
from tfos_nb.state.training_curve import Point
from tfos_nb.truncate import clip

__all__ = [
    "FORMAT",
    "BadRun",
    "Process",
    "Run",
    "from_json",
    "package_versions",
    "plain_arguments",
    "plan_arguments",
    "this_process",
    "to_json",
]

FORMAT = 1
"""Version of the file's format, in its key ``tfos_nb_run``."""

_SILENT = 180.0  # seconds after the last write, on another host, at which the writing process counts as ended
_LONGEST_TEXT = 500  # characters of an argument
_LARGEST_BITS = 1000  # of an integer: a larger one has no float, and with 4300 digits no text
_MOST, _DEEPEST = 64, 3  # elements of an argument that is a collection, and collections within collections
_EPOCHS_KEPT = 2_000
_LAST_TIME = 2**36  # seconds since 1970: the year 4147
_PACKAGES = ("tfos_nb", "tensorflow", "keras", "tf_keras", "pyspark", "numpy")


class BadRun(ValueError):
    """A file that is not the record of a run. The message says why."""


@dataclass(frozen=True)
class Process:
    """Process that writes a run's file: its host, its number, and when it started, in seconds since 1970.

    On Linux, ``ticks`` and ``system`` say the same for certain: they do not change with the clock or the host's name.
    """

    host: str
    pid: int
    started: float
    ticks: int = 0
    system: str = ""

    def runs(self) -> bool | None:
        """Return whether it still runs; None if it is on another host."""
        import psutil

        if self.system and self.system == this_system():
            return ticks_at_start(self.pid) == self.ticks
        if self.host != socket.gethostname():
            return None
        if self.system:
            return False  # the host has restarted
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.started) < 1)
        except psutil.Error:
            return False


def this_process() -> Process:
    """Return the current process."""
    import psutil

    pid = os.getpid()
    return Process(socket.gethostname(), pid, psutil.Process().create_time(), ticks_at_start(pid), this_system())


@dataclass(frozen=True)
class Run(Rich):
    """Record of one run of a cluster, during the run or long after it.

    Parameters
    ----------
    id : str
        Its name among all runs; the cluster's.
    name : str
        The cluster's name.
    status : str
        The cluster's status when the file was written, such as ``"RUNNING"`` or ``"DONE"``: see :attr:`outcome`.
    started, updated : float
        When it began, and when the file was written last, in seconds since 1970.
    seconds : float
        How long it took, or has taken so far.
    error : str
        The text of the failure that ended it; empty without one.
    plan : dict
        The arguments of its :class:`tfos_nb.ClusterPlan` that are not the usual ones, and ``workers``.
    arguments : dict
        The arguments of ``main`` that are data.
    epochs : tuple of dict
        The chief's metrics at the end of each epoch.
    points : tuple of Point
        Its training curve, in at most 400 points.
    rows : int
        How many rows its nodes have taken.
    generation : int
        How often its nodes were started; 1 if no recovery was needed.
    versions : dict
        Of Python and the packages, on the driver.
    spark : dict
        The ``application`` and the ``master``.
    model_dir : str
        Where its models are.
    process : Process, optional
        The process that wrote it.
    path : str
        The file that it was read from.

    Examples
    --------
    >>> run = Run("6f2c", "mnist", "DONE", started=0.0, updated=9.0, seconds=9.0, epochs=({"epoch": 1, "loss": 0.5},))
    >>> run.outcome, run["loss"]
    ('done', [0.5])
    """

    _rich = "run"

    id: str
    name: str
    status: str
    started: float
    updated: float
    seconds: float
    error: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    epochs: tuple[dict[str, Any], ...] = ()
    points: tuple[Point, ...] = ()
    rows: int = 0
    generation: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    spark: dict[str, str] = field(default_factory=dict)
    model_dir: str = ""
    process: Process | None = None
    path: str = field(default="", compare=False)

    @cached_property
    def outcome(self) -> str:
        """``"done"``, ``"failed"``, ``"stopped"``, ``"running"``; or ``"killed"``: its process ended before it did."""
        status = ClusterStatus(self.status)
        if status.ended:
            return status.value.lower()
        alive = self.process.runs() if self.process is not None else None
        if alive is None:
            alive = time.time() - self.updated < _SILENT
        return "running" if alive else "killed"

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of its last epoch; of its last report if no epoch has ended."""
        if self.epochs:
            return {name: value for name, value in self.epochs[-1].items() if name != "epoch"}
        return dict(self.points[-1].metrics) if self.points else {}

    def __getitem__(self, metric: str) -> list[float]:
        """Return the values of a metric, one for each epoch."""
        values = [epoch[metric] for epoch in self.epochs if metric in epoch]
        if not values or metric == "epoch":
            raise KeyError(metric)
        return values

    def to_pandas(self, by: str = "epoch") -> Any:
        """Return its metrics as a pandas DataFrame: see :meth:`tfos_nb.state.history.History.to_pandas`."""
        return training_curve.to_pandas(self.points, training_curve.check_axis(by))

    def plot(self, metrics: Any = None, *, by: str | None = None, log: bool = False) -> Any:
        """Return its curves as a matplotlib figure: see :meth:`tfos_nb.state.history.History.plot`."""
        return figure.figure(self.points, metrics, by, log)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        when = datetime.fromtimestamp(self.started).astimezone().strftime("%Y-%m-%d %H:%M")
        return f"<Run {self.id} {self.name} {when} {self.outcome}, {len(self.epochs)} epochs>"


# --- what a run is recorded of ---


def plain_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments of ``main`` that are data, by name. All others are left out.

    Data are numbers, texts, truth values, None, paths and enums, and small lists and dictionaries of them. Numbers that
    JSON does not have become texts, such as ``"nan"``. A text whose name is that of a secret, such as ``api_key``, is
    replaced, and so is a password in a URL.

    Parameters
    ----------
    args : object
        As it is given to :func:`tfos_nb.launch`: a dictionary, a namespace, a dataclass, or a single value.

    Examples
    --------
    >>> plain_arguments({"lr": 0.01, "layers": [64, 10], "api_key": "d34d", "tokenizer": object()})
    {'lr': 0.01, 'layers': [64, 10], 'api_key': '…'}
    >>> plain_arguments("s3://me:d34d@bucket/rows")
    {'args': 's3://…@bucket/rows'}
    """
    named = _named(args)
    plain = _plain(named, "", 0)
    return plain if isinstance(plain, dict) else {}


def _named(args: Any) -> dict[Any, Any]:
    if isinstance(args, Mapping):
        return dict(args)
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return {one.name: getattr(args, one.name) for one in dataclasses.fields(args)}
    if isinstance(args, argparse.Namespace) or type(args).__name__ == "SimpleNamespace":
        return dict(vars(args))
    return {} if args is None else {"args": args}


class _NotData(Exception):
    """A value is no data."""


def _plain(value: Any, name: str, depth: int) -> Any:
    """Return a value as JSON can represent it."""
    value = _scalar(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        hidden = value is not None and not isinstance(value, bool) and hides_number(name, str(value))
        return HIDDEN if hidden else value
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if not isinstance(text, str):
            raise _NotData
        return HIDDEN if hides(name, text) else clip(without_secrets(text), _LONGEST_TEXT)
    if isinstance(value, (list, tuple)) and depth < _DEEPEST and len(value) <= _MOST:
        named = _names_in_list(value, name)
        return [_plain(one, called, depth + 1) for one, called in zip(value, named, strict=True)]
    if isinstance(value, Mapping) and depth < _DEEPEST and len(value) <= _MOST:
        return HIDDEN if is_secret(name) else _plain_mapping(value, depth)
    raise _NotData


def _scalar(value: Any) -> Any:
    """Return the number of a NumPy scalar, and any other value as it is."""
    if not hasattr(value, "item") or getattr(value, "shape", None) != ():
        return value
    try:
        return value.item()
    except Exception:  # noqa: BLE001 - any class may have an attribute of this name
        raise _NotData from None


def _names_in_list(values: Sequence[Any], name: str) -> list[str]:
    """Return a name for each element of a list: that of an option before it, as in ``["--password", "d34d"]``.

    The second element of a pair of texts has the first one as its name. Everything in a list of secrets is one.

    Examples
    --------
    >>> _names_in_list(["--epochs", "3", "--token", "d34d"], "argv"), _names_in_list(("password", "d34d"), "login")
    (['argv', '--epochs', 'argv', '--token'], ['login', 'password'])
    >>> _names_in_list(("me", "d34d"), "credentials")
    ['credentials', 'credentials']
    """
    if is_secret(name):
        return [name] * len(values)
    pair = len(values) == 2 and all(isinstance(one, str) for one in values)
    before = [name, *(one if isinstance(one, str) and (pair or one.startswith("-")) else name for one in values)]
    return before[: len(values)]


def _plain_mapping(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    found = {}
    of = values.get("name")  # of {"name": "password", "value": "d34d"}
    for key, value in values.items():
        try:
            called = of if key == "value" and isinstance(of, str) else str(key)
            found[str(key)] = _plain(value, called, depth + 1)
        except _NotData:
            continue
    return found


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a training's numbers depend on, without their import."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def plan_arguments(plan: ClusterPlan) -> dict[str, Any]:
    """Return the arguments of a plan that are not the usual ones, and the number of workers."""
    usual = ClusterPlan()
    found: dict[str, Any] = {"workers": plan.workers}
    for one in dataclasses.fields(plan):
        value = getattr(plan, one.name)
        if value != getattr(usual, one.name) and one.name != "name":
            found[one.name] = value.value if isinstance(value, InputMode) else value
    return found


# --- the file ---


def to_json(run: Run) -> str:
    """Return the text of a run's file, with its newest 2,000 epochs.

    A number that is not finite is a text, which ``float`` understands.
    """
    process = run.process
    points = [
        [one.epoch, one.step, one.generation, int(one.ends_epoch), _finite(_brief(one.metrics))] for one in run.points
    ]
    head = {
        "tfos_nb_run": FORMAT,
        "id": run.id,
        "name": run.name,
        "status": run.status,
        "started": _written(run.started),
        "updated": _written(run.updated),
        "seconds": round(run.seconds, 3),
        "error": run.error,
        "plan": run.plan,
        "arguments": run.arguments,
        "rows": run.rows,
        "generation": run.generation,
        "versions": run.versions,
        "spark": run.spark,
        "model_dir": run.model_dir,
        "process": None if process is None else dataclasses.asdict(process),
        "epochs": _finite(list(run.epochs[-_EPOCHS_KEPT:])),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    return "{\n" + ",\n".join([*lines, f' "points": {json.dumps(points, separators=(",", ":"))}']) + "\n}\n"


def from_json(text: str, path: str = "") -> Run:
    """Read the text of a run's file.

    Raises
    ------
    BadRun
        If it is no run's, or of a format that this version does not know.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRun(f"not a JSON file: {error}") from None
    if not isinstance(found, dict) or "tfos_nb_run" not in found:
        raise BadRun("not the record of a run: the key 'tfos_nb_run' is missing")
    if found["tfos_nb_run"] != FORMAT or isinstance(found["tfos_nb_run"], bool):
        raise BadRun(f"its format is {found['tfos_nb_run']!r}, and this version of tfos_nb reads {FORMAT}")
    try:
        return replace(_run_of(found), path=path)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadRun(f"a part of it is missing or wrong: {error!r}") from None


def _run_of(found: dict[str, Any]) -> Run:
    process = found["process"]
    return Run(
        id=_text(found["id"]),
        name=_text(found["name"]),
        status=ClusterStatus(found["status"]).value,
        started=_read(found["started"]),
        updated=_read(found["updated"]),
        seconds=_within(float(found["seconds"]), 1e12),
        error=_text(found["error"]),
        plan=dict(found["plan"]),
        arguments=dict(found["arguments"]),
        epochs=tuple(
            {
                name: int(_within(int(value), 2**62)) if name == "epoch" else float(value)
                for name, value in epoch.items()
            }
            for epoch in found["epochs"]
        ),
        points=tuple(
            Point(int(epoch), int(step), {name: float(one) for name, one in metrics.items()}, bool(ends), int(number))
            for epoch, step, number, ends, metrics in found["points"]
        ),
        rows=int(_within(int(found["rows"]), 2**62)),
        generation=int(_within(int(found["generation"]), 2**31)),
        versions={name: _text(one) for name, one in found["versions"].items()},
        spark={name: _text(one) for name, one in found["spark"].items()},
        model_dir=_text(found["model_dir"]),
        process=None if process is None else _process_of(process),
    )


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _read(text: str) -> float:
    return _within(datetime.fromisoformat(text).timestamp(), _LAST_TIME)


def _process_of(found: Mapping[str, Any]) -> Process:
    pid = int(_within(int(found["pid"]), 2**31))
    started, ticks = _within(float(found["started"]), _LAST_TIME), int(_within(int(found.get("ticks", 0)), 2**62))
    return Process(_text(found["host"]), pid, started, ticks, _text(found.get("system", "")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} must be a text")
    return value


def _within(number: float, most: float) -> float:
    """Return a number from 0 to ``most``; refuse another one, which no run can have."""
    if not 0 <= number <= most:
        raise ValueError(f"{number!r} must be from 0 to {most:g}")
    return number


def _brief(metrics: Mapping[str, float]) -> dict[str, float]:
    """Shorten the numbers of a chart."""
    return {name: float(f"{value:.9g}") for name, value in metrics.items()}


def _finite(value: Any) -> Any:
    """Replace the numbers that JSON does not have, within lists and dictionaries too."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value
