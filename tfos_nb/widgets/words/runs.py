"""Words of recorded runs, which the static tables and the page share: outcomes, facts, columns and differences."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tfos_nb.records.run import Run
from tfos_nb.records.runs import ABSENT, differing
from tfos_nb.redaction import without_password
from tfos_nb.state.metric_order import in_order
from tfos_nb.truncate import clip
from tfos_nb.widgets.words import wording

__all__ = [
    "ARGUMENTS",
    "METRICS",
    "NONE_YET",
    "TONES",
    "argument",
    "columns",
    "differences",
    "facts",
    "metric_columns",
    "other_arguments",
    "place",
    "unreadable",
    "when",
]

TONES = {"done": "ok", "failed": "bad", "stopped": "idle", "running": "run", "killed": "warn"}
"""The colour of each outcome."""

NONE_YET = (
    "No runs here yet: each cluster leaves one in its model_dir, and without a model_dir in tfos_models/NAME. "
    "Train a cluster, then look again."
)

_LONGEST_ARGUMENT = 60
_FILES_NAMED = 5

METRICS, ARGUMENTS = 3, 4
"""Maximum numbers of columns in the page and in the static table."""


def when(seconds: float) -> str:
    """Return a time since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def place(path: str) -> str:
    """Return a path or a URL for the user's eyes: below the working directory without it, and without a password."""
    with contextlib.suppress(OSError):
        path = path.removeprefix(f"{os.getcwd()}/")
    return without_password(path)


def argument(value: Any, room: int = _LONGEST_ARGUMENT) -> str:
    """Return an argument as a short text.

    Examples
    --------
    >>> [argument(value) for value in (0.0001, True, None, "adam", [64, 10], "s3://me:secret@bucket/rows")]
    ['0.0001', 'True', 'None', 'adam', '[64, 10]', 's3://…@bucket/rows']
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    return clip(without_password(str(value)), room)


def differences(runs: Sequence[Run]) -> list[tuple[str, str, list[str]]]:
    """Return what differs between runs: the kind, the name and each run's value, which is empty where it has none.

    Examples
    --------
    >>> one, other = (Run(name, "mnist", "DONE", 0.0, 9.0, 9.0, arguments={"lr": lr}) for name, lr in ("ab", "ba"))
    >>> differences([one, other])
    [('arguments', 'lr', ['b', 'a'])]
    """
    return [
        (kind, name, ["" if value is ABSENT else argument(value) for value in values])
        for kind, name, values in differing(runs)
    ]


def columns(runs: Sequence[Run], most: int) -> tuple[list[str], list[str]]:
    """Return the arguments that differ between the runs: those that have a column, and the names of the others.

    The arguments that the most runs have come first.
    """
    known = Counter(name for run in runs for name in run.arguments)
    names = [name for kind, name, _ in differences(runs) if kind == "arguments"]
    names.sort(key=lambda name: -known[name])
    return names[:most], names[most:]


def other_arguments(names: Sequence[str]) -> list[str]:
    """Return a line that names the arguments that differ and have no column; none if each has one."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [f"also different: {', '.join(clip(name, 40) for name in names[:8])}{more}"] if names else []


def metric_columns(runs: Sequence[Run], most: int) -> list[str]:
    """Return the metrics that have a column: the losses of training and validation, then the others.

    Examples
    --------
    >>> trained = Run("a", "mnist", "DONE", 0.0, 1.0, 1.0, epochs=({"auc": 1.0, "loss": 1.0, "val_loss": 1.0},))
    >>> metric_columns([trained], 2)
    ['loss', 'val_loss']
    """
    names = in_order(name for run in runs for name in run.metrics)
    losses = [name for name in ("loss", "val_loss") if name in names]
    return in_order([*losses, *(name for name in names if name not in losses)][:most])


def facts(run: Run, room: int = 400) -> list[tuple[str, str]]:
    """Return what is known of a run, but its outcome, its times and its error: titles and texts."""
    generations = f"started {run.generation} times: it recovered from a loss" if run.generation > 1 else ""
    found = [
        ("Plan", _named(run.plan, room)),
        ("Arguments", _named(run.arguments, room)),
        ("Rows", wording.count(run.rows) if run.rows else ""),
        ("Metrics", ", ".join(f"{name} {wording.number(value)}" for name, value in list(run.metrics.items())[:12])),
        ("Nodes", generations),
        ("Models", clip(place(run.model_dir), room)),
        ("Spark", _named(run.spark, room)),
        ("Versions", _named(run.versions, room)),
        ("Record", clip(place(run.path), room)),
    ]
    return [(title, text) for title, text in found if text]


def unreadable(files: Mapping[str, str]) -> list[str]:
    """Return a line for each of the first files that are no records, and one for the others.

    Examples
    --------
    >>> unreadable({"models/tfos_runs/notes.json": "not a JSON file: Expecting value"})
    ['not read: models/tfos_runs/notes.json: not a JSON file: Expecting value']
    """
    found = list(files.items())
    told = [f"not read: {clip(place(file), 200)}: {clip(why, 200)}" for file, why in found[:_FILES_NAMED]]
    more = len(found) - _FILES_NAMED
    return [*told, f"and {more} more files were not read"] if more > 0 else told


def _named(values: Mapping[str, Any], room: int) -> str:
    return clip(", ".join(f"{name} {argument(value)}" for name, value in values.items()), room)
