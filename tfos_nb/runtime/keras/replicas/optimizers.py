"""Keras' optimizers under synchronous strategies: add up the gradients first, then update each replica's own copy.

Keras clips, unscales, accumulates and tests the gradients of one replica, and adds up the results. So the norm for
clipping is not that of the global batch. Each worker decides for itself whether a gradient is finite
(``LossScaleOptimizer``), so only some workers may enter the all-reduce and wait forever. And Keras' conditional code
(``gradient_accumulation_steps``, ``ema_overwrite_frequency``) fails, since TensorFlow can combine replicas only outside
of conditions.

Here the replicas' gradients are added up first. After that all replicas compute the same update from the same numbers,
each on its own copies of the variables, and no replica waits for another. In a program's own ``train_step`` the
gradients are added up when a tape returns them. So the step may clip them before it calls an optimizer, or move the
weights along them and back. The same holds for an optimizer class of the program's that overrides ``apply`` or
``apply_gradients``: it is given the gradients of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.keras.replicas.reductions import is_of_rows, targets_of_all_rows
from tfos_nb.runtime.keras.replicas.replica import (
    Replica,
    is_synchronous,
    replica_of_step,
    replica_that_keeps_states,
    sum_over_replicas,
)
from tfos_nb.runtime.keras.replicas.sparse_gradients import sum_gradients

__all__ = ["is_applying", "patch_optimizers"]

_log = logging.getLogger("tfos_nb.keras")


class _Thread(threading.local):
    replica: int | None = None  # index, on this worker, of the replica whose copies of variables are updated


_thread = _Thread()


def is_applying() -> bool:
    """Return whether this thread is a replica whose optimizer updates its copies of the variables."""
    return _thread.replica is not None


def patch_optimizers() -> None:
    """Patch every optimizer of Keras to add up the replicas' gradients first."""
    import keras
    import tensorflow as tf

    loss_scale = keras.optimizers.LossScaleOptimizer
    owners = [c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c)]
    owners[0].apply = _added_up(owners[0].apply)
    if "apply" in vars(loss_scale):
        # Keras' TensorFlow code combines the replicas under a condition. Its common code gives the same result without.
        loss_scale.apply = _added_up(loss_scale.apply, getattr(loss_scale, "_common_apply", None))
    for kind in vars(keras.optimizers).values():  # optimizers that consist of others, each of which applies its part
        if isinstance(kind, type) and "apply" in vars(kind) and kind not in (owners[0], loss_scale):
            kind.apply = _added_up(kind.apply)  # type: ignore[attr-defined]
    _give_classes_whole_gradients(owners[0])
    tf.GradientTape.gradient = _of_all_rows(tf.GradientTape.gradient)
    tf.distribute.StrategyExtended.update = _update_own(tf.distribute.StrategyExtended.update)
    from tensorflow.python.distribute import merge_call_interim as interim  # it has no public name that can be replaced

    interim.strategy_supports_no_merge_call = _needs_no_merge(interim.strategy_supports_no_merge_call)


