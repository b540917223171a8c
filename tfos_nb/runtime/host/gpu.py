"""Measure a node's GPUs with NVML, in the supervisor, so that the TF process is never delayed.

NVML may take seconds to start, and may hang after a GPU driver has crashed. So it is called in a separate thread, and
the heartbeat contains the newest figures. Without NVML, a GPU driver or such a GPU, there are no figures.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.runtime.control.reports import GpuFigures

__all__ = ["GpuWatch", "Gpus", "gpu_variables", "host_has_gpus", "open_nvml"]

logger = logging.getLogger(__name__)

_EVERY = 1.0
_STALE_AFTER = 10.0


def host_has_gpus() -> bool:
    """Return whether this machine has a device file of NVIDIA's driver, AMD's driver, or WSL's GPU driver."""
    return any(os.path.exists(f"/dev/{device}") for device in ("nvidiactl", "kfd", "dxg"))


def gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which TensorFlow uses only these GPUs; none if there are none."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # by default TensorFlow allocates all of a GPU's memory at once
    }


class Gpus:
    """GPUs at addresses that Spark assigned to a task.

    Parameters
    ----------
    addresses : sequence of str
        Addresses from Spark's discovery script: an index in the order of ``nvidia-smi`` (``"0"``), a UUID
        (``"GPU-…"``, ``"MIG-…"``), or a GPU's index and that of its MIG device (``"0:1"``).
    nvml : module, optional
        Default: ``pynvml``.

    Examples
    --------
    >>> Gpus(()).measure()
    ()
    """

    def __init__(self, addresses: Sequence[str], nvml: Any = None) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._told = False
        if addresses:
            self._open(addresses, nvml)

    def _open(self, addresses: Sequence[str], nvml: Any) -> None:
        try:
            self._nvml = open_nvml(nvml)
        except Exception as error:  # noqa: BLE001 - without the package, library or driver there are no figures
            self._nvml = None
            self._tell(error)
            return
        for address in addresses:
            try:
                self._handles.append(_handle(self._nvml, address.strip()))
            except Exception as error:  # noqa: BLE001 - the other GPUs may work
                self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.info("no GPU figures: %s: %s", type(error).__name__, error)

    def measure(self) -> tuple[GpuFigures, ...]:
        """Return the current figures of each GPU. Unknown figures are None; a GPU without figures is left out."""
        figures = (self._figures(handle) for handle in self._handles)
        return tuple(one for one in figures if one != GpuFigures())

    def __len__(self) -> int:
        return len(self._handles)

    def _figures(self, handle: Any) -> GpuFigures:
        nvml = self._nvml
        name = self._ask(nvml.nvmlDeviceGetName, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)  # a MIG device has none
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuFigures(
            name=name.decode(errors="replace") if isinstance(name, bytes) else str(name or ""),
            percent=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
        )

    def _ask(self, query: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return query(handle)
        except Exception as error:  # noqa: BLE001 - the other figures may be available
            self._tell(error)
            return None

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []


class GpuWatch:
    """Measure GPUs once a second, in a daemon thread that may hang.

    Parameters
    ----------
    addresses : sequence of str
        As for :class:`Gpus`. Without addresses no thread is started.
    nvml : module, optional
        Default: ``pynvml``.
    """

    def __init__(self, addresses: Sequence[str], nvml: Any = None) -> None:
        self._addresses = tuple(addresses)
        self._given = nvml
        self._newest: tuple[float, tuple[GpuFigures, ...]] = (0.0, ())
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="tfos_nb gpu", daemon=True)
        if self._addresses:
            self.thread.start()

    @property
    def newest(self) -> tuple[GpuFigures, ...]:
        """The newest figures; none if they are older than 10 s, because NVML then hangs."""
        at, figures = self._newest
        return figures if time.monotonic() - at < _STALE_AFTER else ()

    def close(self) -> None:
        """Let the thread end after its current measurement, without waiting for it."""
        self._over.set()

    def _run(self) -> None:
        gpus = Gpus(self._addresses, self._given)
        while len(gpus) and not self._over.is_set():
            figures = gpus.measure()
            self._newest = (time.monotonic(), figures)
            self._over.wait(_EVERY)
        gpus.close()


def open_nvml(nvml: Any = None) -> Any:
    """Initialise NVML and return its module; raise what it raises without the package, the library or a driver."""
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def _handle(nvml: Any, address: str) -> Any:
    if address.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(address))
    gpu, _, part = address.partition(":")
    if gpu.isdecimal() and part.isdecimal():
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByIndex(int(gpu)), int(part))
    return nvml.nvmlDeviceGetHandleByUUID(address)
