"""Read and restore the contents of a Keras ``fit``'s state.

==============  ======================================================================================================
variables       of the model and its optimizers, on each worker as this worker has them
metrics         of the running epoch: what all replicas have counted together. The first replica continues from it, and
                the others from zero, so that their number may change
callbacks       the attributes that have changed since training began, if they are plain data: the best loss so far, or
                how many epochs to wait
random numbers  of Python, NumPy, and TensorFlow's global generator; those of Keras are variables of the model
==============  ======================================================================================================
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfos_nb.runtime.control.wire import NotData, decode, encode, message
from tfos_nb.runtime.recovery.memory_state import State

__all__ = [
    "LINES",
    "FitContents",
    "StateMetadata",
    "array_of",
    "arrays_of",
    "assign_totals",
    "assign_values",
    "build_optimizer",
    "dtype_of",
    "is_csv_logger",
    "is_named",
    "is_read_over_replicas",
    "of_tensorflow",
    "own_value",
    "parts_of",
    "places_of_trained",
    "random_states",
    "restore_random",
    "shapes_of",
    "value_of",
]

_PLAIN = (type(None), bool, int, float, str, bytes)
_OF_KERAS = frozenset(("model", "_model", "params"))
_OF_THE_PROCESS = frozenset(("_is_tracing", "_profiler_started"))  # of TensorBoard: what goes on in TensorFlow
_MINUS = "min_delta"  # Keras 3 changes its sign when it sets ``monitor_op``, which is a function
_ARRAY = "tfos_nb array"  # marks an array of a type that only its name describes, such as bfloat16
LINES = "_tfos_lines"
"""Attribute of a CSVLogger: how many lines of its file are of earlier trainings."""


@message
@dataclass(frozen=True)
class StateMetadata:
    """State apart from its arrays. Its worker sends it to the workers that do not have the state.

    Attributes
    ----------
    counted : int
        How many of the arrays are variables; those of metrics follow.
    optimizers : dict of str to list of int
        For each optimizer that was built, the positions of its variables among the model's; empty if not known.
    callbacks : list of tuple
        The class and the changed attributes of each callback, in order; the attributes' values are encoded.
    random : tuple
        The states of Python's and NumPy's generators.
    index : list of (str, list of int)
        The types and shapes of the arrays.
    steps : dict of int to int
        How many steps each epoch that is over has had, by its number from 0.
    ended : bool
        Whether a callback has ended the fit after this epoch.
    finished : bool
        Whether it is the fit's last state: a callback has ended it, or this was its last epoch.
    generator : tuple
        The algorithm of TensorFlow's global generator, and its states on the worker's devices; empty if it is not used.
    refused : (int, int)
        The last call of ``train`` of which no more rows are wanted, as a fit had ended early, and how many passes were
        its and earlier ones'; zeros if there is none.
    names : list of str
        Where a loop's variables are among its objects (recovery.loop_states); empty for a fit.
    """

    counted: int = 0
    optimizers: dict[str, list[int]] = field(default_factory=dict)
    callbacks: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    random: tuple[Any, ...] = ()
    index: list[Any] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    ended: bool = False
    finished: bool = False
    refused: tuple[int, int] = (0, 0)
    generator: tuple[Any, ...] = ()
    names: list[str] = field(default_factory=list)


class FitContents:
    """The contents of the state of one ``fit``.

    Parameters
    ----------
    model : keras.Model
        Its model, of Keras 3 or tf_keras, compiled.
    callbacks : sequence
        Its callbacks, without those of tfos_nb.

    Attributes
    ----------
    steps : dict of int to int
        The steps of each epoch that is over, by its number from 0; its owner counts them.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any]) -> None:
        self.model = model
        self._callbacks = callbacks
        self._before: list[dict[str, bytes]] = []
        self._optimizers: dict[str, Any] = {}  # by name, as found last
        self._trained: dict[str, list[int]] = {}  # by those that were built then: places of their variables
        self.steps: dict[int, int] = {}

    @property
    def strategy(self) -> Any:
        """The strategy under which the model trains."""
        return self.model.distribute_strategy

    def begin(self) -> None:
        """Note the callbacks' attributes when training begins: only what changes after that is part of a state."""
        self._before = [_attributes(callback) for callback in self._callbacks]

    # --- variables ---

    def variables(self) -> list[Any]:
        """Return TensorFlow's variables of the model and its optimizers, in the order of the program."""
        self.find_optimizers()
        counted = {id(variable) for metric in self.model.metrics for variable in metric.variables}
        found = {id(one): one for one in self.model.variables}
        for optimizer in self._optimizers.values():
            slots: Any = getattr(optimizer, "variables", [])
            found |= {id(one): one for one in (slots() if callable(slots) else slots)}
        return [of_tensorflow(one) for key, one in found.items() if key not in counted]

    def metrics(self) -> list[Any]:
        """Return TensorFlow's variables of the metrics."""
        found = {id(one): one for metric in self.model.metrics for one in metric.variables}
        return [of_tensorflow(one) for one in found.values()]

    def own(self, variables: Sequence[Any]) -> list[Any]:
        """Return this worker's values."""
        return [own_value(self.strategy, variable) for variable in variables]

    def rest(self, arrays: Sequence[Any], counted: int) -> StateMetadata:
        """Return the current state apart from its arrays, of which ``counted`` are variables."""
        callbacks = [
            (_name(callback), _changed(_attributes(callback), before))
            for callback, before in zip(self._callbacks, self._before, strict=True)
        ]
        return StateMetadata(
            counted,
            self._trained,
            callbacks,
            index=shapes_of(arrays),
            steps=dict(self.steps),
            **random_states(self.strategy),
        )

    def built_optimizers(self) -> list[str]:
        """Return the names of the optimizers that have variables by now, of those that the model had last time."""
        if not self._optimizers:
            self.find_optimizers()
        return [name for name, one in self._optimizers.items() if getattr(one, "built", True)]

    def find_optimizers(self) -> None:
        """Look for the model's optimizers, which a callback may change."""
        self._optimizers = _optimizers(self.model)
        self._trained = places_of_trained(self._optimizers, self.model.variables)

    # --- restore ---

    def build(self, rest: StateMetadata) -> bool:
        """Make the variables of the optimizers that had some, which otherwise come with their first step.

        Return whether that was possible.
        """
        optimizers = _optimizers(self.model)
        return all(
            name in optimizers and self._build(optimizers[name], places) for name, places in rest.optimizers.items()
        )

    def _build(self, optimizer: Any, places: Sequence[int]) -> bool:
        known = self.model.variables
        if any(place >= len(known) for place in places):
            return False  # the state is of another model
        return build_optimizer(self.strategy, optimizer, [known[at] for at in places] or self.model.trainable_variables)

    def assign(self, arrays: Sequence[Any]) -> None:
        """Give the variables these values, on each device."""
        assign_values(self.strategy, self.variables(), arrays)

    def assign_metrics(self, arrays: Sequence[Any]) -> None:
        """Continue to count from these values of all replicas."""
        assign_totals(self.strategy, self.metrics(), arrays)

    def kept_of(self, rest: StateMetadata) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each callback that has saved attributes, with those attributes."""
        left = list(rest.callbacks)
        for callback in self._callbacks:
            kept = next((one for one in left if one[0] == _name(callback)), None)
            if kept is not None:
                left.remove(kept)
                yield callback, {name: _with_arrays(decode(value)) for name, value in kept[1].items()}

    def epochs_of(self, rest: StateMetadata) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each epoch in a saved history, counted from 0, with the metrics that all epochs have."""
        for callback, attributes in self.kept_of(rest):
            if is_named(callback, "History"):
                epochs, metrics = attributes.get("epoch", []), attributes.get("history", {})
                whole = {name: values for name, values in metrics.items() if len(values) == len(epochs)}
                for place, epoch in enumerate(epochs):
                    yield epoch, {name: values[place] for name, values in whole.items()}

    def restore(self, rest: StateMetadata) -> None:
        """Restore the callbacks, the numbers of steps, and the random generators."""
        self.steps = dict(rest.steps)
        for callback, attributes in self.kept_of(rest):
            for attribute, value in attributes.items():
                setattr(callback, attribute, value)
        restore_random(self.strategy, rest)


