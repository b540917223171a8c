"""Show findings as a table, in text or in HTML."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from tfos_nb.errors import PlanError
from tfos_nb.widgets.html import render_section
from tfos_nb.widgets.live import show_bundle

__all__ = ["Finding", "render_findings_html", "render_findings_text", "show_findings"]

State = Literal["ok", "warn", "missing", ""]

_WIDTH = 100
_SIGNS = {"ok": "✓ ok", "warn": "! look", "missing": "✗ missing", "": ""}
_TONES = {"ok": "ok", "warn": "warn", "missing": "bad", "": "idle"}
_WORDS = {"ok": "ok", "warn": "look", "missing": "missing", "": ""}
_CELL = "padding:4px 12px 4px 0;text-align:left;vertical-align:top;white-space:normal;overflow-wrap:anywhere"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes
    ----------
    what : str
        Name of the checked item.
    state : str
        ``ok``, ``warn`` (it works or may work, but the user should know something), ``missing`` (it must be fixed), or
        empty if there is nothing to judge.
    told : str
        What was found.
    remedy : str
        The command that fixes it, or what to do.
    link : str
        A URL that belongs to it.
    """

    what: str
    state: State
    told: str
    remedy: str = ""
    link: str = ""


def render_findings_text(title: str, findings: Sequence[Finding]) -> str:
    """Return the findings as text, for a terminal, a log, and ``text/plain``."""
    signs = max((len(_SIGNS[finding.state]) for finding in findings), default=0)
    names = max((len(finding.what) for finding in findings), default=0)
    indent = " " * (signs + names + 4)
    lines = [title]
    for finding in findings:
        head = f"{_SIGNS[finding.state]:<{signs}}  {finding.what:<{names}}  "
        lines += _wrapped(_plain(finding.told), head, indent)
        for more in filter(None, (finding.link, finding.remedy)):
            lines += [f"{indent}→ {_plain(more)}"]  # not wrapped, so that it can be copied
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, head: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=indent) or [head]


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def render_findings_html(title: str, findings: Sequence[Finding]) -> str:
    """Return the findings as an HTML table in the frame of the panel.

    The cells have styles of their own, which many hosts keep that remove a style sheet.
    """
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL};font-weight:600">{escape(finding.what)}</th>'
        f'<td style="{_CELL};white-space:nowrap">{_pill(finding.state)}</td>'
        f'<td style="{_CELL}">{escape(finding.told)}{_extras(finding)}</td></tr>'
        for finding in findings
    )
    head = f'<div class="t-head"><b class="t-name">{escape(title)}</b></div>'
    caption = f'<caption class="t-unseen" style="text-align:left">{escape(title)}</caption>'
    widths = '<colgroup><col style="width:184px"><col style="width:104px"><col></colgroup>'
    table = f'<div class="t-scroll"><table class="t-findings">{caption}{widths}<tbody>{rows}</tbody></table></div>'
    return render_section(title, head + table)


def _pill(state: State) -> str:
    """Return a finding's state as a word with its colour; the sign is for readers without colours or styles."""
    if not state:
        return ""
    sign = _SIGNS[state].partition(" ")[0]
    return f'<span class="t-pill t-{_TONES[state]}"><span class="t-sign">{sign} </span>{_WORDS[state]}</span>'


def _extras(finding: Finding) -> str:
    link = ""
    if finding.link.startswith(("http://", "https://", "/")):
        address = escape(finding.link)
        link = f'<br><a href="{address}" target="_blank" rel="noopener noreferrer">{address}</a>'
    return link + (f'<br><code class="t-remedy">{escape(finding.remedy)}</code>' if finding.remedy else "")


def show_findings(title: str, findings: Sequence[Finding]) -> None:
    """Show the findings, as an HTML table in notebooks and as text elsewhere."""
    bundle = {
        "text/html": render_findings_html(title, findings),
        "text/plain": render_findings_text(title, findings),
    }
    try:
        show_bundle(bundle)
    except PlanError:  # TFOS_NB_PROGRESS is wrong, which is among what the doctor has found
        sys.stdout.write(bundle["text/plain"] + "\n")
