"""Displays of a recorded run, and of several as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from tfos_nb.records.run import Run
from tfos_nb.records.runs import Runs
from tfos_nb.redaction import without_password
from tfos_nb.state.training_curve import Point
from tfos_nb.truncate import clip, clip_lines
from tfos_nb.widgets.charts.static import render_charts, render_epochs
from tfos_nb.widgets.html import render_section
from tfos_nb.widgets.words import facts, terminal, wording
from tfos_nb.widgets.words import runs as words
from tfos_nb.widgets.words.problems import headline

__all__ = ["run_bundle", "runs_bundle"]

MOST_ROWS = 50
"""Maximum number of runs in the static table; the page has more."""

_COLUMNS_OF_TEXT = 2, 2
_LONGEST_TRACE = 8_000
_WIDEST, _GAP = 24, "  "  # a column of text, and the gap after it


class _Column(NamedTuple):
    """A column; ``cell`` returns plain text."""

    title: str
    cell: Callable[[Run], str]
    number: bool = False


# --- one run ---


def run_bundle(run: Run) -> dict[str, str]:
    """Return what is known of a run: its outcome, facts, error, curves and last epochs."""
    head = (
        f'<div class="t-head"><b class="t-name">{escape(clip(run.name, 80))}</b> {_pill(run)} '
        f'<span class="t-dim t-mono">{escape(clip(run.id, 80))}</span> '
        f'<span class="t-end"><span class="t-dim">{_span(run)}</span></span></div>'
    )
    rows = "".join(
        f'<tr><th scope="row">{title}</th><td class="t-why">{escape(text)}</td></tr>'
        for title, text in words.facts(run)
    )
    table = (
        '<div class="t-scroll"><table class="t-epochs t-facts"><caption class="t-unseen">Facts of the run</caption>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    points: Sequence[Point] = run.points
    curves = render_charts(points) + render_epochs(points)
    foot = f'<div class="t-foot">{_more_of(run)}</div>' if points else ""
    label = f"Run {run.name} {run.id}"
    return {
        "text/html": render_section(label, head + _failure(run) + table + curves + foot),
        "text/plain": _run_text(run),
    }


def _pill(run: Run) -> str:
    return f'<span class="t-pill t-{words.TONES[run.outcome]}">{run.outcome}</span>'


def _span(run: Run) -> str:
    so_far = " so far" if run.outcome == "running" else ""
    return f"{words.when(run.started)} · {wording.duration(run.seconds)}{so_far}"


def _more_of(run: Run) -> str:
    cut = "as far as it was recorded; " if run.outcome in ("running", "killed") else ""
    return f"{cut}.plot() draws the curves with matplotlib, .to_pandas() returns the numbers, also by step"


def _failure(run: Run) -> str:
    if not run.error:
        return ""
    first, rest = headline(without_password(run.error), wording.LONGEST)
    trace = escape(clip_lines(rest, _LONGEST_TRACE))
    folded = f'<details><summary>traceback</summary><pre class="t-trace">{trace}</pre></details>' if rest else ""
    tone = "t-bad" if run.outcome == "failed" else "t-warn"
    return f'<div class="t-say {tone}">{escape(first)}{folded}</div>'


def _run_text(run: Run) -> str:
    lines = [f"{run.name} · {run.outcome} · {_span(run)} · {run.id}"]
    error = headline(without_password(run.error), wording.LONGEST)[0]
    told = [*([("Error", error)] if error else []), *words.facts(run, 96)]
    lines += [f"{title.lower():<10} {clip(text, 96)}" for title, text in told]
    return "\n".join(terminal.plain(line) for line in lines)


# --- several ---


def runs_bundle(runs: Runs) -> dict[str, str]:
    """Return runs as a table, the newest first."""
    count = f"{wording.count(len(runs))} run{'s' * (len(runs) != 1)}"
    place = clip(words.place(runs.place), 200)
    where = f' <span class="t-dim t-mono">{escape(place)}</span>' if place else ""
    head = f'<div class="t-head"><b class="t-name">Runs</b> <span class="t-dim">{count}</span>{where}</div>'
    body = _table(runs, count) if len(runs) else f'<div class="t-say">{escape(words.NONE_YET)}</div>'
    foot = "".join(f'<div class="t-foot">{escape(line)}</div>' for line in _notes(runs, words.ARGUMENTS))
    return {"text/html": render_section("Runs", head + body + foot), "text/plain": _runs_text(runs, count, place)}


def _table(runs: Runs, caption: str) -> str:
    columns = _columns(runs, words.METRICS, words.ARGUMENTS)
    heads = "".join(f'<th scope="col"{_side(one)}>{escape(one.title)}</th>' for one in columns)
    rows = "".join(
        f'<tr><th scope="row"><span class="t-who">{escape(clip(run.name, 60))}</span><br>'
        f'<span class="t-second t-mono">{escape(clip(run.id, 60))}</span></th><td>{_pill(run)}</td>'
        + "".join(f"<td{_side(one)}>{escape(one.cell(run))}</td>" for one in columns)
        + "</tr>"
        for run in runs[:MOST_ROWS]
    )
    return (
        f'<div class="t-scroll"><table class="t-nodes t-runs"><caption class="t-unseen">{caption}</caption><thead><tr>'
        f'<th scope="col">Run</th><th scope="col">Outcome</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _side(column: _Column) -> str:
    return ' class="t-num"' if column.number else ""


def _columns(runs: Runs, metrics: int, arguments: int) -> list[_Column]:
    """Return the columns after the name and the outcome, with at most so many metrics and arguments."""
    return [
        _Column("Started", lambda run: words.when(run.started)),
        _Column("Took", lambda run: wording.duration(run.seconds), True),
        _Column("Epochs", lambda run: str(len(run.epochs)), True),
        _Column("Workers", lambda run: words.argument(run.plan.get("workers", "")), True),
        *map(_metric, words.metric_columns(runs, metrics)),
        *map(_argument, words.columns(runs, arguments)[0]),
    ]


def _metric(name: str) -> _Column:
    return _Column(facts.title(clip(name, 40)), lambda run: wording.number(run.metrics.get(name)), True)


def _argument(name: str) -> _Column:
    return _Column(clip(name, 40), lambda run: words.argument(run.arguments[name]) if name in run.arguments else "")


def _notes(runs: Runs, arguments: int) -> list[str]:
    """Return the lines below the table: what it leaves out, and the files that are no records."""
    found = [f"and {wording.count(len(runs) - MOST_ROWS)} more"] if len(runs) > MOST_ROWS else []
    found += words.other_arguments(words.columns(runs, arguments)[1])
    if len(runs):
        found.append("%tfos_runs shows them with their curves; runs[:2].plot() draws one chart of several")
    return found + words.unreadable(runs.unreadable)


def _runs_text(runs: Runs, count: str, place: str) -> str:
    head = f"Runs: {count}{f' in {place}' if place else ''}"
    notes = _notes(runs, _COLUMNS_OF_TEXT[1])
    if not len(runs):
        return "\n".join(map(terminal.plain, [head, words.NONE_YET, *notes]))
    others = [one for one in _columns(runs, *_COLUMNS_OF_TEXT) if one.title != "Workers"]
    columns = [
        _Column("run", lambda run: f"{terminal.fit(run.name, 14)} {terminal.fit(run.id, 9)}"),
        _Column("outcome", lambda run: run.outcome),
        *(one._replace(title=terminal.fit(one.title.lower(), 10)) for one in others),
    ]
    rows = [[one.title for one in columns]]
    rows += [[terminal.fit(terminal.plain(one.cell(run)), _WIDEST) for one in columns] for run in runs[:MOST_ROWS]]
    widths = [max(terminal.width(row[number]) for row in rows) for number in range(len(columns))]
    lines = [
        _GAP.join(
            terminal.pad(cell, width, right=one.number) for cell, width, one in zip(row, widths, columns, strict=True)
        )
        for row in rows
    ]
    return "\n".join([terminal.plain(head), *(line.rstrip() for line in lines), *map(terminal.plain, notes)])
