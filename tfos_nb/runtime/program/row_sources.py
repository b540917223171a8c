"""Sources of a node's rows: Spark's feed, validation rows, a stream's micro-batches, and files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.datasets.dataset import DatasetOptions
from tfos_nb.runtime.datasets.deferred_dataset import dataset_of
from tfos_nb.runtime.datasets.files import FileSource, Reading, share_of_files
from tfos_nb.runtime.datasets.record_files import WithValues
from tfos_nb.runtime.feed.row_queue import ValidationRows
from tfos_nb.runtime.feed.row_queues import RowQueues
from tfos_nb.runtime.program.strategies import ClusterTask

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["RowSources"]

logger = logging.getLogger(__name__)


class RowSources:
    """Make the datasets of ``ctx``.

    Parameters
    ----------
    task : ClusterTask
        This node's place, which determines its share.
    queues : RowQueues
        The rows that Spark feeds.
    failed : callable
        Called with an error of the rows, which TensorFlow would raise as another type.
    """

    def __init__(self, task: ClusterTask, queues: RowQueues, failed: Callable[[FeedFailed], object]) -> None:
        self._task = task
        self._queues = queues
        self._failed = failed

    def fed(self, options: DatasetOptions, queue: str) -> tf.data.Dataset:
        """Return the rows that Spark feeds to a queue."""
        return self._dataset(self._queues.of(queue), options)

    def validation(self, options: DatasetOptions, queue: str) -> tf.data.Dataset:
        """Return the validation rows of a queue."""
        return self._dataset(ValidationRows(self._queues.of(queue)), options)

    def batches(self, after: int, queue: str) -> Iterator[int]:
        """Yield the number of each micro-batch of a stream after ``after``."""
        while (number := self._queues.of(queue).next_batch(after)) is not None:
            yield number

    @property
    def batch_number(self) -> int | None:
        """Number of the micro-batch that was yielded last; None if the rows do not come from a stream."""
        return self._queues.default.batch

    def stop_feeding(self, queue: str) -> None:
        """Tell the driver that this node wants no more rows of the current call of ``train``."""
        logger.info("no more rows are wanted")
        self._queues.of(queue).enough_of_pass()

    def files(self, pattern: str | Sequence[str]) -> list[str]:
        """Return this node's share of the files."""
        return share_of_files(pattern, *self._task.place_among_readers)

    def read(self, kind: Reading, options: DatasetOptions, *, shuffle: int, seed: int, share: str) -> tf.data.Dataset:
        """Return this node's share of the rows in files."""
        source = FileSource(kind, self._task.place_among_readers, shuffle=shuffle, seed=seed, share=share)
        source.wanted = None if kind.decode is not None else options.wanted()
        decode = kind.decode
        if decode is not None and options.x is not None:
            ragged = (options.x,) if isinstance(options.x, str) else tuple(options.x)
            decode = WithValues(decode, ragged, self._failed)
        return self._dataset(source, options, decode)

    def _dataset(self, rows: Any, options: DatasetOptions, *decode: Any) -> tf.data.Dataset:
        alone, waits = self._task.num_workers == 1, self._task.may_be_synchronous
        return dataset_of(rows, options, self._failed, *decode, alone=alone, waits=waits)

    def passes_begun(self) -> dict[str, int]:
        """Return the number of passes that were begun, by queue."""
        return {name: self._queues.of(name).begun for name in self._queues.names}

    def passes_missed(self) -> int:
        """Return the number of passes, of all queues, that were requested after the last one."""
        return sum(self._queues.of(name).missed for name in self._queues.names)
