"""``python -m benchmarks [NAME…] [--json FILE]``: measure, print the ratios, write them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import PARTITIONS
from benchmarks.settings import Settings
from benchmarks.table import Result, document, render

NAMES = (
    "feed", "replay", "start", "leak", "report", "completion", "board", "panel", "attach", "transform", "first_model",
    "cluster_inference", "tfrecord", "steps", "pauses", "recovery", "going_on", "goodput", "saving", "keeping", "fleet",
    "scaling",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; return 1 if a promise is not kept."""
    asked = _parser().parse_args(argv)
    settings = Settings(
        rows=asked.rows,
        repeat=asked.repeat,
        launches=asked.launches,
        lineage_rows=asked.lineage_rows,
        lineage_partitions=asked.lineage_partitions,
        without_lineage=asked.without_lineage,
        minutes=asked.minutes,
        only_baselines=asked.only_baselines,
    )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    results: list[Result] = []
    for name in dict.fromkeys(asked.names or NAMES):
        results.append(importlib.import_module(f"benchmarks.{name}").run(settings))
        # Written after each benchmark, so that a failure in the next one loses nothing.
        _write(asked.json, results, settings)
    print(render(results))
    return int(any(ratio.met is False for result in results for ratio in result.ratios))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what tfos_nb promises.")
    parser.add_argument("names", nargs="*", metavar="NAME", type=_benchmark, help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--rows", type=_positive, help="rows of each shape (default: by shape)")
    parser.add_argument("--repeat", type=_positive, default=3, help="take each figure so often (default 3)")
    parser.add_argument("--launches", type=_positive, default=20, help="clusters of the leak benchmark (default 20)")
    parser.add_argument("--lineage-rows", type=_positive, help="rows for TensorFlowOnSpark (default: by shape)")
    parser.add_argument("--lineage-partitions", type=_positive, default=PARTITIONS, help="partitions of those")
    parser.add_argument("--minutes", type=float, default=30.0, help="hurt a training for so long (default 30)")
    parser.add_argument("--without-lineage", action="store_true", help="leave TensorFlowOnSpark out")
    parser.add_argument("--only-baselines", action="store_true", help="measure only what feed and start compare with")
    return parser


def _benchmark(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"no benchmark {text!r}; there are {', '.join(NAMES)}")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _write(path: Path | None, results: list[Result], settings: Settings) -> None:
    if path is not None:
        path.write_text(json.dumps(document(results, dataclasses.asdict(settings)), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