def random_states(strategy: Any) -> dict[str, Any]:
    """Return the states of the random generators, as :class:`StateMetadata` has them."""
    states: dict[str, Any] = {"random": (random.getstate(), np.random.get_state())}
    generator = _global_generator()
    if generator is not None:
        parts = [part.numpy() for part in parts_of(strategy, generator.state)]
        states["generator"] = int(generator.algorithm), parts
    return states


def restore_random(strategy: Any, rest: StateMetadata) -> None:
    """Put back the states of the random generators."""
    if rest.random:
        random.setstate(rest.random[0])
        np.random.set_state(rest.random[1])
    if rest.generator:
        _restore_global_generator(strategy, *rest.generator)


def _restore_global_generator(strategy: Any, algorithm: int, states: Sequence[Any]) -> None:
    import tensorflow as tf

    generator = _global_generator()
    if generator is None or generator.algorithm != algorithm:
        tf.random.set_global_generator(tf.random.Generator.from_state(states[0], algorithm))
        return
    for part, state in zip(parts_of(strategy, generator.state), states, strict=False):
        part.assign(state)


def _global_generator() -> Any:
    """Return TensorFlow's global generator; None if the program has not used it, as asking for it would make one."""
    from tensorflow.python.ops import stateful_random_ops

    return stateful_random_ops.global_generator


