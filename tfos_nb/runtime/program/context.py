"""``ctx``: what the user's ``main(args, ctx)`` receives.

:class:`NodeContext` documents all of it, and delegates each part to the class that has its state: rows to
:class:`~tfos_nb.runtime.program.row_sources.RowSources` and :class:`~tfos_nb.runtime.inference.data_feed.RowLists`,
strategies to :class:`~tfos_nb.runtime.program.tensorflow_cluster.TensorFlowCluster`, states to
:class:`~tfos_nb.runtime.recovery.checkpointing.Checkpoints`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed
from tfos_nb.redaction import without_password
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.runtime.control.reports import Reporter
from tfos_nb.runtime.datasets.dataset import DatasetOptions, Names
from tfos_nb.runtime.datasets.formats import reading
from tfos_nb.runtime.feed.messages import check_fed
from tfos_nb.runtime.feed.row_queues import DEFAULT_QUEUE, RowQueues
from tfos_nb.runtime.inference.data_feed import DataFeed, Request, RowLists
from tfos_nb.runtime.inference.serving import RequestExchange
from tfos_nb.runtime.keras.early_stop import watch_fit
from tfos_nb.runtime.program.checkpoint_watch import CheckpointWatch
from tfos_nb.runtime.program.row_sources import RowSources
from tfos_nb.runtime.program.strategies import ClusterTask
from tfos_nb.runtime.program.tensorflow_cluster import CoordinatorCalls, TensorFlowCluster
from tfos_nb.runtime.recovery.checkpointing import CheckpointCalls, Checkpoints, Resumed
from tfos_nb.runtime.recovery.keras_resume import save_whole_epochs, watch_restores
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.storage.checkpoint_directory import directory_of_run
from tfos_nb.runtime.storage.one_writer import WRITER
from tfos_nb.runtime.storage.paths import tf_path
from tfos_nb.runtime.storage.remote import Draft, writing
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads

if TYPE_CHECKING:
    import tensorflow as tf

    from tfos_nb.runtime.program.coordinator_steps import CoordinatedDataset

__all__ = ["ContextCalls", "ContextSettings", "NodeContext"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ContextSettings:
    """Cluster settings of a program's ``ctx``. :class:`NodeContext` documents the fields that it shows.

    Attributes
    ----------
    name : str
        The node's name in the driver. If other nodes of its role are absent, the index in ``task`` differs from it.
    task : ClusterTask
        Its place among the present nodes.
    fed : bool
        Whether Spark feeds it rows.
    input_mode : InputMode
        Whether the cluster is fed, or reads files.
    held_states : tuple of str
        The states from the middle of a pass that all nodes have saved.
    run : str
        Identifies this run among those that share ``model_dir``.
    first_generation : int
        The generation with which this cluster has begun: above 1 if it continues the training of an earlier one.
    """

    name: str
    task: ClusterTask
    cluster_name: str
    model_dir: str
    log_dir: str = ""
    fed: bool = False
    generation: int = 1
    restarts: int = 0
    held_states: tuple[str, ...] = ()
    run: str = ""
    input_mode: InputMode = InputMode.SPARK
    first_generation: int = 1


@dataclass(frozen=True)
class ContextCalls:
    """Callbacks from a program into its node's process.

    Attributes
    ----------
    failed : callable
        Called with an error of the rows, which TensorFlow would raise as another type.
    saving : SavingFlag
        Set while something is saved.
    saved : callable
        Called with the path or URL of a model that :meth:`NodeContext.save` has written.
    checkpoint : CheckpointCalls
        Callbacks about states.
    coordinator : CoordinatorCalls
        Callbacks of a program that serves or coordinates.
    """

    failed: Callable[[FeedFailed], object]
    saving: SavingFlag
    saved: Callable[[str], object]
    checkpoint: CheckpointCalls
    coordinator: CoordinatorCalls


class NodeContext:
    """This node's place in the cluster, its rows, and methods to report and save.

    Attributes
    ----------
    job_name : str
        The role: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
    task_index : int
        The index in that role.
    is_chief : bool
        Whether this node saves, and its result is the cluster's: the chief, or ``worker:0`` without a chief.
    num_workers : int
        Number of nodes that train: the workers, and the chief if it trains too.
    cluster_spec : dict of str to list of str
        The addresses of each role, in TensorFlow's format. ``TF_CONFIG`` is set from it.
    cluster_name : str
        The cluster's name.
    model_dir : str
        Where :meth:`save` writes.
    log_dir : str
        Where ``tf.summary`` and Keras' ``TensorBoard`` callback write; empty without TensorBoard. If the cluster's
        ``log_dir`` is a URL that TensorFlow cannot write to, such as ``hdfs://``, this is a local directory whose files
        are copied there.
    args : object
        The arguments of the program, as in ``main(args, ctx)``.
    generation : int
        How often the cluster's nodes have been started, from 1. If it is 2 or more, ``main`` was called again after a
        loss, or the cluster was launched with ``resume=``; the starts of the earlier cluster are then counted too.
    restarts : int
        How often the nodes may be started again, as set at the launch.
    """

    def __init__(
        self,
        settings: ContextSettings,
        *,
        queues: RowQueues,
        requests: RequestExchange,
        reporter: Reporter,
        stopping: threading.Event,
        calls: ContextCalls,
        args: Any = None,
    ) -> None:
        task = settings.task
        self.node = task.node
        self.job_name = task.node.role.value
        self.task_index = task.node.index
        self.cluster_spec = {role: list(addresses) for role, addresses in task.cluster_spec.items()}
        self.is_chief = task.is_chief
        self.num_workers = task.num_workers
        self.cluster_name = settings.cluster_name
        self.model_dir = settings.model_dir
        self.log_dir = settings.log_dir
        self.args = args
        self.gpus = tuple(task.gpus)
        self.generation = settings.generation
        self.restarts = settings.restarts
        self._settings = settings
        self._run = settings.run or "run"
        self._reporter = reporter
        self._stopping = stopping
        self._rows = queues.default
        self._saving = calls.saving
        self._saved = calls.saved
        self._uploads = Uploads(self._saving)
        self._sources = RowSources(task, queues, calls.failed)
        self._row_lists = RowLists(queues, requests)
        self._tensorflow = TensorFlowCluster(task, self._rows, stopping, calls.coordinator)
        self._checkpoints = Checkpoints(
            self._checkpoint_dir,
            self._rows,
            is_chief=self.is_chief,
            workers=self.num_workers,
            generation=settings.generation,
            restarts=settings.restarts,
            held_states=settings.held_states,
            saving=self._saving,
            uploads=self._uploads,
            calls=calls.checkpoint,
            stored_rows=lambda: self.stored_rows,
        )
        watch_fit(self._sources.passes_begun, self.stop_feeding, self._sources.passes_missed)
        if settings.restarts and settings.fed:
            save_whole_epochs()
        if settings.generation > 1:
            watch_restores(self._rows.resume)

    @property
    def executor_id(self) -> int:
        """The node's number among all: parameter servers first, then chief, evaluator and workers."""
        return self._tensorflow.task.number

    worker_num = executor_id

    @property
    def queue_names(self) -> tuple[str, ...]:
        """The names of the queues that Spark feeds, as set at the launch."""
        return self._row_lists.queues.names

    @property
    def has_read(self) -> bool:
        """Whether a pass over rows from Spark was begun here."""
        return any(self._sources.passes_begun().values())

    # --- rows ---

    def dataset(
        self,
        batch_size: int,
        *,
        x: Names = None,
        y: Names = None,
        sample_weight: str | None = None,
        columns: Sequence[str] | None = None,
        fill: Mapping[str, Any] | None = None,
        shuffle: int = 0,
        seed: int | None = None,
        drop_remainder: bool = False,
        prefetch: int = 2,
        class_weight: Mapping[Any, float] | None = None,
        sparse: Sequence[str] = (),
        queue: str = DEFAULT_QUEUE,
    ) -> tf.data.Dataset:
        """Return this node's share of the rows that Spark feeds.

        Each iteration over it is one pass over the share, so ``fit(ctx.dataset(…), epochs=E)`` makes E passes; the
        driver delivers them by ``train(df, epochs=E)``. The last batch of a pass may be smaller. Shares may be uneven:
        under a synchronous strategy a node at the end of its share waits for the others, and no row is left out.

        Parameters
        ----------
        batch_size : int
            Rows in a batch, as in Keras: under a synchronous strategy the global batch, of which each of R replicas
            gets ``batch_size / R`` rows per step.
        x, y : str or list of str, optional
            Columns for Keras' ``fit``: elements are then ``(x, y)``. A list gives a dictionary of tensors. Without
            them, elements are ``{column: tensor}``.
        sample_weight : str, optional
            A column of weights; elements are then ``(x, y, sample_weight)``.
        columns : list of str, optional
            Only these columns, in dictionary elements.
        fill : mapping, optional
            Replacement for a null, by column. Without it a null is an error.
        shuffle : int, optional
            Shuffle within a buffer of this many rows.
        seed : int, optional
            Seed of the shuffling.
        drop_remainder : bool, optional
            Leave out a smaller last batch.
        prefetch : int, optional
            Number of batches to prepare ahead.
        class_weight : mapping, optional
            Weights by class, for the classes in the column ``y``: numbers, text or one-hot. Elements are then ``(x, y,
            weight)``, with ``sample_weight`` multiplied by it. A class that is not named has the weight 1.
        sparse : list of str, optional
            Columns of Spark ML's vectors that become a ``tf.SparseTensor``; other columns of vectors become dense.
        queue : str, optional
            The queue from which the rows come, one of the cluster's ``queues``.

        Returns
        -------
        tf.data.Dataset
            Tensors of shape ``(rows, …)``: a column of numbers gives ``(rows,)``, lists of n give ``(rows, n)``.

        Raises
        ------
        FeedFailed
            If this node gets no rows from Spark, or a column does not exist or cannot become a tensor.

        Examples
        --------
        >>> model.fit(ctx.dataset(128, x="pixels", y="label"), epochs=3)  # doctest: +SKIP
        """
        self._check_fed("ctx.dataset")
        options = DatasetOptions(
            batch_size,
            x,
            y,
            sample_weight,
            columns,
            {} if fill is None else fill,
            shuffle,
            seed,
            drop_remainder,
            prefetch,
            class_weight,
            sparse,
        )
        return self._sources.fed(options, queue)

    def validation(self, batch_size: int, *, queue: str = DEFAULT_QUEUE, **options: Any) -> tf.data.Dataset:
        """Return this node's share of the validation rows, for ``fit(…, validation_data=ctx.validation(64, …))``.

        They are the rows of ``cluster.train(df, validation=df2)``. They are fed once, before the training rows, and
        each iteration goes through all of them. If ``train`` is called several times, they are those of the call whose
        training rows are currently used.

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
            If no validation rows were given, or this node gets no rows from Spark.

        Examples
        --------
        >>> model.fit(ctx.dataset(64, x="a", y="b"), validation_data=ctx.validation(64, x="a", y="b"))  # doctest: +SKIP
        """
        self._check_fed("ctx.validation")
        return self._sources.validation(DatasetOptions(batch_size, **options), queue)

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
        """Return this node's share of the rows in some files, which the node reads itself.

        The sizes of the shares differ by at most one row, and each row is in one share. Each iteration is one pass.

        Parameters
        ----------
        pattern : str or list of str
            As for :meth:`files`. All nodes must see the same files there.
        batch_size : int
            Rows in a batch: the global one under a synchronous strategy.
        format : {"tfrecord", "parquet", "csv", "images"}, optional
            By default from the files' names.
        shuffle : int, optional
            Use another order in each pass: files (for Parquet: row groups) are shuffled over all nodes, and rows within
            a buffer of this many rows. 0 keeps the order.
        seed : int, optional
            Seed of the shuffling; it must be the same on all nodes. The same seed gives the same orders.
        features : mapping, optional
            TFRecord: as for ``tf.io.parse_example``; by default as in the first record. ``{}`` leaves records as bytes.
        types : mapping, optional
            CSV: Arrow's types by column, such as ``{"x": "float32"}``. By default the types of the first block of the
            first file with rows.
        image_size : tuple of int, optional
            Images: the height and width to which all are resized. Columns: ``"image"`` (uint8, three channels),
            ``"label"`` (the index of the file's directory, in the order of their names), ``"path"``.
        share : {"rows", "files"}, optional
            ``"files"`` gives each node whole files, and no rows are counted: the shares are as even as the files.
        **options
            ``x``, ``y``, ``sample_weight``, ``class_weight``, ``columns``, ``fill``, ``drop_remainder``,
            ``prefetch``: as for :meth:`dataset`.

        Raises
        ------
        FeedFailed
            If no file matches, a file does not have the format, or it differs from the first one. The message names the
            file.

        Examples
        --------
        >>> model.fit(ctx.read("hdfs:///digits/*.parquet", 64, x="pixels", y="label"), epochs=3)  # doctest: +SKIP
        """
        kind = reading(pattern, format, features=features, types=types, image_size=image_size)
        asked = DatasetOptions(batch_size, **options)
        return self._sources.read(kind, asked, shuffle=shuffle, seed=seed, share=share)

    def files(self, pattern: str | Sequence[str]) -> list[str]:
        """Return this node's share of the files that match, for a pipeline of your own: whole files, in order.

        Parameters
        ----------
        pattern : str or list of str
            Paths, directories, patterns with ``*``, ``?``, ``[…]`` and ``**``; local, or URLs that fsspec knows.

        Returns
        -------
        list of str
            Every ``num_workers``-th of the sorted files. Each file is in one node's share.

        Raises
        ------
        FeedFailed
            If no file matches.
        """
        return self._sources.files(pattern)

    def tf_path(self, path: str) -> str:
        """Return a full path: a URL unchanged, any other path on the cluster's default file system.

        The default file system is Hadoop's ``fs.defaultFS`` if this host has a ``core-site.xml``, else the local one.
        TensorFlow itself reads local paths, ``file://`` and ``gs://`` (``hdfs://``, ``s3://`` and others only with
        plug-ins). :meth:`read` reads all that fsspec supports.
        """
        return tf_path(path)

    def stop_feeding(self, queue: str = DEFAULT_QUEUE) -> None:
        """Tell the driver that this node wants no more rows of the current call of ``cluster.train``, for a queue.

        Waiting rows are dropped. When all nodes have called this, Spark does not read the remaining rows, and ``train``
        returns; ``main`` continues. Keras' ``fit`` calls it automatically when it is ended early
        (``model.stop_training``, ``EarlyStopping``). Under a synchronous strategy all workers must call it after the
        same step.
        """
        self._sources.stop_feeding(queue)

    def batches(self, after: int = -1, *, queue: str = DEFAULT_QUEUE) -> Iterator[int]:
        """Iterate over the micro-batches of a stream: yield the number of each batch when it has arrived.

        Iterating over ``ctx.dataset(…)`` inside the loop reads the rows of that batch, so do it once. When ``main``
        asks for the next number, the batch is finished, and Spark's checkpoint records it as done. So save the state
        together with the number before the loop's next iteration, and pass that number as ``after`` when the program
        starts again. Then the state includes each row once.

        Parameters
        ----------
        after : int, optional
            Skip the batches up to this one, since the state includes them.
        queue : str, optional
            The queue that the stream is fed to.

        Yields
        ------
        int
            The batch's number in the stream; for a DStream its time in milliseconds.

        Raises
        ------
        FeedFailed
            If the rows do not come from a stream, batches are missing between ``after`` and the first, or this node
            gets no rows from Spark.

        Examples
        --------
        >>> rows = ctx.dataset(64, x="x", y="y")  # doctest: +SKIP
        >>> for batch in ctx.batches(after=done):  # doctest: +SKIP
        ...     model.fit(rows)
        ...     if ctx.should_stop:
        ...         break  # the batch was cut: Spark gives it again
        ...     save(model, batch)
        """
        self._check_fed("ctx.batches")
        return self._sources.batches(after, queue)

    @property
    def batch_number(self) -> int | None:
        """The number of the micro-batch that was yielded last; None if the rows do not come from a stream."""
        return self._sources.batch_number

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = DEFAULT_QUEUE,
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
        *,
        across_partitions: bool = False,
        arrays: bool = False,
    ) -> DataFeed:
        """Return this node's rows as lists.

        A second call continues with the same rows at the position of the first one. For tensors, :meth:`dataset` and
        :meth:`requests` are much faster.

        Parameters
        ----------
        train_mode : bool
            True: the rows of ``cluster.train``, all passes one after the other. False: those of ``cluster.inference``.
        qname_in : str
            The queue from which the rows come.
        qname_out : str
            Not used, since results are returned to the call that sent their rows. Accepted for older programs.
        input_mapping : dict of str to str, optional
            The tensor of each column: batches are then ``{tensor: list}``. Columns are found by name. If rows have no
            names, they are found by position, in the order of the sorted names.
        across_partitions : bool
            In inference, allow rows of several partitions in a batch. A batch then waits for more rows until each
            partition that has begun has ended.
        arrays : bool
            Return a list of numbers in a row as a NumPy array, which is cheaper.

        Raises
        ------
        FeedFailed
            If the queue does not exist, or this node gets no rows.

        Examples
        --------
        >>> feed = ctx.get_data_feed(train_mode=False)  # doctest: +SKIP
        >>> while not feed.should_stop():  # doctest: +SKIP
        ...     rows = feed.next_batch(256)
        ...     feed.batch_results([model(row) for row in rows])
        """
        self._check_fed("ctx.get_data_feed")
        return self._row_lists.data_feed(
            train_mode, qname_in, qname_out, input_mapping, across=across_partitions, arrays=arrays
        )

    def requests(
        self,
        batch_size: int = 1024,
        *,
        columns: Sequence[str] | None = None,
        fill: Mapping[str, Any] | None = None,
        qname: str = DEFAULT_QUEUE,
        across_partitions: bool = False,
    ) -> Iterator[Request]:
        """Iterate over the rows of ``cluster.inference`` in batches of arrays, each of which needs a reply.

        The iteration ends when the driver has said that no more rows come.

        Parameters
        ----------
        batch_size : int
            Maximum number of rows in a batch. The last batch of a partition may have fewer.
        columns : list of str, optional
            Only these columns.
        fill : mapping, optional
            Replacement for a null, by column.
        qname : str
            The queue from which the rows come.
        across_partitions : bool
            As in :meth:`get_data_feed`.

        Raises
        ------
        FeedFailed
            If a batch was not replied to before the next, or a column does not exist or cannot become a tensor.

        Examples
        --------
        >>> for batch in ctx.requests(512):  # doctest: +SKIP
        ...     batch.reply({"prediction": model(batch["pixels"])})
        """
        self._check_fed("ctx.requests")
        return self._row_lists.requests(batch_size, qname, across_partitions, columns, fill)

    def _check_fed(self, call: str) -> None:
        check_fed(call, self._settings.name, self._settings.fed, self._settings.input_mode)

    # --- TensorFlow's own cluster ---

    def strategy(self, kind: str = "auto", **options: Any) -> Any:
        """Return the ``tf.distribute.Strategy`` of a kind, configured for this cluster.

        Parameters
        ----------
        kind : str, optional
            ``"sync"``: MultiWorkerMirroredStrategy over all workers. ``"async"``: ParameterServerStrategy, on the
            chief; each call returns the same one. ``"mirrored"``: MirroredStrategy over this node's own devices.
            ``"one"``: one device. ``"default"``: the current strategy. ``"auto"`` (the default): ``"async"`` in a
            cluster with parameter servers, ``"sync"`` in any other. On an evaluator ``"sync"`` means ``"one"``.
        **options
            For sync: ``communication``, ``"auto"`` (NCCL if all workers have GPUs), ``"nccl"`` or ``"ring"``;
            ``timeout``, the seconds that a step may wait for its peers; ``protocol``. For async:
            ``variable_partitioner``; ``protocol``. For mirrored: ``devices``, names or a number.

        Raises
        ------
        PlanError
            If the kind is not known, or does not fit the cluster's roles; TensorFlow would wait forever.

        Examples
        --------
        >>> with ctx.strategy().scope():  # doctest: +SKIP
        ...     model = build()
        """
        return self._tensorflow.strategy(kind, options)

    def coordinator(self, **options: Any) -> Any:
        """Return the chief's ``tf.distribute.coordinator.ClusterCoordinator``; ``.strategy`` is its strategy.

        The options are those of ``strategy("async")``. The workers and the parameter servers must call :meth:`serve`.

        Raises
        ------
        PlanError
            On a node that is not the chief, or in a cluster without parameter servers.

        Examples
        --------
        >>> if not ctx.is_chief:  # doctest: +SKIP
        ...     return ctx.serve()
        >>> coordinator = ctx.coordinator()  # doctest: +SKIP
        >>> with coordinator.strategy.scope():  # doctest: +SKIP
        ...     model = build()
        """
        return self._tensorflow.coordinator(options)

    def coordinator_dataset(
        self,
        batch_size: int | Callable[[], Any],
        *,
        repeat: bool = False,
        **options: Any,
    ) -> CoordinatedDataset:
        """Return the workers' rows for the coordinator: each worker reads the rows that Spark has fed to it.

        Parameters
        ----------
        batch_size : int or callable
            Rows in a batch. Or a function that returns a ``tf.data.Dataset``, for data from elsewhere.
        repeat : bool, optional
            Whether a worker repeats its rows endlessly. Needed for tf_keras' ``fit``, which counts steps and gives each
            step to any free worker.
        **options
            ``x``, ``y``, ``shuffle``, ``fill`` …, as for :meth:`dataset`.

        Returns
        -------
        CoordinatedDataset
            ``rows.steps(train_step)`` is one pass. Pass ``iter(rows)`` to ``coordinator.schedule``, and
            ``DatasetCreator(rows)`` to tf_keras.

        Raises
        ------
        FeedFailed
            If no rows will come, or a column does not exist or cannot become a tensor.
        PlanError
            On a node that is not the chief.

        Examples
        --------
        >>> rows = ctx.coordinator_dataset(64, x="pixels", y="label")  # doctest: +SKIP
        >>> for epoch in range(3):  # doctest: +SKIP
        ...     losses = [float(loss) for loss in rows.steps(train_step)]
        """
        if not callable(batch_size):  # the coordinator itself is not fed, but its workers must be
            mode = self._settings.input_mode
            check_fed("ctx.coordinator_dataset", self._settings.name, mode is InputMode.SPARK, mode)
        return self._tensorflow.coordinator_dataset(batch_size, repeat, options)

    def serve(self, protocol: str = "") -> None:
        """Run TensorFlow's server for the other nodes, and do not return.

        Parameter servers call it, and so do the workers of a ``ParameterServerStrategy``, to which the chief gives
        steps. The chief uses the workers' rows from Spark with :meth:`coordinator_dataset`. The cluster is done when
        the chief has returned, and every other node has returned or serves.

        Examples
        --------
        >>> if not ctx.is_chief:  # doctest: +SKIP
        ...     ctx.serve()
        """
        self._tensorflow.serve(protocol)

    def server(self, protocol: str = "", *, config: Any = None) -> Any:
        """Start TensorFlow's server on this node's address and return it, for graphs and sessions of TensorFlow 1.

        Parameters
        ----------
        protocol : str, optional
            The server's protocol. Default: the protocol that was set at the launch.
        config : tf.compat.v1.ConfigProto, optional
            The server's configuration.

        Returns
        -------
        tf.distribute.Server
            The server. Pass ``server.target`` to a session.
        """
        return self._tensorflow.task.server(protocol, config)

    def monitored_session(self, server: Any, **options: Any) -> Any:
        """Return a ``MonitoredSession`` of TensorFlow 1: see :mod:`tfos_nb.runtime.program.between_graph`."""
        from tfos_nb.runtime.program.between_graph import monitored_session

        return monitored_session(server, is_chief=self.is_chief, **options)

    def connect(self, protocol: str = "") -> list[str]:
        """Make the devices of the serving nodes (:meth:`serve`) usable by name here, for a model that spans nodes.

        Returns
        -------
        list of str
            The names of all devices, such as ``"/job:worker/replica:0/task:1/device:CPU:0"``.

        Examples
        --------
        >>> ctx.connect()  # doctest: +SKIP
        >>> with tf.device("/job:worker/task:1"):  # doctest: +SKIP
        ...     weights = tf.Variable(tf.random.normal((256, 10)))
        """
        return self._tensorflow.connect(protocol)

    def mesh(self, device_type: str | None = None, /, **dimensions: int) -> Any:
        """Return a DTensor mesh over the devices of all nodes that train. Each must call it with the same arguments.

        Parameters
        ----------
        device_type : str, optional
            ``"GPU"`` or ``"CPU"``. Default: ``"GPU"`` if the nodes have GPUs.
        **dimensions
            The mesh's dimensions and their sizes. A node's CPU is divided into as many devices as needed.

        Returns
        -------
        tf.experimental.dtensor.Mesh
            The mesh.

        Examples
        --------
        >>> mesh = ctx.mesh(batch=ctx.num_workers)  # doctest: +SKIP
        """
        return self._tensorflow.mesh(device_type, dimensions)

    def release_port(self) -> str:
        """Return this node's address, ``host:port``, on which a server of this process may now listen.

        TensorFlow's and gRPC's servers can listen on it while the node's supervisor still reserves it
        (``SO_REUSEPORT``). So it need not be released first, and no other process can take it. A server that does not
        set that option needs another port.
        """
        return self._tensorflow.task.address

    # --- states and files ---

    @property
    def checkpoint_dir(self) -> str:
        """Directory where :meth:`checkpoint` writes; only this cluster uses it. ``BackupAndRestore`` can use it too."""
        return self._checkpoint_dir()

    @functools.cached_property
    def stored_rows(self) -> StoredRows:
        """What knows which rows the states in :attr:`checkpoint_dir` include; for the node's process."""
        return StoredRows(self._checkpoint_dir(), self._settings.first_generation)

    def _checkpoint_dir(self) -> str:
        return directory_of_run(self.model_dir, self._run)

    def checkpoint(
        self,
        model: Any = None,
        *,
        epoch: int,
        step: int | None = None,
        rows: int | None = None,
        in_memory: bool = False,
        max_to_keep: int = 3,
        **objects: Any,
    ) -> str:
        """Save a state that includes ``epoch`` epochs of the rows; after a loss, training continues from it.

        Every node must call it at the same point of its program, because values that a synchronous strategy distributes
        over the nodes are gathered. The chief writes. If TensorFlow cannot write to :attr:`model_dir` itself, the state
        is uploaded in the background. The next call, or the end of ``main``, waits for the upload and raises its error.

        Parameters
        ----------
        model : keras.Model, optional
            The model, with its optimizer if it is compiled.
        epoch : int
            Number of passes over the rows that the state includes, counted from the first call of ``train``.
        step : int, optional
            Number of steps of the next pass that the nodes have done, each with one batch of :meth:`dataset` on each
            replica. After a loss the iteration has the rows that were in no step.
        rows : int, optional
            The same as a number of rows, that this node has used in this iteration over :meth:`dataset`: for steps that
            do not have one batch each.
        in_memory : bool, optional
            Keep the state in the memory of all nodes instead, as that of Keras' ``fit`` is: it outlives a node, not
            all of them at once. Call it after each step, with ``step``: it saves only after some, so that it costs
            at most 1 % of the time. The objects must consist of variables that :meth:`resume` has seen; of
            ``ctx.strategy("sync")`` if there are several workers. ``max_to_keep`` has no effect then.
        max_to_keep : int, optional
            Number of checkpoints to keep. The newest one of a whole epoch is always kept, and after a loss also the one
            from which the nodes continue.
        **objects
            Other objects of the state, by name: a ``tf.Variable``, an optimizer, or any object that
            ``tf.train.Checkpoint`` accepts.

        Returns
        -------
        str
            The checkpoint's directory; empty with ``in_memory``.

        Raises
        ------
        ValueError
            If ``epoch``, ``step`` or ``rows`` is wrong, there is nothing to save, or ``in_memory`` cannot keep it.
        TfosError
            If the directory cannot be written.

        Examples
        --------
        >>> for epoch in range(ctx.resume(model).epoch, 5):  # doctest: +SKIP
        ...     for batch in ctx.dataset(64):
        ...         step(batch)
        ...     ctx.checkpoint(model, epoch=epoch + 1)

        If an epoch takes hours:

        >>> for epoch in range(ctx.resume(model).epoch, 5):  # doctest: +SKIP
        ...     for number, (x, y) in enumerate(ctx.dataset(64, x="x", y="y"), 1):
        ...         train_step(x, y)
        ...         ctx.checkpoint(model, epoch=epoch, step=number, in_memory=True)
        ...         if number % 10_000 == 0:
        ...             ctx.checkpoint(model, epoch=epoch, step=number)
        ...     ctx.checkpoint(model, epoch=epoch + 1)
        """
        if in_memory:
            self._checkpoints.keep(model, objects, epoch=epoch, step=step, rows=rows)
            return ""
        return self._checkpoints.save(model, objects, epoch=epoch, step=step, rows=rows, max_to_keep=max_to_keep)

    def resume(self, model: Any = None, **objects: Any) -> Resumed:
        """Restore the newest state that this cluster saved before its last loss, if one exists.

        Call it before the first row is read, with the same objects as :meth:`checkpoint`. Rows that the state includes
        are not fed again. Every node finds the same state, no matter when it calls this, because states that are saved
        from now on are only for the next generation.

        Parameters
        ----------
        model : keras.Model, optional
            The model.
        **objects
            Other objects of the state, by name.

        Returns
        -------
        Resumed
            The position to continue from; its ``epoch`` is 0 without a state.

        Raises
        ------
        TfosError
            If the state was saved from other objects.
        """
        return self._checkpoints.resume(model, objects)

    def look_at_place(self) -> None:
        """Report this host's directory for states to the driver, which ends the cluster if the directories differ."""
        self._checkpoints.look_at_place()

    def checkpoints(self, directory: str = "checkpoints", *, pattern: str = "*", poll: float = 0.5) -> Iterator[str]:
        """Yield the path of each checkpoint that the training writes, for an evaluator.

        The iteration ends when the training is over and the newest checkpoint was yielded. A checkpoint is skipped if a
        newer one comes before it was yielded.

        Parameters
        ----------
        directory : str, optional
            Directory of the checkpoints: a path, or a URL that fsspec knows. A relative path is under
            :attr:`model_dir`.
        pattern : str, optional
            Pattern of the file names. For ``tf.train.Checkpoint``'s files the common prefix is yielded, once per
            checkpoint.
        poll : float, optional
            Seconds between two polls of the directory.

        Examples
        --------
        >>> if ctx.job_name == "evaluator":  # doctest: +SKIP
        ...     return [keras.models.load_model(path).evaluate(x, y) for path in ctx.checkpoints()]
        """
        return iter(CheckpointWatch(self.absolute_path(directory), pattern, poll, self._rows, self._stopping))

    def absolute_path(self, path: str) -> str:
        """Return ``path``, put under :attr:`model_dir` if it is relative."""
        return path if os.path.isabs(path) or "://" in path else f"{self.model_dir.rstrip('/')}/{path}"

    def save(self, model: Any, path: str = "model.keras") -> str:
        """Save a Keras model: the chief writes a temporary file and renames it; the other nodes do nothing.

        Parameters
        ----------
        model : keras.Model
            The model.
        path : str, optional
            The file's name, under :attr:`model_dir` if it is relative, or a URL that fsspec knows.

        Returns
        -------
        str
            The full path, on every node.
        """
        if not callable(getattr(model, "save", None)):
            raise TypeError(f"model must be a Keras model in ctx.save, got {type(model).__name__}: {model!r:.60}")
        if not path or path.endswith("/"):
            raise ValueError(f"ctx.save(model, {path!r}): give the file's name, such as 'model.keras'")
        target = self.absolute_path(path)
        if not target.endswith((".keras", ".h5")):
            target += ".keras"
        if self.is_chief:
            with self._saving:
                self._write_model(model, target)
            self._saved(target)
        return target

    @staticmethod
    def _write_model(model: Any, target: str) -> None:
        with writing(target), Draft(target) as draft, WRITER.as_given():
            model.save(draft.path)
        logger.info("saved the model at %s", without_password(target))

    def finish_saving(self) -> None:
        """Wait until all saved files are uploaded; raise an upload's error. The end of ``main`` calls it."""
        self._uploads.finish()

    # --- progress ---

    def report(
        self,
        *,
        epoch: int | None = None,
        epochs: int | None = None,
        step: int | None = None,
        steps: int | None = None,
        epoch_end: bool = False,
        **metrics: Any,
    ) -> None:
        """Show progress in the notebook. It never waits and never raises. Keras' ``fit`` reports automatically.

        Parameters
        ----------
        epoch, epochs, step, steps : int, optional
            The program's current epoch and step, counted from 1, and their totals.
        epoch_end : bool, optional
            Whether this is an epoch's last report: the cluster's history keeps it.
        **metrics
            Numbers by name, such as ``loss=0.3``.
        """
        self._reporter.step(epoch=epoch, epochs=epochs, step=step, steps=steps, epoch_end=epoch_end, **metrics)

    @property
    def should_stop(self) -> bool:
        """Whether the user has asked the cluster to stop. Your own training loop must check it between steps."""
        return self._stopping.is_set()

    def __repr__(self) -> str:
        return f"<ctx {self.node} of {self.cluster_name}>"
