"""Keep the state of a training loop in memory, within an epoch: ``ctx.checkpoint(…, step=, in_memory=True)``.

The memory is one like that of ``fit``'s states (recovery.memory_state), and so are the rounds in which all workers save
(recovery.state_rounds). The states are numbered together with those that ``ctx.checkpoint`` writes to the disk, so that
of two of them the later one is known.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.recovery.fit_agreement import Agreed, agree
from tfos_nb.runtime.recovery.fit_contents import (
    StateMetadata,
    assign_totals,
    assign_values,
    build_optimizer,
    is_named,
    is_read_over_replicas,
    of_tensorflow,
    own_value,
    places_of_trained,
    random_states,
    restore_random,
    shapes_of,
)
from tfos_nb.runtime.recovery.memory_state import LastState, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.state_rounds import Snapshot, StateRounds

__all__ = ["LoopStates", "name_in_memory"]

_log = logging.getLogger(__name__)


_FOLDER = "loop/"  # of their names


def name_in_memory(moment: StateVersion) -> str:
    """Return the name of a state in memory among nodes and driver; its ``step`` is a number of states."""
    return f"{_FOLDER}{moment.directory}"


class LoopStates:
    """The states of a loop in this node's memory.

    Parameters
    ----------
    memory : LastState or None
        Where to keep them; None if nodes are not started again.
    rows : RowQueue
        The rows of this node.
    request : SaveRequest
        Says whether the driver wants a state.
    workers, generation : int
        How many nodes train, and how often they were started.
    held_states : collection of str
        Names of the states of which all nodes have said which rows they include.
    """

    def __init__(
        self,
        memory: LastState | None,
        rows: RowQueue,
        request: SaveRequest,
        *,
        workers: int,
        generation: int,
        held_states: Collection[str],
    ) -> None:
        self._memory, self._rows, self._request = memory, rows, request
        self._workers, self._generation = workers, generation
        known = (StateVersion.of(name.removeprefix(_FOLDER)) for name in held_states if name.startswith(_FOLDER))
        self._known = {moment for moment in known if moment.generation < generation}
        self._rounds: StateRounds | None = None
        self._summed: list[Any] | None = None  # metrics
        self._restorable: set[str] | None = None  # the variables that ctx.resume has seen
        self._epoch = -1  # of the last step; the time between two epochs is no step's

    def step_has_ended(
        self, objects: Mapping[str, Any], epoch: int, rows: int, moment: Callable[[int], StateVersion]
    ) -> None:
        """Save the state after a step, if that is due. All workers call it after the same steps.

        Parameters
        ----------
        objects : mapping of str to object
            What belongs to the state.
        epoch : int
            How many epochs it includes.
        rows : int
            How many of this node's rows of the next epoch it includes.
        moment : callable
            Returns when the next state of an epoch is saved, and counts it.

        Raises
        ------
        ValueError
            If the objects have state that is no variable, several workers do not train together, or epoch and rows do
            not fit the rows that came.
        """
        if self._rounds is None:
            variables = _Variables(objects)
            self._check_restorable(variables)
            self._rounds = StateRounds(self._checked(variables.strategy), self._request, self._workers, self._write)
        if epoch != self._epoch:
            self._epoch = epoch
            self._rounds.step_begins()
        if self._memory is not None and self._rounds.step_has_ended():
            self._save(self._rounds, objects, epoch, rows, moment(epoch))
        self._rounds.step_begins()

    def _check_restorable(self, variables: _Variables) -> None:
        """Refuse variables that the program has made since ``ctx.resume``: after a loss, it could not restore them."""
        made = (one for one in variables.names if not any(one.startswith(f"{at}/") for at in variables.optimizers))
        late = next((one for one in made if self._restorable is not None and one not in self._restorable), None)
        if late is not None:
            raise ValueError(
                f"in_memory=True: {late} was not among the objects given to ctx.resume, so it could not be restored "
                "after a loss. Give the same objects to both, and build the model before ctx.resume: call it once, or "
                "give it an Input"
            )

    def _checked(self, strategy: Any) -> Any:
        """Refuse variables that not all workers share."""
        import tensorflow as tf

        together = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        apart = isinstance(strategy, tf.distribute.ParameterServerStrategy)
        if together or (self._workers == 1 and not apart):
            return strategy
        raise ValueError(
            f"in_memory=True is for a single worker, or for workers that train together by ctx.strategy('sync'). "
            f"The objects of this one of {self._workers} have variables of a {type(strategy).__name__}, or none yet: "
            "make them under ctx.strategy('sync'), or call ctx.checkpoint without in_memory=True, every so many steps"
        )

    def _save(
        self, rounds: StateRounds, objects: Mapping[str, Any], epoch: int, rows: int, moment: StateVersion
    ) -> None:
        rounds.finish()
        began = time.perf_counter()
        variables = _Variables(objects)
        metrics = list(variables.metrics.values())
        if self._summed is None or list(map(id, metrics)) != list(map(id, self._summed)):
            self._summed = metrics
            rounds.sum_up(metrics)
        position = self._rows.position(name_in_memory(moment), epoch, rows)
        if rounds.save(Snapshot(moment, epoch, variables.own(), variables.rest(), position), began=began):
            self._request.pause()

    def _write(self, snapshot: Snapshot, arrays: list[Any], rest: bytes) -> bool:
        assert self._memory is not None, "it was looked at before"
        try:
            self._memory.put(snapshot.moment, snapshot.passes, arrays, rest)
        except OSError as error:
            _log.warning("a state of epoch %d could not be kept in memory: %s", snapshot.moment.epoch + 1, error)
            return False
        self._rows.tell_held(snapshot.position)
        return True

    def finish(self) -> None:
        """Wait until the last state was written, before one is written to the disk; that time is no step's."""
        self._epoch = -1
        if self._rounds is not None:
            self._rounds.finish()

    def restore(self, objects: Mapping[str, Any], after: StateVersion | None) -> StateVersion | None:
        """Restore the latest state of any worker's memory, if one is later than ``after``; return when it was saved.

        All workers call it. Those that have no such state are sent it. Whether there is any is known from the driver,
        so all of them wait for each other, or none does.

        Raises
        ------
        TfosError
            If it is a state of other objects, and there is none to restore after which it was saved.
        ValueError
            If these cannot be kept in memory.
        """
        if self._memory is None:
            return None
        with contextlib.suppress(ValueError):  # they are for the disk alone
            self._restorable = set(_Variables(objects).names)
        agreed = self._agreed(objects, after) if self._known else None
        self._memory.drop_after(agreed.moment if agreed is not None else after or StateVersion(0))
        return agreed.moment if agreed is not None else None

    def _agreed(self, objects: Mapping[str, Any], after: StateVersion | None) -> Agreed | None:
        assert self._memory is not None, "it was looked at before"
        own = self._memory.newest(lambda moment: moment in self._known and (after is None or moment > after))
        try:
            variables = _Variables(objects)
            agreed = agree(self._checked(variables.strategy), own)
            if agreed is None or (after is not None and agreed.moment <= after):
                return None  # the driver compares what the nodes restore
            _assign(variables, objects, agreed)
        except (TfosError, ValueError) as error:
            if after is None:
                raise
            _log.warning("%s. Training continues from the state on the disk", error)
            return None
        return agreed


