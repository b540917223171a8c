"""Keras 3's own ``fit`` and ``evaluate`` under TensorFlow's synchronous strategies.

Keras 3 (measured with 3.15.1 on TensorFlow 2.21) has these faults there, and this module mends each of them in the process
of a node, if and only if the installed Keras still looks as it did when the mends were written:

1. ``fit`` raises ``Attempt to convert a value (PerReplica...)`` under MultiWorkerMirroredStrategy, and ``Invalid
   reduction dimension 0`` once that is cured (keras #20585, #20329; tensorflow #72388).
2. Under every strategy ``fit`` opens a second iterator only to learn the shapes, and drops the rows that it took.
3. After an epoch over a dataset of unknown length, the next epoch is cut to the same number of steps: rows beyond are
   never seen. It also warns that the "input ran out of data" at the regular end of each pass.
4. Each replica's mean loss has the weight 1/replicas, however many rows it had. With uneven data a replica without a
   row shrinks everyone's gradient. Here each replica weighs as many rows as it has, so that the gradient is the one of
   the global batch.
5. BatchNormalization makes NaN of a batch without rows, and its moving averages differ between workers, of which the
   chief's are saved. Here they move by the row-weighted mean over replicas, so that all workers hold the same.
   (tf_keras skips the update for an empty batch too; Keras 3 has lost that.)
6. ``steps_per_execution > 1`` raises ``You must feed a value for placeholder tensor``. Here the steps run one by one.
7. ``BackupAndRestore`` opens one and the same file on all workers. Here each worker has a directory of its own.

Every private name of Keras stays in this file.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["patch_keras_fit"]

_log = logging.getLogger(__name__)


class _Shape(NamedTuple):
    """What a function of Keras must look like for us to dare to replace it or to build on it."""

    owner: str
    name: str
    parameters: tuple[str, ...]
    contains: tuple[str, ...]


_TRAINER = "keras.src.backend.tensorflow.trainer"
_KNOWN = (
    # Replaced.
    _Shape(f"{_TRAINER}:TensorFlowTrainer", "_maybe_symbolic_build", ("self", "iterator", "data_batch"),
           ("next(it)", "strategy.reduce(", "self._symbolic_build(data_batch=data_batch)")),
    _Shape(f"{_TRAINER}:TensorFlowTrainer", "_make_function", ("self", "step_function"),
           ("distribute_strategy.run(step_function, args=(data,))", 'reduction="auto"', "iterator.get_next()")),
    _Shape(f"{_TRAINER}:TFEpochIterator", "catch_stop_iteration", ("self",), ("self.tf_sync()", "OutOfRangeError")),
    _Shape("keras.src.losses.loss", "scale_loss_for_distribution", ("value",), ("1.0 / num_replicas",)),
    _Shape("keras.src.losses.loss", "unscale_loss_for_distribution", ("value",), ("num_replicas",)),
    # Wrapped.
    _Shape("keras.src.layers:BatchNormalization", "_moments", ("self", "inputs", "mask"), ("moments(", "_reduction_axes")),
    _Shape("keras.src.callbacks.backup_and_restore:BackupAndRestore", "on_train_begin", ("self", "logs"),
           ("self._load_model()",)),
    # Built on.
    _Shape(f"{_TRAINER}:TensorFlowTrainer", "train_step", ("self", "data"),
           ("unscale_loss_for_distribution(loss)", "self._loss_tracker.update_state(", "compute_loss(")),
    _Shape("keras.src.losses.loss", "reduce_values", ("values", "sample_weight", "reduction"),
           ("divide_no_nan", "scale_loss_for_distribution(loss)")),
    _Shape("keras.src.trainers.epoch_iterator:EpochIterator", "catch_stop_iteration", ("self",),
           ("self._current_iterator = None", "self._num_batches = self._steps_seen")),
)  # fmt: skip


def patch_keras_fit() -> str:
    """Make Keras 3's ``fit``, ``evaluate`` and ``predict`` right under synchronous strategies.

    To be called once, in the process of a node, before the user's code. It runs no TensorFlow operation, since a
    MultiWorkerMirroredStrategy can only be made before the first one; the mends check themselves at the first step.

    Returns
    -------
    str
        One line for the log: what was done, or why nothing was. It starts with ``WARNING`` if ``fit`` will not work.
    """
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true") and "keras" not in sys.modules:
        return "keras: tf_keras is in use (TF_USE_LEGACY_KERAS=1), nothing to mend"
    try:
        import keras
    except ImportError:
        return "keras: not installed, nothing to mend"
    if keras.backend.backend() != "tensorflow":
        return f"keras: {keras.__version__} runs on {keras.backend.backend()}, not on TensorFlow: nothing to mend"
    unlike = _unlike_known(keras.__version__)
    if unlike:
        return (
            f"WARNING keras: {keras.__version__} is not as known ({unlike}), so it is left as it is; the mends are "
            "written for Keras 3.10 to 3.15. model.fit may fail under MultiWorkerMirroredStrategy, or lose rows. Use "
            "such a version, or tf_keras (TF_USE_LEGACY_KERAS=1 and pip install tf_keras), or a training loop of your own"
        )
    from keras.src.backend.tensorflow import trainer

    if getattr(trainer.TensorFlowTrainer, "_tfos_mended", False):
        return f"keras: {keras.__version__} is mended already"
    _mend(trainer)
    trainer.TensorFlowTrainer._tfos_mended = True
    return f"keras: {keras.__version__} mended: fit and evaluate under synchronous strategies, uneven and empty batches"


def _unlike_known(version: str) -> str:
    """Say in which way the installed Keras is not one that the mends were written for; empty if it is."""
    if version.split(".")[0] != "3":
        return "its major version is not 3"
    for shape in _KNOWN:
        name = f"{shape.owner.rpartition('.')[2].replace(':', '.')}.{shape.name}"
        try:
            function = inspect.unwrap(getattr(_resolve(shape.owner), shape.name))
            parameters, source = tuple(inspect.signature(function).parameters), inspect.getsource(function)
        except (ImportError, AttributeError, OSError, TypeError) as error:
            return f"{name} is missing: {error}"
        if parameters != shape.parameters:
            return f"{name} takes {', '.join(parameters)}"
        for part in shape.contains:
            if part not in source:
                return f"{name} does without {part!r}"
    return ""


def _resolve(owner: str) -> Any:
    module, _, attribute = owner.partition(":")
    found = __import__(module, fromlist=["_"])
    return getattr(found, attribute) if attribute else found


def _mend(trainer: Any) -> None:
    from keras.src import callbacks, layers
    from keras.src.losses import loss

    shares = _Shares()
    make_function = trainer.TensorFlowTrainer._make_function

    def _make_function(self: Any, step_function: Any) -> Any:
        if not is_synchronous(self.distribute_strategy):
            return make_function(self, step_function)
        return _StepFunction(self, step_function, shares).build()

    trainer.TensorFlowTrainer._make_function = _make_function
    trainer.TensorFlowTrainer._maybe_symbolic_build = _build_from_spec
    trainer.TFEpochIterator.catch_stop_iteration = _quiet_end(trainer.TFEpochIterator.catch_stop_iteration)
    loss.scale_loss_for_distribution = shares.scale(loss.scale_loss_for_distribution)
    loss.unscale_loss_for_distribution = shares.unscale(loss.unscale_loss_for_distribution)
    layers.BatchNormalization._moments = _moments_of_rows(layers.BatchNormalization._moments)
    _mend_backup(callbacks.BackupAndRestore)


def is_synchronous(strategy: Any) -> bool:
    """Whether several replicas compute each step together."""
    import tensorflow as tf

    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    return isinstance(strategy, mirrored) and strategy.num_replicas_in_sync > 1


# --- faults 1 and 2: the shapes come from the dataset's element_spec, not from a batch of it -------------------------


def _build_from_spec(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Stand in for ``TensorFlowTrainer._maybe_symbolic_build``; takes no row from the dataset."""
    import tensorflow as tf

    if self._distribute_strategy is None:
        return
    if iterator is not None:
        data_batch = tf.nest.map_structure(_symbol, iterator._distributed_dataset.element_spec)
    with self.distribute_strategy.scope():
        self._symbolic_build(data_batch=data_batch)


