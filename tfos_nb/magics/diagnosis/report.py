"""Show findings as a table, in text or in HTML."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from IPython.display import display

from tfos_nb.widgets.hosts import detect_host

__all__ = ["Finding", "render_findings_html", "render_findings_text", "show_findings"]

State = Literal["ok", "warn", "missing", ""]

_WIDTH = 100
_SIGNS = {"ok": "✓ ok", "warn": "! look", "missing": "✗ missing", "": ""}
_COLOURS = {
    "ok": "var(--jp-success-color1,#1a7f4b)",
    "warn": "var(--jp-warn-color1,#b26a00)",
    "missing": "var(--jp-error-color1,#c0352b)",
    "": "inherit",
}
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
    """Return the findings as an HTML table, which is readable even if the page removes styles."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};white-space:nowrap;color:{_COLOURS[finding.state]}">'
        f"{_SIGNS[finding.state]}</td>"
        f'<th scope="row" style="{_CELL};font-weight:600">{escape(finding.what)}</th>'
        f'<td style="{_CELL}">{escape(finding.told)}{_extras(finding)}</td></tr>'
        for finding in findings
    )
    return f'<table style="margin:2px 0"><caption style="text-align:left">{escape(title)}</caption>{rows}</table>'


def _extras(finding: Finding) -> str:
    link = ""
    if finding.link.startswith(("http://", "https://", "/")):
        address = escape(finding.link)
        link = f'<br><a href="{address}" target="_blank" rel="noopener noreferrer">{address}</a>'
    return link + (f"<br><code>{escape(finding.remedy)}</code>" if finding.remedy else "")


def show_findings(title: str, findings: Sequence[Finding]) -> None:
    """Show the findings, as an HTML table in notebooks and as text elsewhere."""
    text = render_findings_text(title, findings)
    wanted = os.environ.get("TFOS_NB_PROGRESS", "").strip().lower()
    if detect_host().rendering == "text" or wanted in ("text", "none"):
        sys.stdout.write(text + "\n")
        return
    bundle = {"text/html": render_findings_html(title, findings), "text/plain": text}
    display(bundle, raw=True)  # type: ignore[no-untyped-call]
