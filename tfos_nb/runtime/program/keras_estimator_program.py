"""Program that a node runs for a KerasEstimator: build the model, train it on the node's rows, and save it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.code import custom_objects
from tfos_nb.runtime.code.user_classes import own_objects
from tfos_nb.runtime.models.classifier_outputs import Task
from tfos_nb.runtime.models.keras_inputs import KerasInputs, input_tensors
from tfos_nb.runtime.models.keras_model import by_registered_names, structure_of
from tfos_nb.runtime.models.keras_outputs import Label, Outputs, is_config, label_columns, takes_any_shape
from tfos_nb.runtime.program.estimator_programs import seed_everything

__all__ = ["Columns", "Compiling", "KerasProgram"]


@dataclass(frozen=True)
class Columns:
    """Columns that the model learns from.

    Parameters
    ----------
    x : str or tuple of str
        The features: one column, or columns with the names of the model's inputs.
    y : str, list or dict
        The label, or the labels of several outputs, as a list in the outputs' order or by their names.
    weight : str or None
        The rows' weights.
    validation : bool
        Whether validation rows are fed.
    decode : frozenset of str
        The features that contain encoded images.
    """

    x: str | tuple[str, ...]
    y: Label
    weight: str | None = None
    validation: bool = False
    decode: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Compiling:
    """Arguments of ``compile``: names, or Keras' configurations. None keeps the model's own."""

    optimizer: Any = None
    loss: Any = None
    metrics: Any = ()
    learning_rate: float | None = None


@dataclass(frozen=True)
class KerasProgram:
    """Train a Keras model.

    Parameters
    ----------
    model : bytes
        A ``.keras`` file. If it is empty, the function in ``code`` builds the model.
    code : bytes
        The user's code, from :func:`tfos_nb.runtime.code.custom_objects.pack`: own classes, the function that builds
        the model, and the callbacks as its only argument.
    columns, compiling
        The columns to learn from, and the arguments of ``compile``.
    batch_size, epochs, shuffle : int
        As Keras and ``ctx.dataset`` take them.
    task : Task or None
        The model's task. None: derived from its loss.
    seed : int or None
        Seed of weights and shuffling.
    trusted : bool
        Whether Python code in ``model`` may run, because it is the user's own model object from the driver's session.
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
    trusted: bool = False

    def __call__(self, args: Any, ctx: Any) -> dict[str, Any]:
        """Train and save the model; return its path, and the task and whether there are logits for each output."""
        if self.seed is not None:
            seed_everything(self.seed)
        taken = custom_objects.unpack(self.code)
        callbacks = list(taken.args[0]) if taken.args else []
        scope = self._scope(ctx)  # a strategy must be made before any other operation of TensorFlow
        with scope(), _known(taken.custom_objects):
            model = self._read(taken)
        fed = ctx.dataset(self.batch_size, **self._wanted(), shuffle=self.shuffle, seed=self.seed)
        with scope(), _known(taken.custom_objects):
            if takes_any_shape(model) and isinstance(self.columns.x, str):
                model.build(tuple(fed.element_spec[0].shape))
            trained = self._compiled(model, taken.custom_objects)
        outputs = Outputs.of(model)
        tensors, structure = input_tensors(model), structure_of(model, "input")
        inputs = KerasInputs(tensors, self.columns.x, self.columns.decode, structure=structure)
        labels = dict(zip(outputs.names, outputs.labels(self.columns.y, outputs.losses(trained.loss)), strict=True))
        batches = _Batches(inputs, Outputs.of(trained), labels, isinstance(self.columns.y, str))
        rows = batches.of(fed)
        held_out = None
        if self.columns.validation:
            held_out = batches.of(ctx.validation(self.batch_size, **self._wanted()))
        try:
            trained.fit(rows, validation_data=held_out, epochs=self.epochs, callbacks=callbacks, verbose=2)
        except Exception as error:
            if inputs.failures:  # TensorFlow's own message would be a page of text
                raise inputs.failures[0] from error
            raise
        converted = outputs.classifier_outputs(trained.loss, self.task)
        return {"path": ctx.save(model), "classifier_outputs": [[one.task.value, one.logits] for one in converted]}

    def _scope(self, ctx: Any) -> Any:
        import tensorflow as tf

        several = ctx.num_workers > 1 or len(ctx.gpus) > 1
        return tf.distribute.MultiWorkerMirroredStrategy().scope if several else contextlib.nullcontext

    def _wanted(self) -> dict[str, Any]:
        x = self.columns.x
        y = self.columns.y if isinstance(self.columns.y, str) else label_columns(self.columns.y)
        names = {"x": x if isinstance(x, str) else list(x), "y": y}
        return {**names, **({"sample_weight": self.columns.weight} if self.columns.weight else {})}

    def _read(self, taken: custom_objects.ModelCode) -> Any:
        import keras

        if not self.model:
            assert taken.function is not None, "the driver has checked"
            model = taken.function()
            if not isinstance(model, keras.Model):
                raise PlanError(f"the function must return a Keras model, got {type(model).__name__}: return the model")
            return model
        with tempfile.TemporaryDirectory(prefix="tfos_nb-model-") as directory:
            path = os.path.join(directory, "model.keras")
            with open(path, "wb") as file:
                file.write(self.model)
            custom = by_registered_names(taken.custom_objects, path)
            return keras.models.load_model(path, custom_objects=custom or None, safe_mode=not self.trusted)

    def _compiled(self, model: Any, own: Mapping[str, Any]) -> Any:
        """Return the compiled model to train: this one, or one of its layers with the outputs in one dictionary."""
        asked, outputs = self.compiling, Outputs.of(model)
        trained = outputs.flat(model) if outputs.is_deep else model
        if not trained.compiled or asked.optimizer is not None or asked.loss is not None or asked.metrics:
            loss = asked.loss if asked.loss is not None else getattr(model, "loss", None)
            if loss is None:
                raise PlanError("the model is not compiled: compile it, or set loss= and optimizer=")
            outputs.check(self.columns.y, loss, asked.metrics)
            before = _compiled_with(model)
            optimizer = asked.optimizer or getattr(model, "optimizer", None) or "rmsprop"
            metrics = _made(asked.metrics, "metrics", own) if asked.metrics else before.get("metrics")
            switches = {name: value for name, value in before.items() if name != "metrics"}
            by_output = {"loss": _made(loss, "losses", own), "metrics": metrics}
            if outputs.is_deep:
                by_output.update({name: switches.pop(name, None) for name in ("loss_weights", "weighted_metrics")})
                said = {name: outputs.by_name(value, name) if value else None for name, value in by_output.items()}
            else:
                said = {"loss": outputs.loss(by_output["loss"]), "metrics": outputs.metrics(metrics)}
            trained.compile(optimizer=_made(optimizer, "optimizers", own), **said, **switches)
        if asked.learning_rate is not None:
            trained.optimizer.learning_rate = asked.learning_rate
        return trained