def _symbol(spec: Any) -> Any:
    import keras
    import tensorflow as tf

    # TensorFlow's PerReplicaSpec, where a worker has several devices: one spec for each of them, all alike.
    spec = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
        return None
    return keras.KerasTensor(
        spec.shape,
        keras.backend.standardize_dtype(spec.dtype),
        sparse=isinstance(spec, tf.SparseTensorSpec),
        **({"ragged": True} if isinstance(spec, tf.RaggedTensorSpec) else {}),
    )


# --- fault 3: a dataset of unknown length stays one ------------------------------------------------------------------


def _quiet_end(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``TFEpochIterator.catch_stop_iteration``: remember no length, where the dataset has none to give."""

    @contextlib.contextmanager
    def catch_stop_iteration(self: Any) -> Iterator[None]:
        import tensorflow as tf

        if self.steps_per_epoch is not None or self.data_adapter.num_batches is not None:
            with original(self):
                yield
            return
        try:
            yield
            self.tf_sync()
        except (StopIteration, tf.errors.OutOfRangeError):
            self._current_iterator = None
            self.data_adapter.on_epoch_end()

    return catch_stop_iteration


# --- fault 4: each replica weighs as many rows as it has -------------------------------------------------------------


class _Shares(threading.local):
    """This replica's part of the rows of the step under way; replicas of one process are threads."""

    share: Any = None
    used: bool = False

    @contextlib.contextmanager
    def during(self, share: Any) -> Iterator[None]:
        self.share, self.used = share, False
        try:
            yield
        finally:
            self.share = None

    def scale(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``scale_loss_for_distribution``: the replica's mean times its rows / all rows, not times 1 / replicas."""

        @functools.wraps(original)
        def scale_loss_for_distribution(value: Any) -> Any:
            import tensorflow as tf

            if self.share is None:
                return original(value)
            self.used = True
            return value * tf.cast(self.share, value.dtype)

        return scale_loss_for_distribution

    def unscale(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``unscale_loss_for_distribution``: back to the replica's own mean, 0 if it has no row."""

        @functools.wraps(original)
        def unscale_loss_for_distribution(value: Any) -> Any:
            import tensorflow as tf

            if self.share is None:
                return original(value)
            return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

        return unscale_loss_for_distribution


class _StepFunction:
    """What ``TensorFlowTrainer._make_function`` makes, for several replicas that may have different numbers of rows."""

    def __init__(self, model: Any, step: Any, shares: _Shares) -> None:
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

        self.model = model
        self.step = step
        self.shares = shares
        self.strategy = model.distribute_strategy
        self.trains = step == model.train_step
        self.own_step = step.__func__ not in (TensorFlowTrainer.train_step, TensorFlowTrainer.test_step)

    def build(self) -> Callable[[Any], Any]:
        """Make the function that ``fit`` calls with its iterator, once for each ``steps_per_execution`` steps."""
        import tensorflow as tf

        on_data: Any = tf.autograph.experimental.do_not_convert(self._on_data)
        if not self.model.run_eagerly:
            on_data = tf.function(on_data, reduce_retracing=True, jit_compile=self.model.jit_compile)

        @tf.autograph.experimental.do_not_convert
        def on_iterator(iterator: Any) -> Any:
            return on_data(_without_optionals(iterator.get_next()))

        once = on_iterator if self.model.run_eagerly else tf.function(on_iterator, reduce_retracing=True)

        def function(iterator: Any) -> Any:
            outputs = None
            for _ in range(self.model.steps_per_execution):
                try:
                    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                        outputs = once(iterator)
                    else:  # train_on_batch hands over a Python generator
                        outputs = on_data(_without_optionals(next(iterator)))
                except (tf.errors.OutOfRangeError, StopIteration):
                    if outputs is None:
                        raise
                    break
            return outputs

        return function

    def _on_data(self, data: Any) -> Any:
        import keras
        import tensorflow as tf

        # Nothing of a step before its data: else the optimizer counts a step more at the end of an epoch, and it is a
        # matter of chance on which workers (Keras in a single process does count one more).
        with tf.control_dependencies(_tensors(self.strategy, data)):
            outputs = self.strategy.run(self._on_replica, args=(data,))
        if self.trains and self.own_step and not self.shares.used:
            _log.warning(
                "the train_step of %s does not take its loss from compute_loss: replicas with fewer rows will not "
                "weigh less, as they do elsewhere",
                type(self.model).__name__,
            )
        return keras.tree.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], outputs)

    def _on_replica(self, data: Any) -> Any:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        rows = tf.cast(_rows(data), tf.float32)
        share = tf.math.divide_no_nan(rows, context.all_reduce(tf.distribute.ReduceOp.SUM, rows))
        averages = _moving_averages(self.model) if self.trains else []
        before = [tf.convert_to_tensor(v.value) for v in averages]
        with self.shares.during(share):
            outputs = self.step(data)
        moved = [tf.convert_to_tensor(v.value) - old for v, old in zip(averages, before, strict=True)]
        outputs, moved = self._level(context, outputs, rows, moved, share)
        for variable, old, by in zip(averages, before, moved, strict=True):
            variable.value.assign(old + by)
        return outputs

    def _level(self, context: Any, outputs: Any, rows: Any, moved: list[Any], share: Any) -> tuple[Any, list[Any]]:
        """Replace metrics and moves of moving averages by their row-weighted means over replicas, in one collective."""
        import keras
        import tensorflow as tf

        leaves = keras.tree.flatten(outputs)
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.shape.rank == 0]
        # The weights that the trainer's own loss metric gives: rows since the metrics were reset.
        seen = rows if self.own_step else tf.cast(tf.convert_to_tensor(self.model._loss_tracker.count), tf.float32)
        parts = [(tf.cast(leaves[i], tf.float32), seen) for i in places]
        parts += [(tf.cast(move, tf.float32), share) for move in moved]
        # where, not a product alone: what is NaN for want of rows must count nothing.
        flat = [tf.reshape(tf.where(w > 0, value * w, tf.zeros_like(value)), [-1]) for value, w in parts]
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat([[seen], *flat], axis=0))
        sums = tf.split(total, [1, *(part.shape[0] for part in flat)])
        for place, value in zip(places, sums[1:], strict=False):
            leaves[place] = tf.math.divide_no_nan(value[0], sums[0][0])
        levelled = [
            tf.cast(tf.reshape(value, move.shape), move.dtype)
            for value, move in zip(sums[1 + len(places) :], moved, strict=True)
        ]
        return keras.tree.pack_sequence_as(outputs, leaves), levelled


