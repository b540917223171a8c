"""Let ``fit`` and ``evaluate`` of Keras 3 and of tf_keras report their progress, and end when asked.

Between two reports only the clock is read. Keras' numbers are read only when a report is due, because reading them from
a GPU has to wait for the GPU.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tfos_nb.runtime.code.on_import import OnImport
from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, PAST
from tfos_nb.runtime.keras.replicas.collective_calls import call_with_all_workers, is_of_all_workers, shown
from tfos_nb.runtime.keras.replicas.replica import is_synchronous
from tfos_nb.runtime.keras.versions import uses_tf_keras

__all__ = ["PastEpoch", "autolog", "progress_callback", "was_stopped"]

_REPORTS_PER_SECOND = 5
_SECONDS_BETWEEN_AGREEMENTS = 0.5
_FLAVOURS = ("keras", "tf_keras")
_METHODS = ("fit", "evaluate")
_STOPPED = "_tfos_stopped"  # attribute of a model whose fit the user has stopped
_KNOWN = frozenset(("epoch", "epochs", "step", "steps", "epoch_end", "phase"))


class Stop(Protocol):
    """Interface of a stop flag; ``threading.Event`` implements it."""

    def is_set(self) -> bool:
        """Whether training must end."""
        ...


class _Progress:
    """The methods of the progress callback, for the ``Callback`` class of either Keras.

    Keras calls the methods, and sets ``model`` and ``params``. An evaluation during ``fit`` is a validation, so its
    numbers get the names ``val_…``, which Keras gives them at the epoch's end. In other evaluations they get the names
    ``test_…``, so that they are not mistaken for those of the training.
    """

    model: Any
    params: dict[str, Any] | None

    def __init__(self, report: Callable[..., Any], stop: Stop | None = None) -> None:
        super().__init__()  # of the Callback class; it sets _supports_tf_logs to False
        # Without this, tf_keras converts all logs to numbers at each batch, which it cannot do under a
        # ParameterServerStrategy.
        self._supports_tf_logs = True
        self._report = report
        self._stop = stop
        self._due = -math.inf
        self._divisor = 1
        self._agreement: _Agreement | None = None
        self._fitting = False
        self._epoch = 0
        self._step = 0
        self._steps: int | None = None
        self._cut_short = False
        self._test_step = 0
        self._test_steps: int | None = None
        self._test_agreement: _Agreement | None = None

    # --- fit ---

    def on_train_begin(self, logs: Any = None) -> None:
        self._fitting = True
        self._agreement = self._begin()
        self._steps = self._of_params("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._step = 0
        self._cut_short = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step = batch + 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + 1 / _REPORTS_PER_SECOND
            self._send(self._numbers_within(logs))
        if self._stop is not None and any(self._is_asked(self._agreement, at_epoch_end=False)):
            self.model.stop_training = True
            vars(self.model)[_STOPPED] = True
        self._cut_short = bool(getattr(self.model, "stop_training", False))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._cut_short:  # an epoch that was left early does not show how many steps it has
            self._steps = self._step or self._steps
        if self._step or logs:
            self._send(_numbers(logs), epoch_end=True)
        else:  # no row came, so the epoch does not count
            self._epoch, self._step = epoch, self._steps or 0
        self._due = time.monotonic() + 1 / _REPORTS_PER_SECOND
        if self._stop is not None:
            asked, ends = self._is_asked(self._agreement, at_epoch_end=True)
            if asked or ends:
                self.model.stop_training = True  # also where a callback of another worker alone has set it
            if asked:
                vars(self.model)[_STOPPED] = True

    def on_train_end(self, logs: Any = None) -> None:
        self._fitting = False
        self._send({}, phase=OVER)

    # --- evaluate, also as fit's validation ---

    def expect_evaluation(self, steps: int | None) -> None:
        """Set the number of steps of the next validation. If it is None, the length of the last one is assumed."""
        self._test_steps = steps if steps is not None else self._test_steps

    def on_test_begin(self, logs: Any = None) -> None:
        self._test_step = 0
        if self._fitting:
            self._send_test({})  # fit has already reported its last batch
        else:
            self._test_steps = self._of_params("steps")
        agreement = self._begin()
        self._test_agreement = agreement if self._can_stop_evaluating else None

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._test_step = batch + 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + 1 / _REPORTS_PER_SECOND
            self._send_test(self._numbers_within(logs))
        can_stop = self._stop is not None and self._can_stop_evaluating
        if can_stop and any(self._is_asked(self._test_agreement, at_epoch_end=False)):
            self.model.stop_evaluating = True

    def on_test_end(self, logs: Any = None) -> None:
        self._test_steps = self._test_step or None
        if self._fitting:
            self._send({})
        else:
            self._send_test(_numbers(logs), phase=OVER)

    @property
    def _can_stop_evaluating(self) -> bool:
        """Whether this Keras can end an evaluation: tf_keras cannot."""
        return hasattr(self.model, "stop_evaluating")

    # --- both ---

    def _begin(self) -> _Agreement | None:
        strategy = getattr(self.model, "distribute_strategy", None)
        together = strategy is not None and is_synchronous(strategy)
        self._divisor = _replicas_summed_over(self.model, strategy) if together else 1
        return _Agreement(strategy) if together and self._stop is not None else None

    def _is_asked(self, agreement: _Agreement | None, *, at_epoch_end: bool) -> tuple[bool, bool]:
        """Return whether any worker was asked to stop, and whether a callback of any ends the training."""
        asked = self._stop is not None and self._stop.is_set()
        ends = at_epoch_end and bool(getattr(self.model, "stop_training", False))
        return (asked, ends) if agreement is None else agreement.reached(asked, ends, at_epoch_end)

    def _of_params(self, name: str) -> Any:
        return (self.params or {}).get(name)

    def _numbers_within(self, logs: Any) -> dict[str, float]:
        return {name: value / self._divisor for name, value in _numbers(logs).items()}

    def _send(self, numbers: dict[str, float], *, epoch_end: bool = False, phase: str = FIT) -> None:
        self._report(
            epoch=self._epoch,
            epochs=self._of_params("epochs"),
            step=self._step,
            steps=self._steps,
            epoch_end=epoch_end,
            phase=phase,
            **_as_arguments(numbers),
        )

    def _send_test(self, numbers: dict[str, float], *, phase: str = EVALUATE) -> None:
        prefix = "val" if self._fitting else "test"
        steps = self._test_steps
        self._report(
            epoch=self._epoch if self._fitting else None,
            epochs=self._of_params("epochs") if self._fitting else None,
            step=self._test_step,
            steps=steps if steps is None or steps >= self._test_step else None,
            epoch_end=False,
            phase=phase,
            **{f"{prefix}_{name}": value for name, value in numbers.items()},
        )


@dataclass(frozen=True)
class PastEpoch:
    """Function that reports an epoch that an earlier cluster has done, as :func:`progress_callback` would have.

    Parameters
    ----------
    report : callable
        The argument of :func:`progress_callback`.
    """

    report: Callable[..., Any]

    def __call__(self, epoch: int, epochs: int, steps: int | None, metrics: dict[str, Any]) -> None:
        """Report the metrics of epoch ``epoch`` of ``epochs``, which had so many steps."""
        numbers = _as_arguments(_numbers(metrics))
        self.report(epoch=epoch, epochs=epochs, step=steps, steps=steps, epoch_end=True, phase=PAST, **numbers)


class _Agreement:
    """Make all workers of a synchronous strategy leave ``fit`` after the same step when one of them is asked to.

    The same holds for ``evaluate``. A callback that sets ``model.stop_training`` at the end of an epoch asks, too.

    If one worker left alone, the others would wait in a collective forever. So about twice a second all of them average
    their flags. The number of steps until the next time must be the same for all. So it is computed from another shared
    number: the mean of the workers' seconds since the last time.
    """

    def __init__(self, strategy: Any) -> None:
        self._reduce = strategy.reduce
        if is_of_all_workers(strategy):
            self._reduce = functools.partial(call_with_all_workers, strategy.reduce)
        self._count = 0
        self._last = 0
        self._next = 1
        self._since = time.monotonic()

    def reached(self, asked: bool, ends: bool, at_epoch_end: bool) -> tuple[bool, bool]:
        """Return whether any worker was asked, and whether any ends; always False between two agreements."""
        self._count += not at_epoch_end
        if self._count < self._next and not at_epoch_end:
            return False, False
        import tensorflow as tf

        mine = tf.constant([float(asked), float(ends), time.monotonic() - self._since], tf.float32)
        any_asked, any_ends, seconds = self._reduce("MEAN", mine, axis=None).numpy()
        steps = self._count - self._last
        if steps and not at_epoch_end:
            per_step = float(seconds) / steps
            self._next = self._count + max(1, min(1000, int(_SECONDS_BETWEEN_AGREEMENTS / max(per_step, 1e-6))))
        self._last, self._since = self._count, time.monotonic()
        return bool(any_asked > 0), bool(any_ends > 0)


def was_stopped(model: Any) -> bool:
    """Return whether the user has stopped a model's last ``fit``, and the cluster; else a callback has ended it."""
    return bool(vars(model).get(_STOPPED, False))


