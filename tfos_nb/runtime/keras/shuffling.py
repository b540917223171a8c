"""Let all workers of a synchronous strategy shuffle a dataset of the program's own in the same order.

A strategy gives each worker its part of every batch. So all workers must have the same batches, in the same order.
Without a seed of the program's, each worker draws an order of its own, and rows are used twice or never. Here the
order comes from a seed that all workers derive from what they all know: the cluster's addresses, and the place in the
program. It is another one in each run. These orders are replaced:

- ``fit(x, y)`` with arrays, and with a ``PyDataset``: Keras shuffles them by default. So does ``tf_keras`` with arrays.
- ``Dataset.shuffle``, ``Dataset.random``, ``Dataset.list_files`` and ``Dataset.sample_from_datasets`` without a seed.

``tf.random.set_seed`` and ``keras.utils.set_random_seed`` switch this off: the program's seed is the same on all
workers. An order that the program draws itself, as in a generator, is its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfos_nb.runtime.control.plan import Role, tf_config, training_addresses
from tfos_nb.runtime.keras.replicas.replica import is_synchronous

__all__ = ["patch_datasets", "patch_iterators", "patch_legacy_arrays"]

_LIBRARIES = ("tensorflow.", "keras.", "tf_keras.", "tfos_nb.runtime.keras.", "contextlib", "functools")
_OURS = "tfos_nb."  # frames of the node, above the program
_ORDER = "_tfos_order"

_seeds_given: Counter[str] = Counter()
_lock = threading.Lock()


def _cluster() -> str:
    """Return the addresses of the workers that train together; empty if this process trains alone."""
    cluster, _ = tf_config()
    members = training_addresses(cluster)
    return json.dumps(members) if len(members) > 1 and Role.PS.value not in cluster else ""


def _agreed_seed(place: str) -> int | None:
    """Return a seed that all workers get for the same place in the program; None if none is needed.

    Each call for a place gives another one. The program's own global seed is left alone.
    """
    from tensorflow.python.eager import context

    cluster = _cluster()
    if not cluster or context.global_seed() is not None:
        return None
    key = f"{cluster} {place}"
    with _lock:
        number = _seeds_given[key]
        _seeds_given[key] += 1
    digest = hashlib.sha256(f"{key} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1 or 1


def _place() -> str:
    """Return the lines of the program that are being run, from the innermost to ``main``.

    The node's own frames above ``main`` are left out, since they may differ between workers.
    """
    lines: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_LIBRARIES):
            if module.startswith(_OURS):
                break
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


# --- datasets of the program ------------------------------------------------------------------------------------------


def patch_datasets() -> None:
    """Patch ``tf.data`` to use an agreed seed where the program gives none."""
    from tensorflow.python.data.util import random_seed

    if not hasattr(random_seed.get_seed, "__wrapped__"):
        random_seed.get_seed = _seeded(random_seed.get_seed)


def _seeded(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``get_seed`` of ``tf.data``."""

    @functools.wraps(original)
    def get_seed(seed: Any) -> Any:
        return original(_agreed_seed(_place()) if seed is None else seed)

    return get_seed


# --- arrays and PyDatasets --------------------------------------------------------------------------------------------


class _Order:
    """Order of the rows of arrays in each pass, and of the batches of a ``PyDataset`` in each epoch.

    Parameters
    ----------
    seed : int
        A seed that all workers have.
    """

    def __init__(self, seed: int) -> None:
        self.passes = 0  # iterators that were made
        self.epochs = 0
        self._seed = seed

    def of_rows(self, count: int) -> np.ndarray[Any, Any]:
        """Return the current pass's order of so many rows."""
        return self._chance(self.passes).permutation(int(count))

    def of_rows_in_batches(self, count: int, batch: int) -> np.ndarray[Any, Any]:
        """Return an order of so many rows in which each batch keeps its rows (``shuffle="batch"``)."""
        chance = self._chance(self.passes)
        parts = np.split(np.arange(int(count)), range(batch, int(count), batch))
        return np.concatenate([chance.permutation(part) for part in parts])

    def of_batches(self, count: int) -> np.ndarray[Any, Any]:
        """Return the current epoch's order of so many batches."""
        return self._chance(self.epochs).permutation(count)

    def of_next_pass(self, count: int) -> np.ndarray[Any, Any]:
        """Return the order of so many rows in the next pass, where nothing else counts the passes."""
        self.passes += 1
        return self.of_rows(count)

    def _chance(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, number))


class _Thread(threading.local):
    shuffled: Callable[[Any], Any] | None = None  # replaces tf.random.shuffle while Keras builds a dataset of arrays
    order: _Order | None = None  # of the fit that begins


_thread = _Thread()


