"""Keras 3's own ``fit`` and ``evaluate`` under TensorFlow's synchronous strategies.

Keras 3 (measured with 3.12, 3.15.1 and 3.16.0.dev on TensorFlow 2.21) has the faults below. This module patches each of
them in a node's process, but only if the installed Keras has the code that the patches replace:

1. ``fit`` raises ``Attempt to convert a value (PerReplica...)`` under MultiWorkerMirroredStrategy, and ``Invalid
   reduction dimension 0`` once that is solved (keras #20585, #20329; tensorflow #72388).
2. Under every strategy ``fit`` opens a second iterator only to learn the shapes, and drops the rows that it took.
3. After an epoch over a dataset of unknown length, the next epoch is limited to the same number of steps, and later
   rows are never used. Keras also warns that the "input ran out of data" at the normal end of each pass. If the length
   is known, each worker uses its own. Workers with datasets of different lengths then do different numbers of steps,
   and fail in, or wait forever for, each other's collectives.
4. Keras computes losses, metrics and states on one replica's rows, whatever their number. With uneven rows, masks or
   weights the gradients are not those of the global batch. A replica without a row causes NaN, errors or a crash. Here
   every value is that of the global batch (:mod:`tfos_nb.runtime.keras.replicas.replica`,
   :mod:`tfos_nb.runtime.keras.placeholder_rows`).
5. Optimizers clip, test, accumulate and average before the replicas' gradients are added up, or fail under a
   condition (:mod:`tfos_nb.runtime.keras.replicas.optimizers`).
6. ``steps_per_execution > 1`` raises ``You must feed a value for placeholder tensor``. Here the steps run one by one.
   So do those of ``predict``, whose graph for all steps would be traced again on all workers for each new batch size.
   ``predict_on_batch`` returns its batch once for each replica. Here it returns one batch, this worker's own.
7. ``BackupAndRestore`` opens the same file on all workers. It also writes a state as two files, one after the other: if
   a process dies in between, the state and the epoch beside it do not match. Here each worker has a directory of its
   own, and a state is written atomically.
8. Each worker shuffles arrays in an order of its own, and takes its part of other batches than the other workers. Rows
   are used twice or never. Here all workers shuffle in one order (:mod:`tfos_nb.runtime.keras.shuffling`).

Private names of Keras are used only in this file and in those that it names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import Role, tf_config, training_addresses
from tfos_nb.runtime.keras.adapt import patch_adapt
from tfos_nb.runtime.keras.inputs import columns_of, refuse_states_of_rows, refuse_text
from tfos_nb.runtime.keras.progress import was_stopped
from tfos_nb.runtime.keras.replicas.collective_calls import wait_for_all_workers
from tfos_nb.runtime.keras.replicas.losses import patch_losses
from tfos_nb.runtime.keras.replicas.optimizers import patch_optimizers
from tfos_nb.runtime.keras.replicas.replica import is_synchronous, sent_as
from tfos_nb.runtime.keras.replicas.states import patch_states
from tfos_nb.runtime.keras.scope import build, warn_of_a_model_outside
from tfos_nb.runtime.keras.shuffling import patch_iterators
from tfos_nb.runtime.keras.step import OWN_BATCH, StepFunction, cut_predictions, with_results
from tfos_nb.runtime.keras.versions import advice, uses_tf_keras
from tfos_nb.runtime.storage.checkpoint_directory import BACKUP
from tfos_nb.runtime.storage.remote import scheme_of, tensorflow_opens

__all__ = ["build_early", "count_from", "iterator_of", "patch_keras_fit"]

_log = logging.getLogger(__name__)


_PART = "part"
_ITERATOR, _FIRST, _LEFT = "_tfos_iterator", "_tfos_first_step", "_tfos_steps_left"
_COLUMNS = "_tfos_columns"
NODE_VARIABLE = "TFOS_NB_NODE"
"""A node's own name, which it keeps when ``TF_CONFIG`` counts only the remaining nodes."""
# The functions that the patches replace or wrap, with the parameters with which Keras calls them. Classes are found by
# their methods, because Keras 3.16 has renamed the trainer.
_PARAMETERS = (
    ("model", "_make_function", ("self", "step_function")),
    ("model", "_maybe_symbolic_build", ("self", "iterator", "data_batch")),
    ("model", "predict_step", ("self", "data")),
    ("model", "make_predict_function", ("self", "force")),
    ("model", "predict_on_batch", ("self", "x")),
    ("model", "get_metrics_result", ("self",)),
    ("module", "reduce_per_replica", ("values", "strategy", "reduction")),
    ("model", "_get_metrics_result_or_logs", ("self", "logs")),
    ("iterator", "catch_stop_iteration", ("self",)),
    ("iterator", "_get_iterator", ("self",)),
    ("arrays", "get_tf_dataset", ("self",)),
    ("loss", "reduce_values", ("values", "sample_weight", "reduction")),
    ("loss", "apply_mask", ("sample_weight", "mask", "dtype", "reduction")),
    ("loss", "scale_loss_for_distribution", ("value",)),
    ("loss", "unscale_loss_for_distribution", ("value",)),
    ("Optimizer", "apply", ("self", "grads", "trainable_variables")),
    ("Variable", "assign", ("self", "value")),
    ("BackupAndRestore", "_save_model", ("self",)),
)