def progress_callback(report: Callable[..., Any], stop: Stop | None = None, *, flavour: str | None = None) -> Any:
    """Make a Keras callback that reports progress and ends training when asked to.

    Parameters
    ----------
    report : callable
        Called as ``report(epoch=, epochs=, step=, steps=, epoch_end=, phase=, **metrics)`` at the end of a batch, at
        most five times a second. It is also called at the end of each epoch, with ``epoch_end=True`` and the
        validation's ``val_…``. Epochs and steps count from 1; ``steps`` is None until it is known. ``phase`` is
        ``"fit"``, ``"evaluate"`` during an evaluation, with the evaluation's own steps, or ``"over"`` once Keras has
        returned. The function must not block.
    stop : threading.Event, optional
        Training ends within about half a second after it is set, and so does an evaluation of Keras 3. Under a
        synchronous strategy every worker must have this callback with a flag. It is enough to set the flag on one
        worker; all workers end after the same step.
    flavour : {"keras", "tf_keras"}, optional
        The Keras of the callback. Default: the one that ``tf.keras`` is.

    Returns
    -------
    keras.callbacks.Callback
        The callback, to be passed to ``fit`` or ``evaluate``.
    """
    if flavour is None:
        flavour = _FLAVOURS[uses_tf_keras(os.environ)]
    keras = importlib.import_module(flavour)
    made = type("ProgressCallback", (_Progress, keras.callbacks.Callback), {"__doc__": _Progress.__doc__})
    return made(report, stop)


