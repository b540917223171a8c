"""The environment of TensorFlowOnSpark 2.2.5: created when needed, kept in the user's cache, apart from ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.session import ROOT

__all__ = ["measure", "run"]

_MEASURE_SECONDS = 900.0
_INSTALL_SECONDS = 1800.0


def measure(
    shape: str,
    rows: int,
    partitions: int,
    repeat: int,
    module: str = "benchmarks.lineage",
    *,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Send `rows` rows of `shape` in `partitions` through TensorFlowOnSpark, `repeat` times; return its rates."""
    return run(module, shape, rows, partitions, repeat, *more)


def run(module: str, *arguments: Any) -> dict[str, Any]:
    """Run a benchmark module in the environment; return the JSON of the last line that it prints."""
    python = _environment()
    # Neither our Spark nor our Python may leak into it.
    kept = {key: value for key, value in os.environ.items() if key not in ("SPARK_HOME", "PYSPARK_PYTHON")}
    command = [str(python), "-m", module, *map(str, arguments)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=_MEASURE_SECONDS,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"TensorFlowOnSpark could not be measured:\n{ended.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def _environment() -> Path:
    """Return the environment's Python; build the environment if none has these versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "tfos_nb" / "bench-tfos"
    python = folder / "bin" / "python"
    wanted = _requirements()
    marker = folder / "installed.json"
    if marker.exists() and json.loads(marker.read_text()) == wanted:
        return python
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    install = [str(python), "-m", "pip", "install", "--quiet", *wanted]
    subprocess.run(install, check=True, timeout=_INSTALL_SECONDS, stdout=sys.stderr)
    marker.write_text(json.dumps(wanted))
    return python


def _requirements() -> list[str]:
    # It imports pkg_resources, which newer setuptools do not have; setuptools before 66 does not run on Python 3.12.
    setuptools = "setuptools<66" if sys.version_info < (3, 12) else "setuptools<80"
    ours = [f"{name}=={metadata.version(name)}" for name in ("pyspark", "tensorflow")]
    return [setuptools, "wheel", "packaging", "tensorflowonspark==2.2.5", *ours]
