"""What a node runs for a KerasEstimator: it builds the model, trains it on its share of the rows, and saves it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime import baggage
from tfos_nb.runtime.fit_programs import seed_everything
from tfos_nb.runtime.heads import Task
from tfos_nb.runtime.remote import tensorflow_opens

__all__ = ["Columns", "Compiling", "KerasProgram"]

_CLASSES = ("categorical", "classes")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")


@dataclass(frozen=True)
class Columns:
    """Which columns the model learns from.

    Parameters
    ----------
    x : str or tuple of str
        The features: one column, or those that are called like the model's inputs.
    y : str
        The label.
    weight : str or None
        The rows' weights.
    validation : bool
        Whether there are validation rows.
    """

    x: str | tuple[str, ...]
    y: str
    weight: str | None = None
    validation: bool = False


@dataclass(frozen=True)
class Compiling:
    """What the model is compiled with: names, or configurations in Keras' own form. None: as it is compiled."""

    optimizer: Any = None
    loss: Any = None
    metrics: tuple[Any, ...] = ()
    learning_rate: float | None = None


@dataclass(frozen=True)
class KerasProgram:
    """Trains a Keras model.

    Parameters
    ----------
    model : bytes
        A ``.keras`` file; empty: the function in ``code`` builds the model.
    code : bytes
        Code of the user's, from :func:`tfos_nb.runtime.baggage.pack`: own classes, the function that builds the model,
        and the callbacks as its only argument.
    columns, compiling
        What is learned from, and how.
    batch_size, epochs, shuffle : int
        As Keras and ``ctx.dataset`` take them.
    task : Task or None
        What the model is for. None: what its loss says.
    seed : int or None
        Of weights and shuffling.
    """

    model: bytes = field(repr=False)
    code: bytes = field(repr=False)
    columns: Columns
    compiling: Compiling
    batch_size: int
    epochs: int
    shuffle: int = 0
    task: Task | None = None
    seed: int | None = None

    def __call__(self, args: Any, ctx: Any) -> dict[str, Any]:
        """Train, and say where the model is and what it is for."""
        if self.seed is not None:
            seed_everything(self.seed)
        taken = baggage.unpack(self.code)
        callbacks = list(taken.args[0]) if taken.args else []
        with self._scope(ctx), _known(taken.custom_objects):
            model = self._compiled(self._read(taken), taken.custom_objects)
        rows = ctx.dataset(self.batch_size, **self._wanted(), shuffle=self.shuffle, seed=self.seed)
        held_out = ctx.validation(self.batch_size, **self._wanted()) if self.columns.validation else None
        self._check_shape(model, rows)
        if ctx.restarts and model.built and tensorflow_opens(ctx.checkpoint_dir):
            import keras

            callbacks.append(keras.callbacks.BackupAndRestore(ctx.checkpoint_dir))
        model.fit(rows, validation_data=held_out, epochs=self.epochs, callbacks=callbacks, verbose=2)
        task, logits = self._task(model)
        return {"path": ctx.save(model), "task": task.value, "logits": logits}

    def _scope(self, ctx: Any) -> Any:
        import tensorflow as tf

        several = ctx.num_workers > 1 or len(ctx.gpus) > 1
        return tf.distribute.MultiWorkerMirroredStrategy().scope() if several else contextlib.nullcontext()

    def _wanted(self) -> dict[str, Any]:
        x = self.columns.x
        names = {"x": x if isinstance(x, str) else list(x), "y": self.columns.y}
        return {**names, **({"sample_weight": self.columns.weight} if self.columns.weight else {})}

    def _read(self, taken: baggage.Baggage) -> Any:
        import keras

        if not self.model:
            assert taken.function is not None, "the driver has looked"
            model = taken.function()
            if not isinstance(model, keras.Model):
                raise PlanError(f"the function that builds the model returned a {type(model).__name__}: return it")
            return model
        with tempfile.TemporaryDirectory(prefix="tfos_nb-model-") as directory:
            path = os.path.join(directory, "model.keras")
            with open(path, "wb") as file:
                file.write(self.model)
            return keras.models.load_model(path, custom_objects=dict(taken.custom_objects) or None)

    def _compiled(self, model: Any, own: Mapping[str, Any]) -> Any:
        import keras

        asked = self.compiling
        if not model.compiled or asked.optimizer is not None or asked.loss is not None or asked.metrics:
            loss = asked.loss if asked.loss is not None else getattr(model, "loss", None)
            if loss is None:
                raise PlanError("the model is not compiled: compile it, or give loss= and optimizer=")
            before = getattr(model, "optimizer", None)
            optimizer = asked.optimizer if asked.optimizer is not None else before or "rmsprop"
            metrics = [_metric(_own(metric, own)) for metric in asked.metrics or _metrics_of(model)]
            model.compile(
                optimizer=keras.optimizers.get(_own(optimizer, own)),
                loss=keras.losses.get(_own(loss, own)),
                metrics=metrics,
            )
        if asked.learning_rate is not None:
            model.optimizer.learning_rate = asked.learning_rate
        return model

    def _check_shape(self, model: Any, rows: Any) -> None:
        """Refuse features of another width than the model's, which TensorFlow would tell of in a page of text."""
        shape = getattr(model, "input_shape", None) if isinstance(self.columns.x, str) else None
        if not isinstance(shape, tuple) or None in shape[1:]:
            return
        given = rows.element_spec[0].shape
        if given.rank is not None and tuple(given[1:]) != shape[1:]:
            has, takes = (("x".join(map(str, sizes)) or "1") for sizes in (tuple(given[1:]), shape[1:]))
            raise FeedFailed(
                f"column {self.columns.x!r} has {has} values a row, and the model takes {takes}: build it for these "
                "columns, or give others"
            )

    def _task(self, model: Any) -> tuple[Task, bool]:
        """Return what the model is for, and whether it gives logits."""
        shape = model.output_shape
        if not isinstance(shape, tuple):
            raise PlanError("the model has several outputs, and there is one label: use TFEstimator")
        name, logits = _loss_of(model)
        one = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
        if self.task is not None:
            binary = self.task is Task.BINARY or (self.task is Task.CLASSES and one)
            return (Task.BINARY if binary else self.task), logits
        if name in _BINARY and one:
            return Task.BINARY, logits
        if any(word in name for word in _CLASSES) and len(shape) == 2 and not one:
            return Task.CLASSES, logits
        return Task.VALUES, False


def _loss_of(model: Any) -> tuple[str, bool]:
    """Return the name of a model's loss, and whether it takes logits."""
    import keras

    loss = model.loss
    if isinstance(loss, (str, dict)):
        loss = keras.losses.get(loss)
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return str(getattr(loss, "__name__", None) or config.get("name", "")), bool(config.get("from_logits", False))


@contextlib.contextmanager
def _known(own: Mapping[str, Any]) -> Any:
    """Let Keras find the user's own classes by their names."""
    import keras

    with keras.saving.custom_object_scope(dict(own)):
        yield


def _metric(value: Any) -> Any:
    """Make a metric of its description; a name is left to Keras, which asks the loss what accuracy means."""
    import keras

    return keras.metrics.get(value) if isinstance(value, dict) else value


def _own(value: Any, own: Mapping[str, Any]) -> Any:
    return own[value] if isinstance(value, str) and value in own else value


def _metrics_of(model: Any) -> list[Any]:
    """Return the metrics that a compiled model was compiled with."""
    config = model.get_compile_config() if model.compiled else None
    return list((config or {}).get("metrics") or [])
