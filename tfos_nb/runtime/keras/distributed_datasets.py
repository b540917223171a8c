"""Let a synchronous strategy use the batches of a fed dataset without dividing them again.

TensorFlow's strategies divide each batch of a dataset into one part for each replica, on every worker separately. So a
partial batch of two workers becomes two steps of half its size, and a worker without batches joins with empty ones. A
dataset of fed rows knows the right sizes (:mod:`tfos_nb.runtime.datasets.batching`). So a strategy must not divide its
batches, nor those of a dataset that ``map``, ``prefetch`` and the like make from it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfos_nb.runtime.feed.passes import Cut, Division, Readers
from tfos_nb.runtime.keras.own_loops import expect_lacking_rows
from tfos_nb.runtime.keras.replicas.replica import is_synchronous

__all__ = ["cut_of", "divide_datasets", "divisible", "is_shared_out", "of_size", "tracked"]

_log = logging.getLogger("tfos_nb.keras")
_MARK = "_tfos_nb_cut"
_TRACKED = "_tfos_nb_tracked"
_ENDLESS = -1  # tf.data.INFINITE_CARDINALITY, without TensorFlow
# Those that give one batch for each batch that they take, in the same order.
_BATCH_BY_BATCH = ("_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset", "LaterDataset")
# TensorFlow's classes of datasets that change the batches, by name. A batch size after one of them is the program's
# own, so TensorFlow divides it.
_REBATCHING = ("batch", "window", "flatmap", "interleave", "groupby", "bucket", "parse", "sample", "choose")


def divisible(dataset: Any, cut: Cut) -> Any:
    """Mark a dataset with its ``cut``, by which strategies divide it; return the dataset."""
    setattr(dataset, _MARK, cut)
    return dataset


def tracked(dataset: Any, cut: Cut) -> Any:
    """Mark a dataset of the batches that ``cut`` makes, so that :func:`cut_of` finds it; return the dataset."""
    setattr(dataset, _TRACKED, cut)
    return dataset


def cut_of(dataset: Any, *, repeated: bool = False) -> Cut | None:
    """Return the cut of fed rows if a dataset's batches are the cut's, one for one and in order; else None.

    ``map`` and ``prefetch`` keep them so. ``filter``, ``shuffle``, ``cache``, ``take`` and others do not. With
    ``repeated``, the dataset must be one pass after another without end, by ``repeat()``; else a single one.
    """
    if repeated != (dataset.cardinality() == _ENDLESS if hasattr(dataset, "cardinality") else False):
        return None
    while (cut := getattr(dataset, _TRACKED, None)) is None:
        kinds = (*_BATCH_BY_BATCH, "_RepeatDataset") if repeated else _BATCH_BY_BATCH
        known, inputs = type(dataset).__name__ in kinds, _inputs_of(dataset)
        unordered = getattr(dataset, "_deterministic", None) in (False, "false")
        if not known or unordered or len(inputs) != 1 or dataset.options().deterministic is False:
            return None
        dataset = inputs[0]
    return cut if isinstance(cut, Cut) else None


def is_shared_out(dataset: Any) -> bool:
    """Return whether a dataset is made of rows that are divided among the workers."""
    return any(hasattr(one, _MARK) for one in _made_of(dataset))


def divide_datasets() -> None:
    """Patch TensorFlow's synchronous strategies to use the batches of fed rows as they are cut.

    Its iterators are patched to count as readers of the rows while they are alive.
    """
    import tensorflow as tf

    _count_iterators()
    owner = next(c for c in tf.distribute.Strategy.__mro__ if "experimental_distribute_dataset" in vars(c))
    if hasattr(owner.experimental_distribute_dataset, "__wrapped__"):
        return
    owner.experimental_distribute_dataset = _taken_as_cut(owner.experimental_distribute_dataset)
    owner.distribute_datasets_from_function = _cut_for_replicas(owner.distribute_datasets_from_function)


def _count_iterators() -> None:
    from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

    for kind in (iterator_ops.OwnedIterator, multi_device_iterator_ops.OwnedMultiDeviceIterator):
        if not hasattr(kind.__init__, "__wrapped__"):
            kind.__init__ = _counted(kind.__init__)


def _counted(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the ``__init__`` of an iterator. One that is made of components is the same once more, in a graph."""

    @functools.wraps(original)
    def __init__(self: Any, dataset: Any = None, *args: Any, **options: Any) -> None:  # noqa: N807
        for readers in _readers_of(dataset) if dataset is not None else ():
            readers.opened()
            weakref.finalize(self, readers.closed)
        original(self, dataset, *args, **options)

    return __init__