class _Variables:
    """The variables of objects, by where they are: those that all replicas share, and the metrics of each replica."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        import tensorflow as tf

        found, self.optimizers = _walked(tf.train.Checkpoint(**objects))
        self.sources = found  # as Keras has them
        tensors = {place: of_tensorflow(one) for place, one in found.items()}
        self.metrics = {place: one for place, one in tensors.items() if is_read_over_replicas(one)}
        self.shared = {place: one for place, one in tensors.items() if place not in self.metrics}
        strategies = (getattr(one, "distribute_strategy", None) for one in tensors.values())
        self.strategy = next((one for one in strategies if one is not None), None) or tf.distribute.get_strategy()

    @property
    def names(self) -> list[str]:
        """Where they are: first the shared ones."""
        return [*self.shared, *self.metrics]

    def own(self) -> list[Any]:
        """Return this worker's values of the shared ones."""
        return [own_value(self.strategy, one) for one in self.shared.values()]

    def rest(self) -> StateMetadata:
        """Return what belongs to a state beside its arrays."""
        trained = places_of_trained(self.optimizers, [self.sources[name] for name in self.names])
        return StateMetadata(len(self.shared), trained, names=self.names, **random_states(self.strategy))


def _assign(variables: _Variables, objects: Mapping[str, Any], agreed: Agreed) -> None:
    """Give the variables a state's values."""
    rest, sources = agreed.rest, variables.sources
    for name, places in rest.optimizers.items():
        trained = [sources[rest.names[place]] for place in places if rest.names[place] in sources]
        if name in variables.optimizers and trained:
            build_optimizer(variables.strategy, variables.optimizers[name], trained)
    variables = _Variables(objects)
    if differing := sorted(set(variables.names) ^ set(rest.names)):
        where = "objects given to ctx.resume" if differing[0] in variables.names else "state in memory"
        raise TfosError(
            f"the state in memory does not match the objects given to ctx.resume: only the {where} has {differing[0]}. "
            "Build the same objects as the program that saved it, with their variables, before ctx.resume"
        )
    order = {name: place for place, name in enumerate(rest.names)}
    arrays = [agreed.arrays[order[name]] for name in variables.names]
    tensors = [*variables.shared.values(), *variables.metrics.values()]
    for name, array, shape in zip(variables.names, arrays, shapes_of(tensors), strict=True):
        if [array.dtype.name, list(array.shape)] != shape:
            raise TfosError(
                f"the state in memory does not match the objects given to ctx.resume: {name} has the type and shape "
                f"{shape}, and {[array.dtype.name, list(array.shape)]} in the state. Build the same objects as the "
                "program that saved it"
            )
    shared = len(variables.shared)
    assign_values(variables.strategy, tensors[:shared], arrays[:shared])
    assign_totals(variables.strategy, tensors[shared:], arrays[shared:])
    restore_random(variables.strategy, rest)