@dataclass(frozen=True)
class _Batches:
    """Convert a batch of columns to Keras' inputs, labels and weights.

    Parameters
    ----------
    inputs : KerasInputs
        Converts the features to the model's inputs.
    outputs : Outputs
        The model's outputs, for the labels.
    labels : mapping
        The column of each output's label, by the output's name.
    alone : bool
        Whether the label is a single column, not a dictionary of columns.
    """

    inputs: KerasInputs
    outputs: Outputs
    labels: Mapping[str, str | None]
    alone: bool

    def of(self, dataset: Any) -> Any:
        """Return the dataset for Keras."""
        import tensorflow as tf

        self.inputs.check(dataset.element_spec[0])
        return dataset.map(tf.autograph.experimental.do_not_convert(self.__call__))

    def __call__(self, x: Any, y: Any, *weight: Any) -> Any:
        """Return the inputs, the labels and, if given, the weights of a batch.

        Labels of type ``double`` are cast as Keras casts those of an array, since a metric that is a function may not
        cast them.
        """
        import keras
        import tensorflow as tf

        labels = [self.labels[name] for name in self.outputs.names]
        columns: dict[Any, Any] = {labels[0]: y} if self.alone else y
        columns = {
            name: tf.cast(values, keras.config.floatx()) if values.dtype == tf.float64 else values
            for name, values in columns.items()
        }
        rows = tf.shape(next(iter(columns.values())))[0]
        return (self.inputs(x), self.outputs.packed_labels(labels, columns, rows), *weight)


@contextlib.contextmanager
def _known(own: Mapping[str, Any]) -> Any:
    """Let Keras find the user's code by its names within the block, and save it under its registered names."""
    import keras

    for name, value in own.items():
        package, _, bare = name.rpartition(">")
        if package and keras.saving.get_registered_object(name) is None:
            keras.saving.register_keras_serializable(package, bare)(value)
    with keras.saving.custom_object_scope(dict(own)):
        yield


def _made(value: Any, kind: str, own: Mapping[str, Any]) -> Any:
    """Return Keras' objects for their names or configurations.

    The name of a metric is returned unchanged, because Keras derives the meaning of "accuracy" from the loss.
    """
    import keras

    if isinstance(value, Mapping) and not is_config(value):
        return {key: _made(part, kind, own) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_made(part, kind, own) for part in value]
    if isinstance(value, str) and value in own:
        value = own[value]
    if value is None or (kind == "metrics" and not is_config(value)):
        return value
    return getattr(keras, kind).get(value)


def _compiled_with(model: Any) -> dict[str, Any]:
    """Return a model's arguments of ``compile`` besides optimizer and loss: metrics, loss weights, and switches."""
    import keras

    config = (model.get_compile_config() if model.compiled else None) or {}
    with keras.saving.custom_object_scope(own_objects(model)):
        return {
            name: keras.saving.deserialize_keras_object(value)
            for name, value in config.items()
            if name not in ("optimizer", "loss")
        }