def parts_of(strategy: Any, variable: Any) -> tuple[Any, ...]:
    """Return this process's parts of a variable, one for each device."""
    parts: tuple[Any, ...] = strategy.experimental_local_results(variable)
    return parts


def places_of_trained(optimizers: Mapping[str, Any], variables: Sequence[Any]) -> dict[str, list[int]]:
    """Return the places, among these variables, of those that each optimizer trains that was built."""
    places = {id(one): place for place, one in enumerate(variables)}
    return {
        name: [places[id(one)] for one in getattr(optimizer, "_trainable_variables", ()) if id(one) in places]
        for name, optimizer in optimizers.items()
        if getattr(optimizer, "built", True)
    }


def build_optimizer(strategy: Any, optimizer: Any, variables: Sequence[Any]) -> bool:
    """Make the variables of an optimizer, which otherwise come with its first step; return whether that is possible."""
    if getattr(optimizer, "built", None) is True:
        return True
    make = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
    if make is None:
        return False
    with strategy.scope():
        make(variables)
    return True


def assign_values(strategy: Any, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Give variables these values, on each device."""
    for variable, array in zip(variables, arrays, strict=True):
        for part in parts_of(strategy, variable):
            part.assign(array)


def assign_totals(strategy: Any, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Let variables of metrics continue from these values of all replicas."""
    import tensorflow as tf

    first = getattr(strategy.extended, "_id_in_cluster", 0) == 0
    for variable, array in zip(variables, arrays, strict=True):
        summed = is_read_over_replicas(variable) and variable.aggregation == tf.VariableAggregation.SUM
        for place, part in enumerate(parts_of(strategy, variable)):
            part.assign(array if not summed or (first and not place) else np.zeros_like(array))


def own_value(strategy: Any, variable: Any) -> Any:
    """Return this process's value of a variable as a NumPy array, not to be written to: that of its first device."""
    return array_of(value_of(parts_of(strategy, variable)[0]))


def value_of(part: Any) -> Any:
    """Return a variable's value on its device: as its ``value()``, but in half the time, as no gradient needs it."""
    import tensorflow as tf

    return tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=part.dtype)


def array_of(value: Any) -> Any:
    """Return a variable's value as a NumPy array, not to be written to.

    On a CPU it is not copied, unlike ``numpy()``: TensorFlow gives the variable another buffer when it changes while
    this one is in use. Single numbers are copied: NumPy refuses those of a type that it does not know, as bfloat16.
    """
    array = np.asarray(value if value.shape.rank else value.numpy())
    array.setflags(write=False)
    return array


def is_read_over_replicas(variable: Any) -> bool:
    """Return whether each replica has its own value, and their sum or mean is read outside of a step."""
    import tensorflow as tf

    return getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ and hasattr(
        variable, "values"
    )


