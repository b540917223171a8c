"""What ``ctx`` offers beyond a node's rows: strategies, servers, and what goes on beside the training."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import Role
from tfos_nb.runtime.program.peers import each_alone
from tfos_nb.runtime.program.strategies import Member, mesh

if TYPE_CHECKING:
    from tfos_nb.runtime.control.plan import Node
    from tfos_nb.runtime.feed.row_queue import RowQueue
    from tfos_nb.runtime.program.coordinator_steps import CoordinatedDataset

__all__ = ["Roles"]


class Roles:
    """The part of :class:`~tfos_nb.runtime.program.context.NodeContext` that knows TensorFlow's kinds of training."""

    node: Node
    cluster_spec: dict[str, list[str]]
    gpus: tuple[str, ...]
    model_dir: str
    _passes: RowQueue
    _serving: Callable[[], object]
    _coordinating: Callable[[], object] | None = None
    _coordinated: Callable[[Any], Callable[[int, int], object]] | None = None
    _late: Callable[[], list[int]] | None = None
    _through: Callable[[int, int], object] | None = None
    _stopping: threading.Event
    _coordinator: Any = None
    _turns: Iterator[int]

    def strategy(self, kind: str = "auto", **options: Any) -> Any:
        """Return the ``tf.distribute.Strategy`` of a kind, told what this cluster is.

        Parameters
        ----------
        kind : str, optional
            ``"sync"``: MultiWorkerMirroredStrategy over all workers. ``"async"``: ParameterServerStrategy, on the
            chief; the same one however often it is asked for. ``"mirrored"``: MirroredStrategy over this node's own
            devices. ``"one"``: one device. ``"default"``: the strategy in force. ``"auto"``, if nothing is given:
            async in a cluster with parameter servers, sync in any other. On an evaluator sync means one.
        **options
            Of sync: ``communication``, ``"auto"`` (NCCL where all workers have GPUs), ``"nccl"`` or ``"ring"``;
            ``timeout``, the seconds that a step may wait for its peers; ``protocol``. Of async:
            ``variable_partitioner``; ``protocol``. Of mirrored: ``devices``, names or a number.

        Raises
        ------
        PlanError
            If the kind is not known, or the cluster's roles do not fit it; TensorFlow would wait for ever.

        Examples
        --------
        >>> with ctx.strategy().scope():  # doctest: +SKIP
        ...     model = build()
        """
        meant = self._member.kind_of(kind)
        if meant == "async":
            if self._coordinator is None:
                self._coordinator = self._coordinate(options)
            return self._coordinator.strategy
        return self._member.strategy(meant, options)

    def coordinator(self, **options: Any) -> Any:
        """Return the chief's ``tf.distribute.coordinator.ClusterCoordinator``; ``.strategy`` is its strategy.

        The options are those of ``strategy("async")``. The workers and the parameter servers :meth:`serve` meanwhile.

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
        self.strategy("async", **options)
        return self._coordinator

    def _coordinate(self, options: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        if self._coordinating is not None:
            self._coordinating()  # TensorFlow waits for servers that never come: the driver knows better
        each_alone()
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self._member.strategy("async", options))
        self._turns = itertools.count(1)
        if self._coordinated is not None:
            self._through = self._coordinated(coordinator)
        return coordinator

    def coordinator_dataset(
        self,
        batch_size: int | Callable[[], Any],
        *,
        repeat: bool = False,
        **options: Any,
    ) -> CoordinatedDataset:
        """Return the workers' rows for the coordinator: each worker goes through those that Spark has fed to it.

        Parameters
        ----------
        batch_size : int or callable
            Rows in a batch. Or a function that returns a ``tf.data.Dataset``, for data that the workers have otherwise.
        repeat : bool, optional
            Whether a worker goes on after its last row, through its rows again and again. Needed for tf_keras' ``fit``,
            which counts steps and gives each to whichever worker is free.
        **options
            As :meth:`~tfos_nb.runtime.program.context.NodeContext.dataset` takes them: ``x``, ``y``, ``shuffle``,
            ``fill`` …

        Returns
        -------
        CoordinatedDataset
            ``rows.steps(train_step)`` is one pass. ``iter(rows)`` is what ``coordinator.schedule`` takes. tf_keras
            takes it as ``DatasetCreator(rows)``.

        Raises
        ------
        FeedFailed
            If no rows will come, or a column is not there or has no tensor.
        PlanError
            On a node that is not the chief.

        Examples
        --------
        >>> rows = ctx.coordinator_dataset(64, x="pixels", y="label")  # doctest: +SKIP
        >>> for epoch in range(3):  # doctest: +SKIP
        ...     losses = [float(loss) for loss in rows.steps(train_step)]
        """
        from tfos_nb.runtime.datasets.dataset import DatasetOptions
        from tfos_nb.runtime.program.coordinator import FedDataset, fed_columns
        from tfos_nb.runtime.program.coordinator_steps import CoordinatedDataset

        coordinator = self.coordinator()
        function: Callable[[], Any]
        if callable(batch_size):
            if options or repeat:
                raise PlanError(f"{', '.join(options) or 'repeat'}: for rows from Spark; a function says it itself")
            function = batch_size
        else:
            unknown = [name for name in ("class_weight", "sparse") if options.get(name)]
            if unknown:
                raise PlanError(f"coordinator_dataset takes no {', '.join(unknown)}: do it in the step")
            chosen = DatasetOptions(batch_size, **options)
            self._passes.ask()  # for the workers, which do not know what the state holds
            function = FedDataset(chosen, fed_columns(chosen, self._stopping), repeat)
        turns = None if callable(batch_size) else self._turns
        return CoordinatedDataset(coordinator, function, self._late, turns, self._through)

    def serve(self, protocol: str = "") -> None:
        """Run TensorFlow's server for the other nodes, and do not return: what a parameter server's ``main`` does.

        So do the workers of a ``ParameterServerStrategy``, whose chief gives them their steps; their rows from Spark
        are then the chief's to use, by :meth:`coordinator_dataset`. The cluster is done when the chief has returned,
        and every other node has returned or serves.

        Examples
        --------
        >>> if not ctx.is_chief:  # doctest: +SKIP
        ...     ctx.serve()
        """
        from tfos_nb.runtime.program.coordinator import LocalFeed

        rows = LocalFeed(self._passes, self.node.index, self._stopping)  # kept: TensorFlow refers to it weakly
        if self.node.role is Role.WORKER:
            rows.register()
        server = self.server(protocol)
        self._serving()
        server.join()

    def server(self, protocol: str = "", *, config: Any = None) -> Any:
        """Start TensorFlow's server on this node's address and return it: for graphs and sessions of TensorFlow 1.

        Parameters
        ----------
        protocol : str, optional
            Default: the plan's.
        config : tf.compat.v1.ConfigProto, optional
            Of the server.

        Returns
        -------
        tf.distribute.Server
            ``server.target`` is what a session takes.
        """
        return self._member.server(protocol, config)

    def monitored_session(self, server: Any, **options: Any) -> Any:
        """Return a ``MonitoredSession`` of TensorFlow 1: see :mod:`tfos_nb.runtime.program.between_graph`."""
        from tfos_nb.runtime.program.between_graph import monitored_session

        return monitored_session(server, is_chief=bool(getattr(self, "is_chief", False)), **options)

    def connect(self, protocol: str = "") -> list[str]:
        """Make the devices of the nodes that :meth:`serve` usable by name here, for a model that spans nodes.

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
        if self._coordinating is not None:
            self._coordinating()
        return self._member.connect(protocol)

    def mesh(self, device_type: str | None = None, /, **dimensions: int) -> Any:
        """Return a DTensor mesh over the devices of all nodes that train; each calls it, with the same arguments.

        Parameters
        ----------
        device_type : str, optional
            ``"GPU"`` or ``"CPU"``. Default: GPU where the nodes have some.
        **dimensions
            The mesh's dimensions and their sizes. A node's CPU is cut into as many devices as needed.

        Returns
        -------
        tf.experimental.dtensor.Mesh

        Examples
        --------
        >>> mesh = ctx.mesh(batch=ctx.num_workers)  # doctest: +SKIP
        """
        return mesh(self._member, dimensions, device_type or ("GPU" if self.gpus else "CPU"))

    def checkpoints(self, directory: str = "checkpoints", *, pattern: str = "*", poll: float = 0.5) -> Iterator[str]:
        """Give the path of each checkpoint that the training writes, as it comes: what an evaluator goes through.

        It ends when the training is over and the newest checkpoint has been given out. One that is overtaken before it
        was given out is left out.

        Parameters
        ----------
        directory : str, optional
            Where they are written, under :attr:`model_dir` if it is relative; a path or a URL that fsspec knows.
        pattern : str, optional
            Which files count. Of ``tf.train.Checkpoint``'s files the common prefix is given, once a checkpoint.
        poll : float, optional
            Seconds between two looks.

        Examples
        --------
        >>> if ctx.job_name == "evaluator":  # doctest: +SKIP
        ...     return [keras.models.load_model(path).evaluate(x, y) for path in ctx.checkpoints()]
        """
        from tfos_nb.runtime.program.checkpoint_watch import CheckpointWatch

        place = directory if os.path.isabs(directory) or "://" in directory else f"{self.model_dir}/{directory}"
        return iter(CheckpointWatch(place, pattern, poll, self._passes, self._stopping))

    def release_port(self) -> str:
        """Return this node's address, ``host:port``, on which a server of this process may now listen.

        TensorFlow's servers, and gRPC's, listen on it while the node's supervisor still holds it against others
        (``SO_REUSEPORT``), so nothing has to be let go and there is no moment in which it could be lost. A server that
        does not set that option itself takes a port of its own.
        """
        at: Sequence[str] = self.cluster_spec[self.node.role.value]
        return at[self.node.index]

    @property
    def _member(self) -> Member:
        return Member(self.node, self.cluster_spec, self.gpus)