def autolog(report: Callable[..., Any], stop: Stop | None = None, log_dir: str = "") -> str:
    """Make every ``model.fit`` and ``model.evaluate`` of Keras 3 and of tf_keras add :func:`progress_callback`.

    A Keras that is not imported yet is patched when it is imported. If the program passes a progress callback itself,
    only that one is used. With a log directory, ``fit`` also writes its epochs there for TensorBoard, unless it gets a
    ``TensorBoard`` callback.

    Returns
    -------
    str
        One line for the log.
    """
    done = []
    for flavour in _FLAVOURS:
        if flavour in sys.modules:
            done.append(_wrap(sys.modules[flavour], _Added(report, stop, log_dir)))
        else:
            sys.meta_path.insert(0, OnImport(flavour, lambda module: _wrap(module, _Added(report, stop, log_dir))))
            done.append(f"{flavour} when it is imported")
    return f"autolog: {', '.join(done)}"


class _Flushing:
    """Make a ``TensorBoard`` callback write each epoch at its end. TensorFlow's writers wait two minutes by default."""

    _writers: dict[str, Any]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]  # of the TensorBoard class
        for writer in getattr(self, "_writers", {}).values():
            writer.flush()


@dataclass(frozen=True)
class _Added:
    """Callbacks that are added to those of a call of ``fit`` or ``evaluate``."""

    report: Callable[..., Any]
    stop: Stop | None
    log_dir: str

    def to(self, inside: list[Any], keras: Any, method: str) -> list[Any]:
        """Return the callbacks ``inside`` with ours added at the end, but before the first one that saves a state.

        So a state is saved only after its epoch was reported.
        """
        added = [progress_callback(self.report, self.stop, flavour=keras.__name__)]
        board = keras.callbacks.TensorBoard
        if self.log_dir and method == "fit" and not any(isinstance(one, board) for one in inside):
            added.append(type("TensorBoard", (_Flushing, board), {})(self.log_dir, write_graph=False))
        place = next((place for place, one in enumerate(inside) if _saves_state(one)), len(inside))
        return [*inside[:place], *added, *inside[place:]]


