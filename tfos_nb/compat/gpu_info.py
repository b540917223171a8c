"""``gpu_info``: the unused GPUs of this host, under TensorFlowOnSpark's name.

A node gets its GPUs from Spark, and ``CUDA_VISIBLE_DEVICES`` is set, so a program seldom needs this.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

from tfos_nb.errors import TfosError

__all__ = ["AS_LIST", "AS_STRING", "MAX_RETRIES", "get_gpus", "is_gpu_available"]

MAX_RETRIES = 3
AS_STRING = "string"
AS_LIST = "list"


def is_gpu_available() -> bool:
    """Return whether this host has a GPU."""
    return bool(_gpus())


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> str | list[str]:
    """Return GPUs that no process uses.

    Parameters
    ----------
    num_gpu : int
        Number of GPUs.
    worker_index : int
        Index of the caller among the workers on this host, so that they get different GPUs; -1: random GPUs.
    format : str
        ``AS_STRING``, for ``CUDA_VISIBLE_DEVICES``, or ``AS_LIST``.

    Raises
    ------
    TfosError
        If fewer GPUs are free.
    """
    free = [index for index, busy in _gpus() if not busy]
    if worker_index < 0:
        random.shuffle(free)
        chosen = free[:num_gpu]
    else:
        chosen = free[worker_index * num_gpu : (worker_index + 1) * num_gpu]
    if len(chosen) < num_gpu:
        raise TfosError(
            f"worker {worker_index} asked for {num_gpu} GPUs, and only {len(chosen)} are free on this host: ask for "
            "fewer"
        )
    names = [str(index) for index in chosen]
    return names if format == AS_LIST else ",".join(names)


def _gpus() -> list[tuple[int, bool]]:
    """Return the index of each GPU, and whether a process uses it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library or no driver: no GPU
        return []
    try:
        return [(index, _is_busy(pynvml, index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _is_busy(nvml: Any, index: int) -> bool:
    return bool(nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index)))
