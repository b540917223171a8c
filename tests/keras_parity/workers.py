"""Run a program of this folder as all workers of a cluster on loopback, and in one process."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.programs import reserved_ports, start

__all__ = ["as_worker", "read_results", "run", "write_results"]

DEADLINE = 3600.0  # seconds: hundreds of models, each traced for training and evaluation by each worker


def run(count: int, program: str, folder: Path, *arguments: str) -> tuple[list[Path], Path]:
    """Run the program as each of ``count`` workers, and in one process; return the files that they wrote."""
    outs = [folder / f"out.{index}" for index in range(count)]
    alone = folder / "out.alone"
    processes = []
    with reserved_ports(count) as addresses:
        try:
            for index, out in enumerate([*outs, alone]):
                config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                which = json.dumps(config) if out != alone else ""
                processes.append(start(f"tests.keras_parity.{program}", str(out), *arguments, TF_CONFIG=which))
            said = [process.communicate(DEADLINE)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-6000:]
    return outs, alone


def as_worker() -> tuple[int, int, Any]:
    """Return this process' number, the number of workers, and their strategy; patch Keras as in a node."""
    import tensorflow as tf

    from tfos_nb.runtime.program.setup import patch_keras_fit

    task = json.loads(os.environ.get("TF_CONFIG") or "{}")
    worker, workers = task.get("task", {}).get("index", 0), len(task.get("cluster", {}).get("worker", [])) or 1
    print(patch_keras_fit())
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if workers > 1 else tf.distribute.get_strategy()
    return worker, workers, strategy


def write_results(out: str, cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    """Write a line of JSON for each named case: its result, or the ``error`` that it raised."""
    with open(out, "w") as file:
        for name, train in cases:
            try:
                result = train()
            except Exception as error:  # noqa: BLE001 - the other cases must run too
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
            file.write(json.dumps({"name": name, **result}) + "\n")
            file.flush()


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file of :func:`write_results`, by the names of the cases."""
    return {one.pop("name"): one for one in map(json.loads, path.read_text().splitlines())}
