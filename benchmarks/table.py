"""Results as values, as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

__all__ = ["Ratio", "Result", "document", "median", "render"]

_PACKAGES = ("tfos_nb", "pyspark", "pyarrow", "tensorflow", "keras", "numpy", "grpcio")


@dataclass(frozen=True)
class Ratio:
    """One figure compared with another of the same run, and the promise about their ratio.

    Parameters
    ----------
    what : str
        What is compared.
    ours, against : float
        The two figures.
    unit : str
        Unit of both figures.
    target : float or None
        The promise; None where the ratio is only for information.
    at_most : bool
        Whether the promise is an upper bound.
    """

    what: str
    ours: float
    against: float
    unit: str
    target: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float:
        """Our figure as a multiple of the other; two zeros are equal."""
        if self.against:
            return self.ours / self.against
        return 1.0 if not self.ours else float("inf")

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None without a promise."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


@dataclass(frozen=True)
class Result:
    """Result of one benchmark: the ratios, and every figure that they were computed from."""

    name: str
    ratios: tuple[Ratio, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def median(values: Sequence[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def document(results: Sequence[Result], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all results, with the details that a later reader needs; nothing in it names the machine."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "cores": os.cpu_count(),
        # A load above the number of cores: other programs used the machine.
        "load_average_at_end": [round(load, 2) for load in os.getloadavg()],
        "settings": settings,
        "results": [_as_json(result) for result in results],
    }


def render(results: Sequence[Result]) -> str:
    """Return the ratios as a table, with the notes under it."""
    head = ("benchmark", "what", "ours", "against", "unit", "ratio", "target", "")
    rows = [_cells(result.name, ratio) for result in results for ratio in result.ratios]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [_line(head, widths), _line(tuple("-" * width for width in widths), widths)]
    lines += [_line(row, widths) for row in rows]
    lines += [f"{result.name}: {note}" for result in results for note in result.notes]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _as_json(result: Result) -> dict[str, Any]:
    ratios = [{**dataclasses.asdict(one), "ratio": one.ratio, "met": one.met} for one in result.ratios]
    return {"name": result.name, "ratios": ratios, "figures": result.figures, "notes": list(result.notes)}


def _cells(name: str, ratio: Ratio) -> tuple[str, ...]:
    target = "" if ratio.target is None else f"{'<=' if ratio.at_most else '>='} {ratio.target:g}"
    verdict = {None: "", True: "met", False: "MISSED"}[ratio.met]
    return (
        name,
        ratio.what,
        _number(ratio.ours),
        _number(ratio.against),
        ratio.unit,
        f"{ratio.ratio:.2f}",
        target,
        verdict,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # Align numbers to the right, words to the left.
    aligned = [
        cell.rjust(width) if 2 <= column <= 5 and column != 4 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