def _walked(root: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables and the optimizers below an object that TensorFlow tracks, by where they are.

    Optimizers come last, as they refer to the variables that they train, and do so once they are built.

    Raises
    ------
    ValueError
        If an object has state that is no variable, or a variable has no numbers.
    """
    import tensorflow as tf
    from tensorflow.python.training.saving import saveable_object_util

    view, seen = tf.train.TrackableView(root), {id(root)}
    now, later = deque([("", root)]), deque[tuple[str, Any]]()
    variables: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    while now or later:
        place, one = (now or later).popleft()
        for name, child in view.children(one).items():
            if id(child) in seen:
                continue
            seen.add(id(child))
            where = f"{place}/{name}" if place else name
            if isinstance(variable := of_tensorflow(child), tf.Variable):
                if variable.dtype in (tf.string, tf.resource, tf.variant):
                    raise ValueError(
                        f"in_memory=True keeps numbers, and {where} is a variable of {variable.dtype.name}"
                    )
                variables[where] = child
            elif saveable_object_util.trackable_has_serialize_to_tensor(child):
                raise ValueError(
                    f"in_memory=True keeps variables, and {where} is a {type(child).__name__}, which has other state: "
                    "leave it out, or call ctx.checkpoint without in_memory=True, every so many steps"
                )
            elif is_named(child, "Optimizer", "BaseOptimizer"):
                optimizers[where] = child
                later.append((where, child))
            else:
                now.append((where, child))
    return variables, optimizers
