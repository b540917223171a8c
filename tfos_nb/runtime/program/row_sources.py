"""Where a node's rows can come from, as ``ctx`` has it: beside Spark's feed the validation rows, streams and files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.datasets.dataset import DatasetOptions
from tfos_nb.runtime.datasets.deferred_dataset import dataset_of
from tfos_nb.runtime.datasets.files import FileSource, share_of_files
from tfos_nb.runtime.datasets.formats import reading
from tfos_nb.runtime.datasets.record_files import WithValues
from tfos_nb.runtime.feed.row_queue import RowQueue, ValidationRows
from tfos_nb.runtime.feed.row_queues import DEFAULT_QUEUE
from tfos_nb.runtime.storage.paths import tf_path

if TYPE_CHECKING:
    import tensorflow as tf

    from tfos_nb.runtime.inference.data_feed import NodeRows

__all__ = ["Sources"]

logger = logging.getLogger(__name__)


class Sources:
    """The part of :class:`tfos_nb.runtime.program.context.NodeContext` that gives rows."""

    _passes: RowQueue
    _node_rows: NodeRows | None = None
    _failed: Callable[[FeedFailed], object]
    cluster_spec: dict[str, list[str]]
    job_name: str
    task_index: int
    num_workers: int

    def _queue(self, name: str) -> RowQueue:
        """Return the rows of a queue."""
        if self._node_rows is None:
            return self._passes
        return self._node_rows.queues.of(name)

    def _passes_begun(self) -> dict[str, int]:
        """Count the passes that were begun, by queue."""
        names = (DEFAULT_QUEUE,) if self._node_rows is None else self._node_rows.queues.names
        return {name: self._queue(name).begun for name in names}

    def _passes_missed(self) -> int:
        """Count the passes that were asked for when no more were to come, of all queues."""
        return sum(self._queue(name).missed for name in self._passes_begun())

    def validation(self, batch_size: int, *, queue: str = DEFAULT_QUEUE, **options: Any) -> tf.data.Dataset:
        """Return this node's share of the validation rows, for ``fit(…, validation_data=ctx.validation(64, …))``.

        The rows that the driver gave as ``cluster.train(df, validation=df2)``. They were fed once, before the training
        rows, and each iteration goes through all of them. Where ``train`` is called several times, they are those of
        the call whose rows are being trained on.

        Parameters
        ----------
        batch_size : int
            Rows in a batch: the global one under a synchronous strategy.
        queue : str, optional
            The queue that ``train`` was called for.
        **options
            As for :meth:`dataset`.

        Raises
        ------
        FeedFailed
            If no validation rows were given.

        Examples
        --------
        >>> model.fit(ctx.dataset(64, x="a", y="b"), validation_data=ctx.validation(64, x="a", y="b"))  # doctest: +SKIP
        """
        rows, asked = ValidationRows(self._queue(queue)), DatasetOptions(batch_size, **options)
        return dataset_of(rows, asked, self._failed, alone=self.num_workers == 1, waits=self._may_be_synchronous)

    def stop_feeding(self, queue: str = DEFAULT_QUEUE) -> None:
        """Say that this node wants no more rows of what ``cluster.train`` was called with, for a queue.

        Rows that wait are dropped. When all nodes have said so, what Spark still has to read is not read, and ``train``
        returns; ``main`` goes on. Keras' ``fit`` says it by itself when it was ended early (``model.stop_training``,
        ``EarlyStopping``). Under a synchronous strategy all workers have to say it after the same step.
        """
        logger.info("no more rows are wanted")
        self._queue(queue).enough_of_pass()

    def batches(self, after: int = -1, *, queue: str = DEFAULT_QUEUE) -> Iterator[int]:
        """Go through the micro-batches of a stream: gives the number of each one when it is there.

        Each iteration over ``ctx.dataset(…)`` within a turn is over that batch, so iterate over it once. By asking for
        the next number, ``main`` says that it is through with the batch: only then does Spark's checkpoint note it as
        done. So save before the turn ends, and give what was saved as ``after`` when it starts again: then each row
        is in the state once.

        Parameters
        ----------
        after : int, optional
            Leave out the batches to this one: the state has them.
        queue : str, optional
            The queue that the stream is fed to.

        Yields
        ------
        int
            The batch's number in the stream; of a DStream its time, in milliseconds.

        Raises
        ------
        FeedFailed
            If the rows come from no stream, or batches are missing between ``after`` and the first.

        Examples
        --------
        >>> rows = ctx.dataset(64, x="x", y="y")  # doctest: +SKIP
        >>> for batch in ctx.batches(after=done):  # doctest: +SKIP
        ...     model.fit(rows)
        ...     if ctx.should_stop:
        ...         break  # the batch was cut: Spark gives it again
        ...     save(model, batch)
        """
        while (number := self._queue(queue).next_batch(after)) is not None:
            yield number

    @property
    def batch_number(self) -> int | None:
        """The number of the micro-batch that is given out, or was last; None if the rows come from no stream."""
        return self._passes.batch

    def tf_path(self, path: str) -> str:
        """Return a path in full: a URL as it is, any other path on the cluster's default file system.

        That is Hadoop's ``fs.defaultFS`` where this host has its ``core-site.xml``, else the local one. TensorFlow
        itself reads local paths, ``file://`` and ``gs://`` (``hdfs://``, ``s3://`` and others only with plug-ins);
        :meth:`read` reads whatever fsspec knows.
        """
        return tf_path(path)

    def files(self, pattern: str | Sequence[str]) -> list[str]:
        """Return this node's share of the files that match, for a pipeline of one's own: whole files, in order.

        Parameters
        ----------
        pattern : str or list of str
            Paths, directories, patterns with ``*``, ``?``, ``[…]`` and ``**``; local, or URLs that fsspec knows.

        Returns
        -------
        list of str
            Every ``num_workers``-th file of the sorted ones. Each file is in one node's share.

        Raises
        ------
        FeedFailed
            If nothing matches.
        """
        rank, count = self._place_among_readers()
        return share_of_files(pattern, rank, count)

    def read(
        self,
        pattern: str | Sequence[str],
        batch_size: int,
        *,
        format: str | None = None,
        shuffle: int = 0,
        seed: int = 0,
        features: Mapping[str, Any] | None = None,
        types: Mapping[str, str] | None = None,
        image_size: tuple[int, int] | None = None,
        share: str = "rows",
        **options: Any,
    ) -> tf.data.Dataset:
        """Return this node's share of the rows in some files, which it reads by itself.

        The shares' numbers of rows differ by one at most, and no row is in two. Each iteration is one pass.

        Parameters
        ----------
        pattern : str or list of str
            As for :meth:`files`. All nodes must see the same files there.
        batch_size : int
            Rows in a batch: the global one under a synchronous strategy.
        format : {"tfrecord", "parquet", "csv", "images"}, optional
            By default what the files' names say.
        shuffle : int, optional
            Another order in each pass: files (of Parquet: row groups) change places over all nodes, and rows within so
            many. 0 leaves all as it is.
        seed : int, optional
            Of the shuffling; the same on all nodes. The same seed gives the same orders.
        features : mapping, optional
            TFRecord: as for ``tf.io.parse_example``; by default as in the first record. ``{}`` leaves records as bytes.
        types : mapping, optional
            CSV: Arrow's types by column, such as ``{"x": "float32"}``. By default as the first block of the first file
            that has rows.
        image_size : tuple of int, optional
            Images: height and width that all are made. Columns: ``"image"`` (uint8, three channels), ``"label"`` (the
            number of the file's directory, in the order of their names), ``"path"``.
        share : {"rows", "files"}, optional
            ``"files"`` gives each node whole files, and nobody counts rows: the shares are as even as the files.
        **options
            ``x``, ``y``, ``sample_weight``, ``class_weight``, ``columns``, ``fill``, ``drop_remainder``,
            ``prefetch``: as for :meth:`dataset`.

        Raises
        ------
        FeedFailed
            If nothing matches, a file is not what its format says, or not like the first one. It names the file.

        Examples
        --------
        >>> model.fit(ctx.read("hdfs:///digits/*.parquet", 64, x="pixels", y="label"), epochs=3)  # doctest: +SKIP
        """
        kind = reading(pattern, format, features=features, types=types, image_size=image_size)
        asked = DatasetOptions(batch_size, **options)
        source = FileSource(kind, self._place_among_readers(), shuffle=shuffle, seed=seed, share=share)
        source.wanted = None if kind.decode is not None else asked.wanted()
        decode = kind.decode
        if decode is not None and asked.x is not None:
            ragged = (asked.x,) if isinstance(asked.x, str) else tuple(asked.x)
            decode = WithValues(decode, ragged, self._failed)
        alone, waits = self.num_workers == 1, self._may_be_synchronous
        return dataset_of(source, asked, self._failed, decode, alone=alone, waits=waits)

    @property
    def _may_be_synchronous(self) -> bool:
        """Whether this node can be one of several workers of a ``MultiWorkerMirroredStrategy``."""
        return self.num_workers > 1 and "ps" not in self.cluster_spec and self.job_name in ("chief", "worker")

    def _place_among_readers(self) -> tuple[int, int]:
        """Return this node's number among those that train, and how many these are; any other node reads all."""
        chiefs = len(self.cluster_spec.get("chief", ()))
        leads = chiefs if self.num_workers > len(self.cluster_spec.get("worker", ())) else 0
        if self.job_name == "worker":
            return leads + self.task_index, self.num_workers
        return (0, self.num_workers) if self.job_name == "chief" and leads else (0, 1)
