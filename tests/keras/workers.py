"""Run a program of this folder as all workers of a cluster on loopback, or as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.test_strategy import reserved_ports

__all__ = ["run_alone", "run_workers"]

CHECKOUT = Path(__file__).parents[2]
DEADLINE = 900.0  # seconds: dozens of models, each traced for training and evaluation


def _start(program: str, out: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.keras.{program}", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": path, "TF_GRPC_REUSE_PORT": "1", "CUDA_VISIBLE_DEVICES": "-1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_workers(count: int, program: str, folder: Path, *arguments: str) -> list[Path]:
    """Run the program as each of so many workers; return the files that they wrote."""
    outs = [folder / f"out.{index}" for index in range(count)]
    with reserved_ports(count) as addresses, contextlib.ExitStack() as stack:
        workers = []
        for index, out in enumerate(outs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            workers.append(_start(program, out, *arguments, TF_CONFIG=json.dumps(config)))
            stack.callback(workers[-1].kill)
        said = [worker.communicate(timeout=DEADLINE)[0] for worker in workers]
    for worker, text in zip(workers, said, strict=True):
        assert worker.returncode == 0, text[-6000:]
    return outs


def run_alone(program: str, folder: Path, *arguments: str) -> Path:
    """Run the program in one process; return the file that it wrote."""
    out = folder / "out.alone"
    process = _start(program, out, *arguments)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said[-6000:]
    return out
