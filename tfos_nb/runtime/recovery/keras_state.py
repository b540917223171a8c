"""Keep the state of a Keras ``fit`` in memory while it trains, and continue from it after a loss.

The user's program needs no code for this::

    every few steps, and after each epoch     LastState ◀── variables, metrics, callbacks (recovery.fit_contents)
                                              driver    ◀── which rows they include (RowQueue.hold)
    as often as launch(checkpoint_every=)     StoredStates ◀── the same, written by the chief
    the next generation's on_train_begin      all workers take the latest state that any of them has
                                              (recovery.fit_agreement); the rows are fed from there on

A state within an epoch counts only if all nodes have reported to the driver which rows it includes: the driver names
such states to the next generation. Otherwise the last state of a whole epoch counts. Keras 3 saves within an epoch
where the batches of ``fit`` are those of ``ctx.dataset``, one for one. tf_keras saves after each epoch. If nodes are
about to join or to leave, the driver asks for a state at once, and the workers wait after it (recovery.save_request).

The state of ``main``'s first ``fit`` is kept, also after it has ended and others follow. If the state would not be
exact, none is kept, and ``main`` starts from the beginning. This is so for a ``fit`` with ``steps_per_epoch``, if its
dataset is not one pass after another without end; and for independent workers, each with a model of its own. A ``fit``
that a callback has ended early is not trained further: its state says that it has ended, and which rows it did not
want. A ``fit`` with the user's own ``BackupAndRestore`` is left to that callback.
"""

from __future__ import annotations

import csv
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.control.wire import encode
from tfos_nb.runtime.feed.messages import HeldRows
from tfos_nb.runtime.feed.passes import Cut
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.fit_agreement import Agreed, AnyWorker, Totals, agree
from tfos_nb.runtime.recovery.fit_contents import LINES, FitContents, is_csv_logger, is_named, shapes_of
from tfos_nb.runtime.recovery.memory_state import LastState, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.save_schedule import SaveSchedule
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.recovery.stored_states import StoredStates
from tfos_nb.runtime.storage.one_writer import WRITER

__all__ = ["FitHooks", "keep_fits"]