def _saves_state(callback: Any) -> bool:
    return any(kind.__name__ in ("BackupAndRestore", "SaveCallback") for kind in type(callback).__mro__)


def _wrap(keras: Any, added: _Added) -> str:
    model: Any = getattr(keras, "Model", None)
    for name in _METHODS:
        method: Any = getattr(model, name, None)
        if not callable(method) or "callbacks" not in inspect.signature(method).parameters:
            return f"not {keras.__name__}: its Model.{name} takes no callbacks"

    for name in _METHODS:
        setattr(model, name, shown(_reporting(getattr(model, name), keras, added)))
    for name in ("predict", "train_on_batch", "test_on_batch"):
        setattr(model, name, shown(getattr(model, name)))
    return str(keras.__name__)


def _reporting(method: Any, keras: Any, added: _Added) -> Any:
    """Wrap ``fit`` or ``evaluate``."""
    method = getattr(method, "_tfos_method", method)
    signature = inspect.signature(method)
    container = keras.callbacks.CallbackList

    @functools.wraps(method)
    def method_that_reports(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        callbacks: Any = given.arguments.get("callbacks")
        finished = isinstance(callbacks, container)
        inside = _single(callbacks.callbacks if finished else callbacks)
        ours = next((one for one in inside if isinstance(one, _Progress)), None)
        if ours is not None:
            if finished and method.__name__ == "evaluate":  # fit's own container: this is its validation
                ours.expect_evaluation(_steps_of(given.arguments))
        elif not finished:
            given.arguments["callbacks"] = added.to(inside, keras, method.__name__)
        elif type(callbacks) is container:
            # A finished container does not set up added callbacks. So make a new one that has them.
            several = added.to(inside, keras, method.__name__)
            params = getattr(callbacks, "params", None) or {}
            given.arguments["callbacks"] = container(several, model=given.arguments["self"], **params)
        return method(*given.args, **given.kwargs)

    method_that_reports._tfos_method = method  # type: ignore[attr-defined]
    return method_that_reports


def _single(callbacks: Any) -> list[Any]:
    """Return a list of the callbacks that ``fit`` was given: none, one, or several."""
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []


def _steps_of(arguments: dict[str, Any]) -> int | None:
    """Return the number of steps of an evaluation with these arguments; None if that needs reading data."""
    import tensorflow as tf

    steps, x = arguments.get("steps"), arguments.get("x")
    if steps is not None:
        return int(steps)
    if isinstance(x, tf.data.Dataset):
        cardinality = int(x.cardinality())
        return cardinality if cardinality >= 0 else None
    shape = getattr(x, "shape", None)
    rows = shape[0] if shape else None
    return -(-rows // int(arguments.get("batch_size") or 32)) if isinstance(rows, int) else None


def _replicas_summed_over(model: Any, strategy: Any) -> int:
    """Return the number of replicas over which tf_keras has added up numbers that were already equal on all of them.

    This happens within an epoch on several workers. The test is the same private one as in tf_keras.
    """
    import tensorflow as tf

    legacy = any(base.__module__.startswith("tf_keras.") for base in type(model).__mro__)
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return strategy.num_replicas_in_sync if legacy and workers and strategy.extended._in_multi_worker_mode() else 1


def _as_arguments(numbers: dict[str, float]) -> dict[str, float]:
    return {(f"{name}_metric" if name in _KNOWN else name): value for name, value in numbers.items()}


def _numbers(logs: Any) -> dict[str, float]:
    if not hasattr(logs, "items"):  # under a ParameterServerStrategy it may be a result that is not computed yet
        return {}
    found = {}
    for name, value in logs.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found
