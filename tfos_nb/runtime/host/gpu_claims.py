"""Claim GPUs of the host, with NVML and a lock for each, where Spark gives its tasks none.

If Spark manages GPUs (``spark.executor.resource.gpu.amount`` and a discovery script), this module is not used.
Otherwise a GPU is free if no process computes on it and no node holds its lock. The locks are ``flock`` on files in the
host's ``/tmp``, shared by all executors and users. The system releases them when the node's supervisor ends in any way.

A GPU is named by its UUID, since CUDA counts GPUs in another order than NVML does.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tfos_nb.errors import TfosError

__all__ = ["GPU_COUNT_SCHEMA", "GpuClaims", "GpuCount", "GpusTaken"]

GPU_COUNT_SCHEMA = "host string, gpus long"
_LOCKS = Path("/tmp")  # noqa: S108 - the same for all of a host's users, who may only take locks there
_PATIENCE = 20.0
_POLL_SECONDS = 0.5


class GpusTaken(TfosError):
    """This host has not so many free GPUs."""


class GpuClaims:
    """The GPUs of this host that one node has for itself.

    Parameters
    ----------
    nvml : module, optional
        ``pynvml`` if not given.
    locks : Path, optional
        Where the files lie that are locked; the same for all processes of the host.

    Examples
    --------
    >>> claims = GpuClaims()
    >>> claims.take(0)
    ()
    """

    def __init__(self, nvml: Any = None, locks: Path = _LOCKS) -> None:
        self._nvml = nvml
        self._locks = locks
        self._held: dict[str, int] = {}

    def take(self, count: int, patience: float = _PATIENCE) -> tuple[str, ...]:
        """Take ``count`` GPUs, or none; wait for them for ``patience`` seconds, since a node before may just be ending.

        Returns
        -------
        tuple of str
            Their UUIDs, as ``CUDA_VISIBLE_DEVICES`` takes them.

        Raises
        ------
        GpusTaken
            With what each of the host's GPUs is doing.
        """
        deadline = time.monotonic() + patience
        nothing = threading.Event()  # neither NVML nor a lock tells when a GPU is free: it has to be asked again
        while len(self._held) < count:
            doing = self._hold(count)
            if len(self._held) >= count:
                break
            self.close()  # so that two nodes do not each hold half of what they need
            if len(doing) < count or time.monotonic() >= deadline:
                raise GpusTaken(_refusal(count, doing))
            nothing.wait(_POLL_SECONDS * (0.5 + random.random()))
        return tuple(self._held)

    def close(self) -> None:
        """Give them back."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _hold(self, count: int) -> dict[str, str]:
        """Hold as many GPUs as are free, up to ``count``; tell of each that was looked at why it is not held."""
        doing = {}
        for uuid, busy in self._gpus():
            file = None if busy or len(self._held) == count else self._lock(uuid)
            if file is not None:
                self._held[uuid] = file
            doing[uuid] = busy or ("free" if uuid in self._held else "held by another node")
        return doing

    def _lock(self, name: str) -> int | None:
        """Lock a file, without waiting. It is only read: another user may have made it."""
        path = self._locks / f"tfos_nb-gpu-{name}.lock"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDONLY, 0o644))
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return None
        return file

    def _gpus(self) -> list[tuple[str, str]]:
        """List the GPUs that this process may see: UUID, and what computes there."""
        with _opened(self._nvml) as nvml:
            if nvml is None:
                return []
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            found = [(index, _text(nvml.nvmlDeviceGetUUID(handle)), handle) for index, handle in enumerate(handles)]
            return [(uuid, _computing(nvml, handle)) for index, uuid, handle in found if _visible(index, uuid)]

    def __len__(self) -> int:
        """How many GPUs of this host a node may see, taken or not."""
        return len(self._gpus())


@dataclass(frozen=True)
class GpuCount:
    """A Spark task that counts its host's GPUs: one row."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count."""
        deque(batches, maxlen=0)
        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()], "gpus": [len(GpuClaims())]})


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[Any]:
    try:
        opened = importlib.import_module("pynvml") if nvml is None else nvml
        opened.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library or no driver: no GPU
        yield None
        return
    try:
        yield opened
    finally:
        with contextlib.suppress(Exception):
            opened.nvmlShutdown()


def _computing(nvml: Any, handle: Any) -> str:
    pids = [str(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return f"used by process {', '.join(pids)}" if pids else ""


def _visible(index: int, uuid: str) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES``, where a container or an administrator set it, lets this process have it."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names is None or any(
        name == str(index) or (name and uuid.startswith(name)) for name in names.replace(" ", "").split(",")
    )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _refusal(count: int, doing: dict[str, str]) -> str:
    has = ", ".join(f"{uuid} {what}" for uuid, what in doing.items()) or "none"
    return (
        f"gpus={count}: {socket.gethostname()} has not so many free. Its GPUs: {has}. Ask for fewer GPUs or nodes, or "
        "have Spark share them out: spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount"
    )
