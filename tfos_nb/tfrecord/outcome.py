"""Outcome of a write: its result, or the reason of its failure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tfos_nb.rich import Rich

__all__ = ["Saved", "cause_of"]

_CAUSE = re.compile(r"^(?:[\w.]*\.)?(RecordError|FeedFailed|PlanError): (.*)$", re.MULTILINE)
_NAMED = re.compile(r"[\w.]+(Error|Exception)\b.*: ")


@dataclass(frozen=True)
class Saved(Rich):
    """Result of a write.

    Attributes
    ----------
    path : str
        Where.
    files, rows, size : int
        How many files and rows, and their bytes.
    """

    _rich = "saved"

    path: str
    files: int
    rows: int
    size: int


def cause_of(error: Exception) -> str:
    """Return a task's last message, without Spark's and Python's tracebacks around it."""
    text = str(error)
    found = _CAUSE.findall(text)
    if found:
        return str(found[-1][1])
    # Java's trace lists the root cause last; each cause begins with "Caused by:".
    lines = [line.strip().removeprefix("Caused by:").lstrip(": ") for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line) and "PythonException" not in line]
    return f"{type(error).__name__}: {(named or lines or ['no reason given'])[-1 if named else 0]}"