def _added_up(original: Callable[..., Any], within: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Wrap ``Optimizer.apply``: call ``within``, by default ``original``, with the gradients of the global batch."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        import tensorflow as tf

        grads = list(grads)
        if _thread.replica is not None or not grads or not is_synchronous(tf.distribute.get_strategy()):
            return original(self, grads, trainable_variables)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            _build(self, trainable_variables)
        context = tf.distribute.get_replica_context()
        if context is None:
            return _apply_alike(functools.partial(within or original, self, grads, trainable_variables))
        grads = _of_global_batch(grads)
        with _own_copies(context):
            return (within or original)(self, grads, trainable_variables)

    return apply


def _give_classes_whole_gradients(base: Any) -> None:
    """Patch the methods that the program's classes of optimizers override: those that exist, and later ones."""

    def init_subclass(kind: type[Any], /, **options: Any) -> None:
        super(base, kind).__init_subclass__(**options)
        _patch_overrides(kind)

    base.__init_subclass__ = classmethod(init_subclass)
    left = list(base.__subclasses__())
    while left:
        kind = left.pop()
        left.extend(kind.__subclasses__())
        if not kind.__module__.startswith("keras."):
            _patch_overrides(kind)


def _patch_overrides(kind: Any) -> None:
    if "apply" in vars(kind):
        kind.apply = _added_up(kind.apply)
    if "apply_gradients" in vars(kind):
        kind.apply_gradients = _pairs_added_up(kind.apply_gradients)


def _pairs_added_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Optimizer.apply_gradients``, which is given pairs of a gradient and a variable."""

    @functools.wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)

        def apply_pairs(optimizer: Any, grads: Any, variables: Any) -> Any:
            return original(optimizer, list(zip(grads, variables, strict=True)), *args, **kwargs)

        return _added_up(apply_pairs)(self, [grad for grad, _ in pairs], [variable for _, variable in pairs])

    return apply_gradients


def _apply_alike(apply: Callable[[], Any]) -> None:
    """Update all replicas' copies with the same gradients outside of a step, where Keras' own code fails."""
    import tensorflow as tf

    def on_replica() -> None:
        with _own_copies(tf.distribute.get_replica_context()):
            apply()

    tf.distribute.get_strategy().run(tf.autograph.experimental.do_not_convert(on_replica))


def _build(optimizer: Any, variables: list[Any]) -> None:
    import tensorflow as tf
    from keras.src import backend

    if not optimizer.built:
        # Outside of the step's graph, because TensorFlow would create variables under conditions there, and fail.
        with tf.init_scope(), backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def _of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GradientTape.gradient`` for gradients with respect to variables.

    If the program has computed sums over rows, the gradient is that of the sums over the rows of all replicas. In a
    program's own step it is the gradient of the global batch.
    """

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        replica = replica_of_step()
        if replica is None or replica.applying:
            return original(self, target, sources, output_gradients, *args, **kwargs)
        by = [hasattr(source, "assign") for source in tf.nest.flatten(sources)]
        if replica.by_rows and any(by):
            if all(by) and replica.is_in_its_graph:
                target, output_gradients = _sums_of_all_rows(replica, target, output_gradients)
            else:
                _warn_of_sums(target)
        gradients = original(self, target, sources, output_gradients, *args, **kwargs)
        if not replica.is_in_its_graph:
            replica.has_own_gradients |= any(by)
        if not replica.own_step or not replica.is_in_its_graph:
            return gradients
        flat = tf.nest.flatten(gradients)
        by_variables = [place for place, one in enumerate(flat) if by[place] and one is not None]
        for place, whole in zip(by_variables, replica.whole_gradients([flat[i] for i in by_variables]), strict=True):
            flat[place] = whole
        return tf.nest.pack_sequence_as(gradients, flat)

    return gradient


def _sums_of_all_rows(replica: Replica, target: Any, output_gradients: Any) -> tuple[Any, Any]:
    """Return the target and output gradients for a tape; sums over rows replace a target that is computed from them."""
    import tensorflow as tf

    targets = tf.nest.flatten(target)
    if not any(map(is_of_rows, targets)):
        return target, output_gradients
    upstream = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    return targets_of_all_rows(replica, targets, upstream)


def _warn_of_sums(target: Any) -> None:
    """Warn if a loss is computed from sums over rows: each replica uses only its own rows."""
    import tensorflow as tf

    if any(map(is_of_rows, tf.nest.flatten(target))):
        _log.warning(
            "a loss is made of sums over the rows of a batch, in a loop or a condition, or with a gradient by inputs "
            "and variables together: each worker uses only its own rows. Compute it outside of loops and conditions, "
            "and take the gradient by the variables only"
        )


def _of_global_batch(gradients: list[Any]) -> list[Any]:
    replica = replica_of_step()
    if replica is not None and not replica.is_in_its_graph and (replica.has_own_gradients or not replica.own_step):
        raise PlanError(
            "an optimizer is applied within a loop or a condition of a train_step, where TensorFlow cannot add up "
            "the gradients of several workers: move it out of there, or let Python run the loop (for step in range(3))"
        )
    if replica is not None and replica.has_whole_gradients:
        return replica.alike(gradients)
    if replica is not None:
        gradients = replica.gradients(gradients)
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if places:
        whole = sum_gradients(sum_over_replicas, [gradients[i] for i in places])
        for place, reduced in zip(places, whole, strict=True):
            gradients[place] = reduced
    return gradients


@contextlib.contextmanager
def _own_copies(context: Any) -> Iterator[None]:
    """Use this replica's own copies of variables within the block, without combining replicas."""
    from tensorflow.python.distribute import distribute_lib

    replica = replica_that_keeps_states()
    _thread.replica = context._replica_id
    if replica is not None:
        replica.applying = True
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(context.strategy))
    try:
        with distribute_lib.UpdateContext(_thread.replica):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()
        _thread.replica = None
        if replica is not None:
            replica.applying = False


def _update_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``StrategyExtended.update``, which updates the copies of all replicas of this worker."""

    @functools.wraps(original)
    def update(self: Any, var: Any, fn: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        if _thread.replica is None:
            return original(self, var, fn, args, kwargs, **options)
        copies = getattr(var, "values", None)
        own = copies[_thread.replica] if isinstance(copies, (tuple, list)) else var
        return fn(own, *args, **(kwargs or {}))

    return update


def _needs_no_merge(original: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap the check that Keras makes before it combines the replicas."""

    @functools.wraps(original)
    def strategy_supports_no_merge_call() -> bool:
        return _thread.replica is not None or original()

    return strategy_supports_no_merge_call