class _Trainer(NamedTuple):
    """Keras' classes that implement ``fit``."""

    model: Any  # the class that has the functions for one step
    iterator: Any  # the class that goes through the batches of an epoch

    @classmethod
    def of(cls, keras: Any) -> _Trainer:
        """Find them through ``keras.Model``."""
        model = next(c for c in keras.Model.__mro__ if "_make_function" in vars(c))
        known = vars(sys.modules[model.__module__]).values()
        iterators = (c for c in known if inspect.isclass(c) and {"_get_iterator", "tf_sync"} <= vars(c).keys())
        return cls(model, next(iterators))


def patch_keras_fit() -> str:
    """Patch Keras 3's ``fit``, ``evaluate`` and ``predict`` for synchronous strategies.

    Call it once, in a node's process, before the user's code. It runs no TensorFlow operation, since a
    MultiWorkerMirroredStrategy can be made only before the first one. The patches check themselves at the first step.

    Returns
    -------
    str
        One line for the log: what was patched, or why nothing was. It starts with ``WARNING`` if ``fit`` will not work.
    """
    if uses_tf_keras(os.environ) and "keras" not in sys.modules:
        return "keras: tf_keras is in use (TF_USE_LEGACY_KERAS=1), nothing to patch"
    if importlib.util.find_spec("keras") is None:
        return "keras: not installed, nothing to patch"
    import keras

    if keras.backend.backend() != "tensorflow":
        return f"keras: {keras.__version__} runs on {keras.backend.backend()}, not on TensorFlow: nothing to patch"
    model: Any = keras.Model
    if getattr(model, "_tfos_mended", False):
        return f"keras: {keras.__version__} is mended already"
    try:
        trainer = _Trainer.of(keras)
        unlike = _unlike_known(keras, trainer)
    except (StopIteration, AttributeError, ImportError) as error:
        trainer, unlike = None, f"what fit is made of is not found: {error!r}"
    if unlike or trainer is None:
        _refuse_fit(keras, unlike)
        return f"WARNING keras: {advice(keras.__version__, unlike)}"
    _mend(trainer)
    model._tfos_mended = True
    return f"keras: {keras.__version__} mended: fit and evaluate under synchronous strategies, uneven and empty batches"


