"""Compare epoch times with and without tf.data autotuning.

All cores are busy. The same generator of batches is read to its end and released, alternating with and without
autotuning. A late release happens in few epochs and takes long there, so the means are compared.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["run"]

_BATCHES, _PAUSE = 60, 0.05  # 3 s an epoch
_EPOCHS = 4


def run(settings: Settings) -> Result:
    """Read `4 * settings.repeat` epochs with autotuning, and as many without."""
    import tensorflow as tf

    from tfos_nb.runtime.datasets.tuning import untuned

    tuned = tf.data.Dataset.from_generator(_batches, output_signature=tf.TensorSpec((), tf.int32)).prefetch(2)
    kinds = {"tuned": tuned, "untuned": untuned(tuned)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with _busy_cores():
        for number in range(_EPOCHS * settings.repeat):
            for name, dataset in kinds.items():
                seconds[name].append(_epoch(dataset))
            settings.say(f"pauses {number + 1}: {seconds['tuned'][-1]:.2f} and {seconds['untuned'][-1]:.2f} s")
    means = {name: statistics.mean(times) for name, times in seconds.items()}
    ratio = Ratio("an epoch and its end, untuned", means["untuned"], means["tuned"], "s", 1.0, at_most=True)
    return Result("pauses", (ratio,), {"seconds": seconds}, (f"{os.cpu_count()} busy cores",))


def _batches() -> Iterator[int]:
    for number in range(_BATCHES):
        time.sleep(_PAUSE)
        yield number


def _epoch(dataset: Any) -> float:
    began = time.perf_counter()
    iterator = iter(dataset)
    for _ in iterator:
        pass
    del iterator
    return time.perf_counter() - began


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=_burn, daemon=True) for _ in range(os.cpu_count() or 1)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def _burn() -> None:
    while True:
        pass