def _without_optionals(data: Any) -> Any:
    """What Keras' ``_autoconvert_optionals`` does to a batch."""
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)


def _tensors(strategy: Any, data: Any) -> list[Any]:
    import tensorflow as tf

    local = [strategy.experimental_local_results(v) for v in tf.nest.flatten(data) if v is not None]
    return [v for v in tf.nest.flatten(local, expand_composites=True) if tf.is_tensor(v)]


def _rows(data: Any) -> Any:
    import keras
    import tensorflow as tf

    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


# --- fault 5: BatchNormalization -------------------------------------------------------------------------------------


def _moving_averages(model: Any) -> list[Any]:
    import keras

    names = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            variables = (getattr(layer, name, None) for name in names)
            found.update((id(variable), variable) for variable in variables if variable is not None)
    return list(found.values())


def _moments_of_rows(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Wrap ``BatchNormalization._moments``: a batch without rows has the moving averages for its mean and variance."""

    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        import tensorflow as tf

        mean, variance = original(self, inputs, mask)
        if self.synchronized or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return mean, variance
        has_rows = tf.shape(inputs)[0] > 0
        return (
            tf.where(has_rows, mean, tf.cast(self.moving_mean, mean.dtype)),
            tf.where(has_rows, variance, tf.cast(self.moving_variance, variance.dtype)),
        )

    return _moments


# --- fault 7: BackupAndRestore ---------------------------------------------------------------------------------------


def _mend_backup(backup: Any) -> None:
    init, on_train_begin = backup.__init__, backup.on_train_begin

    @functools.wraps(init)
    def __init__(self: Any, backup_dir: str, *args: Any, **kwargs: Any) -> None:
        init(self, _dir_of_this_worker(backup_dir), *args, **kwargs)

    @functools.wraps(on_train_begin)
    def level_after_restore(self: Any, logs: Any = None) -> None:
        on_train_begin(self, logs)
        if is_synchronous(self.model.distribute_strategy):
            _start_from_latest(self.model)

    backup.__init__ = __init__
    backup.on_train_begin = level_after_restore


def _dir_of_this_worker(backup_dir: str) -> str:
    """Give each of several workers its own directory; they may die between one worker's save and the next one's."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    alone = len(cluster.get("chief", [])) + len(cluster.get("worker", [])) < 2
    if not backup_dir or alone or "ps" in cluster or task.get("type") not in ("chief", "worker"):
        return backup_dir
    return os.path.join(backup_dir, f"{task['type']}-{task['index']}")


def _start_from_latest(model: Any) -> None:
    """Hand the state of the replica that was restored to the latest epoch to all others, if they differ.

    Without this a worker that died before its last save would wait for ever for an epoch that the others do not run.
    """
    import tensorflow as tf

    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = {id(v): v for v in [*model.variables, *getattr(model.optimizer, "variables", [])]}
    mine = tf.constant(model._initial_epoch or 0, tf.int64)

    def on_replica() -> tuple[Any, Any]:
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        places = tf.one_hot(replica, context.num_replicas_in_sync, dtype=tf.int64)
        epochs = context.all_reduce(tf.distribute.ReduceOp.SUM, places * mine)
        source = tf.argmax(epochs, output_type=tf.int32)
        for variable in variables.values():
            value = tf.convert_to_tensor(variable.value)
            wide = value if value.dtype.is_floating else tf.cast(value, tf.int64)
            from_source = tf.where(source == replica, wide, tf.zeros_like(wide))
            wide = context.all_reduce(tf.distribute.ReduceOp.SUM, from_source)
            variable.value.assign(tf.cast(wide, value.dtype))
        return tf.reduce_min(epochs), tf.reduce_max(epochs)

    earliest, latest = (
        int(model.distribute_strategy.experimental_local_results(v)[0])
        for v in model.distribute_strategy.run(tf.function(on_replica))
    )
    if earliest != latest:
        _log.warning("the workers' backups end at epochs %d to %d; all continue after epoch %d", earliest, latest, latest)
        model._initial_epoch = latest