def _readers_of(dataset: Any) -> list[Readers]:
    """Return the readers of the fed rows that a dataset is made of, whatever it has made of their batches."""
    cuts = (getattr(one, _TRACKED, None) or getattr(one, _MARK, None) for one in _made_of(dataset, down_to=_TRACKED))
    return list({id(cut): cut.readers for cut in cuts if cut is not None}.values())


def _taken_as_cut(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Strategy.experimental_distribute_dataset``."""

    @functools.wraps(original)
    def experimental_distribute_dataset(self: Any, dataset: Any, options: Any = None) -> Any:
        cuts = _cuts_of(dataset) if is_synchronous(self) else []
        if not cuts:
            return original(self, _in_order(dataset), options)
        expect_lacking_rows(self)
        for cut in cuts:
            division = division_of(self, cut.batch)
            cut.divide(division)
            if cut.batch < division.workers:
                _log.warning(
                    "batch_size=%d is less than the number of workers, %d: it counts all workers' rows, at least "
                    "one each. "
                    "Give %d or more",
                    cut.batch,
                    division.workers,
                    division.workers,
                )
        if len(cuts) == 1 and cuts[0].whole and not cuts[0].batch % self.num_replicas_in_sync:
            dataset = dataset.map(functools.partial(of_size, cuts[0].batch // self.num_replicas_in_sync))
        return self.extended._distribute_datasets_from_function(lambda _: dataset, options)

    return experimental_distribute_dataset


def _cut_for_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Strategy.distribute_datasets_from_function``, whose function returns a dataset of batches per replica."""

    @functools.wraps(original)
    def distribute_datasets_from_function(self: Any, dataset_fn: Any, options: Any = None) -> Any:
        @functools.wraps(dataset_fn)
        def divided(context: Any) -> Any:
            dataset = dataset_fn(context)
            expect_lacking_rows(self)
            for cut in _cuts_of(dataset) if is_synchronous(self) else []:
                cut.divide(division_of(self, cut.batch * self.num_replicas_in_sync))
            return dataset

        return original(self, divided, options)

    return distribute_datasets_from_function


def _in_order(dataset: Any) -> Any:
    """Put the values of sparse tensors in order, as TensorFlow needs them to cut a batch.

    Keras makes sparse tensors from SciPy's matrices, whose values may be in any order.
    """
    import tensorflow as tf

    specs = tf.nest.flatten(dataset.element_spec) if isinstance(dataset, tf.data.Dataset) else []
    return dataset.map(_reordered) if any(isinstance(spec, tf.SparseTensorSpec) for spec in specs) else dataset


def _reordered(*batch: Any) -> Any:
    import tensorflow as tf

    def reordered(leaf: Any) -> Any:
        return tf.sparse.reorder(leaf) if isinstance(leaf, tf.SparseTensor) else leaf

    return tf.nest.map_structure(reordered, batch if len(batch) > 1 else batch[0])


def of_size(size: int, *batch: Any) -> Any:
    """Return the batch with its number of rows, ``size``, as a static shape."""
    import tensorflow as tf

    def sized(leaf: Any) -> Any:
        unknown = isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is None
        return tf.ensure_shape(leaf, (size, *leaf.shape[1:])) if unknown else leaf

    return tf.nest.map_structure(sized, batch if len(batch) > 1 else batch[0])


def division_of(strategy: Any, batch: int) -> Division:
    """Return how a strategy divides a global batch of ``batch`` rows."""
    replicas = len(strategy.extended.worker_devices)
    workers = strategy.num_replicas_in_sync // replicas
    return Division(batch, getattr(strategy.extended, "_id_in_cluster", 0) if workers > 1 else 0, workers, replicas)


def _cuts_of(dataset: Any) -> list[Cut]:
    """Return the cuts of the datasets that a dataset is made of; empty if it has changed some of their batches."""
    cuts: list[Cut] = []
    for one in _made_of(dataset):
        name = type(one).__name__.lower()
        if (cut := getattr(one, _MARK, None)) is not None:
            cuts.append(cut)
        elif not _inputs_of(one) or any(word in name for word in _REBATCHING):
            return []
    return cuts


def _made_of(dataset: Any, down_to: str = _MARK) -> Iterator[Any]:
    """Iterate over the datasets that a dataset is made of, down to those that cut their rows."""
    left = [dataset]
    while left:
        yield (one := left.pop())
        if not hasattr(one, down_to):
            left.extend(_inputs_of(one))


def _inputs_of(dataset: Any) -> list[Any]:
    return list(dataset._inputs()) if hasattr(dataset, "_inputs") else []
