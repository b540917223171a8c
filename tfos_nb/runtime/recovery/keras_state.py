"""Keep the state of a Keras ``fit`` in memory after each epoch, and continue from it after a loss.

The user's program needs no code for this. Each worker keeps the model's and the optimizer's variables, and the number
of passes that they include (:mod:`tfos_nb.runtime.recovery.memory_state`). In the next generation the worker with the
latest state sends it to those that have an earlier one or none. The rows are fed from the next pass on.

The state of ``main``'s first ``fit`` is kept, also after it has ended and others follow. If the state would not be
exact, none is kept, and ``main`` starts from the beginning. This is so for a ``fit`` with ``steps_per_epoch``, whose
epochs are not passes; for one that callbacks ended early; and for independent workers, each with a model of its own. A
``fit`` with the user's own ``BackupAndRestore`` is left to that callback.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.memory_state import LastState, State

__all__ = ["keep_fits"]

_log = logging.getLogger(__name__)


def keep_fits(memory: LastState, queue: RowQueue, held: Callable[[], object], *, generation: int, workers: int) -> None:
    """Have the first ``fit`` of Keras 3 or tf_keras keep its state, and go on from the one that is there.

    Parameters
    ----------
    memory : LastState
        Where to keep it.
    queue : RowQueue
        The rows: it knows how many passes were made, and is told how many are in a state.
    held : callable
        Called after each epoch whose state is kept, here or by Keras' ``BackupAndRestore``.
    generation : int
        In the first one there is no state to go on from.
    workers : int
        How many nodes train.
    """
    keeping = _Keeping(memory, queue, held, generation, workers)
    for flavour in ("keras", "tf_keras"):
        when_imported(flavour, keeping.watch)


@dataclass
class _Keeping:
    memory: LastState
    queue: RowQueue
    held: Callable[[], object]
    generation: int
    workers: int
    kept: Any = None  # the callback of the first fit
    _models: list[Any] = field(default_factory=list)

    def watch(self, keras: Any) -> None:
        model: Any = getattr(keras, "Model", None)
        if model is None or model in self._models:  # tf_keras by the name of keras
            return
        self._models.append(model)
        model.fit = self._wrapped(model.fit, keras.callbacks)
        load = getattr(model, "_maybe_load_initial_counters_from_ckpt", None)
        if load is not None:
            model._maybe_load_initial_counters_from_ckpt = self._going_on(load)

    def _wrapped(self, fit: Callable[..., Any], callbacks: Any) -> Callable[..., Any]:
        signature = inspect.signature(fit)
        kind = type("KeepsState", (_KeepsState, callbacks.Callback), {"__doc__": _KeepsState.__doc__})

        @functools.wraps(fit)
        def fit_that_keeps(model: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(model, *args, **kwargs)
            theirs: Any = given.arguments.get("callbacks")
            several: Sequence[Any] = theirs if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
            first, self.kept = self.kept is None, self.kept or kind(self)
            if self._has_backup(several):
                told = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.held())
                given.arguments["callbacks"] = [*several, told]
            elif first and self._can_keep(model, given.arguments, theirs):
                given.arguments["callbacks"] = [*several, self.kept]  # the last: what others change is kept
            return fit(*given.args, **given.kwargs)

        return fit_that_keeps

    @staticmethod
    def _has_backup(callbacks: Sequence[Any]) -> bool:
        return any(kind.__name__ == "BackupAndRestore" for one in callbacks for kind in type(one).__mro__)

    def _can_keep(self, model: Any, arguments: dict[str, Any], callbacks: Any) -> bool:
        import tensorflow as tf

        finished = type(callbacks).__name__ == "CallbackList"  # it is only used, and none can be added to it
        strategy = model.distribute_strategy
        together = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        alone = self.workers == 1 and not isinstance(strategy, tf.distribute.ParameterServerStrategy)
        whole = arguments.get("steps_per_epoch") is None
        return (together or alone) and whole and not finished

    def _going_on(self, load: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        """Wrap what tf_keras asks for the epoch with, after the callbacks have been told of the beginning."""

        @functools.wraps(load)
        def load_or_go_on(model: Any, steps_per_epoch: Any, initial_epoch: int) -> tuple[int, int]:
            epoch, step = load(model, steps_per_epoch, initial_epoch)
            put_back = self.kept.epoch if self.kept is not None and self.kept.model is model else 0
            return (put_back, 0) if put_back > epoch else (epoch, step)

        return load_or_go_on


class _KeepsState:
    """The methods of a callback that keeps the state after each epoch, and puts it back before the first."""

    model: Any

    def __init__(self, keeping: _Keeping) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._keeping = keeping
        self._variables: list[Any] = []
        self.epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        keeping = self._keeping
        if keeping.generation == 1 or keeping.queue.asked or not _build(self.model):
            return
        strategy, variables = self.model.distribute_strategy, _variables(self.model)
        own = _fitting(keeping.memory.newest(), variables)
        agreed = _put_back(strategy, variables, own)
        if agreed is not None:
            self.epoch, passes = agreed
            self.model._initial_epoch = self.epoch  # as Keras 3's BackupAndRestore does
            keeping.queue.resume(passes)
            _log.info("fit goes on after epoch %d, from memory", self.epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        variables = self._variables = self._variables or _variables(self.model)
        arrays = [_parts(self.model.distribute_strategy, variable)[0].numpy() for variable in variables]
        try:
            self._keeping.memory.put(epoch + 1, self._keeping.queue.passes_done, arrays)
        except OSError as error:
            _log.warning("the state after epoch %d could not be kept in memory: %s", epoch + 1, error)
        else:
            self._keeping.held()

    def on_train_end(self, logs: Any = None) -> None:
        if getattr(self.model, "stop_training", False):
            self._keeping.memory.clear()  # it would be trained on to its last epoch


def _build(model: Any) -> bool:
    """Make the optimizer's variables, which otherwise come with its first step; whether all there will be are there."""
    optimizer = getattr(model, "optimizer", None)
    if not model.built:
        return False
    if optimizer is None or getattr(optimizer, "built", None) is True:
        return True
    make = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
    if make is None:
        return False
    with model.distribute_strategy.scope():
        make(model.trainable_variables)
    return True