def shapes_of(variables: Sequence[Any]) -> list[list[Any]]:
    """Return the types and shapes of variables or arrays, as :attr:`State.index` has them."""
    return [[variable.dtype.name, list(variable.shape)] for variable in variables]


def arrays_of(state: State) -> list[Any]:
    """Return a state's arrays."""
    pairs = zip(state.data, state.index, strict=True)
    return [np.frombuffer(data, dtype_of(kind)).reshape(shape) for data, (kind, shape) in pairs]


def of_tensorflow(variable: Any) -> Any:
    """Return TensorFlow's variable of one of Keras 3, or the one that it is."""
    is_keras_3 = type(variable).__module__.startswith("keras.")
    return getattr(variable, "value", variable) if is_keras_3 else variable


def _optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers of a model and of those in it, by name: some have several."""
    found: dict[int, tuple[str, Any]] = {}
    inner = [(f"{at}.optimizer", getattr(one, "optimizer", None)) for at, one in enumerate(model._flatten_layers())]
    for name, value in [("optimizer", getattr(model, "optimizer", None)), *vars(model).items(), *inner]:
        for key, one in _parts(name, value):
            if is_named(one, "Optimizer", "BaseOptimizer"):
                found.setdefault(id(one), (key, one))
    return dict(found.values())


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{place}]", one) for place, one in enumerate(value))
    else:
        yield name, value


def _changed(attributes: dict[str, bytes], before: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in attributes.items() if name == LINES or before.get(name) != value}


def _name(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _attributes(callback: Any) -> dict[str, bytes]:
    """Return the attributes of a callback that are plain data, encoded."""
    if is_csv_logger(callback):  # its other attributes say what it does with the file that it has opened
        # Without the columns it would take those of the next epoch, which may have no val_ metrics.
        return {LINES: encode(getattr(callback, LINES, 0)), "keys": encode(callback.keys)}
    left_out = _OF_KERAS | _OF_THE_PROCESS if is_named(callback, "TensorBoard") else _OF_KERAS
    plain = {name: value for name, value in vars(callback).items() if name not in left_out and _is_plain(value)}
    found = {}
    for name, value in plain.items():
        with contextlib.suppress(NotData, OverflowError):  # an integer of more than 64 bits
            found[name] = encode(_named_arrays(value))
    if hasattr(callback, "monitor_op"):
        found.pop(_MINUS, None)
    return found


def _named_arrays(value: Any) -> Any:
    """Replace arrays of types such as bfloat16 by their bytes, type and shape; ``_with_arrays`` undoes it."""
    if isinstance(value, np.ndarray) and np.dtype(value.dtype.str) != value.dtype:
        return _ARRAY, value.dtype.name, list(value.shape), value.tobytes()
    if type(value) in (list, tuple):
        return type(value)(_named_arrays(one) for one in value)
    return {key: _named_arrays(one) for key, one in value.items()} if type(value) is dict else value


def _with_arrays(value: Any) -> Any:
    if type(value) is tuple and len(value) == 4 and value[0] == _ARRAY:
        _, kind, shape, data = value
        return np.frombuffer(data, dtype_of(kind)).reshape(shape)
    if type(value) in (list, tuple):
        return type(value)(_with_arrays(one) for one in value)
    return {key: _with_arrays(one) for key, one in value.items()} if type(value) is dict else value


def dtype_of(name: str) -> Any:
    """Return NumPy's type of this name."""
    import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it; TensorFlow brings it

    return np.dtype(name)


def is_named(value: Any, *names: str) -> bool:
    """Whether the class of a value, or one that it is made of, has one of these names: Keras 3's, or tf_keras'."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def is_csv_logger(callback: Any) -> bool:
    """Whether a callback is Keras' CSVLogger, or made of it."""
    return is_named(callback, "CSVLogger")


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if type(value) in (list, tuple):
        return depth < 8 and all(_is_plain(one, depth + 1) for one in value)
    if type(value) is dict:
        return depth < 8 and all(_is_plain(one, depth + 1) for pair in value.items() for one in pair)
    return type(value) in _PLAIN or isinstance(value, (np.number, np.bool_))
