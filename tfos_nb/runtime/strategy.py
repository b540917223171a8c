"""What a node does to TensorFlow and Keras before and while the user's ``main`` runs."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from tfos_nb.runtime.keras_fit import patch_keras_fit
from tfos_nb.runtime.keras_step import is_synchronous

__all__ = ["autolog", "disable_auto_shard", "patch_keras_fit", "progress_callback"]

_REPORTS_PER_SECOND = 10
_SECONDS_BETWEEN_AGREEMENTS = 0.5
_FLAVOURS = ("keras", "tf_keras")


class Stop(Protocol):
    """What is asked of a stop flag; a ``threading.Event`` is one."""

    def is_set(self) -> bool:
        """Whether training is to end."""
        ...


def disable_auto_shard(dataset: Any) -> Any:
    """Return the ``tf.data.Dataset`` with auto-sharding off: each worker keeps all the rows that it was fed."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


class _Progress:
    """The methods of the progress callback, for the ``Callback`` class of either Keras.

    Keras calls the methods; ``model`` and ``params`` are set by it.
    """

    model: Any
    params: dict[str, Any]

    def __init__(self, report: Callable[..., Any], stop: Stop | None = None) -> None:
        super().__init__()
        self._report = report
        self._stop = stop
        self._epoch = 0
        self._step = 0
        self._steps: int | None = None
        self._last_report = -math.inf
        self._agreement: _Agreement | None = None
        self._divisor = 1

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = getattr(self.model, "distribute_strategy", None)
        together = strategy is not None and is_synchronous(strategy)
        self._agreement = _Agreement(strategy) if together and self._stop is not None else None
        self._divisor = _replicas_summed_over(self.model, strategy) if together else 1
        self._steps = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step = batch + 1
        now = time.monotonic()
        if now - self._last_report >= 1 / _REPORTS_PER_SECOND:
            self._last_report = now
            metrics = {name: value / self._divisor for name, value in _numbers(logs).items()}
            self._send(metrics, epoch_end=False)
        self._stop_if_asked(at_epoch_end=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._steps = self._step or self._steps
        self._send(_numbers(logs), epoch_end=True)
        self._last_report = time.monotonic()
        self._stop_if_asked(at_epoch_end=True)

    def _send(self, metrics: dict[str, float], *, epoch_end: bool) -> None:
        known = {"epoch", "epochs", "step", "steps", "epoch_end"}
        metrics = {(f"{name}_metric" if name in known else name): value for name, value in metrics.items()}
        self._report(
            epoch=self._epoch,
            epochs=self.params.get("epochs"),
            step=self._step,
            steps=self._steps,
            epoch_end=epoch_end,
            **metrics,
        )

    def _stop_if_asked(self, *, at_epoch_end: bool) -> None:
        if self._stop is None:
            return
        asked = self._stop.is_set()
        if self._agreement is not None:
            asked = self._agreement.reached(asked, at_epoch_end)
        if asked:
            self.model.stop_training = True


class _Agreement:
    """All workers of a synchronous strategy leave ``fit`` after the same step, whichever of them was asked to.

    A worker that left alone would leave the others waiting in a collective for ever. So about twice a second all of
    them add up their flags. When to do so next must be the same number of steps for all, so it is computed from a
    number that all of them share as well: the sum of the seconds since the last time.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._count = 0
        self._last = 0
        self._next = 1
        self._since = time.monotonic()

    def reached(self, asked: bool, at_epoch_end: bool) -> bool:
        """Whether any worker was asked to stop; between two agreements always False."""
        self._count += not at_epoch_end
        if self._count < self._next and not at_epoch_end:
            return False
        import tensorflow as tf

        mine = tf.constant([float(asked), time.monotonic() - self._since], tf.float32)
        flags, seconds = self._strategy.reduce("MEAN", mine, axis=None).numpy()
        steps = self._count - self._last
        if steps and not at_epoch_end:
            per_step = float(seconds) / steps
            self._next = self._count + max(1, min(1000, int(_SECONDS_BETWEEN_AGREEMENTS / max(per_step, 1e-6))))
        self._last, self._since = self._count, time.monotonic()
        return bool(flags > 0)


def progress_callback(report: Callable[..., Any], stop: Stop | None = None, *, flavour: str | None = None) -> Any:
    """Make a Keras callback that reports progress and ends training when asked to.

    Parameters
    ----------
    report : callable
        Called as ``report(epoch=, epochs=, step=, steps=, epoch_end=, **metrics)`` at the end of a batch, at most ten
        times a second, and at the end of each epoch, then with ``epoch_end=True`` and with the validation's ``val_…``.
        Epochs and steps count from 1; ``steps`` is None until it is known. It must not block.
    stop : threading.Event, optional
        Training ends within about half a second after it is set. Under a synchronous strategy it is enough to set it
        on one worker, and all of them end after the same step; then each of them must have this callback with a flag.
    flavour : {"keras", "tf_keras"}, optional
        Whose callback it is. By default what ``tf.keras`` is.

    Returns
    -------
    keras.callbacks.Callback
    """
    if flavour is None:
        flavour = _FLAVOURS[os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")]
    keras = importlib.import_module(flavour)
    made = type("ProgressCallback", (_Progress, keras.callbacks.Callback), {"__doc__": _Progress.__doc__})
    return made(report, stop)


def autolog(report: Callable[..., Any], stop: Stop | None = None) -> str:
    """Make every ``model.fit`` of Keras 3 and of tf_keras add :func:`progress_callback` by itself.

    A Keras that is imported later gets it when it is imported. A ``fit`` that was given a progress callback keeps that.

    Returns
    -------
    str
        One line for the log.
    """
    done = []
    for flavour in _FLAVOURS:
        if flavour in sys.modules:
            done.append(_wrap_fit(sys.modules[flavour], report, stop))
        else:
            sys.meta_path.insert(0, _OnImport(flavour, lambda module: _wrap_fit(module, report, stop)))
            done.append(f"{flavour} when it is imported")
    return f"autolog: {', '.join(done)}"


def _wrap_fit(keras: Any, report: Callable[..., Any], stop: Stop | None) -> str:
    model: Any = getattr(keras, "Model", None)
    fit: Any = getattr(model, "fit", None)
    signature = inspect.signature(fit) if callable(fit) else inspect.Signature()
    if "callbacks" not in signature.parameters:
        return f"not {keras.__name__}: its Model.fit takes no callbacks"
    fit = getattr(fit, "_tfos_fit", fit)

    @functools.wraps(fit)
    def fit_and_report(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        callbacks: Any = given.arguments.get("callbacks")
        if hasattr(callbacks, "append") and not isinstance(callbacks, list):  # a CallbackList is a container already
            if not any(isinstance(one, _Progress) for one in callbacks.callbacks):
                callbacks.append(progress_callback(report, stop, flavour=keras.__name__))
            return fit(*given.args, **given.kwargs)
        several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        if not any(isinstance(one, _Progress) for one in several):
            several.append(progress_callback(report, stop, flavour=keras.__name__))
        given.arguments["callbacks"] = several
        return fit(*given.args, **given.kwargs)

    fit_and_report._tfos_fit = fit  # type: ignore[attr-defined]
    model.fit = fit_and_report
    return str(keras.__name__)


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that is first imported, and is gone then."""

    def __init__(self, name: str, then: Callable[[ModuleType], Any]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as others would, and make its loader call the function afterwards."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replicas_summed_over(model: Any, strategy: Any) -> int:
    """Over how many replicas the numbers within an epoch are sums of what is the same on all of them already.

    It is so with tf_keras on several workers, and by the same private test as there.
    """
    import tensorflow as tf

    legacy = any(base.__module__.startswith("tf_keras.") for base in type(model).__mro__)
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return strategy.num_replicas_in_sync if legacy and workers and strategy.extended._in_multi_worker_mode() else 1


def _numbers(logs: Any) -> dict[str, float]:
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found
