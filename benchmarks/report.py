"""Measure the cost of reporting in the training thread: Keras' ``fit`` with and without a node's callback.

Both run in one process and alternate, with a step of about five milliseconds. ``Reporter.step`` is also measured alone,
as a custom loop calls it. Another process reads the reports, as on a node.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings
    from tfos_nb.runtime.control.reports import Reporter

__all__ = ["run"]

STEP_SECONDS = 0.005
TURN = 20  # steps
PAIRS = 60  # pairs of turns, in each repetition
CALLS = 20_000
SHARE = 0.01
_READER = """
import socket, sys
from tfos_nb.runtime.control.reports import ReportBox
ReportBox(socket.socket(fileno=int(sys.argv[1]))).run()
"""


def run(settings: Settings) -> Result:
    """Measure both."""
    found: dict[str, list[float]] = {"without": [], "with": [], "hook": [], "bare": [], "sent": []}
    with _reporter() as reporter:
        training = _Training(reporter)
        settings.say(f"report: a step of {1000 * training.step_seconds:.1f} ms")
        for number in range(settings.repeat):
            training.fit(found)
            found["bare"].append(1e6 * _bare(reporter))
            found["sent"].append(1e6 * _sent(reporter))
            settings.say(f"report: {number + 1}/{settings.repeat}: {found['bare'][-1]:.2f} us a call")
    step = median(found["without"])
    part = SHARE * step
    pairs = [ours / theirs for ours, theirs in zip(found["with"], found["without"], strict=True)]
    ratios = (
        Ratio("fit, a step with reports / without", median(pairs) * step, step, "us", 1 + SHARE, at_most=True),
        Ratio("fit, in the callback / 1 % of a step", statistics.fmean(found["hook"]), part, "us", 1.0, at_most=True),
        Ratio("Reporter.step / 1 % of a step", median(found["bare"]), part, "us", 1.0, at_most=True),
        Ratio("Reporter.step that sends / 1 % of a step", median(found["sent"]), part, "us"),
    )
    low, _, high = statistics.quantiles(pairs, n=4)
    text = f"fit: the median of {len(pairs)} pairs; the middle half of them is between {low:.3f} and {high:.3f}."
    return Result("report", ratios, found, (text,))


class _Training:
    """A Keras model whose step takes about :data:`STEP_SECONDS`."""

    def __init__(self, reporter: Reporter) -> None:
        import keras
        import numpy as np

        self._reporter = reporter
        layers = [keras.layers.Dense(256, "relu") for _ in range(3)]
        self._model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])
        self._model.compile("sgd", "mse", metrics=["mae"])
        self._rows, self._generator = 64, np.random.default_rng(0)
        while (step := min(self._plain() for _ in range(3))) < 0.9 * STEP_SECONDS:
            self._rows = int(self._rows * min(2.0, STEP_SECONDS / step)) + 1
        self.step_seconds = step

    def fit(self, found: dict[str, list[float]]) -> None:
        """Add the microseconds of a step, with reports and without, measured in turns of some steps in one fit."""
        from tfos_nb.runtime.keras.progress import progress_callback

        ours = progress_callback(self._reporter.step, threading.Event())
        turns = _turns(ours)
        self._fit(2 * PAIRS * TURN + 1, [turns])
        for kind in ("without", "with"):
            found[kind] += [1e6 * seconds / TURN for seconds in turns.seconds[kind]]
        found["hook"] += [1e6 * seconds / TURN for seconds in turns.in_hook]

    def _plain(self) -> float:
        started = time.perf_counter()
        self._fit(TURN, [])  # has one more step, the first, which traces the graph
        began = time.perf_counter()
        self._fit(3 * TURN, [])
        return max(1e-6, (time.perf_counter() - began) - (began - started)) / (2 * TURN)

    def _fit(self, steps: int, callbacks: list[Any]) -> None:
        import tensorflow as tf

        rows = self._generator.normal(size=(self._rows, 256)).astype("float32")
        data = tf.data.Dataset.from_tensors((rows, rows[:, :1])).repeat(steps)
        self._model.fit(data, verbose=0, shuffle=False, callbacks=callbacks)


def _turns(ours: Any) -> Any:
    """Make a callback that calls ours in half of the turns, and times the turns and our part of them."""
    import keras

    class Turns(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: dict[str, list[float]] = {"without": [], "with": []}
            self.in_hook: list[float] = []
            self.spent = self.began = 0.0

        def set_model(self, model: Any) -> None:
            super().set_model(model)
            ours.set_model(model)

        def on_train_begin(self, logs: Any = None) -> None:
            ours.set_params(self.params)
            ours.on_train_begin(logs)
            ours.on_epoch_begin(0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            turn, within = divmod(batch - 1, TURN)  # the first step belongs to no turn
            # without, with, with, without: a machine that gets slower favours neither.
            kind = "without" if turn % 4 in (0, 3) else "with"
            if batch and kind == "with":
                started = time.perf_counter()
                ours.on_train_batch_end(batch, logs)
                self.spent += time.perf_counter() - started
            if batch and within == TURN - 1:
                self.seconds[kind].append(time.perf_counter() - self.began)
                if kind == "with":
                    self.in_hook.append(self.spent)
                self.spent = 0.0
            if not batch or within == TURN - 1:
                self.began = time.perf_counter()

    return Turns()


def _bare(reporter: Reporter) -> float:
    """Return the mean seconds of a call."""
    started = time.perf_counter()
    for step in range(CALLS):
        reporter.step(epoch=1, epochs=3, step=step, steps=CALLS, loss=0.5, mae=0.25)
    return (time.perf_counter() - started) / CALLS


def _sent(reporter: Reporter) -> float:
    """Return the mean seconds of a call that always sends its report."""
    calls = CALLS // 20
    started = time.perf_counter()
    for step in range(calls):
        reporter.step(epoch=step, epochs=3, step=step, steps=calls, epoch_end=True, loss=0.5, mae=0.25)
    return (time.perf_counter() - started) / calls


@contextmanager
def _reporter() -> Iterator[Reporter]:
    """Yield a reporter whose reports another process reads."""
    from tfos_nb.runtime.control.reports import Reporter

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    command = [sys.executable, "-c", _READER, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        try:
            yield Reporter(ours)
        finally:
            reader.kill()
            ours.close()
