"""Keep the state of a Keras ``fit`` in memory while it trains, and continue from it after a loss.

The user's program needs no code for this::

    every few steps, and after each epoch     LastState ◀── variables, metrics, callbacks (recovery.fit_contents)
                                              driver    ◀── which rows they include (RowQueue.hold)
    as often as launch(checkpoint_every=),    StoredStates ◀── the same, written by the chief
    and with the last epoch
    the next generation's on_train_begin      all workers take the latest state that any of them has
                                              (recovery.fit_agreement); the rows are fed from there on

A state within an epoch counts only if all nodes have reported to the driver which rows it includes: the driver names
such states to the next generation. Otherwise the last state of a whole epoch counts. Keras 3 saves within an epoch
where the batches of ``fit`` are those of ``ctx.dataset``, one for one. tf_keras saves after each epoch. If nodes are
about to join or to leave, the driver asks for a state at once, and the workers wait after it (recovery.save_request).

If ``main`` calls ``fit`` several times, the last state of each is kept, too (memory_state.FinishedFits): the next
generation's calls return at once, up to the one that was interrupted. If the state would not be
exact, none is kept, and ``main`` starts from the beginning. This is so for a ``fit`` with ``steps_per_epoch``, if its
dataset is not one pass after another without end; and for independent workers, each with a model of its own. A ``fit``
that a callback has ended early is not trained further: its state says that it has ended, and which rows it did not
want. A ``fit`` with the user's own ``BackupAndRestore`` is left to that callback.
"""

from __future__ import annotations

import csv
import functools
import inspect
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.control.wire import encode
from tfos_nb.runtime.feed.messages import HeldRows
from tfos_nb.runtime.feed.passes import Cut
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.fit_agreement import Agreed, AnyWorker, agree
from tfos_nb.runtime.recovery.fit_contents import (
    LINES,
    FitContents,
    arrays_of,
    is_csv_logger,
    is_named,
    shapes_of,
)
from tfos_nb.runtime.recovery.memory_state import MOST_FITS, FinishedFits, LastState, State, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.state_rounds import Snapshot, StateRounds
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.recovery.stored_states import StoredStates
from tfos_nb.runtime.storage.one_writer import WRITER

