"""Data of recorded runs for the page: a row for each run, and the curves of those that the user chooses.

The page gets the rows at once, and curves only when it asks for them: see :data:`BUDGET`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.records.run import Run
from tfos_nb.records.runs import Runs
from tfos_nb.redaction import without_password
from tfos_nb.state.chart_data import chart_data, comparison_data
from tfos_nb.state.training_curve import chart_names
from tfos_nb.truncate import clip, clip_lines, size
from tfos_nb.widgets.words import runs as words
from tfos_nb.widgets.words import wording
from tfos_nb.widgets.words.problems import headline

__all__ = ["BUDGET", "FIELDS", "MOST_COMPARED", "MOST_RUNS", "answer", "page_model"]

MOST_RUNS = 500
"""Maximum number of runs in the table."""

MOST_COMPARED = 10
"""Maximum number of runs in one chart, which has a colour for each."""

BUDGET = 200_000
"""Maximum size of the table's message, in bytes of JSON. If the texts to search do not fit, they are cut."""

FIELDS = (
    "id", "name", "outcome", "tone", "started", "seconds", "epochs", "workers", "metrics", "arguments", "search",
)  # fmt: skip
"""Names of the elements of a run's list."""

_WHOLE = 2**53  # up to which the page has each integer
_ROOMS = (400, 150, 60)  # bytes of a text to search


def page_model(runs: Runs) -> dict[str, Any]:
    """Return the dictionary that the page shows.

    Returns
    -------
    dict
        The ``place``; how many runs there are in ``total``; the newest ``runs``, each a list with the elements of
        ``fields``; the names of the ``metrics`` and ``arguments`` that have a column; the lines below the table in
        ``notes``; and what to do if there is no run in ``empty``.
    """
    shown = runs[:MOST_RUNS]
    metrics = words.metric_columns(shown, words.METRICS)
    arguments, others = words.columns(shown, words.ARGUMENTS)
    model = {
        "place": clip(words.place(runs.place), 300),
        "total": len(runs),
        "fields": FIELDS,
        "metrics": [clip(name, 40) for name in metrics],
        "arguments": [clip(name, 40) for name in arguments],
        "notes": [*words.other_arguments(others), *words.unreadable(runs.unreadable)],
        "empty": "" if len(runs) else words.NONE_YET,
    }
    for room in _ROOMS:
        model["runs"] = [_row(run, metrics, arguments, room) for run in shown]
        if size(model) <= BUDGET:
            break
    return model


def _row(run: Run, metrics: Sequence[str], arguments: Sequence[str], room: int) -> list[Any]:
    return [
        clip(run.id, 60),
        clip(run.name, 60),
        run.outcome,
        words.TONES[run.outcome],
        round(run.started, 3),
        round(run.seconds, 1),
        len(run.epochs),
        _cell(run.plan.get("workers", "")),
        [_cell(run.metrics[name]) if name in run.metrics else None for name in metrics],
        [_cell(run.arguments[name]) if name in run.arguments else None for name in arguments],
        clip(_search(run), room),
    ]


def _cell(value: Any) -> float | str:
    """Return a number to sort by, or a text."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _WHOLE:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.7g}")
    return words.argument(value)


def _search(run: Run) -> str:
    """Return the text that the filter looks at, in lower case."""
    arguments = [f"{name}={words.argument(value, 40)}" for name, value in run.arguments.items()]
    return " ".join([run.name, run.id, run.outcome, *arguments, *run.metrics]).lower()


def answer(runs: Runs, ids: Sequence[str], metric: str = "", by: str = "") -> dict[str, Any]:
    """Return what the page shows of chosen runs.

    Parameters
    ----------
    runs : Runs
        All runs.
    ids : sequence of str
        The chosen ones.
    metric, by : str
        What the chart is to show: see :func:`tfos_nb.state.chart_data.comparison_data`.

    Returns
    -------
    dict
        ``chart``, or in it a ``message`` if there is nothing to draw. For one run its ``facts`` and its ``error``; for
        several the ``differences`` of their arguments, plan and versions.

    Raises
    ------
    PlanError
        If a run is not there any more, or too many are chosen.
    """
    known = {run.id: run for run in runs}
    missing = [run for run in ids if run not in known]
    if missing or not ids:
        raise PlanError(f"no run has the id {clip(', '.join(missing), 60)!r} any more: refresh the table")
    if len(ids) > MOST_COMPARED:
        raise PlanError(f"at most {MOST_COMPARED} runs fit in one chart, got {len(ids)}: choose fewer")
    chosen = [known[run] for run in ids]
    return {"chart": _chart(chosen, metric, by), **(_facts(chosen[0]) if len(chosen) == 1 else _differences(chosen))}


def _chart(chosen: Sequence[Run], metric: str, by: str) -> dict[str, Any]:
    names = {name for run in chosen for name in chart_names(run.points)}
    if not names:
        told = "This run has reported no" if len(chosen) == 1 else "None of these runs has reported a"
        return {"message": f"{told} metric, so there is no curve."}
    if len(chosen) == 1:
        return chart_data(chosen[0].points, metric=metric, by=by)
    return comparison_data({run.id: run.points for run in chosen}, metric=metric if metric in names else "", by=by)


def _facts(run: Run) -> dict[str, Any]:
    first, rest = headline(without_password(run.error), wording.LONGEST)
    return {"facts": words.facts(run), "error": [first, clip_lines(rest, 6_000)]}


def _differences(chosen: Sequence[Run]) -> dict[str, Any]:
    return {"differences": [(kind, clip(name, 60), values) for kind, name, values in words.differences(chosen)]}
