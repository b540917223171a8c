"""Check that a model's parts were made in the strategy's scope, and build the model there before its first step.

A metric made outside of the scope counts only the rows of its own worker. A layer made outside starts with different
weights on each worker. Neither TensorFlow nor Keras reports this. An optimizer made outside fails with "Mixing
different tf.distribute.Strategy objects".
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.keras.replicas.replica import as_one_process, is_synchronous
from tfos_nb.runtime.keras.replicas.rows_needed import is_of_keras

__all__ = [
    "build",
    "note_strategy",
    "refuse_losses_by_row",
    "refuse_what_is_outside",
    "strategies",
    "warn_of_a_model_outside",
]

_log = logging.getLogger("tfos_nb.keras")
_HOW = "Make and compile the model within `with strategy.scope():`"

_strategies: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies that this process has made
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def note_strategy(strategy: Any) -> None:
    """Remember a strategy that is being made."""
    _strategies.add(strategy)


def strategies() -> list[Any]:
    """Return the strategies that this process has made."""
    return list(_strategies)


def warn_of_a_model_outside(model: Any) -> None:
    """Warn once that each worker trains its own copy of a model that was made outside of any scope.

    Raises
    ------
    PlanError
        If the model's optimizer was made inside a scope.
    """
    if model in _warned:
        return
    if any(map(_is_distributed, _of_optimizers(model))):
        raise PlanError(
            f"model {model.name!r} was made outside of the strategy's scope, but its optimizer inside. {_HOW}"
        )
    if any(map(is_synchronous, _strategies)):
        _warned.add(model)
        _log.warning(
            "model %r was made outside of the strategy's scope, so each worker trains its own model on its "
            "own rows. To train one model together: %s",
            model.name,
            _HOW,
        )


def refuse_what_is_outside(model: Any) -> None:
    """Refuse metrics, optimizers and trainable layers of a distributed model that were made outside of its scope.

    Raises
    ------
    PlanError
        If one exists; the message names the first one.
    """
    for metric in _innermost(model.metrics):
        raise PlanError(
            f"metric {metric.name!r} was made outside of the strategy's scope: it would count the rows of one worker "
            f"alone. {_HOW}, and its metrics"
        )
    if not all(map(_is_distributed, _of_optimizers(model))):
        raise PlanError(f"the optimizer of model {model.name!r} was made outside of the strategy's scope. {_HOW}")
    for layer in _innermost(getattr(model, "layers", ())):  # a layer may be its own trainer
        raise PlanError(
            f"layer {layer.name!r} was built outside of the strategy's scope: each worker would begin with weights of "
            f"its own. {_HOW}"
        )


def _innermost(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield layers and metrics with variables outside of the scope: only the innermost ones, not their containers."""
    for part in parts:
        variables = part.trainable_variables if hasattr(part, "trainable_variables") else part.variables
        if not all(map(_is_distributed, variables)):
            inner = list(_innermost([*getattr(part, "layers", ()), *getattr(part, "metrics", ())]))
            yield from inner or [part]


def refuse_losses_by_row(model: Any) -> None:
    """Refuse losses of ``compile`` that return one number per row: Keras adds up their gradients, not their means.

    Raises
    ------
    PlanError
        If one exists.
    """
    import keras

    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none"):
            raise PlanError(
                f"loss {loss.name!r} has reduction={loss.reduction!r}: one process trains on the sum of its rows' "
                "losses, but several workers would not. Use reduction='sum', which has the same gradients, or leave "
                "it out to use the mean"
            )


def build(model: Any, data_batch: Any) -> None:
    """Build a model's layers, metrics, loss and optimizer from the shapes of a batch.

    For this, Keras calls the model, and the program's metrics and loss, with symbolic tensors. Where that fails, a step
    of the program's own is called so. With ``run_eagerly`` metrics and loss may be functions that read numbers, so they
    are not called.
    """
    import keras

    unbuilt = model.optimizer is not None and not model.optimizer.built
    if unbuilt and is_synchronous(model.distribute_strategy):
        refuse_what_is_outside(model)  # before the build, which fails with an optimizer from outside
    try:
        model._symbolic_build(data_batch=data_batch)
    except Exception:
        if _build_by_own_step(model, data_batch):
            return
        if not model.run_eagerly:
            raise
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
        y_pred = keras.src.backend.compute_output_spec(model, x, training=False)
        for part in (model._compile_metrics, model._compile_loss):
            if part is not None and not part.built:
                part.build(y, y_pred)
        _finish_build(model)


def _build_by_own_step(model: Any, data_batch: Any) -> bool:
    """Build a model by its own ``train_step`` or ``test_step``; return whether all its layers have weights then.

    Keras builds a model by ``call(x)`` and by the loss of ``y``. One process does not: a GAN has no ``call``, and a
    step may make the arguments of ``call`` and the targets itself.
    """
    import keras

    own = [step for step in (model.train_step, model.test_step) if not is_of_keras(step)]
    batch = keras.tree.map_structure(_symbolic, data_batch)
    for step in own:
        # It fails at the latest where it applies gradients, which symbols do not have; by then all layers were called.
        with contextlib.suppress(Exception), as_one_process():
            keras.src.backend.compute_output_spec(step, batch)
    if not own or not all(part.built for part in model._flatten_layers(include_self=False)):
        return False
    model.built = True
    _finish_build(model)
    return True


def _symbolic(value: Any) -> Any:
    import keras

    if value is None or isinstance(value, keras.KerasTensor):
        return value
    return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))


def _finish_build(model: Any) -> None:
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def _of_optimizers(model: Any) -> Iterator[Any]:
    """Yield the variables of the optimizers among a model's attributes, including that of ``compile``."""
    import keras

    for value in _values(vars(model).values()):
        if isinstance(value, keras.optimizers.Optimizer):
            yield from value.variables


def _values(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from _values(value) if isinstance(value, (list, tuple)) else [value]


def _is_distributed(variable: Any) -> bool:
    import tensorflow as tf

    return isinstance(getattr(variable, "_value", variable), tf.distribute.DistributedValues)