__all__ = ["FitHooks", "FitKeeping"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitHooks:
    """State that the patches of Keras keep about a ``fit``.

    Attributes
    ----------
    cut_of : callable
        Returns the cut of fed rows whose batches a dataset gives, one for one; None if there is none. ``repeated`` says
        that the dataset must repeat its passes without end.
    iterator_of : callable
        Returns the iterator of a model's ``fit`` that has just begun.
    build : callable
        Called with the model and that iterator: builds model and metrics, if that is possible before the first step.
    count_from : callable
        Called with that iterator and a number: the steps of an epoch are numbered from there.
    was_stopped : callable
        Returns whether a model's ``fit`` ends as the user stops the cluster: it may be continued later.
    """

    cut_of: Callable[..., Cut | None]
    iterator_of: Callable[[Any], Any]
    build: Callable[[Any, Any], object]
    count_from: Callable[[Any, int], object]
    was_stopped: Callable[[Any], object]


def _nothing(*of: Any, **more: Any) -> None:
    """Do nothing: the hooks of a Keras that is not patched."""


_NO_HOOKS = FitHooks(_nothing, _nothing, _nothing, _nothing, _nothing)


@dataclass
class FitKeeping:
    """Have each ``fit`` of Keras 3 or tf_keras save its state, and continue from a saved one: :meth:`begin`.

    Parameters
    ----------
    memory : LastState
        Where to keep it.
    finished : FinishedFits
        Where to keep the last states of fits after which others have begun.
    queue : RowQueue
        The rows. It knows how many passes were made, and receives the number that a state includes.
    held : callable
        Called after each epoch whose state is kept, here or by Keras' ``BackupAndRestore``.
    request : SaveRequest
        Says whether the driver wants a state.
    generation : int
        In the first one there is no state to go on from.
    workers : int
        How many nodes train.
    held_states : collection of str
        The states within an epoch of which all nodes have said which rows they include.
    hooks : FitHooks, optional
        Without them, only whole epochs are kept.
    stored : StoredStates, optional
        Where the chief also writes states, for the loss of all memories.
    is_stored : bool, optional
        Whether the chief writes states, as all workers know.
    rows : StoredRows, optional
        Which rows states of an earlier cluster include, whose training this one continues.
    tell_epoch : callable, optional
        Called with the number of each epoch that an earlier cluster has done, that of all epochs, the epoch's steps,
        and its metrics.
    """

    memory: LastState
    finished: FinishedFits
    queue: RowQueue
    held: Callable[[], object]
    request: SaveRequest
    generation: int
    workers: int
    held_states: Collection[str] = ()
    hooks: FitHooks = _NO_HOOKS
    stored: StoredStates | None = None
    is_stored: bool = False
    rows: StoredRows | None = None
    tell_epoch: Callable[..., object] = _nothing
    kept: _KeptFit | None = field(default=None, init=False)  # the last fit that is kept
    # A fit came before which rows were read: it and what follows cannot be continued from.
    _is_over: bool = field(default=False, init=False)
    _copying: Future[None] | None = field(default=None, init=False)
    _copier: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "tfos_nb finished fit"), init=False
    )
    _models: list[Any] = field(default_factory=list, init=False)

    def begin(self) -> None:
        """Patch ``fit``, now or when Keras is imported."""
        for flavour in ("keras", "tf_keras"):
            when_imported(flavour, self._watch)

    def _watch(self, keras: Any) -> None:
        model: Any = getattr(keras, "Model", None)
        if model is None or model in self._models:  # tf_keras by the name of keras
            return
        self._models.append(model)
        model.fit = self._wrapped(model.fit, keras.callbacks)
        load = getattr(model, "_maybe_load_initial_counters_from_ckpt", None)
        if load is not None:
            model._maybe_load_initial_counters_from_ckpt = self._going_on(load)

    def _wrapped(self, fit: Callable[..., Any], callbacks: Any) -> Callable[..., Any]:
        signature = inspect.signature(fit)

        @functools.wraps(fit)
        def fit_that_keeps(model: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(model, *args, **kwargs)
            theirs: Any = given.arguments.get("callbacks")
            several: list[Any] = list(theirs) if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
            if self._has_backup(several):
                told = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.has_saved())
                given.arguments["callbacks"] = [*several, told]
            elif self._can_keep(model, given.arguments, theirs) and self._follows_the_last(model.distribute_strategy):
                steps, x = given.arguments.get("steps_per_epoch"), given.arguments.get("x")
                self.kept = _KeptFit(self, 0 if self.kept is None else self.kept.number + 1)
                given.arguments["callbacks"] = self.kept.around(several, callbacks, x, steps)
            elif self.writes:
                _log.warning("checkpoint_every= has no effect on this fit: its state is not kept (docs/recovery.md)")
            return fit(*given.args, **given.kwargs)

        return fit_that_keeps

    def _follows_the_last(self, strategy: Any) -> bool:
        """Whether a fit is the first one, or follows the last one that is kept: no row was read in between.

        All workers decide alike: an iterator that reads ahead may have begun a pass on one of them.
        """
        if self._is_over or self.kept is None:
            return not self._is_over
        broken = not self.kept.has_ended or self.kept.passes_begun != self.queue.begun
        full = self.kept.number + 1 >= MOST_FITS
        self._is_over = full or AnyWorker(strategy).says(broken)
        return not self._is_over

    def finish(self, fit: int) -> None:
        """Copy the last state of a fit, in the background, from the memory that the next fit uses."""
        if not self.finished.has(fit):
            self._copying = self._copier.submit(self._copy, fit)

    def _copy(self, fit: int) -> None:
        last = self.memory.newest(lambda moment: moment.fit == fit and not moment.step)
        if last is None:
            _log.warning("the state of a fit that has ended is not kept: a later one would start from its beginning")
            return
        self.put_finished(last.moment, last.passes, arrays_of(last), last.rest)

    def put_finished(self, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes) -> None:
        """Keep the last state of a fit on the host's disk."""
        try:
            self.finished.put(moment, passes, arrays, rest)
        except OSError as error:
            _log.warning("the state of a fit that has ended could not be kept: %s", error)

    def await_copy(self) -> bool:
        """Wait until the last state of the fit before was copied; return whether all are there."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()
        return self.kept is None or all(map(self.finished.has, range(self.kept.number)))

    def has_saved(self) -> None:
        """Tell the driver of the state of a whole epoch, and wait if it has asked for one."""
        self.held()
        self.request.pause_if_asked()

    def is_usable(self, moment: StateVersion) -> bool:
        """Whether training can continue from a state: it is of whole epochs, or its rows are known."""
        return not moment.step or moment.name in self.held_states or self.rows_of(moment) is not None

    def rows_of(self, moment: StateVersion) -> HeldRows | None:
        """Return which rows of its epoch a state of an earlier cluster includes."""
        return self.rows.of(moment.name) if self.rows is not None and moment.step else None

    @property
    def writes(self) -> bool:
        """Whether this node writes states to the ``model_dir``."""
        return self.stored is not None and self.stored.writes

    @property
    def continues_earlier(self) -> bool:
        """Whether an earlier cluster's training is continued: it is never begun anew, also after further losses."""
        return self.rows is not None and self.rows.since > 1

    def keep(self, moment: StateVersion, passes: int, arrays: list[Any], rest: bytes) -> bool:
        """Keep a state in memory; return whether there was room for it."""
        if not self.await_copy():
            return False
        try:
            self.memory.put(moment, passes, arrays, rest)
        except OSError as error:
            at = f"step {moment.step} of epoch {moment.epoch + 1}" if moment.step else f"epoch {moment.epoch}"
            _log.warning("the state after %s could not be kept in memory: %s", at, error)
            return False
        return True

    def store_if_due(
        self,
        moment: StateVersion,
        passes: int,
        arrays: list[Any],
        rest: bytes,
        *,
        waits: bool,
        is_last: bool = False,
    ) -> bool:
        """Have the chief write a state, if it is due or the fit's last one; return whether it is being written.

        ``waits``: nodes join or leave with this state. Write it now, and return whether that succeeded.
        """
        stored = self.kept.stored if self.kept is not None else None
        if stored is None or not stored.writes or not (waits or is_last or stored.is_due) or not self.await_copy():
            return False
        stored.begin(moment, passes, arrays, rest)
        return not waits or stored.finish()

    def own_state(self, fit: int) -> State | None:
        """Return the latest state of a fit that this worker has, in memory or on its host's disk."""
        own = self.memory.newest(lambda moment: moment.fit == fit and self.is_usable(moment))
        last = self.finished.of(fit)
        return last if own is None or (last is not None and last.moment >= own.moment) else own

    def last_fit(self) -> int:
        """Return the last fit of which this worker has a state, in memory or on its host's disk; -1 without one."""
        own = self.memory.newest(self.is_usable)
        on_disk = next(fit for fit in itertools.count() if not self.finished.has(fit)) - 1
        return max(on_disk, own.moment.fit if own is not None else -1)

    def forget(self) -> None:
        """Delete all states of the last fit: none of them is to be continued from."""
        assert self.kept is not None, "a fit has begun"
        self.await_copy()
        self.memory.drop_from(self.kept.number)
        if self.kept.stored is not None:
            self.kept.stored.clear()

    @staticmethod
    def _has_backup(callbacks: Sequence[Any]) -> bool:
        return any(is_named(one, "BackupAndRestore") for one in callbacks)

    def _can_keep(self, model: Any, arguments: dict[str, Any], callbacks: Any) -> bool:
        import tensorflow as tf

        finished = type(callbacks).__name__ == "CallbackList"  # it is only used, and none can be added to it
        strategy = model.distribute_strategy
        together = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        alone = self.workers == 1 and not isinstance(strategy, tf.distribute.ParameterServerStrategy)
        known = arguments.get("steps_per_epoch") is None or self.rows_cut(model, arguments.get("x"), True) is not None
        return (together or alone) and known and not finished

    def rows_cut(self, model: Any, dataset: Any, repeated: bool) -> Cut | None:
        """Return how the rows of a dataset are cut into the steps of Keras 3; None if that is not known."""
        return self.hooks.cut_of(dataset, repeated=repeated) if hasattr(model, "_make_function") else None

    def _going_on(self, load: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        """Wrap the method that gives tf_keras its first epoch; it runs after ``on_train_begin``."""

        @functools.wraps(load)
        def load_or_go_on(model: Any, steps_per_epoch: Any, initial_epoch: int) -> tuple[int, int]:
            epoch, step = load(model, steps_per_epoch, initial_epoch)
            put_back = self.kept.epoch if self.kept is not None and self.kept.is_of(model) else 0
            return (put_back, 0) if put_back > epoch else (epoch, step)

        return load_or_go_on


class _KeptFit:
    """A fit whose state is kept. Keras calls its callbacks :class:`_RestoreCallback` and :class:`_SaveCallback`.

    Attributes
    ----------
    number : int
        Its number among the fits of ``main``, from 0.
    stored : StoredStates or None
        Where the chief writes its states.
    has_ended : bool
        Whether it has ended without an error.
    passes_begun : int
        Passes that were begun when it ended.
    """

    def __init__(self, keeping: FitKeeping, number: int) -> None:
        self.number = number
        self.stored = keeping.stored.of_fit(number) if keeping.stored is not None and number else keeping.stored
        self.has_ended = False
        self.passes_begun = 0
        self._epochs = 0
        self._keeping = keeping
        self._dataset: Any = None
        self._steps: int | None = None  # of an epoch, if its epochs are numbers of steps, not passes over the rows
        self._left = False  # its epoch was left, as the user stops the cluster
        self._is_cut_short: bool | None = None  # the running epoch, by Stop; None until its steps are over
        self._is_stopped = False  # as the user stops the cluster
        self._callbacks: list[Any] = []
        self._contents: FitContents | None = None
        self._iterator: Any = None
        self._amid: _MidEpochSaver | None = None
        self._agreed: Agreed | None = None  # until the epoch with which it goes on has begun
        self._first = 0  # the epoch with which it goes on
        self._batches = 0  # steps of the running epoch
        self._ended = False  # by a callback, here or in the restored state

    @property
    def epoch(self) -> int:
        """Number of the epoch with which it begins; 0 if no state was restored."""
        return self._first if self._agreed is not None else 0

    def is_of(self, model: Any) -> bool:
        """Whether it is a fit of this model."""
        return self._contents is not None and self._contents.model is model

    def around(self, callbacks: Sequence[Any], module: Any, dataset: Any, steps: int | None) -> list[Any]:
        """Return Keras' callbacks with ours: the first one puts the state back, the last one keeps what others change.

        Keras adds its ``History`` behind the last one, unless it is given. ``steps``: its epochs have so many
        steps, and its dataset repeats its passes.
        """
        several = list(callbacks)
        if not any(isinstance(one, module.History) for one in several):
            several.append(module.History())
        self._callbacks, self._dataset, self._steps = several, dataset, steps
        kinds = [
            type(kind.__name__.strip("_"), (kind, module.Callback), {}) for kind in (_RestoreCallback, _SaveCallback)
        ]
        first, last = (kind(self) for kind in kinds)
        return [first, *several, last]

    # --- calls from Keras ---

    def train_begins(self, model: Any, epochs: int) -> None:
        """Put the latest state back, if there is one. The other callbacks do not know yet that training begins."""
        keeping, self._epochs = self._keeping, epochs
        self._contents = contents = FitContents(model, self._callbacks)
        if self.number:
            keeping.finish(self.number - 1)
        self._iterator = keeping.hooks.iterator_of(model)
        cut = keeping.rows_cut(model, self._dataset, self._steps is not None)
        if cut is not None:
            self._amid = _MidEpochSaver(keeping, contents, cut, fit=self.number, steps=self._steps)
        else:
            _log.info("the state of this fit is saved after whole epochs only: docs/recovery.md says of which data")
        if keeping.generation == 1:
            return
        agreed = None if keeping.queue.asked else self._agree()
        if agreed is None:
            self._begin_first()
            return
        if not model.built:
            keeping.hooks.build(model, self._iterator)
        if not model.built or not self._fits(agreed):
            late = "its model is built with the first step only"
            self._start_anew("the saved state is not of this model" if model.built else late)
            keeping.forget()  # a later recovery must not use it either
            return
        self._continue_from(agreed, epochs)

    def _begin_first(self) -> None:
        """Forget states of this fit, or later ones, of a training that has gone on from an earlier state."""
        self._keeping.memory.drop_from(self.number)
        if self.stored is not None and self.number:
            self.stored.drop_all()
            self.stored.drop_later_fits()
        if self._keeping.continues_earlier and not self._keeping.queue.asked:
            _log.warning("fit starts from the beginning: the training that resume= names has no state of it")

    def _start_anew(self, reason: str) -> None:
        """Log that fit starts from the beginning; refuse it if the user has asked for an earlier cluster's training."""
        if self._keeping.continues_earlier:
            raise TfosError(
                f"fit cannot continue the training that resume= names: {reason}. Build the model of that training, "
                "with the shapes of its inputs, before fit; or launch without resume="
            )
        _log.warning("fit starts from the beginning: %s", reason)

    def _continue_from(self, agreed: Agreed, epochs: int) -> None:
        keeping, contents = self._keeping, self._contents
        assert contents is not None, "training has begun"
        self._agreed, self._ended = agreed, agreed.rest.ended
        contents.assign(agreed.arrays[: agreed.rest.counted])
        if agreed.others_follow:
            self._return_at_once(agreed, epochs)
            return
        keeping.memory.drop_after(agreed.moment)
        if self.stored is not None:
            self.stored.drop_after(agreed.moment)
        if agreed.rest.finished and (self._ended or epochs <= agreed.moment.epoch):
            self._keep_finished(agreed)
        rows = keeping.rows_of(agreed.moment) if self.stored is not None else None
        keeping.queue.resume(agreed.passes, agreed.moment.name, agreed.rest.refused, rows)
        if agreed.rest.refused[0] or (self._amid is not None and not self._ended):
            # If rows were refused, no epoch will ask, and the driver waits for it. Otherwise the first epoch would ask,
            # and wait for rows that may as well come while its step is traced.
            keeping.queue.ask()
        # As Keras 3's BackupAndRestore does. A fit that has ended has no more epochs.
        whole = self._steps is not None and agreed.moment.step >= self._steps  # saved at an epoch's end, within a pass
        contents.model._initial_epoch = self._first = epochs if self._ended else agreed.moment.epoch + whole
        self._continue_csv_logs(agreed)
        step = f", step {agreed.moment.step}" if agreed.moment.step else ""
        if self._ended:
            _log.info("fit has ended early, after epoch %d, and is not repeated", agreed.moment.epoch)
        else:
            _log.info("fit continues after epoch %d%s", agreed.moment.epoch, step)

    def _continue_csv_logs(self, agreed: Agreed) -> None:
        assert self._contents is not None, "training has begun"
        for callback, attributes in self._contents.kept_of(agreed.rest):
            if is_csv_logger(callback):
                _continue_csv(callback, agreed.moment.epoch, attributes.get(LINES, 0))

    def _keep_finished(self, agreed: Agreed) -> None:
        """Keep the last state of this fit here: another one will use the memory."""
        if not self._keeping.finished.has(self.number):
            self._keeping.put_finished(agreed.moment, agreed.passes, agreed.arrays, encode(agreed.rest))

    def _return_at_once(self, agreed: Agreed, epochs: int) -> None:
        """Do no epoch: this fit has ended, and a later one was interrupted, which says from where rows come."""
        contents = self._contents
        assert contents is not None, "training has begun"
        self._keep_finished(agreed)
        contents.model._initial_epoch = self._first = max(epochs, agreed.moment.epoch)
        self._continue_csv_logs(agreed)
        _log.info("fit has ended in an earlier generation, and is not repeated")

    def _agree(self) -> Agreed | None:
        """Return the latest state of all workers, in a memory or, if that is later, written by the chief."""
        keeping, contents = self._keeping, self._contents
        assert contents is not None, "training has begun"
        own, last, unread = keeping.own_state(self.number), keeping.last_fit(), None
        if self.stored is not None:
            try:
                own = self.stored.newest(keeping.is_usable, own.moment if own is not None else None) or own
                last = max(last, self.stored.last_fit(keeping.is_usable))
            except Exception as error:  # noqa: BLE001 - of any store; it does not matter if a memory has a state
                unread = error
        agreed = agree(contents.strategy, own, self.number, last)
        if agreed is None and unread is not None:
            raise TfosError(
                f"no node has a state in memory, and those that were written cannot be read: {unread}. Launch the "
                "cluster again when the model_dir can be read"
            ) from unread
        return agreed

    def _fits(self, agreed: Agreed) -> bool:
        contents = self._contents
        assert contents is not None, "training has begun"
        variables = contents.variables() if contents.build(agreed.rest) else []
        return shapes_of(variables) == agreed.rest.index[: agreed.rest.counted]

    def train_has_begun(self) -> None:
        """Put the callbacks' own states back, which they have reset."""
        assert self._contents is not None, "training has begun"
        for callback in self._callbacks:
            if is_csv_logger(callback) and self._agreed is None:
                setattr(callback, LINES, _lines_of(callback))
        self._contents.begin()
        if self._agreed is not None:
            self._contents.restore(self._agreed.rest)
            for epoch, metrics in self._contents.epochs_of(self._agreed.rest):
                if epoch < self._agreed.moment.epoch:
                    self._keeping.tell_epoch(epoch + 1, self._epochs, self._contents.steps.get(epoch), metrics)
        if self._ended:
            self._contents.model.stop_training = True  # as the callback has left it

    def epoch_begins(self, epoch: int) -> None:
        """Put back what the other callbacks have changed, if the epoch goes on; then this epoch's metrics, too."""
        agreed, contents, self._agreed = self._agreed, self._contents, None
        assert contents is not None, "training has begun"
        contents.model._initial_epoch = None  # a later fit of the same model begins with its own
        self._is_cut_short, self._batches = None, 0
        step = agreed.moment.step if agreed is not None and agreed.moment.epoch == epoch else 0
        if agreed is not None and step:
            contents.assign(agreed.arrays[: agreed.rest.counted])
            self._put_metrics_back(agreed)
            contents.restore(agreed.rest)
            self._keeping.hooks.count_from(self._iterator, step)
        if self._amid is not None:
            self._amid.begin(epoch, step)

    def _put_metrics_back(self, agreed: Agreed) -> None:
        contents, counted = self._contents, agreed.rest.counted
        assert contents is not None, "training has begun"
        # Keras may build the metrics with the first step only.
        self._keeping.hooks.build(contents.model, self._iterator)
        if shapes_of(contents.metrics()) == agreed.rest.index[counted:]:
            contents.assign_metrics(agreed.arrays[counted:])
        else:
            _log.warning("the metrics of epoch %d are of the rows after the loss only", agreed.moment.epoch + 1)

    def batch_begins(self, batch: int) -> None:
        """Note when a step begins."""
        if self._amid is not None:
            self._amid.step_begins(batch)

    def batch_has_ended(self, batch: int) -> None:
        """Save the state, if it is due, or if the user stops the cluster, which all workers do after the same step."""
        assert self._contents is not None, "training has begun"
        model = self._contents.model
        self._batches = batch + 1
        self._left = bool(getattr(model, "stop_training", False) and self._keeping.hooks.was_stopped(model))
        if self._amid is not None:
            self._amid.step_has_ended(batch, is_last=self._left)

    def steps_are_over(self) -> None:
        """Save the state if the epoch's rows were cut short, as by Stop: a later cluster continues with its next step.

        Neither validation nor the callbacks of an epoch's end may change it before. All workers agree on it, which
        takes a message of each; so this is done where a later cluster can continue from the state.
        """
        is_known = self._is_cut_short is not None
        if is_known or self._left or self._amid is None or not self._keeping.is_stored:
            return
        self._is_cut_short = self._says_cut_short()
        if self._is_cut_short:
            self._is_stopped = True
            if self._batches:
                self._amid.epoch_has_ended(is_last=True)

    def epoch_has_ended(self, epoch: int) -> None:
        """Save the state of whole epochs, or of a fit that a callback ends with this one."""
        keeping, contents = self._keeping, self._contents
        assert contents is not None, "training has begun"
        contents.steps[epoch] = self._batches
        keeping.hooks.count_from(self._iterator, 0)
        if self._amid is not None:
            self._amid.finish()
        stopped = self._is_stopped = self._is_stopped or self._says_stopped()
        if self._is_cut_short is None and stopped:
            self._is_cut_short = self._says_cut_short()
        if self._is_cut_short:
            return
        if stopped and not self._batches:
            return  # without the progress callback, fit begins an epoch that has no rows
        if self._left and (self._amid is None or not self._amid.is_pass_over):
            return  # its state was saved after its last step, or it cannot be saved within an epoch
        self._ended = bool(getattr(contents.model, "stop_training", False)) and not stopped
        finished = self._ended or epoch + 1 >= self._epochs
        if self._steps is not None and not finished:  # it may end within a pass
            if self._amid is not None:
                self._amid.epoch_has_ended(is_last=stopped)
            return
        refused = keeping.queue.refused_with_current if self._ended else keeping.queue.refused
        arrays = contents.own(contents.variables())
        passes = keeping.queue.passes_counted
        moment = StateVersion(epoch + 1, fit=self.number)
        metadata = contents.rest(arrays, len(arrays))
        rest = encode(replace(metadata, ended=self._ended, finished=finished, refused=refused))
        waits = stopped or keeping.request.asked
        stored = keeping.store_if_due(moment, passes, arrays, rest, waits=waits, is_last=finished)
        if keeping.keep(moment, passes, arrays, rest) or stored:
            keeping.has_saved()

    @property
    def _has_all_steps(self) -> bool:
        """Whether an epoch that is a number of steps has had them: rows after them may be dropped."""
        return self._steps is not None and self._amid is not None and self._amid.is_pass_over

    def _says_stopped(self) -> bool:
        """Whether the user stops the cluster, as the progress callback says, or else the rows of any worker."""
        assert self._contents is not None, "training has begun"
        model = self._contents.model
        if self._keeping.hooks.was_stopped(model):
            return True
        ends = getattr(model, "stop_training", False)
        return bool(ends) and AnyWorker(self._contents.strategy).says(self._keeping.queue.was_stopped)

    def _says_cut_short(self) -> bool:
        """Whether Stop has dropped rows of the pass on any worker: its steps are done, and the epoch is not."""
        assert self._contents is not None, "training has begun"
        if self._has_all_steps:
            return False
        queue = self._keeping.queue
        return AnyWorker(self._contents.strategy).says(queue.was_stopped and queue.record.is_cut_short)

    def train_ends(self) -> None:
        """Keep no state that does not say that a callback has ended the training."""
        assert self._contents is not None, "training has begun"
        self._contents.model._initial_epoch = self._agreed = self._iterator = None
        if self._amid is not None:
            self._amid.finish()
        ended_late = getattr(self._contents.model, "stop_training", False) and not self._ended
        if ended_late and not (self._is_stopped or self._keeping.hooks.was_stopped(self._contents.model)):
            self._keeping.forget()  # it was ended after its last state, which would be trained further
        self.has_ended, self.passes_begun = True, self._keeping.queue.begun


class _RestoreCallback:
    """The methods of the first callback."""

    model: Any
    params: dict[str, Any] | None

    def __init__(self, fit: _KeptFit) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._fit = fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._fit.train_begins(self.model, int((self.params or {}).get("epochs") or 0))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._fit.batch_begins(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._fit.steps_are_over()  # of fit's own validation

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._fit.steps_are_over()


class _SaveCallback:
    """The methods of the last callback."""

    def __init__(self, fit: _KeptFit) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._fit = fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._fit.train_has_begun()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._fit.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._fit.batch_has_ended(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._fit.epoch_has_ended(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._fit.train_ends()


class _MidEpochSaver:
    """Saves states within an epoch.

    All workers do so after the same steps, and together: :class:`~tfos_nb.runtime.recovery.state_rounds.StateRounds`.
    """

    def __init__(self, keeping: FitKeeping, contents: FitContents, cut: Cut, *, fit: int, steps: int | None) -> None:
        self._keeping, self._contents, self._cut = keeping, contents, cut
        self._fit, self._steps_of_epoch = fit, steps
        cut.count_from_here()
        self._rounds = StateRounds(contents.strategy, keeping.request, keeping.workers, self._write)
        self._variables: list[Any] = []
        self._optimizers: list[str] | None = None  # those that were built then
        self._is_last = False  # the state that is being written
        self._epoch = self._first = 0
        self._of_epoch = self._done_before = 0  # steps of this epoch, and of those before it, in this generation
        self._is_epoch_due = False  # its last step was to be saved
        self._lowest: int | None = None  # the number of the first step that this epoch has had here

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch, or continue it after its step ``first``."""
        self._contents.find_optimizers()
        self._epoch, self._first, self._lowest = epoch, first, None
        self._done_before, self._of_epoch = self._done_before + self._of_epoch, 0

    def step_begins(self, batch: int) -> None:
        """Note the time, and the number of the epoch's first step."""
        self._rounds.step_begins()
        self._lowest = batch if self._lowest is None else self._lowest

    def step_has_ended(self, batch: int, *, is_last: bool) -> None:
        """Save, if it is due, or the last one; ``batch`` is the number of the epoch's last step, counted from 0.

        The last step of an epoch is saved with it, after the callbacks of its end.
        """
        is_due = self._rounds.step_has_ended()
        self._of_epoch = batch + 1 - (self._lowest or 0)  # several for each call with steps_per_execution
        ends = self._steps_of_epoch is not None and self._first + self._of_epoch >= self._steps_of_epoch
        if is_last and not ends:
            self._save(is_last=True)
        if getattr(self._contents.model, "stop_training", False):
            return
        if is_due and ends:
            self._is_epoch_due = True
        elif is_due:
            self._save()

    def epoch_has_ended(self, *, is_last: bool) -> None:
        """Save the state at the end of an epoch that is not a whole pass, if it is due, or the last one."""
        due, self._is_epoch_due = self._is_epoch_due, False
        if due or is_last:
            self._save(is_last=is_last)

    @property
    def is_pass_over(self) -> bool:
        """Whether the last step was the last one of its pass, or of an epoch of a number of steps."""
        if self._steps_of_epoch is not None:
            return self._first + self._of_epoch >= self._steps_of_epoch
        (record, _), steps = self._cut.place, self._of_epoch
        return record is not None and record.steps is not None and steps >= record.steps

    def _position(self, name: str, passes: int) -> PositionHeld | None:
        """Return which rows of the pass after ``passes`` ones are in the state of this name.

        None if that cannot be said: the steps may be the pass's last ones, or the next pass is read ahead already.
        """
        (record, before), division = self._cut.place, self._cut.division
        replicas = division.replicas if division is not None else 1
        steps = self._of_epoch
        if self._steps_of_epoch is not None:
            steps += self._done_before - before // replicas
        if record is None or record is not self._keeping.queue.record or steps < 1 or before % replicas:
            return None
        rows = record.rows_after(steps * replicas)
        is_known = division is not None or record.has_more or record.is_cut_short
        is_amid = steps < record.steps if record.steps is not None else is_known
        try:
            return self._keeping.queue.position(name, passes, rows) if is_amid else None
        except ValueError as error:  # another pass has begun
            _log.debug("no state is saved: %s", error)
            return None

    def _save(self, *, is_last: bool = False) -> None:
        """Save the state after the last step, if all workers know its position and are in one pass.

        ``is_last``: the user stops the cluster. Write it to the disk, for a later one.
        """
        self._rounds.finish()
        began = time.perf_counter()
        keeping, contents = self._keeping, self._contents
        if self._optimizers != contents.built_optimizers():
            self._optimizers, self._variables = contents.built_optimizers(), contents.variables()
            self._rounds.sum_up(contents.metrics())
        snapshot, self._is_last = self._snapshot(), is_last
        if not self._rounds.save(snapshot, began=began, is_last=is_last) or snapshot is None:
            return
        rows = keeping.rows if is_last and keeping.writes else None
        if rows is not None and not rows.await_kept(snapshot.moment.name):
            _log.warning("the rows of the last state are not known: resume= would continue from an earlier one")
        if self._rounds.is_wanted:
            keeping.request.pause()

    def _snapshot(self) -> Snapshot | None:
        """Return the state after the last step, with values that later steps do not change; None without a position."""
        contents, keeping = self._contents, self._keeping
        moment = StateVersion(self._epoch, keeping.generation, self._first + self._of_epoch, fit=self._fit)
        passes = keeping.queue.passes_before_current
        position = self._position(moment.name, passes)
        if position is None:
            return None
        rest = replace(contents.rest([], len(self._variables)), refused=keeping.queue.refused)
        return Snapshot(moment, passes, contents.own(self._variables), rest, position)

    def _write(self, snapshot: Snapshot, arrays: list[Any], rest: bytes) -> bool:
        """Write a state, and report it to the driver; return whether it was written anywhere."""
        keeping, position = self._keeping, snapshot.position
        of = snapshot.moment, snapshot.passes, arrays, rest
        stored = keeping.store_if_due(*of, waits=self._is_last or position.waits)
        if is_kept := keeping.keep(*of) or stored:
            keeping.queue.tell_held(replace(position, stored=stored))
        return is_kept

    def finish(self) -> None:
        """Wait until the last state was written, as before that of a whole epoch."""
        self._rounds.finish()


def _lines_of(logger: Any) -> int:
    """Return how many lines a CSVLogger's file has that are of earlier trainings."""
    if not logger.append or not os.path.isfile(logger.filename):
        return 0
    with open(logger.filename, encoding="utf-8") as file:
        return sum(1 for _ in file)


def _continue_csv(logger: Any, epoch: int, before: int) -> None:
    """Let a CSVLogger append, without the epochs in its file that are trained again.

    The first ``before`` lines are of earlier trainings.
    """
    logger.append = True
    setattr(logger, LINES, before)
    if WRITER.is_other or not os.path.isfile(logger.filename):
        return
    with open(logger.filename, newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter=logger.sep))
    own = [line for line in lines[before:] if line and (not line[0].isdigit() or int(line[0]) < epoch)]
    kept = [*lines[:before], *own]
    if kept != lines:
        part = f"{logger.filename}.part"
        with open(part, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=logger.sep).writerows(kept)
        os.replace(part, logger.filename)