def _variables(model: Any) -> list[Any]:
    """Return TensorFlow's variables of a model and of its optimizer, in the order of the program."""
    optimizer = getattr(model, "optimizer", None)
    slots: Any = getattr(optimizer, "variables", [])
    counted = {id(variable) for metric in model.metrics for variable in metric.variables}
    found = {id(one): one for one in [*model.variables, *(slots() if callable(slots) else slots)]}
    return [getattr(one, "value", one) if _is_keras_3(one) else one for key, one in found.items() if key not in counted]


def _is_keras_3(variable: Any) -> bool:
    return type(variable).__module__.startswith("keras.")


def _parts(strategy: Any, variable: Any) -> tuple[Any, ...]:
    """Return this process's parts of a variable, one a device."""
    parts: tuple[Any, ...] = strategy.experimental_local_results(variable)
    return parts


def _fitting(state: State | None, variables: list[Any]) -> State | None:
    """Return a state if it is of these variables."""
    if state is None:
        return None
    wanted = [[variable.dtype.name, list(variable.shape)] for variable in variables]
    if state.index != wanted:
        _log.warning("the state in memory is not of this model: fit starts from the beginning")
        return None
    return state


def _put_back(strategy: Any, variables: list[Any], own: State | None) -> tuple[int, int] | None:
    """Put the latest state of all replicas back; return its epoch and passes, or None if there is none.

    Workers that have it keep their own: what a strategy does not hold alike may differ.
    """
    import numpy as np
    import tensorflow as tf

    if own is not None:
        kinds = [variable.dtype.as_numpy_dtype for variable in variables]
        shapes = [tuple(variable.shape) for variable in variables]
        arrays = [np.frombuffer(*pair).reshape(shape) for *pair, shape in zip(own.data, kinds, shapes, strict=True)]
    else:
        arrays = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    latest, passes = (own.epoch, own.passes) if own is not None else (0, 0)
    if strategy.num_replicas_in_sync > 1:
        latest, passes, agreed = _latest_of_all(strategy, latest, passes, arrays)
        if own is None or own.epoch != latest:
            arrays = agreed
    if latest == 0:
        return None
    for variable, array in zip(variables, arrays, strict=True):
        for part in _parts(strategy, variable):
            part.assign(array)
    return latest, passes


def _latest_of_all(strategy: Any, epoch: int, passes: int, arrays: list[Any]) -> tuple[int, int, list[Any]]:
    """Return the latest epoch of all replicas, and the passes and arrays of the first of them that has it."""
    import tensorflow as tf

    mine = [tf.convert_to_tensor(array) for array in arrays]  # captured, and no constants of the graph

    def on_replica() -> tuple[Any, Any, list[Any]]:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        place = tf.one_hot(replica, context.num_replicas_in_sync, dtype=tf.int64)
        total = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
        epochs, counts = total(place * epoch), total(place * passes)
        source = tf.argmax(epochs, output_type=tf.int32)
        of_source = []
        for array in mine:
            wide = array if array.dtype.is_floating else tf.cast(array, tf.int64)
            sent = total(tf.where(source == replica, wide, tf.zeros_like(wide)))
            of_source.append(tf.cast(sent, array.dtype))
        return epochs[source], counts[source], of_source

    found = strategy.run(tf.function(on_replica))
    latest, counted, agreed = tf.nest.map_structure(lambda one: _parts(strategy, one)[0], found)
    return int(latest), int(counted), list(agreed)
