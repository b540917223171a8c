"""``spark-submit`` for a test: in a process of its own, with a deadline, and its output shown if it fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.clusters import daemons
from tests.conftest import ENVIRONMENT
from tfos_nb.java import find_java

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 420.0


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Return settings of Spark as words of a command line."""
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


@contextmanager
def submitted(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, home: Path | None = None
) -> Iterator[daemons.Daemon]:
    """Submit a program; it is ended when the block is left."""
    home = home or Path(pyspark.__file__).parent
    whole = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **environment,
    }
    given = [str(home / "bin" / "spark-submit"), *arguments]
    running = daemons.start("spark-submit", given, {name: value for name, value in whole.items() if value}, folder)
    try:
        yield running
    finally:
        running.stop()


def outcome(running: daemons.Daemon, seconds: float = SECONDS) -> None:
    """Wait until a program has ended well."""
    try:
        code: object = running.process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = f"none after {seconds:.0f} seconds"
    assert code == 0, f"exit code {code}:\n{running.log.read_text(errors='replace')[-8000:]}"


def printed(text: str) -> dict[str, Any]:
    """Return what a program printed as its last word: a line of JSON."""
    line = next(line for line in reversed(text.splitlines()) if line.startswith('{"outcome"'))
    found: dict[str, Any] = json.loads(line)["outcome"]
    return found
