"""Refuse further rows when a ``fit`` ends early, and end a ``fit`` that gets no more rows.

Keras' callbacks, such as ``EarlyStopping``, end a ``fit`` with ``model.stop_training = True``. The remaining passes are
then not used, and Spark would read their rows for nothing.

A ``fit`` over ``dataset.repeat()`` takes as many batches as it has steps, and reads no further: its iterator would
begin the next pass, whose rows are for the next reader.

In the opposite case, a ``fit`` has more epochs than passes are fed. It would continue with empty passes, and Keras
would report a loss and an accuracy of 0 for each.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.keras.distributed_datasets import is_shared_out

__all__ = ["watch_fit"]

_FLAVOURS = ("keras", "tf_keras")

_log = logging.getLogger(__name__)


def watch_fit(begun: Callable[[], dict[str, int]], enough: Callable[[str], object], missed: Callable[[], int]) -> None:
    """Patch ``fit`` of Keras 3 and of tf_keras to report an early end, and to end when no more rows come.

    Parameters
    ----------
    begun : callable
        Returns the number of passes begun so far, by queue. Only a ``fit`` that has begun a pass ends a feed.
    enough : callable
        Called after such a ``fit``, with the queue's name, if ``model.stop_training`` is set.
    missed : callable
        Returns the number of passes that were requested after the last one.
    """
    watch = _Watch(begun, enough, missed)
    for flavour in _FLAVOURS:
        when_imported(flavour, watch)


@dataclass(frozen=True)
class _Watch:
    begun: Callable[[], dict[str, int]]
    enough: Callable[[str], object]
    missed: Callable[[], int]

    def __call__(self, keras: Any) -> None:
        """Wrap ``Model.fit`` of an imported Keras module."""
        model: Any = getattr(keras, "Model", None)
        if model is not None:
            model.fit = self._wrapped(model.fit, keras.callbacks)

    def _wrapped(self, fit: Callable[..., Any], callbacks: Any) -> Callable[..., Any]:
        signature = inspect.signature(fit)
        guard = type("EndOfRows", (_EndOfRows, callbacks.Callback), {"__doc__": _EndOfRows.__doc__})

        @functools.wraps(fit)
        def fit_that_tells(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.begun()
            given = signature.bind(model, *args, **kwargs)
            theirs: Any = given.arguments.get("callbacks")
            if not isinstance(theirs, callbacks.CallbackList):  # nothing can be added to a finished CallbackList
                several = theirs if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
                given.arguments["callbacks"] = [guard(self.missed), *several]  # ours is first
            given.arguments |= _without_more(model, given.arguments)
            history = fit(*given.args, **given.kwargs)
            passes = {name: count - before[name] for name, count in self.begun().items() if count != before[name]}
            if getattr(model, "stop_training", False):
                for queue in passes:
                    self.enough(queue)
            elif steps := given.arguments.get("steps_per_epoch"):
                _warn_of_steps(steps, len(history.epoch), sum(passes.values()))
            return history

        return fit_that_tells


def _without_more(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dataset of a ``fit``, if it is fed and repeated without end, with as many batches as are used."""
    import tensorflow as tf

    dataset: Any = arguments.get("x")
    steps: Any = arguments.get("steps_per_epoch")
    at_once: Any = getattr(model, "steps_per_execution", 1)
    counts = isinstance(dataset, tf.data.Dataset) and type(steps) is int and type(at_once) is int
    if not counts or not is_shared_out(dataset) or dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        return {}
    epochs = arguments.get("epochs", 1) - arguments.get("initial_epoch", 0)
    return {"x": dataset.take(epochs * at_once * -(-steps // at_once))}


def _warn_of_steps(steps: int, epochs: int, passes: int) -> None:
    """Warn if epochs of a number of steps have found no rows: Keras does not begin the next pass within an epoch."""
    if 0 < passes < epochs:
        _log.warning(
            "WARNING fit(steps_per_epoch=%s) made %d epochs of %d passes over the rows: an epoch that begins at the "
            "end of a pass finds no rows, and its loss is 0. Leave steps_per_epoch out, so that an epoch is a pass, or "
            "give dataset.repeat(). cluster.train() waits until its passes are read, or main calls ctx.stop_feeding()",
            steps,
            epochs,
            passes,
        )


class _EndOfRows:
    """The methods of a callback that ends ``fit`` at the first epoch for which no row was fed.

    All workers of a synchronous strategy see it at the same epoch, since steps continue until the last worker has no
    rows. The metrics of such an epoch mean nothing, so they are removed from the logs of the callbacks after this one.
    An empty micro-batch of a stream is a normal pass.
    """

    model: Any
    params: dict[str, Any] | None

    def __init__(self, missed: Callable[[], int]) -> None:
        super().__init__()  # of the Callback class; it sets _supports_tf_logs to False
        self._supports_tf_logs = True
        self._missed = missed
        self._before = self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before, self._steps = self._missed(), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._steps or self._missed() == self._before:
            return
        self.model.stop_training = True
        if isinstance(logs, dict):
            logs.clear()
        of = (self.params or {}).get("epochs")
        _log.warning(
            "WARNING fit ends before epoch %d of %s: no more rows were fed. Set the number of epochs of the feed: "
            "--epochs %s, or cluster.train(df, epochs=%s)",
            epoch + 1,
            of,
            of,
            of,
        )
