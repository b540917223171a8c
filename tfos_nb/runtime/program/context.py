"""``ctx``: what the user's ``main(args, ctx)`` receives."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.plan import Node, Role
from tfos_nb.runtime.control.reports import Reporter
from tfos_nb.runtime.datasets.dataset import DatasetOptions, Names
from tfos_nb.runtime.datasets.deferred_dataset import dataset_of
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.row_queues import DEFAULT_QUEUE
from tfos_nb.runtime.inference.data_feed import NodeRows, RowFeeds
from tfos_nb.runtime.keras.early_stop import watch_fit
from tfos_nb.runtime.program.roles import Roles
from tfos_nb.runtime.program.row_sources import Sources
from tfos_nb.runtime.recovery.checkpointing import Checkpointing
from tfos_nb.runtime.recovery.keras_resume import save_whole_epochs, watch_restores
from tfos_nb.runtime.storage.one_writer import WRITER
from tfos_nb.runtime.storage.remote import Draft, writing
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads
from tfos_nb.truncate import without_password

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["NodeContext"]

logger = logging.getLogger(__name__)


class NodeContext(Roles, RowFeeds, Sources, Checkpointing):
    """This node's place in the cluster, its rows, and the way to report and save.

    Attributes
    ----------
    job_name : str
        The role: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
    task_index : int
        The index in that role.
    is_chief : bool
        Whether this node saves and speaks for the cluster: the chief, or ``worker:0`` where there is none.
    num_workers : int
        How many nodes train: the workers, and the chief if it trains too.
    cluster_spec : dict of str to list of str
        TensorFlow's own: the addresses of each role. ``TF_CONFIG`` is set from it.
    cluster_name : str
        The cluster's name.
    model_dir : str
        Where :meth:`save` writes.
    log_dir : str
        Where ``tf.summary`` and Keras' ``TensorBoard`` callback write what TensorBoard shows; empty if there is none.
        Of a URL that TensorFlow cannot write to, such as ``hdfs://``, a local directory, whose files are copied there.
    args : object
        What the program was given, as in ``main(args, ctx)``.
    generation : int
        How often the cluster's nodes were gathered, from 1: above it, ``main`` is called again after a loss.
    restarts : int
        How often they may be started again, as the cluster was launched.
    """

    def __init__(
        self,
        node: Node,
        cluster_spec: Mapping[str, Sequence[str]],
        *,
        cluster_name: str,
        model_dir: str,
        log_dir: str = "",
        passes: RowQueue,
        rows: NodeRows | None = None,
        reporter: Reporter,
        stopping: threading.Event,
        failed: Callable[[FeedFailed], object],
        serving: Callable[[], object],
        saving: Callable[[bool], object],
        held: Callable[[], object] = lambda: None,
        seen: Callable[[str, str], object] = lambda place, mark: None,
        args: Any = None,
        gpus: Sequence[str] = (),
        generation: int = 1,
        restarts: int = 0,
        held_states: Collection[str] = (),
        run: str = "",
        chief_trains: bool = False,
        coordinating: Callable[[], object] | None = None,
        coordinated: Callable[[Any], Callable[[int, int], object]] | None = None,
        late: Callable[[], list[int]] | None = None,
    ) -> None:
        self.node = node
        self.job_name = node.role.value
        self.task_index = node.index
        self.cluster_spec = {role: list(addresses) for role, addresses in cluster_spec.items()}
        self.is_chief = node.role is Role.CHIEF or (
            node == Node(Role.WORKER, 0) and Role.CHIEF.value not in self.cluster_spec
        )
        coordinates = Role.PS.value in self.cluster_spec and not chief_trains
        trains = [Role.WORKER.value] if coordinates else [Role.WORKER.value, Role.CHIEF.value]
        self.num_workers = sum(len(self.cluster_spec.get(role, ())) for role in trains)
        self.cluster_name = cluster_name
        self.model_dir = model_dir
        self.log_dir = log_dir
        self.args = args
        self.gpus = tuple(gpus)
        self.generation = generation
        self.restarts = restarts
        self._held_states = frozenset(held_states)
        self._run = run or "run"
        self._passes = passes
        self._node_rows = rows
        self._reporter = reporter
        self._stopping = stopping
        self._failed = failed
        self._serving = serving
        self._coordinating = coordinating
        self._coordinated = coordinated
        self._late = late
        self._saving = SavingFlag(saving)
        self._uploads = Uploads(self._saving)
        self._held = held
        self._seen = seen
        watch_fit(self._passes_begun, self.stop_feeding, self._passes_missed)
        if restarts and rows is not None and rows.fed:
            save_whole_epochs()
        if generation > 1:
            watch_restores(passes.resume)

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
        under a synchronous strategy a node that has come to its end waits for the others, and no row is left out.

        Parameters
        ----------
        batch_size : int
            Rows in a batch, as Keras takes it: the global batch under a synchronous strategy, which gives each of R
            replicas ``batch_size / R`` rows a step.
        x, y : str or list of str, optional
            Columns for Keras' ``fit``: elements are then ``(x, y)``, a list giving a dictionary of tensors. Without
            them, elements are ``{column: tensor}``.
        sample_weight : str, optional
            A column of weights; elements are then ``(x, y, sample_weight)``.
        columns : list of str, optional
            Only these columns, in dictionary elements.
        fill : mapping, optional
            What to put in place of a null, by column. Without it a null is an error.
        shuffle : int, optional
            Shuffle within a buffer of so many rows.
        seed : int, optional
            Of the shuffling.
        drop_remainder : bool, optional
            Leave a smaller last batch out.
        prefetch : int, optional
            Batches to prepare ahead.
        class_weight : mapping, optional
            Weights by class, for the classes in the column ``y``: numbers, text or one-hot. Elements are then ``(x, y,
            weight)``, with ``sample_weight`` multiplied by it. A class that is not named weighs 1.
        sparse : list of str, optional
            Columns of Spark ML's vectors that are to be a ``tf.SparseTensor``; others of these become dense.
        queue : str, optional
            The queue whose rows these are, one of the cluster's ``queues``.

        Returns
        -------
        tf.data.Dataset
            Tensors of shape ``(rows, …)``: a number a row gives ``(rows,)``, lists of n give ``(rows, n)``.

        Raises
        ------
        FeedFailed
            If a column is not there, or has no tensor.

        Examples
        --------
        >>> model.fit(ctx.dataset(128, x="pixels", y="label"), epochs=3)  # doctest: +SKIP
        """
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
        rows = self._queue(queue)
        rows.shuffled |= bool(shuffle)
        alone, waits = self.num_workers == 1, self._may_be_synchronous
        return dataset_of(rows, options, self._failed, alone=alone, waits=waits)

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
        """Show progress in the notebook. Never waits and never raises; Keras' ``fit`` reports by itself.

        Parameters
        ----------
        epoch, epochs, step, steps : int, optional
            Where the program is, counted from 1, and of how many.
        epoch_end : bool, optional
            Whether this is an epoch's last report: the cluster's history keeps it.
        **metrics
            Numbers by name, such as ``loss=0.3``.
        """
        self._reporter.step(epoch=epoch, epochs=epochs, step=step, steps=steps, epoch_end=epoch_end, **metrics)

    @property
    def should_stop(self) -> bool:
        """Whether the user has asked the cluster to stop: a loop of one's own looks at it between steps."""
        return self._stopping.is_set()

    def absolute_path(self, path: str) -> str:
        """Return ``path``, put under :attr:`model_dir` if it is relative."""
        return path if os.path.isabs(path) or "://" in path else f"{self.model_dir.rstrip('/')}/{path}"

    def save(self, model: Any, path: str = "model.keras") -> str:
        """Save a Keras model: the chief writes, beside the place and then renamed, and the other nodes do nothing.

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
            raise TypeError(f"ctx.save takes a Keras model, not {type(model).__name__}: {model!r:.60}")
        if not path or path.endswith("/"):
            raise ValueError(f"ctx.save(model, {path!r}): give the file's name, such as 'model.keras'")
        target = self.absolute_path(path)
        if not target.endswith((".keras", ".h5")):
            target += ".keras"
        if self.is_chief:
            with self._saving:
                self._write_model(model, target)
        return target

    @staticmethod
    def _write_model(model: Any, target: str) -> None:
        with writing(target), Draft(target) as draft, WRITER.as_given():
            model.save(draft.path)
        logger.info("saved the model at %s", without_password(target))

    def finish_saving(self) -> None:
        """Wait until all that was saved is where it belongs; raise what kept it from that. The end of ``main`` does."""
        self._uploads.finish()

    def __repr__(self) -> str:
        return f"<ctx {self.node} of {self.cluster_name}>"
