"""Displays of what was written to TFRecord files, and of what a read has left out."""

from __future__ import annotations

from html import escape
from typing import Any

from tfos_nb.redaction import without_password
from tfos_nb.truncate import clip
from tfos_nb.widgets.html import render_section
from tfos_nb.widgets.words import wording

__all__ = ["saved_bundle", "skipped_bundle"]

_SHOWN = 20


def saved_bundle(saved: Any) -> dict[str, str]:
    """Return the outcome of a write: where, and how many files, rows and bytes."""
    path = without_password(saved.path)
    facts = [("Files", wording.count(saved.files)), ("Rows", wording.count(saved.rows)), ("Size", _bytes(saved.size))]
    if saved.files:
        facts.append(("A file", f"{_bytes(saved.size // saved.files)} on average"))
    tiles = "".join(
        f'<div class="t-tile"><span class="t-label">{name}</span> <b>{value}</b></div>' for name, value in facts
    )
    head = (
        '<div class="t-head"><b class="t-name">TFRecord files</b> <span class="t-pill t-ok">written</span> '
        f'<span class="t-dim t-mono">{escape(path)}</span></div>'
    )
    if not saved.files:
        head = head.replace("t-ok", "t-idle").replace("written", "nothing was written")
    return {
        "text/html": render_section("TFRecord files", f'{head}<div class="t-sum">{tiles}</div>'),
        "text/plain": repr(saved),
    }


def skipped_bundle(skipped: Any) -> dict[str, str]:
    """Return the places that a read has left out, by file."""
    files = sorted(skipped.files.items())
    places = sum(damage.records for _, damage in files)
    word = f"{places} damaged place{'s' * (places != 1)}" if files else "nothing was left out"
    head = (
        '<div class="t-head"><b class="t-name">Skipped records</b> '
        f'<span class="t-pill t-{"warn" if files else "ok"}">{word}</span></div>'
    )
    rows = "".join(
        f'<tr><th scope="row" class="t-mono">{escape(clip(without_password(url.removeprefix("file://")), 200))}</th>'
        f'<td class="t-num">{damage.records}</td><td class="t-num">{damage.first}</td>'
        f'<td class="t-why">{escape(clip(damage.why, 200))}</td></tr>'
        for url, damage in files[:_SHOWN]
    )
    titles = (
        '<th scope="col">File</th>',
        *(f'<th scope="col" class="t-num">{name}</th>' for name in ("Places", "Byte")),
    )
    table = (
        f'<div class="t-scroll"><table class="t-epochs"><caption class="t-unseen">{word}</caption><thead><tr>'
        f'{"".join(titles)}<th scope="col">First reason</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
    more = f'<div class="t-foot">and {len(files) - _SHOWN} files more</div>' if len(files) > _SHOWN else ""
    return {
        "text/html": render_section("Skipped records", head + (table + more if files else "")),
        "text/plain": repr(skipped),
    }


def _bytes(size: int) -> str:
    """Format a size in the unit that suits it.

    Examples
    --------
    >>> _bytes(812), _bytes(493_562), _bytes(7_200_000_000)
    ('812 B', '494 kB', '7.2 GB')
    """
    if size < 1000:
        return f"{size} B"
    return f"{size / 1000:.0f} kB" if size < 1_000_000 else wording.memory(size)
