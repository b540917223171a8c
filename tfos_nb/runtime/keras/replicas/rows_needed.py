"""Find out which rows the function of a loss or a metric needs: each row alone, or all rows of the global batch.

A function is traced with two numbers of rows. If each of its results depends on one row alone, a replica computes it
from its own rows. If it compares rows, or returns one number for a batch, it is called on the rows of all replicas.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tfos_nb.runtime.keras.replicas.comparisons import compares_rows, has_captured_rows
from tfos_nb.runtime.keras.replicas.replica import Replica, as_one_process, current

__all__ = ["RowsNeeded", "can_gather", "is_loss_of_keras", "is_of_keras", "rows_needed"]

_SIZE = 16  # elements of an argument's unknown dimensions, other than rows, while its function is traced
_ROWS = (61, 67)  # numbers of rows with which a function is traced
_log = logging.getLogger("tfos_nb.keras")


def is_loss_of_keras(loss: Any) -> bool:
    """Return whether a loss is Keras' own, and not the program's."""
    owner = next(c for c in type(loss).__mro__ if "call" in vars(c))
    fn = getattr(loss, "fn", None)
    return is_of_keras(owner) and (fn is None or is_of_keras(fn))


def is_of_keras(thing: Any) -> bool:
    """Return whether a class or a function is Keras' own, and not the program's."""
    return str(getattr(thing, "__module__", "")).startswith("keras.")


class RowsNeeded(enum.Enum):
    """Rows that the function of a loss or a metric must be called with, and its result."""

    OWN = "computes each number from one row"
    ROWS = "compares the rows of a batch"
    BATCH = "returns as many numbers for every batch"
    PAIRS = "compares the rows of a batch and returns other numbers than one per row"
    UNKNOWN = "could not be checked for whether it compares the rows of a batch"


def rows_needed(holder: Any, theirs: bool, function: Callable[..., Any], arguments: Any) -> RowsNeeded:
    """Return which rows a function of labels and outputs needs.

    The function is traced for each signature, and the answer is stored in ``holder``. A replica never decides by the
    values of its rows, so all replicas decide alike.
    """
    import keras
    import tensorflow as tf

    if _is_of_batch(holder, function, arguments):
        return RowsNeeded.BATCH
    if theirs:
        return RowsNeeded.OWN
    leaves = keras.tree.flatten(arguments)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.dtype != tf.string for leaf in leaves):
        return RowsNeeded.UNKNOWN
    known = vars(holder).setdefault("_tfos_needs", {})
    key = tuple((leaf.dtype.name, tuple(leaf.shape[1:])) for leaf in leaves)
    if key not in known:
        try:
            with as_one_process(), _without_effects():
                known[key] = _traced_needs(function, arguments)
        except Exception:  # noqa: BLE001 - it may need anything that is missing here; its own call reports a real error
            known[key] = RowsNeeded.UNKNOWN
    return RowsNeeded(known[key])


def _traced_needs(function: Callable[..., Any], arguments: Any) -> RowsNeeded:
    import keras

    given, made = _traced(function, arguments, _ROWS[0])
    _, of_more = _traced(function, arguments, _ROWS[1])
    if not compares_rows(keras.tree.flatten(given), made, of_more):
        return RowsNeeded.OWN
    if has_captured_rows(made.graph):
        return RowsNeeded.UNKNOWN
    by_row = made.shape.rank and (made.shape[0], of_more.shape[0]) == _ROWS
    return RowsNeeded.ROWS if by_row else RowsNeeded.PAIRS


def _traced(function: Callable[..., Any], arguments: Any, count: int) -> tuple[Any, Any]:
    """Return placeholders for ``count`` rows of the arguments, and the function's result for them."""
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph  # can use variables of the step, unlike tf.Graph

    def placeholder(leaf: Any) -> Any:
        sizes = [_SIZE if size is None else size for size in leaf.shape[1:]]
        return tf.compat.v1.placeholder(leaf.dtype, [count, *sizes])

    with FuncGraph("rows").as_default():
        given = keras.tree.map_structure(placeholder, arguments)
        return given, tf.convert_to_tensor(function(*given))


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """Trace without a change to variables or to the step within the block."""
    import tensorflow as tf
    from keras.src.backend.common.stateless_scope import StatelessScope

    before = current.keeper
    current.keeper = Replica(tf.ones([]), None)  # another one, so that functions are still traced into the graph
    try:
        with StatelessScope():
            yield
    finally:
        current.keeper = before


def can_gather(replica: Replica, holder: Any, needs: RowsNeeded) -> bool:
    """Return whether a function can be called on the rows of all replicas; if not, say so once in the log."""
    if needs == RowsNeeded.UNKNOWN:
        todo = "Write it as a function of dense tensors with any number of rows that uses no rows but its arguments"
    elif replica.compiled:
        todo = "compile(jit_compile=False) gives it the rows of all workers"
    elif not replica.is_in_its_graph:
        todo = "Call it outside of loops and conditions of TensorFlow to give it the rows of all workers"
    else:
        return True
    # One number may be right without the rows: of_all_rows computes it from the sums and means of all replicas.
    if needs != RowsNeeded.BATCH and "_tfos_warned" not in vars(holder):
        vars(holder)["_tfos_warned"] = True
        _log.warning(
            "%r %s, but each worker calls it on its own rows. Its value may differ from that of one process. %s",
            getattr(holder, "name", type(holder).__name__),
            needs.value,
            todo,
        )
    return False


def _is_of_batch(holder: Any, function: Callable[..., Any], arguments: Any) -> bool:
    """Return whether a function of labels and outputs returns as many numbers for every batch, such as one.

    The function is traced once for each signature, and the answer is stored in ``holder``.
    """
    import keras
    import tensorflow as tf

    leaves = keras.tree.flatten(arguments)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.dtype != tf.string for leaf in leaves):
        return False
    known = vars(holder).setdefault("_tfos_of_batch", {})
    key = tuple((leaf.dtype.name, leaf.shape.rank) for leaf in leaves)
    if key not in known:
        from keras.src import backend

        given = keras.tree.map_structure(
            lambda leaf: keras.KerasTensor((None, *leaf.shape[1:]), leaf.dtype.name), arguments
        )
        try:
            with as_one_process():
                shape = getattr(backend.compute_output_spec(function, *given), "shape", (None,))
            known[key] = shape == () or shape[0] is not None
        except Exception:  # noqa: BLE001 - it may fail without rows in any way; its own call reports a real error
            known[key] = False
    return bool(known[key])