@contextlib.contextmanager
def _shuffling(permutation: Callable[[int], np.ndarray[Any, Any]]) -> Iterator[None]:
    """Let ``tf.random.shuffle`` put the rows in the order of ``permutation``, in this thread."""
    import tensorflow as tf

    def shuffled(value: Any) -> Any:
        order = tf.numpy_function(permutation, [tf.shape(value, tf.int64)[0]], tf.int64)
        return tf.ensure_shape(tf.gather(value, order), value.shape)

    before, _thread.shuffled = _thread.shuffled, shuffled
    try:
        yield
    finally:
        _thread.shuffled = before


def _mend_shuffle() -> None:
    import tensorflow as tf

    for module in (tf.random, tf.compat.v2.random):
        if not hasattr(module.shuffle, "_tfos_nb"):
            module.shuffle = _in_agreed_order(module.shuffle)


def _in_agreed_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``tf.random.shuffle``."""
    import tensorflow as tf

    @functools.wraps(original)
    def shuffle(value: Any, seed: Any = None, name: Any = None) -> Any:
        if _thread.shuffled is None or seed is not None:
            return original(value, seed, name)
        return _thread.shuffled(value)

    converted: Any = tf.autograph.experimental.do_not_convert(shuffle)
    converted._tfos_nb = True
    return converted  # type: ignore[no-any-return]


def patch_iterators(iterator: Any) -> None:
    """Patch Keras' ``TFEpochIterator``, which shuffles arrays and the batches of a ``PyDataset``.

    It counts the passes. Keras also makes iterators that it does not use, and the orders must not depend on whether
    TensorFlow prepares a batch of them.
    """
    from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter

    _mend_shuffle()
    adapter: Any = array_data_adapter.ArrayDataAdapter
    adapter.get_tf_dataset = _of_arrays(adapter.get_tf_dataset)
    iterator.__init__ = _with_order(iterator.__init__)
    iterator.__iter__ = _next_epoch(iterator.__iter__)
    iterator._get_iterator = _next_pass(iterator._get_iterator)
    module: Any = py_dataset_adapter
    module.random = _Random()


def _with_order(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TFEpochIterator.__init__``."""

    @functools.wraps(original)
    def init(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("shuffle"):
            original(self, distribute_strategy, *args, **kwargs)
            return
        # All workers call fit equally often, so its number is enough.
        seed = _agreed_seed("fit") if is_synchronous(distribute_strategy) else None
        order = None if seed is None else _Order(seed)
        setattr(self, _ORDER, order)
        before, _thread.order = _thread.order, order
        try:
            original(self, distribute_strategy, *args, **kwargs)
        finally:
            _thread.order = before

    return init


def _of_arrays(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``ArrayDataAdapter.get_tf_dataset``."""

    @functools.wraps(original)
    def get_tf_dataset(self: Any) -> Any:
        order, shuffle = _thread.order, self._shuffle
        if not shuffle or order is None:
            return original(self)
        by_batch = functools.partial(order.of_rows_in_batches, batch=self._batch_size)
        # The order of shuffle="batch" is made at once. Otherwise Keras asks for that of each batch, some in advance.
        self._shuffle = True
        try:
            with _shuffling(by_batch if shuffle == "batch" else order.of_rows):
                return original(self)
        finally:
            self._shuffle = shuffle

    return get_tf_dataset


def _next_epoch(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``TFEpochIterator.__iter__``, which Keras calls at the start of each epoch."""

    @functools.wraps(original)
    def begin(self: Any) -> Any:
        if hasattr(self, _ORDER):
            _Random.order = order = getattr(self, _ORDER)
            if order is not None:
                order.epochs += 1
        return original(self)

    return begin


def _next_pass(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``TFEpochIterator._get_iterator``, which Keras calls for each iterator that it makes."""

    @functools.wraps(original)
    def get(self: Any) -> Any:
        if (order := getattr(self, _ORDER, None)) is not None:
            order.passes += 1
        return original(self)

    return get


class _Random:
    """Replacement of the module ``random`` in Keras' adapter of a ``PyDataset``, which shuffles the batches' numbers.

    It does so in threads, which do not say for which ``fit``. The epoch that began last is the one.
    """

    order: _Order | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)

    def shuffle(self, values: list[Any]) -> None:
        """Shuffle the list in place."""
        if self.order is None:
            random.shuffle(values)
        else:
            values[:] = [values[place] for place in self.order.of_batches(len(values))]


def patch_legacy_arrays() -> None:
    """Patch ``tf_keras``, which shuffles arrays in ``fit``."""
    from tf_keras.src.engine import data_adapter

    _mend_shuffle()
    adapter: Any = data_adapter.TensorLikeDataAdapter
    if not hasattr(adapter.__init__, "__wrapped__"):
        adapter.__init__ = _of_legacy_arrays(adapter.__init__)


def _of_legacy_arrays(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TensorLikeDataAdapter.__init__``."""
    import tensorflow as tf

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        shuffles = kwargs.get("shuffle") and isinstance(
            tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy
        )
        seed = _agreed_seed("fit") if shuffles else None
        if seed is None:
            original(self, *args, **kwargs)
            return
        with _shuffling(_Order(seed).of_next_pass):
            original(self, *args, **kwargs)

    return init
