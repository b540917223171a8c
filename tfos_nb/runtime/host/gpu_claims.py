"""Claim GPUs of the host with NVML and lock files, if Spark does not assign GPUs to its tasks.

If Spark manages GPUs (``spark.executor.resource.gpu.amount`` and a discovery script), this module is not used.
Otherwise a GPU is free if no process computes on it and no node holds its lock. The locks are ``flock`` on files in the
host's ``/tmp``, shared by all executors and users. The system releases them when the node's supervisor ends in any way.

A GPU is named by its UUID, since CUDA counts GPUs in another order than NVML does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.host.gpu import open_nvml

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["GPU_COUNT_SCHEMA", "GpuClaims", "GpuCount", "GpusTaken"]

GPU_COUNT_SCHEMA = "host string, gpus long"
_LOCKS = Path("/tmp")  # noqa: S108 - shared by all users of the host; the files are only locked, never read or written
_PATIENCE = 20.0
_POLL_SECONDS = 0.5


class GpusTaken(TfosError):
    """This host does not have as many free GPUs as requested."""


class GpuClaims:
    """GPUs of this host that one node has claimed. Other nodes cannot claim them until :meth:`close`.

    Parameters
    ----------
    nvml : module, optional
        Default: ``pynvml``.
    locks : Path, optional
        Directory of the lock files. It must be the same for all processes of the host.

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
        """Claim ``count`` GPUs, or none.

        Parameters
        ----------
        count : int
            Number of GPUs.
        patience : float
            Maximum seconds to wait for free GPUs, because a previous node may just be ending.

        Returns
        -------
        tuple of str
            Their UUIDs, in a form that ``CUDA_VISIBLE_DEVICES`` accepts.

        Raises
        ------
        GpusTaken
            If there are too few. The message says what each of the host's GPUs is used for.
        """
        deadline = time.monotonic() + patience
        nothing = threading.Event()  # there is no notification when a GPU becomes free, so poll
        while len(self._held) < count:
            doing = self._hold(count)
            if len(self._held) >= count:
                break
            self.close()  # otherwise two nodes could each hold half of the GPUs and wait for the other half
            if len(doing) < count or time.monotonic() >= deadline:
                raise GpusTaken(_refusal(count, doing))
            nothing.wait(_POLL_SECONDS * (0.5 + random.random()))
        return tuple(self._held)

    def close(self) -> None:
        """Release all claimed GPUs."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _hold(self, count: int) -> dict[str, str]:
        """Lock free GPUs, up to ``count`` in all. Return the use of each GPU of the host, by UUID."""
        doing = {}
        for uuid, busy in self._gpus():
            file = None if busy or len(self._held) == count else self._lock(uuid)
            if file is not None:
                self._held[uuid] = file
            doing[uuid] = busy or ("free" if uuid in self._held else "held by another node")
        return doing

    def _lock(self, name: str) -> int | None:
        """Lock a GPU's file without waiting; None if another process holds the lock.

        The file is opened only for reading, because another user may own it.
        """
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
        """Return UUID and computing processes (empty: none) of each GPU that this process may use."""
        with _opened(self._nvml) as nvml:
            if nvml is None:
                return []
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            found = [(index, _text(nvml.nvmlDeviceGetUUID(handle)), handle) for index, handle in enumerate(handles)]
            return [(uuid, _computing(nvml, handle)) for index, uuid, handle in found if _visible(index, uuid)]

    def __len__(self) -> int:
        """Return the number of this host's GPUs that this process may use, free or not."""
        return len(self._gpus())


@dataclass(frozen=True)
class GpuCount:
    """Spark task that counts its host's GPUs."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return one row: the host's name and its number of GPUs."""
        deque(batches, maxlen=0)
        import pyarrow as pa  # here, since a supervisor does without

        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()], "gpus": [len(GpuClaims())]})


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[Any]:
    try:
        opened = open_nvml(nvml)
    except Exception:  # noqa: BLE001 - without the package, library or driver there is no GPU
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
    """Return whether this process' own ``CUDA_VISIBLE_DEVICES`` allows a GPU. If it is not set, all are allowed."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names is None or any(
        name == str(index) or (name and uuid.startswith(name)) for name in names.replace(" ", "").split(",")
    )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _refusal(count: int, doing: dict[str, str]) -> str:
    has = ", ".join(f"{uuid} {what}" for uuid, what in doing.items()) or "none"
    return (
        f"gpus={count}: {socket.gethostname()} has too few free GPUs. Its GPUs: {has}. Ask for fewer GPUs or nodes, or "
        "let Spark assign them: spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount"
    )
