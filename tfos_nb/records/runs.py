"""Recorded runs of a directory: :func:`runs` finds them, :class:`Runs` compares them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from tfos_nb.errors import PlanError
from tfos_nb.records.run import BadRun, Run, from_json
from tfos_nb.redaction import without_password
from tfos_nb.rich import Rich
from tfos_nb.runtime.storage.paths import absolute, is_local
from tfos_nb.runtime.storage.remote import Unreachable, answered_within, file_system, refuse_unknown
from tfos_nb.state import figure
from tfos_nb.state.metric_order import in_order
from tfos_nb.state.training_curve import chart_names

__all__ = ["ABSENT", "FOLDER", "HOME", "Runs", "differing", "runs"]

FOLDER = "tfos_runs"
"""Name of the directory, beside the models, that has the files of the runs."""

HOME = "tfos_models"
"""Directory that has the models of clusters without a ``model_dir``, by the cluster's name."""

_LEVELS = 2  # directories above that of a model_dir
_WITHIN = 60.0  # seconds in which a store must answer
_AT_ONCE = 16  # files of a store that are read at the same time


class Runs(Rich, Sequence[Run]):
    """Some recorded runs, the newest first; at the end of a notebook's cell they are a table.

    ``runs[0]`` is the newest run, ``runs["mnist"]`` the newest of that name, and ``runs["6f2c"]`` the run whose id
    begins with that text.

    Parameters
    ----------
    found : sequence of Run
        The runs.
    place : str
        The directory that was searched.
    unreadable : mapping of str to str
        Files that are no records, and why.
    """

    _rich = "runs"

    def __init__(self, found: Sequence[Run], place: str = "", unreadable: Mapping[str, str] | None = None) -> None:
        self._runs = tuple(sorted(found, key=lambda run: (-run.started, run.id)))
        self.place = place
        self.unreadable = dict(unreadable or {})

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @overload
    def __getitem__(self, which: int | str) -> Run: ...

    @overload
    def __getitem__(self, which: slice | list[int] | list[str]) -> Runs: ...

    def __getitem__(self, which: int | str | slice | list[int] | list[str]) -> Run | Runs:
        """Return a run by its number, its name, or the start of its id; several by a slice or a list of these.

        Raises
        ------
        KeyError
            If no run has this id or name, or several ids begin so.
        IndexError
            If there are fewer runs.
        """
        if isinstance(which, slice):
            return Runs(self._runs[which], self.place)
        if isinstance(which, list):
            return Runs([self[one] for one in which], self.place)
        if isinstance(which, str):
            return self._named(which)
        try:
            return self._runs[which]
        except IndexError:
            raise IndexError(f"there is no run {which}: there are {len(self)}") from None

    def _named(self, which: str) -> Run:
        found = [run for run in self if run.name == which or run.id == which]
        if not found and which:
            found = [run for run in self if run.id.startswith(which)]
            if len(found) > 1:
                raise KeyError(f"{len(found)} runs have an id that begins with {which!r}: write more of it")
        if not found:
            known = ", ".join(f"{run.id} ({run.name})" for run in self._runs[:5])
            raise KeyError(f"no run has the id or the name {which!r}; the newest are {known or 'none'}")
        return found[0]

    @property
    def metrics(self) -> list[str]:
        """The names of all their metrics that have a chart: a metric and its validation share one."""
        return in_order(dict.fromkeys(name for run in self for name in chart_names(run.points)))

    def differences(self) -> dict[str, list[Any]]:
        """Return what differs between the runs: for each argument, setting of the plan or version the runs' values.

        A value that a run does not have is None.

        Examples
        --------
        >>> one = Run("a1", "mnist", "DONE", 1.0, 9.0, 8.0, arguments={"lr": 0.1, "units": 64})
        >>> other = Run("b2", "mnist", "DONE", 0.0, 9.0, 9.0, arguments={"lr": 0.01, "units": 64})
        >>> Runs([one, other]).differences()
        {'lr': [0.1, 0.01]}
        """
        kinds = {"arguments": "", "plan": "plan ", "versions": "version "}
        return {
            f"{kinds[kind]}{name}": [None if value is ABSENT else value for value in values]
            for kind, name, values in differing(self)
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each run, the newest first.

        Its index is the id. An argument's column is called ``args.NAME``, and a metric, that of the last epoch, has its
        own name.
        """
        import pandas as pd

        rows = [
            {
                "name": run.name,
                "outcome": run.outcome,
                "started": pd.Timestamp(run.started, unit="s", tz="UTC"),
                "seconds": run.seconds,
                "rows": run.rows,
                "epochs": len(run.epochs),
                "workers": run.plan.get("workers"),
                **{f"args.{name}": value for name, value in run.arguments.items()},
                **run.metrics,
            }
            for run in self
        ]
        return pd.DataFrame(rows, index=pd.Index([run.id for run in self], name="id"))

    def plot(self, metric: str = "", *, by: str | None = None, log: bool = False) -> Any:
        """Return a metric of all these runs in one chart, as a matplotlib figure; validation is dashed.

        Parameters
        ----------
        metric : str, optional
            Which metric. Default: the first, which is the loss if there is one.
        by : str, optional
            ``"epoch"`` or ``"step"``. Default: epochs, if each run has two.
        log : bool, optional
            Whether the y axis is logarithmic.

        Raises
        ------
        MissingPackage
            If matplotlib is not installed.
        PlanError
            If no run has reported that metric.
        """
        return figure.comparison({f"{run.name} {run.id}": run.points for run in self}, metric, by, log)

    def __repr__(self) -> str:
        count = f"{len(self)} run{'s' * (len(self) != 1)}"
        return f"<Runs: {count}{f' in {self.place}' if self.place else ''}>"


ABSENT = object()
"""Value of a run that has no such argument, setting or package, in what :func:`differing` returns."""


def differing(runs: Sequence[Run]) -> list[tuple[str, str, list[Any]]]:
    """Return what differs between runs: ``arguments``, ``plan`` or ``versions``, the name, and each run's value."""
    found = []
    for kind in ("arguments", "plan", "versions"):
        maps: list[Mapping[str, Any]] = [getattr(run, kind) for run in runs]
        for name in dict.fromkeys(name for one in maps for name in one):
            values = [one.get(name, ABSENT) for one in maps]
            if any(value != values[0] for value in values[1:]):
                found.append((kind, name, values))
    return found


def runs(directory: str | os.PathLike[str] | None = None) -> Runs:
    """Return the runs that were recorded in a directory, the newest first.

    Parameters
    ----------
    directory : str, optional
        A path, or a URL that fsspec knows: the ``model_dir`` of clusters, or a directory one or two levels above.
        Default: ``tfos_models`` in the working directory.

    Returns
    -------
    Runs
        A sequence. At the end of a notebook's cell it is a table; ``%tfos_runs`` shows it with its curves.

    Raises
    ------
    PlanError
        If the directory does not exist, or is a file.
    Unreachable
        If its store does not answer.

    Examples
    --------
    >>> found = tfos_nb.runs()  # doctest: +SKIP
    >>> found[0].metrics, found[:2].differences()  # doctest: +SKIP
    """
    given: Any = directory
    if not isinstance(given, (str, os.PathLike, type(None))) or given == "":
        raise PlanError(f"directory must be a path or a URL, got {given!r}")
    place = os.fspath(directory) if directory is not None else HOME
    try:
        refuse_unknown(place)
    except Unreachable as error:
        raise PlanError(str(error)) from None
    place = absolute(place)
    shown = without_password(place)
    system, path = file_system(place)
    if not answered_within(_WITHIN, place, lambda: system.isdir(path)):
        if directory is None:
            return Runs([], shown)
        kind = "is a file" if system.exists(path) else "does not exist"
        raise PlanError(f"{shown} {kind}: give the model_dir of a cluster, or a directory that has some")
    texts = answered_within(_WITHIN, place, lambda: _texts(system, path.rstrip("/")))
    return _read(texts, shown)


def _texts(system: Any, path: str) -> dict[str, str | OSError]:
    """Return the texts of all files that may be records, by path, or the error of a file that cannot be read."""
    system.invalidate_cache()  # object stores remember a listing
    found = {name for folder in _folders(system, path) for name, _ in _listed(system, folder) if name.endswith(".json")}
    names = sorted(name for name in found if not os.path.basename(name).startswith("."))  # which are being written

    def text(name: str) -> str | OSError:
        try:
            if is_local(system) and not os.path.isfile(name):  # a pipe would be waited for
                return OSError("not a file")
            return bytes(system.cat_file(name)).decode("utf-8", "replace")
        except OSError as error:
            return error

    if is_local(system):
        return {name: text(name) for name in names}
    with ThreadPoolExecutor(_AT_ONCE) as readers:
        return dict(zip(names, readers.map(text, names), strict=True))


def _folders(system: Any, path: str) -> list[str]:
    """Return the directories with records: the given one, and those up to two levels below."""
    found, level = [path] if os.path.basename(path) == FOLDER else [], [path]
    seen = {os.path.realpath(path)}
    for _ in range(_LEVELS + 1):
        below = [name for above in level for name, is_folder in _listed(system, above) if is_folder]
        if is_local(system):  # a link may lead to a directory that is listed already
            known = {os.path.realpath(name): name for name in reversed(below)}
            below = [name for real, name in known.items() if real not in seen]
            seen |= known.keys()
        found += [name for name in below if os.path.basename(name) == FOLDER]
        level = [name for name in below if os.path.basename(name) != FOLDER]
    return found


def _listed(system: Any, path: str) -> list[tuple[str, bool]]:
    """Return the paths in a directory, and which are directories; none if it has gone or may not be read."""
    try:
        return [(one["name"].rstrip("/"), _is_folder(system, one)) for one in system.ls(path, detail=True)]
    except OSError:
        return []


def _is_folder(system: Any, one: Mapping[str, Any]) -> bool:
    return one["type"] == "directory" or bool(one.get("islink") and system.isdir(one["name"]))


def _read(texts: Mapping[str, str | OSError], place: str) -> Runs:
    found, unreadable = dict[str, Run](), dict[str, str]()
    for name, text in texts.items():
        try:
            if isinstance(text, OSError):
                raise BadRun(str(text))
            run = from_json(text, name)
        except BadRun as error:
            unreadable[name] = str(error)
            continue
        known = found.get(run.id)
        if known is None or known.updated < run.updated:  # the other one is an older copy of the file
            found[run.id] = run
    return Runs(list(found.values()), place, unreadable)
