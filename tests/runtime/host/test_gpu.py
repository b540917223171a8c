"""The GPUs of a node by NVML: addressed as in Spark, measured in their own thread, empty without a GPU.

The fake has pynvml's functions as its documentation describes them; the real pynvml is tested too.
"""

# ruff: noqa: N802 - these are pynvml's names
from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tfos_nb.runtime.control.reports import GpuFigures
from tfos_nb.runtime.host.gpu import Gpus, GpuWatch

SECONDS = 20.0
GIB = 1 << 30


class NotSupported(Exception):
    pass


class NotFound(Exception):
    pass


class FakeNvml:
    """Two GPUs, the second of them split into two MIG instances."""

    def __init__(self) -> None:
        self.opened = 0
        self.mute: set[str] = set()

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 1:
            raise NotFound(index)
        return f"gpu{index}"

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: str, index: int) -> str:
        return f"{device}/mig{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return {"GPU-aa": "gpu0", "MIG-bb": "gpu1/mig0"}[uuid]

    def nvmlDeviceGetName(self, handle: str) -> Any:
        self._listen("name")
        return b"NVIDIA H100" if handle == "gpu0" else f"NVIDIA {handle}"  # older versions of pynvml return bytes

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._listen("rates")
        if handle != "gpu0":
            raise NotSupported("MIG")
        return SimpleNamespace(gpu=87, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._listen("memory")
        return SimpleNamespace(total=80 * GIB, used=3 * GIB, free=77 * GIB)

    def _listen(self, query: str) -> None:
        if query in self.mute:
            raise NotSupported(query)


WHOLE = GpuFigures("NVIDIA H100", 87.0, 3 * GIB, 80 * GIB)
PART = GpuFigures("NVIDIA gpu1/mig0", None, 3 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("addresses", "figures"),
    [
        (("0",), (WHOLE,)),
        (("GPU-aa",), (WHOLE,)),
        ((" 0 ", "1:0"), (WHOLE, PART)),
        (("MIG-bb",), (PART,)),
        (("7", "0", "GPU-gone", "what?"), (WHOLE,)),
        (("7",), ()),
        ((), ()),
    ],
    ids=str,
)
def test_gpus_are_found_as_spark_addresses_them(addresses: tuple[str, ...], figures: tuple[GpuFigures, ...]) -> None:
    assert Gpus(addresses, FakeNvml()).measure() == figures


@pytest.mark.parametrize(
    ("mute", "figures"),
    [
        ({"name"}, (GpuFigures("", 87.0, 3 * GIB, 80 * GIB),)),
        ({"rates"}, (GpuFigures("NVIDIA H100", None, 3 * GIB, 80 * GIB),)),
        ({"memory"}, (GpuFigures("NVIDIA H100", 87.0),)),
        ({"name", "rates", "memory"}, ()),
    ],
    ids=["name", "rates", "memory", "all"],
)
def test_a_failing_query_does_not_affect_the_others_and_is_logged_once(
    mute: set[str], figures: tuple[GpuFigures, ...], caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()
    gpus = Gpus(("0",), nvml)
    nvml.mute = mute
    with caplog.at_level(logging.DEBUG, "tfos_nb"):
        assert [gpus.measure() for _ in range(5)] == [figures] * 5
    assert len(caplog.records) == 1
    nvml.mute = set()
    assert gpus.measure() == (WHOLE,)  # the figure may come back


def test_a_host_without_nvml_has_no_figures_and_logs_that_once(caplog: pytest.LogCaptureFixture) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is an NVML here")
    with caplog.at_level(logging.DEBUG, "tfos_nb"):
        assert Gpus(("0", "1")).measure() == ()
        watch = GpuWatch(())
    assert [record.message for record in caplog.records] == [
        "no GPU figures: NVMLError_LibraryNotFound: NVML Shared Library Not Found"
    ]
    assert (watch.newest, watch.thread.is_alive()) == ((), False)


@pytest.mark.gpu
def test_a_real_gpu_has_a_name_and_memory() -> None:
    gpus = Gpus(("0",))
    if not len(gpus):
        pytest.skip("there is no GPU here")
    [figures] = gpus.measure()
    assert figures.name
    assert figures.memory_total is not None
    assert figures.memory_used is not None
    assert 0 <= figures.memory_used <= figures.memory_total
    gpus.close()


def test_a_watch_measures_until_it_is_closed_and_then_closes_nvml() -> None:
    nvml = FakeNvml()
    measured = threading.Event()
    memory = nvml.nvmlDeviceGetMemoryInfo

    def asked_again(handle: str) -> Any:
        if watch.newest:
            measured.set()
        return memory(handle)

    nvml.nvmlDeviceGetMemoryInfo = asked_again  # type: ignore[method-assign]
    watch = GpuWatch(("0",), nvml)
    assert measured.wait(SECONDS)
    assert watch.newest == (WHOLE,)
    watch.close()
    watch.thread.join(SECONDS)
    assert not watch.thread.is_alive()
    assert nvml.opened == 0


def test_a_hanging_gpu_driver_blocks_nothing_else() -> None:
    hangs, asked = threading.Event(), threading.Event()
    nvml = FakeNvml()

    def hanging() -> None:
        asked.set()
        hangs.wait(SECONDS)

    nvml.nvmlInit = hanging  # type: ignore[method-assign]
    watch = GpuWatch(("0",), nvml)
    assert asked.wait(SECONDS)
    assert watch.newest == ()
    watch.close()
    hangs.set()
    watch.thread.join(SECONDS)
    assert not watch.thread.is_alive()


def test_outdated_figures_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GpuWatch(())
    watch._newest = (100.0, (WHOLE,))
    for now, shown in ((105.0, (WHOLE,)), (111.0, ())):
        monkeypatch.setattr("tfos_nb.runtime.host.gpu.time.monotonic", lambda now=now: now)
        assert watch.newest == shown