_ROUNDING = 1e-6  # of the variance of equal numbers

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
    """

    cut_of: Callable[..., Cut | None]
    iterator_of: Callable[[Any], Any]
    build: Callable[[Any, Any], object]
    count_from: Callable[[Any, int], object]


def _nothing(*of: Any, **more: Any) -> None:
    """Do nothing: the hooks of a Keras that is not patched."""


_NO_HOOKS = FitHooks(_nothing, _nothing, _nothing, _nothing)


def keep_fits(
    memory: LastState,
    queue: RowQueue,
    held: Callable[[], object],
    request: SaveRequest,
    *,
    generation: int,
    workers: int,
    held_states: Collection[str] = (),
    hooks: FitHooks = _NO_HOOKS,
    stored: StoredStates | None = None,
    rows: StoredRows | None = None,
) -> None:
    """Have the first ``fit`` of Keras 3 or tf_keras save its state, and continue from a saved one.

    Parameters
    ----------
    memory : LastState
        Where to keep it.
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
    rows : StoredRows, optional
        Which rows states of an earlier cluster include, whose training this one continues.
    """
    keeping = _Keeping(memory, queue, held, request, generation, workers, frozenset(held_states), hooks, stored, rows)
    for flavour in ("keras", "tf_keras"):
        when_imported(flavour, keeping.watch)


@dataclass
class _Keeping:
    memory: LastState
    queue: RowQueue
    held: Callable[[], object]
    request: SaveRequest
    generation: int
    workers: int
    held_states: frozenset[str]
    hooks: FitHooks
    stored: StoredStates | None
    rows: StoredRows | None
    kept: _KeptFit | None = None  # the first fit
    _models: list[Any] = field(default_factory=list)

    def watch(self, keras: Any) -> None:
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
            first, self.kept = self.kept is None, self.kept or _KeptFit(self)
            if self._has_backup(several):
                told = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.has_saved())
                given.arguments["callbacks"] = [*several, told]
            elif first and self._can_keep(model, given.arguments, theirs):
                steps, x = given.arguments.get("steps_per_epoch"), given.arguments.get("x")
                given.arguments["callbacks"] = self.kept.around(several, callbacks, x, by_steps=steps is not None)
            elif first and self.stored is not None:
                _log.warning("checkpoint_every= has no effect: the state of this fit is not kept (docs/recovery.md)")
            return fit(*given.args, **given.kwargs)

        return fit_that_keeps

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
    def continues_earlier(self) -> bool:
        """Whether an earlier cluster's training is continued, and these are the first nodes that do so."""
        return self.rows is not None and self.rows.since == self.generation > 1

    def keep(self, moment: StateVersion, passes: int, arrays: list[Any], rest: bytes) -> bool:
        """Keep a state in memory; return whether there was room for it."""
        try:
            self.memory.put(moment, passes, arrays, rest)
        except OSError as error:
            at = f"step {moment.step} of epoch {moment.epoch + 1}" if moment.step else f"epoch {moment.epoch}"
            _log.warning("the state after %s could not be kept in memory: %s", at, error)
            return False
        return True

    def store_if_due(self, moment: StateVersion, passes: int, arrays: list[Any], rest: bytes, *, waits: bool) -> bool:
        """Have the chief write a state, if it is due; return whether it is being written.

        ``waits``: nodes join or leave with this state. Write it now, and return whether that succeeded.
        """
        if self.stored is None or not (waits or self.stored.is_due):
            return False
        self.stored.begin(moment, passes, arrays, rest)
        return not waits or self.stored.finish()

    def forget(self) -> None:
        """Delete all states: none of them is to be continued from."""
        self.memory.clear()
        if self.stored is not None:
            self.stored.clear()

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
    """The fit whose state is kept. Keras calls its callbacks :class:`_RestoreCallback` and :class:`_SaveCallback`."""

    def __init__(self, keeping: _Keeping) -> None:
        self._keeping = keeping
        self._dataset: Any = None
        self._by_steps = False  # its epochs are numbers of steps, not passes over the rows
        self._callbacks: list[Any] = []
        self._contents: FitContents | None = None
        self._iterator: Any = None
        self._amid: _MidEpochSaver | None = None
        self._agreed: Agreed | None = None  # until the epoch with which it goes on has begun
        self._first = 0  # the epoch with which it goes on
        self._ended = False  # by a callback, here or in the restored state

    @property
    def epoch(self) -> int:
        """Number of the epoch with which it begins; 0 if no state was restored."""
        return self._first if self._agreed is not None else 0

    def is_of(self, model: Any) -> bool:
        """Whether it is a fit of this model."""
        return self._contents is not None and self._contents.model is model

    def around(self, callbacks: Sequence[Any], module: Any, dataset: Any, *, by_steps: bool) -> list[Any]:
        """Return Keras' callbacks with ours: the first one puts the state back, the last one keeps what others change.

        Keras adds its ``History`` behind the last one, unless it is given. ``by_steps``: its epochs are numbers of
        steps, and its dataset repeats its passes.
        """
        several = list(callbacks)
        if not any(isinstance(one, module.History) for one in several):
            several.append(module.History())
        self._callbacks, self._dataset, self._by_steps = several, dataset, by_steps
        kinds = [
            type(kind.__name__.strip("_"), (kind, module.Callback), {}) for kind in (_RestoreCallback, _SaveCallback)
        ]
        first, last = (kind(self) for kind in kinds)
        return [first, *several, last]

    # --- calls from Keras ---

    def train_begins(self, model: Any, epochs: int) -> None:
        """Put the latest state back, if there is one. The other callbacks do not know yet that training begins."""
        keeping = self._keeping
        self._contents = contents = FitContents(model, self._callbacks)
        self._iterator = keeping.hooks.iterator_of(model)
        cut = keeping.rows_cut(model, self._dataset, self._by_steps)
        if cut is not None:
            self._amid = _MidEpochSaver(keeping, contents, cut, by_steps=self._by_steps)
        if keeping.generation == 1 or keeping.queue.asked:
            return
        if not model.built:
            keeping.hooks.build(model, self._iterator)
        if not model.built:
            self._start_anew("its model is built with the first step only")
            return
        agreed = self._agree()
        if agreed is None:
            return
        if not self._fits(agreed):
            self._start_anew("the saved state is not of this model")
            keeping.forget()  # a later recovery must not use it either
            return
        self._continue_from(agreed, epochs)

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
        keeping.memory.drop_after(agreed.moment)
        if keeping.stored is not None:
            keeping.stored.drop_after(agreed.moment)
        contents.assign(agreed.arrays[: agreed.rest.counted])
        rows = keeping.rows_of(agreed.moment) if keeping.stored is not None else None
        keeping.queue.resume(agreed.passes, agreed.moment.name, agreed.rest.refused, rows)
        if agreed.rest.refused or (self._amid is not None and not self._ended):
            # If rows were refused, no epoch will ask, and the driver waits for it. Otherwise the first epoch would ask,
            # and wait for rows that may as well come while its step is traced.
            keeping.queue.ask()
        # As Keras 3's BackupAndRestore does. A fit that has ended has no more epochs.
        contents.model._initial_epoch = self._first = epochs if self._ended else agreed.moment.epoch
        for callback, attributes in contents.kept_of(agreed.rest):
            if is_csv_logger(callback):
                _continue_csv(callback, agreed.moment.epoch, attributes.get(LINES, 0))
        step = f", step {agreed.moment.step}" if agreed.moment.step else ""
        if self._ended:
            _log.info("fit has ended early, after epoch %d, and is not repeated", agreed.moment.epoch)
        else:
            _log.info("fit continues after epoch %d%s", agreed.moment.epoch, step)

    def _agree(self) -> Agreed | None:
        """Return the latest state of all workers, in a memory or, if that is later, written by the chief."""
        keeping, contents = self._keeping, self._contents
        assert contents is not None, "training has begun"
        own, unread = keeping.memory.newest(keeping.is_usable), None
        if keeping.stored is not None:
            try:
                own = keeping.stored.newest(keeping.is_usable, own.moment if own is not None else None) or own
            except Exception as error:  # noqa: BLE001 - of any store; it does not matter if a memory has a state
                unread = error
        agreed = agree(contents.strategy, own)
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
        if self._ended:
            self._contents.model.stop_training = True  # as the callback has left it

    def epoch_begins(self, epoch: int) -> None:
        """Put back what the other callbacks have changed, if the epoch goes on; then this epoch's metrics, too."""
        agreed, contents, self._agreed = self._agreed, self._contents, None
        assert contents is not None, "training has begun"
        contents.model._initial_epoch = None  # a later fit of the same model begins with its own
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
        """Save the state, if it is due."""
        if self._amid is not None:
            self._amid.step_has_ended(batch)

    def epoch_has_ended(self, epoch: int) -> None:
        """Save the state of whole epochs, or of a fit that a callback ends with this one."""
        keeping, contents = self._keeping, self._contents
        assert contents is not None, "training has begun"
        keeping.hooks.count_from(self._iterator, 0)
        if self._amid is not None:
            self._amid.await_writer()
        self._ended = bool(getattr(contents.model, "stop_training", False))
        if self._by_steps and not self._ended:
            return  # it may end within a pass: the states of its steps are enough
        refused = keeping.queue.current_call if self._ended else 0
        arrays = contents.own(contents.variables())
        moment, passes = StateVersion(epoch + 1), keeping.queue.passes_done
        rest = encode(replace(contents.rest(arrays, len(arrays)), ended=self._ended, refused=refused))
        stored = keeping.store_if_due(moment, passes, arrays, rest, waits=keeping.request.asked)
        if keeping.keep(moment, passes, arrays, rest) or stored:
            keeping.has_saved()

    def train_ends(self) -> None:
        """Keep no state that does not say that a callback has ended the training."""
        assert self._contents is not None, "training has begun"
        self._contents.model._initial_epoch = self._agreed = self._iterator = None
        if self._amid is not None:
            self._amid.await_writer()
        if getattr(self._contents.model, "stop_training", False) and not self._ended:
            self._keeping.forget()  # it was ended after its last state, which would be trained further


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

    All workers do so after the same steps. The values are taken at once, and written in a thread. Before the next state
    is taken, each worker waits until its last one was written and its rows were reported to the driver. So all workers
    have the older one of the two states that a memory holds.
    """

    def __init__(self, keeping: _Keeping, contents: FitContents, cut: Cut, *, by_steps: bool) -> None:
        self._keeping, self._contents, self._cut, self._by_steps = keeping, contents, cut, by_steps
        cut.count_from_here()
        self._schedule = SaveSchedule(keeping.workers)
        self._writer = ThreadPoolExecutor(1, "tfos_nb state")
        self._writing: Future[float] | None = None
        self._totals: Totals | None = None
        self._any = AnyWorker(contents.strategy)
        self._variables: list[Any] = []
        self._optimizers: list[str] = []  # those that were built then
        self._cost = 0.0  # seconds that the last state took
        self._steps = 0  # of all epochs
        self._busy = self._began = 0.0  # seconds of the steps since the last state
        self._since = 0  # that one's step
        self._epoch = self._first = 0
        self._lowest: int | None = None  # the number of the first step that this epoch has had here

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch, or continue it after its step ``first``."""
        self._epoch, self._first, self._lowest = epoch, first, None

    def step_begins(self, batch: int) -> None:
        """Note the time, and the number of the epoch's first step."""
        self._began = time.perf_counter()
        self._lowest = batch if self._lowest is None else self._lowest

    def step_has_ended(self, batch: int) -> None:
        """Save, if it is due; ``batch`` is the number of the epoch's last step, counted from 0."""
        self._busy += time.perf_counter() - self._began
        self._steps += 1
        due, look = self._schedule.is_due(self._steps), self._schedule.is_look_due(self._steps)
        if not (due or look) or getattr(self._contents.model, "stop_training", False):
            return
        if due or self._is_wanted():
            self._save(batch + 1 - (self._lowest or 0))

    def _is_wanted(self) -> bool:
        """Whether the driver has asked any worker for a state; all workers look after the same steps."""
        self._schedule.looked(self._steps)
        return self._any.says(self._keeping.request.asked)

    def _position(self, name: str, passes: int, steps: int) -> PositionHeld | None:
        """Return which rows of a pass are in the state of this name, after so many passes and steps of the epoch.

        None if that cannot be said: the steps may be the pass's last ones, or the next pass is read ahead already.
        """
        (record, before), division = self._cut.place, self._cut.division
        replicas = division.replicas if division is not None else 1
        if self._by_steps:
            steps = self._steps - before // replicas
        if record is None or record is not self._keeping.queue.record or steps < 1:
            return None
        rows = record.rows_after(steps * replicas)
        is_amid = steps < record.steps if record.steps is not None else division is not None or record.has_more
        try:
            return (
                self._keeping.queue.position(name, self._keeping.queue.passes_before_current, rows) if is_amid else None
            )
        except ValueError as error:  # another pass has begun
            _log.debug("no state is saved: %s", error)
            return None

    def _save(self, steps: int) -> None:
        """Save the state after so many steps of this epoch, if all workers know its position and are in one pass."""
        began = time.perf_counter()
        self.await_writer()
        contents, keeping = self._contents, self._keeping
        moment = StateVersion(self._epoch, keeping.generation, self._first + steps)
        passes = keeping.queue.passes_before_current
        position = self._position(moment.name, passes, steps)
        if self._totals is None or self._optimizers != contents.built_optimizers():
            self._optimizers = contents.built_optimizers()
            self._variables = contents.variables()
            self._totals = Totals(contents.strategy, contents.metrics())
        mine = [self._busy, self._cost, float(keeping.request.asked), float(position is None), passes, passes**2]
        counted, (busy, cost, asked, lacking, mean, of_squares) = self._totals.read(mine)
        if position is None or lacking > 0 or of_squares - mean**2 > _ROUNDING:
            self._schedule.postponed(self._steps)
            return
        self._schedule.saved(self._steps, per_step=busy / (self._steps - self._since), cost=cost)
        self._since, self._busy = self._steps, 0.0
        arrays = [*contents.own(self._variables), *counted]
        rest = encode(contents.rest(arrays, len(self._variables)))
        position = replace(position, waits=asked > 0)  # on any worker
        self._writing = self._writer.submit(self._write, moment, passes, arrays, rest, position)
        self._cost = time.perf_counter() - began
        if position.waits:
            self.await_writer()
            keeping.request.pause()

    def _write(
        self, moment: StateVersion, passes: int, arrays: list[Any], rest: bytes, position: PositionHeld
    ) -> float:
        """Write a state, and report it to the driver; return the seconds of one of the processors that it took."""
        began, keeping = time.perf_counter(), self._keeping
        stored = keeping.store_if_due(moment, passes, arrays, rest, waits=position.waits)
        if keeping.keep(moment, passes, arrays, rest) or stored:
            keeping.queue.tell_held(replace(position, stored=stored))
        return (time.perf_counter() - began) / (os.cpu_count() or 1)

    def await_writer(self) -> None:
        """Wait until the last state was written, as before the next one, and before that of a whole epoch."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._cost += writing.result()


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
