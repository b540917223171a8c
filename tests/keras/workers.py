"""Run a program of this folder as all workers of a cluster on loopback, and in one process."""

from __future__ import annotations

import json
from pathlib import Path

from tests.programs import reserved_ports, start

__all__ = ["run"]

DEADLINE = 1800.0  # seconds: dozens of models, each traced for training and evaluation


def run(count: int, program: str, folder: Path, *arguments: str) -> tuple[list[Path], Path]:
    """Run the program as each of so many workers, and in one process; return the files that they wrote."""
    outs = [folder / f"out.{index}" for index in range(count)]
    alone = folder / "out.alone"
    processes = []
    with reserved_ports(count) as addresses:
        try:
            for index, out in enumerate([*outs, alone]):
                config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                which = json.dumps(config) if out != alone else ""
                processes.append(start(f"tests.keras.{program}", str(out), *arguments, TF_CONFIG=which))
            said = [process.communicate(DEADLINE)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-6000:]
    return outs, alone