def _unlike_known(keras: Any, trainer: _Trainer) -> str:
    """Return how the installed Keras differs from those that the patches were written for; empty if it does not."""
    from keras.src.losses import loss
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    if keras.__version__.split(".")[0] != "3":
        return "its major version is not 3"
    owners = {
        "model": trainer.model,
        "module": sys.modules[trainer.model.__module__],
        "iterator": trainer.iterator,
        "arrays": ArrayDataAdapter,
        "loss": loss,
        "Optimizer": keras.optimizers.Optimizer,
        "Variable": keras.Variable,
        "BackupAndRestore": keras.callbacks.BackupAndRestore,
    }
    for owner, name, parameters in _PARAMETERS:
        function = getattr(owners[owner], name, None)
        if function is None:
            return f"{owner}.{name} is missing"
        found = tuple(inspect.signature(inspect.unwrap(function)).parameters)
        if found != parameters:
            return f"{owner}.{name} takes {', '.join(found)}"
    return ""


def _refuse_fit(keras: Any, unlike: str) -> None:
    """Make ``fit``, ``evaluate`` and ``predict`` raise an error on several workers, with the reason.

    There they would fail or return wrong numbers.
    """
    told = advice(keras.__version__, unlike)
    for name in ("fit", "evaluate", "predict"):
        setattr(keras.Model, name, _refused_on_several(getattr(keras.Model, name), told))


