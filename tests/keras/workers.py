"""Run a program of this folder as all workers of a cluster on loopback, or as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.test_strategy import reserved_ports

__all__ = ["run"]

CHECKOUT = Path(__file__).parents[2]
DEADLINE = 1800.0  # seconds: dozens of models, each traced for training and evaluation


def _start(program: str, out: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.keras.{program}", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": path, "TF_GRPC_REUSE_PORT": "1", "CUDA_VISIBLE_DEVICES": "-1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(count: int, program: str, folder: Path, *arguments: str) -> tuple[list[Path], Path]:
    """Run the program as each of so many workers, and in one process; return the files that they wrote."""
    outs = [folder / f"out.{index}" for index in range(count)]
    alone = folder / "out.alone"
    with reserved_ports(count) as addresses, contextlib.ExitStack() as stack:
        processes = []
        for index, out in enumerate([*outs, alone]):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            which = json.dumps(config) if out != alone else ""
            processes.append(_start(program, out, *arguments, TF_CONFIG=which))
            stack.callback(processes[-1].kill)
        said = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-6000:]
    return outs, alone
