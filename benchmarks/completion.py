"""Measure how long completion takes on a magic's line, with thousands of variables, against the bound.

For information, the same lines are measured without the extension: IPython then offers Python's own names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["run"]

BOUND_MS = 50.0
VARIABLES = 5_000
TIMES = 20
LINES = (
    "%%tfos_cluster mnist --",
    "%%tfos_cluster mnist --data ",
    "%%tfos_cluster mnist --args v",
    "%%tfos_cluster mnist --fn ",
    "%tfos_train fr",
    "%tfos_stop ",
    "%tfos_spark --",
)


class Rows:
    """An object that the magics accept as a DataFrame."""

    def mapInArrow(self) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""


def run(settings: Settings) -> Result:
    """Measure each line with and without the extension."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    from tfos_nb.magics import load, unload

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.user_ns.update({f"value_{number}": [number] for number in range(VARIABLES)})
    shell.user_ns.update({f"frame_{number}": Rows() for number in range(100)})
    shell.user_ns["main"] = run
    load(shell)
    ours = {line: _milliseconds(shell, line, TIMES * settings.repeat) for line in LINES}
    unload(shell)
    without = {line: _milliseconds(shell, line, settings.repeat) for line in LINES}
    slowest = max(LINES, key=lambda line: median(ours[line]))
    settings.say(f"completion: {median(ours[slowest]):.1f} ms at the most")
    ratios = (
        Ratio(f"slowest line ({slowest.strip()}) / {BOUND_MS:g} ms", median(ours[slowest]), BOUND_MS, "ms", 1.0, True),
        Ratio(
            "median line / the same without the extension",
            median([median(values) for values in ours.values()]),
            median([median(values) for values in without.values()]),
            "ms",
        ),
    )
    note = f"{VARIABLES} variables and 100 DataFrames in the namespace."
    return Result("completion", ratios, {"ours": ours, "without": without}, (note,))


def _milliseconds(shell: Any, line: str, times: int) -> list[float]:
    from IPython.core.completer import provisionalcompleter

    taken = []
    for _ in range(times):
        started = time.perf_counter()
        with provisionalcompleter():
            list(shell.Completer.completions(line, len(line)))
        taken.append((time.perf_counter() - started) * 1000)
    return taken