def _refused_on_several(original: Callable[..., Any], told: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_synchronous(self.distribute_strategy):
            raise PlanError(told)
        return original(self, *args, **kwargs)

    return refused


def _mend(trainer: _Trainer) -> None:
    import keras

    of_model, of_iterator = trainer
    make_function = of_model._make_function

    def _make_function(self: Any, step_function: Any) -> Any:
        if not is_synchronous(self.distribute_strategy):
            return make_function(self, step_function)
        return StepFunction(self, step_function).build()

    of_model._make_function = _make_function
    cut_predictions(of_model)
    owner = next(c for c in of_model.__mro__ if "_get_metrics_result_or_logs" in vars(c))
    owner._get_metrics_result_or_logs = with_results(owner._get_metrics_result_or_logs)
    of_model.make_predict_function = _one_by_one(of_model.make_predict_function)
    of_model.predict_on_batch = _of_own_batch(of_model.predict_on_batch)
    module: Any = sys.modules[of_model.__module__]
    module.reduce_per_replica = _concatenated(module.reduce_per_replica)
    of_model._maybe_symbolic_build = _build_from_spec
    patch_iterators(of_iterator)
    of_iterator.__init__ = _without_length(of_iterator.__init__)
    of_iterator.__next__ = _counted_from(of_iterator.__next__)
    of_iterator.catch_stop_iteration = _quiet_end(of_iterator.catch_stop_iteration)
    patch_losses()
    patch_states()
    patch_optimizers()
    patch_adapt()
    _mend_backup(keras.callbacks.BackupAndRestore)


# --- faults 1 and 2: the shapes come from the dataset's element_spec, not from a batch of it -------------------------


def _build_from_spec(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Replace ``TensorFlowTrainer._maybe_symbolic_build``; takes no row from the dataset."""
    import tensorflow as tf

    if iterator is not None:
        # Past Keras' tracking of attributes; weak, since what an iterator has asked for ends with it.
        vars(self)[_ITERATOR] = weakref.ref(iterator)
        refuse_text(self, iterator._distributed_dataset.element_spec, getattr(iterator, _COLUMNS, (None, None)))
    if self._distribute_strategy is None:
        warn_of_a_model_outside(self)
        return
    refuse_states_of_rows(self)
    if iterator is not None:
        data_batch = tf.nest.map_structure(_symbol, iterator._distributed_dataset.element_spec)
    with self.distribute_strategy.scope():
        build(self, data_batch)


def _symbol(spec: Any) -> Any:
    import keras
    import tensorflow as tf

    # If a worker has several devices, this is TensorFlow's PerReplicaSpec: one spec for each device, all of them equal.
    spec = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
        return None
    return keras.KerasTensor(
        spec.shape,
        keras.backend.standardize_dtype(spec.dtype),
        sparse=isinstance(spec, tf.SparseTensorSpec),
        **({"ragged": True} if isinstance(spec, tf.RaggedTensorSpec) else {}),
    )


# --- fault 3: datasets of unknown length stay so, and a length that only this worker knows is hidden -----------------


def _without_length(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TFEpochIterator.__init__``: all workers continue until the last one has no rows left."""

    @functools.wraps(original)
    def init(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        import tensorflow as tf

        x: Any = kwargs.get("x")
        if isinstance(x, tf.data.Dataset):
            setattr(self, _COLUMNS, columns_of(x))
        open_ended = kwargs.get("steps_per_epoch") is None
        counted = isinstance(x, tf.data.Dataset) and open_ended and x.cardinality() >= 0
        if counted and is_synchronous(distribute_strategy):
            # A filter that keeps all rows: TensorFlow cannot know this, so the length becomes unknown.
            kwargs["x"] = x.filter(tf.autograph.experimental.do_not_convert(lambda *row: True))
        original(self, distribute_strategy, *args, **kwargs)

    return init


def _quiet_end(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``TFEpochIterator.catch_stop_iteration``: do not remember a length if the dataset's is unknown."""

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


# --- an epoch that goes on in its middle ------------------------------------------------------------------------------


def iterator_of(model: Any) -> Any:
    """Return the iterator of a model's ``fit`` that has just begun; a later ``evaluate`` has another one."""
    known = vars(model).get(_ITERATOR)
    return known() if known is not None else None


def build_early(model: Any, iterator: Any) -> None:
    """Build what a model's running ``fit`` would otherwise build with its first step, if the program allows it."""
    import tensorflow as tf

    if is_synchronous(model.distribute_strategy) or iterator is None:
        return  # it is built
    with contextlib.suppress(Exception):  # its loss or metric may take real numbers only
        build(model, tf.nest.map_structure(_symbol, iterator._distributed_dataset.element_spec))


def count_from(iterator: Any, step: int) -> None:
    """Number the steps of the epoch that a ``fit`` begins with its iterator from ``step`` on.

    With ``steps_per_epoch``, the epoch has only the steps that are left. 0 ends the numbering.
    """
    if iterator is not None:
        setattr(iterator, _FIRST, step)
        setattr(iterator, _LEFT, iterator.steps_per_epoch - step if step and iterator.steps_per_epoch else None)


def _counted_from(original: Callable[[Any], tuple[int, int, Any]]) -> Callable[[Any], tuple[int, int, Any]]:
    """Wrap ``TFEpochIterator.__next__``."""

    @functools.wraps(original)
    def counted(self: Any) -> tuple[int, int, Any]:
        left = getattr(self, _LEFT, None)
        if left is not None:
            if left <= 0:
                raise StopIteration
            setattr(self, _LEFT, left - self.steps_per_execution)
        begin, end, data = original(self)
        first = getattr(self, _FIRST, 0)
        return begin + first, end + first, data

    return counted


# --- fault 6: several steps at a time, and batches of this worker's own ----------------------------------------------


class _Thread(threading.local):
    own_batch = False  # the batch belongs to this worker alone: no other replica has rows of it


_thread = _Thread()


class _Predict:
    """Function that ``predict`` calls with a list of batches, and ``predict_on_batch`` with one batch of this worker.

    Parameters
    ----------
    model : keras.Model
        The model.
    make : callable
        Keras' ``make_predict_function``, whose function concatenates the predictions of all replicas.
    """

    def __init__(self, model: Any, make: Callable[..., Any]) -> None:
        self._model = model
        self._functions = [_made(model, make) for _ in (False, True)]

    def __call__(self, batches: list[Any]) -> Any:
        """Predict batches one by one, each by a function that takes a list of one."""
        import keras

        if not _thread.own_batch:
            refuse_states_of_rows(self._model)
        function = self._functions[_thread.own_batch]
        parts = [function([batch]) for batch in batches]
        return keras.tree.map_structure(_joined, *parts) if len(parts) > 1 else parts[0]


def _made(model: Any, make: Callable[..., Any]) -> Any:
    steps, model.steps_per_execution = model.steps_per_execution, 1
    try:
        make(model, True)
    finally:
        model.steps_per_execution = steps
    return model.predict_function


def _one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``make_predict_function``."""

    @functools.wraps(original)
    def make_predict_function(self: Any, force: bool = False) -> None:
        if not is_synchronous(self.distribute_strategy):
            original(self, force)
        elif self.predict_function is None or force:
            cut_predictions(type(self))  # its predict_step may be the program's
            self.predict_function = _Predict(self, original)

    return make_predict_function


def _of_own_batch(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``predict_on_batch``: Keras returns a batch once for each replica."""

    @functools.wraps(original)
    def predict_on_batch(self: Any, x: Any) -> Any:
        own = is_synchronous(self.distribute_strategy)
        _thread.own_batch = vars(self)[OWN_BATCH] = own  # replicas run in other threads
        try:
            return original(self, x)
        finally:
            _thread.own_batch = vars(self)[OWN_BATCH] = False

    return predict_on_batch


def _concatenated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``reduce_per_replica``, which combines the values that the replicas return."""

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        import keras
        import tensorflow as tf

        def reduced(value: Any) -> Any:
            parts = strategy.experimental_local_results(value)
            if _thread.own_batch:
                return parts[0]
            if isinstance(parts[0], tf.RaggedTensor):
                return tf.concat([_gathered(part, strategy) for part in parts], axis=0)
            kind = parts[0].dtype
            if (sent := sent_as(kind)) == kind:
                return original(value, strategy, reduction)
            wide = strategy.run(functools.partial(tf.cast, dtype=sent), args=(value,))
            return tf.cast(original(wide, strategy, reduction), kind)

        if reduction != "concat" or not is_synchronous(strategy):
            return original(values, strategy, reduction)
        return keras.tree.map_structure(reduced, values)

    return reduce_per_replica


def _gathered(ragged: Any, strategy: Any) -> Any:
    """Return the rows of a ragged tensor from all workers. TensorFlow itself gathers only dense tensors."""
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return ragged
    lengths = [strategy.gather(one, axis=0) for one in ragged.nested_row_lengths()]
    return tf.RaggedTensor.from_nested_row_lengths(strategy.gather(ragged.flat_values, axis=0), lengths)


def _joined(*parts: Any) -> Any:
    import tensorflow as tf

    return tf.sparse.concat(0, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, axis=0)


# --- fault 7: BackupAndRestore ---------------------------------------------------------------------------------------


def _mend_backup(backup: Any) -> None:
    init, on_train_begin, save_model = backup.__init__, backup.on_train_begin, backup._save_model
    on_train_end = backup.on_train_end

    @functools.wraps(init)
    def init_for_worker(self: Any, backup_dir: str, *args: Any, **kwargs: Any) -> None:
        _refuse_elsewhere(backup_dir)
        self._dir_of_one = backup_dir  # directory of a training with a single worker
        init(self, _dir_of_this_worker(backup_dir), *args, **kwargs)

    @functools.wraps(on_train_begin)
    def level_after_restore(self: Any, logs: Any = None) -> None:
        newest, *older = _states(self.backup_dir) or _states(self._dir_of_one) or [self.backup_dir]
        _use_state(self, newest, *older[:1])
        on_train_begin(self, logs)
        if is_synchronous(self.model.distribute_strategy):
            _start_from_latest(self.model)

    @functools.wraps(save_model)
    def save_whole(self: Any) -> None:
        _save_whole(self, save_model)

    @functools.wraps(on_train_end)
    def remove_all(self: Any, logs: Any = None) -> None:
        if was_stopped(self.model):  # a later cluster may continue the training
            return
        on_train_end(self, logs)
        if self.delete_checkpoint:
            wait_for_all_workers(self.model.distribute_strategy)  # so that the directory is gone when fit returns
            for state in _states(self._dir_of_one):
                _remove_state(state)
            _remove_if_empty(self._dir_of_one)

    backup.__init__ = init_for_worker
    backup.on_train_end = remove_all
    backup.on_train_begin = level_after_restore
    backup._save_model = save_whole


def _states(backup_dir: str) -> list[str]:
    """Return the directories of a backup's states, the newest first."""
    import tensorflow as tf

    names: list[str] = []
    with contextlib.suppress(tf.errors.NotFoundError):  # another worker may remove it after it was listed
        names = tf.io.gfile.listdir(backup_dir) if tf.io.gfile.isdir(backup_dir) else []
    numbers = [int(name.rstrip("/").removeprefix(BACKUP)) for name in names if name.startswith(BACKUP)]
    return [os.path.join(backup_dir, f"{BACKUP}{number}") for number in sorted(numbers, reverse=True)]


def _refuse_elsewhere(backup_dir: str) -> None:
    if backup_dir and not tensorflow_opens(backup_dir):
        raise PlanError(
            f"BackupAndRestore({backup_dir!r}): TensorFlow writes its files, and cannot write to "
            f"{scheme_of(backup_dir)}://. "
            "Leave it out, and fit continues from the state that the nodes keep in memory; or give a shared path"
        )


def _remove_state(state: str) -> None:
    import tensorflow as tf

    with contextlib.suppress(tf.errors.NotFoundError):  # another worker has just done so
        tf.io.gfile.rmtree(state)


def _remove_if_empty(backup_dir: str) -> None:
    """Remove the workers' common directory once the last worker has removed its own, as Keras does."""
    import tensorflow as tf

    with contextlib.suppress(tf.errors.NotFoundError):
        if not tf.io.gfile.listdir(backup_dir):
            tf.io.gfile.rmtree(backup_dir)


def _use_state(backup: Any, folder: str, previous: str = "") -> None:
    """Let a backup read and write in ``folder``, and read from ``previous``, if given, when ``folder`` has no state."""
    for attribute in ("_weights_path", "_training_metadata_path"):
        name = os.path.basename(getattr(backup, attribute))
        setattr(backup, attribute, os.path.join(folder, name))
        if previous:
            setattr(backup, attribute.replace("_", "_prev_", 1), os.path.join(previous, name))


def _save_whole(backup: Any, save_model: Callable[[Any], None]) -> None:
    """Write a state to a temporary directory and rename it, then remove older states.

    With ``double_checkpoint`` the previous state is kept.
    """
    import tensorflow as tf

    files, before = tf.io.gfile, _states(backup.backup_dir)
    number = int(before[0].rpartition(BACKUP)[2]) + 1 if before else 0
    part = os.path.join(backup.backup_dir, _PART)
    if files.exists(part):
        files.rmtree(part)
    files.makedirs(part)
    _use_state(backup, part)
    save_model(backup)
    whole = os.path.join(backup.backup_dir, f"{BACKUP}{number}")
    files.rename(part, whole)
    kept = before[: int(getattr(backup, "double_checkpoint", False))]
    _use_state(backup, whole, *kept)
    for state in before[len(kept) :]:
        files.rmtree(state)


def _dir_of_this_worker(backup_dir: str) -> str:
    """Return this worker's own directory, since workers may die between one worker's save and the next one's.

    It has the worker's name, so that the worker finds it again when others have gone, even if it is the only one left.
    """
    import tensorflow as tf

    cluster, task = tf_config()
    alone = len(training_addresses(cluster)) < 2
    if not backup_dir or Role.PS.value in cluster or not task or not Role(task["type"]).computes:
        return backup_dir
    name = os.environ.get(NODE_VARIABLE) or f"{task['type']}:{task['index']}"
    own = os.path.join(backup_dir, name.replace(":", "-"))
    return backup_dir if alone and not tf.io.gfile.isdir(own) else own


def _start_from_latest(model: Any) -> None:
    """Copy the state of the replica with the latest restored epoch to all others, if they differ.

    Without this, a worker that died before its last save would wait forever for an epoch that the others do not run.
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
        _log.warning("the workers' backups end at epochs %d to %d; all continue after %d", earliest, latest, latest)
        model._initial_epoch = latest
