"""``spark-submit`` for a test: in a process of its own, with a deadline, and its output shown if it fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.cluster_managers import daemons
from tests.conftest import ENVIRONMENT
from tfos_nb.spark.java import find_java

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 420.0
SECONDS_TO_PACK = 1800.0
"""For a program whose environment, of 2 GB, is made, packed and unpacked first."""
_HOME = Path(pyspark.__file__).parent


def as_options(settings: Mapping[str, object]) -> list[str]:
    """Return settings of Spark as arguments of a command line."""
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def environment_of(more: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Return the environment of a submitted program, without the variables that are empty in ``more``."""
    whole = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home or _HOME),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }
    return {name: value for name, value in whole.items() if value}


@contextmanager
def submitted(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, home: Path | None = None
) -> Iterator[daemons.Daemon]:
    """Submit a program; end it when the block is left."""
    given = [str((home or _HOME) / "bin" / "spark-submit"), *arguments]
    running = daemons.start("spark-submit", given, environment_of(environment, home), folder)
    try:
        yield running
    finally:
        running.stop()


def outcome(running: daemons.Daemon, seconds: float = SECONDS) -> None:
    """Wait until a program has ended successfully."""
    try:
        code: object = running.process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = f"none after {seconds:.0f} seconds"
    assert code == 0, f"exit code {code}:\n{running.log.read_text(errors='replace')[-8000:]}"


def printed(text: str) -> dict[str, Any]:
    """Return the last line of JSON that a program printed."""
    line = next(line for line in reversed(text.splitlines()) if line.startswith('{"outcome"'))
    found: dict[str, Any] = json.loads(line)["outcome"]
    return found


def runs_in_what_was_shipped(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that each node of ``where_it_runs.py`` had its Python and its TensorFlow from the archive."""
    assert sorted(results) == ["worker:0", "worker:1"]
    for node in results.values():
        assert node["epochs"] == [0, 1]
        assert Path(node["python"]).is_relative_to(node["folder"])
        unpacked = Path(node["python"]).parents[1]  # in YARN's folder this is a link to the host's cache
        assert Path(node["tensorflow"]).resolve().is_relative_to(unpacked.resolve())
