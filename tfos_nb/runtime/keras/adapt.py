"""Let ``adapt`` of Keras' preprocessing layers use the rows of all workers.

Each worker's layer reads its own worker's rows. Before it computes a mean, a vocabulary or boundaries, the workers
exchange their statistics. So all workers get the numbers of one process on all rows. No row leaves its worker: only
moments, counts of tokens, and summaries of quantiles are exchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tfos_nb.runtime.keras.distributed_datasets import is_shared_out
from tfos_nb.runtime.keras.replicas.replica import is_synchronous, of_each_replica
from tfos_nb.runtime.keras.scope import strategies

__all__ = ["patch_adapt"]


class _Adapting:
    """State of a running ``adapt`` over rows that are divided among workers.

    Parameters
    ----------
    strategy : tf.distribute.Strategy
        The strategy whose workers have the rows.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.rows = 0  # number of rows that this worker has used

    def counted(self, *batch: Any) -> Any:
        """Count the rows of a batch, and return it."""
        import tensorflow as tf

        tf.py_function(self._count, [tf.shape(tf.nest.flatten(batch)[0])[0]], [])
        return batch if len(batch) > 1 else batch[0]

    def _count(self, rows: Any) -> None:
        self.rows += int(rows)

    def of_all_workers(self, own: Any) -> list[Any]:
        """Return each worker's tensor, in the workers' order. They may have different sizes, but one type."""
        import tensorflow as tf

        message = np.frombuffer(tf.io.serialize_tensor(own).numpy(), np.uint8)
        replicas, here = self.strategy.num_replicas_in_sync, len(self.strategy.extended.worker_devices)

        sent = self._of_each_replica([len(message)])
        longest = int(sent.max())
        told = self._of_each_replica(np.pad(message, (0, longest - len(message)))).astype(np.uint8)
        return [
            tf.io.parse_tensor(told[place, : int(sent[place, 0])].tobytes(), own.dtype)
            for place in range(0, replicas, here)
        ]

    def _of_each_replica(self, own: Any) -> Any:
        """Return the integers of all replicas as an array with one line for each replica."""
        import tensorflow as tf

        told = self.strategy.run(lambda: of_each_replica(tf.constant(own, tf.int32))[1])
        return self.strategy.experimental_local_results(told)[0].numpy()


_under_way: list[_Adapting] = []  # at most one: only main's thread calls adapt


def patch_adapt() -> None:
    """Patch ``Normalization``, ``Discretization``, ``TextVectorization`` and the lookups to adapt to all rows."""
    from keras import layers

    lookup = next(c for c in layers.StringLookup.__mro__ if "finalize_state" in vars(c))  # IntegerLookup's too
    merged: tuple[tuple[Any, Callable[[Any, _Adapting], None]], ...] = (
        (layers.Normalization, _merge_moments),
        (layers.Discretization, _merge_summaries),
        (lookup, _merge_counts),
    )
    for layer, merge in merged:
        layer.adapt = _to_all_rows(layer.adapt)
        layer.finalize_state = _after(merge, layer.finalize_state)
    layers.TextVectorization.adapt = _to_all_rows(layers.TextVectorization.adapt)


def _to_all_rows(adapt: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``adapt(self, data)``."""
    signature = inspect.signature(adapt)

    @functools.wraps(adapt)
    def adapt_to_all(self: Any, data: Any, *args: Any, **kwargs: Any) -> None:
        import tensorflow as tf

        strategy = next(filter(is_synchronous, strategies()), None)
        if strategy is None or _under_way or not is_shared_out(data):
            adapt(self, data, *args, **kwargs)
            return
        adapting = _Adapting(strategy)
        _under_way.append(adapting)
        try:
            if hasattr(self, "update_state"):
                _take_all(self, data, signature.bind(self, data, *args, **kwargs).arguments.get("steps"))
            else:
                adapt(self, data.map(tf.autograph.experimental.do_not_convert(adapting.counted)), *args, **kwargs)
        finally:
            _under_way.clear()

    return adapt_to_all


def _take_all(layer: Any, data: Any, steps: int | None) -> None:
    """Do what the layer's ``adapt`` does. The ``adapt`` of Keras 3.16 fails on a worker without rows."""
    layer.reset_state()
    for batch in data if steps is None else data.take(steps):
        layer.update_state(batch[0] if isinstance(batch, tuple) else batch)
    layer.finalize_state()


def _after(merge: Callable[[Any, _Adapting], None], finalize: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``finalize_state(self)``: first merge the workers' statistics, if rows are divided among them."""

    @functools.wraps(finalize)
    def finalize_state(self: Any) -> None:
        if _under_way:
            merge(self, _under_way[0])
        finalize(self)

    return finalize_state


def _merge_moments(layer: Any, adapting: _Adapting) -> None:
    """Compute the mean and the variance of all rows from those of each worker, by the law of total variance."""
    import tensorflow as tf

    found = tf.stack([tf.convert_to_tensor(layer.adapt_mean), tf.convert_to_tensor(layer.adapt_variance)])
    counts = np.array([int(one) for one in adapting.of_all_workers(tf.constant(adapting.rows))], np.float64)
    moments = np.array([one.numpy() for one in adapting.of_all_workers(tf.cast(found, tf.float64))])
    if not counts.sum():
        return
    means, variances = moments[:, 0], moments[:, 1]
    mean = np.average(means, axis=0, weights=counts)
    variance = np.average(variances + (means - mean) ** 2, axis=0, weights=counts)
    layer.adapt_mean.assign(mean)
    layer.adapt_variance.assign(variance)


def _merge_summaries(layer: Any, adapting: _Adapting) -> None:
    """Merge the workers' summaries of quantiles, as the layer merges those of its batches."""
    import tensorflow as tf
    from keras.src.layers.preprocessing.discretization import merge_summaries

    if layer.num_bins is None:
        return
    first, *others = (one.numpy() for one in adapting.of_all_workers(tf.constant(layer.summary, tf.float32)))
    layer.summary = functools.reduce(lambda merged, one: merge_summaries(one, merged, layer.epsilon), others, first)


def _merge_counts(layer: Any, adapting: _Adapting) -> None:
    """Add the other workers' counts of tokens, and of documents with a token, to this worker's."""
    import tensorflow as tf

    tables = [layer.token_counts]
    if layer.output_mode == "tf_idf":
        tables.append(layer.token_document_counts)
        layer.num_documents.assign(sum(adapting.of_all_workers(tf.convert_to_tensor(layer.num_documents))))
    for table in tables:
        tokens, counts = table.export()
        table.remove(tokens)
        told = zip(adapting.of_all_workers(tokens), adapting.of_all_workers(counts), strict=True)
        for found, number in told:
            table.insert(found, number + table.lookup(found))
