"""Measure how long this process waits in collectives: for the slowest worker, and for the network.

In synchronous training all workers make the same steps at the same time, so the slowest one is not seen by its steps.
It is seen by its waits: it comes last to each all-reduce, and all others wait for it. Two clocks in the step's graph
measure this, one when the worker's own numbers are ready and one when the sums are.

Only processes without a GPU are measured. On a GPU an operation counts as done when it was queued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["measure_waits", "waited"]


class _Total:
    """Seconds that this process has waited, in a variable that graphs can add to."""

    def __init__(self) -> None:
        self._variable: Any = None

    def add(self, seconds: Any) -> None:
        """Add a tensor, in the graph that is being made or now."""
        if self._variable is None:
            self._variable = _variable()
        self._variable.assign_add(seconds)

    def read(self) -> float | None:
        """Return the seconds so far; None if there was no collective."""
        return None if self._variable is None else float(self._variable.numpy())


_total = _Total()


def waited() -> float | None:
    """Return the seconds that this process has waited in collectives so far; None if there was none."""
    return _total.read()


def measure_waits() -> None:
    """Patch TensorFlow's all-reduce, before the first step is traced."""
    from tensorflow.python.ops import collective_ops

    collective_ops.all_reduce_v2 = _measured(collective_ops.all_reduce_v2)


def _measured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_reduce_v2``, which is given the worker's own tensor."""

    @functools.wraps(original)
    def all_reduce_v2(tensor: Any, *args: Any, **options: Any) -> Any:
        import tensorflow as tf

        if tf.config.list_logical_devices("GPU"):  # nor can XLA compile a clock
            return original(tensor, *args, **options)
        with tf.control_dependencies([tensor]):
            ready = tf.timestamp()
        reduced = original(tensor, *args, **options)
        with tf.control_dependencies([reduced]):
            done = tf.timestamp()
        _total.add(done - ready)
        return reduced

    return all_reduce_v2


def _variable() -> Any:
    """Make a variable of this process alone: within a strategy's scope ``tf.Variable`` would make one for all."""
    import tensorflow as tf
    from tensorflow.python.ops import resource_variable_ops

    with tf.init_scope(), tf.device("/CPU:0"):
        return resource_variable_ops.ResourceVariable(0.0, dtype=tf.float64, trainable=False)
