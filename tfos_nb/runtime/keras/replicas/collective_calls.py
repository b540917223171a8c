"""Show in a node's stack which calls end only if all workers make them.

Waiting for a collective and waiting for data look the same from outside: the innermost Python frame is TensorFlow's.
So these calls go through :func:`call_with_all_workers`, whose frame the driver finds in the stack
(:mod:`tfos_nb.driver.hangs.explanation`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfos_nb.runtime.control.plan import tf_config, training_addresses

__all__ = ["call_in_group", "call_with_all_workers", "is_of_all_workers", "shown", "wait_for_all_workers"]


def call_with_all_workers(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function. The name of this one, in the stack, says that all workers must make this call."""
    return function(*args, **kwargs)


def call_in_group(size: int, function: Callable[..., Any], /, *args: Any) -> Any:
    """Call a function that ends once ``size`` workers call it."""
    return call_with_all_workers(function, *args) if _are_all_workers(size) else function(*args)


def is_of_all_workers(strategy: Any) -> bool:
    """Return whether each step of a strategy needs all nodes of the cluster that train, and these are several."""
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return _are_all_workers(getattr(strategy.extended, "_num_workers", 0))  # it may have a resolver of its own


def _are_all_workers(count: int) -> bool:
    return count > 1 and count == len(training_addresses(tf_config()[0]))


def wait_for_all_workers(strategy: Any) -> None:
    """Return once all workers of a strategy have made this call; at once if a single worker has it."""
    import tensorflow as tf

    def meet() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1))

    if is_of_all_workers(strategy):
        call_with_all_workers(strategy.run, tf.function(meet))


def shown(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a Keras model that computes: with a strategy of all workers, all of them must call it."""
    method = getattr(method, "_tfos_shown", method)

    @functools.wraps(method)
    def method_that_is_shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = getattr(self, "distribute_strategy", None)
        if strategy is None or not is_of_all_workers(strategy):
            return method(self, *args, **kwargs)
        return call_with_all_workers(method, self, *args, **kwargs)

    method_that_is_shown._tfos_shown = method  # type: ignore[attr-defined]
    return method_that_is_shown
