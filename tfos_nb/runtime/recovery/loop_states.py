"""Keep the state of a training loop in memory, within an epoch: ``ctx.checkpoint(…, step=, in_memory=True)``.

The memory is one like that of ``fit``'s states (recovery.memory_state), and so are the rounds in which all workers save
(recovery.state_rounds). The states are numbered together with those that ``ctx.checkpoint`` writes to the disk, so that
of two of them the later one is known.
"""

from __future__ import annotations

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
    random_states,
    restore_random,
    shapes_of,
)
from tfos_nb.runtime.recovery.memory_state import LastState, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.state_rounds import Snapshot, StateRounds

__all__ = ["LoopStates", "moment_of", "name_of"]

_log = logging.getLogger(__name__)


def name_of(moment: StateVersion) -> str:
    """Return the name of a state of a loop, on the disk and for the driver; its ``step`` is a number of states.

    Examples
    --------
    >>> name_of(StateVersion(2)), name_of(StateVersion(2, 1, 40)), moment_of("00000002-0001-00000040").step
    ('00000002', '00000002-0001-00000040', 40)
    """
    within = f"-{moment.generation:04d}-{moment.step:08d}" if moment.step else ""
    return f"{moment.epoch:08d}{within}"


def moment_of(name: str) -> StateVersion:
    """Return when a state of this name was saved."""
    return StateVersion(*map(int, name.split("-")))


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
        self._held_states = frozenset(held_states)
        self._rounds: StateRounds | None = None
        self._summed: list[Any] = []  # metrics

    def step_has_ended(
        self, objects: Mapping[str, Any], epoch: int, rows: Callable[[], int], moment: Callable[[int], StateVersion]
    ) -> None:
        """Save the state after a step, if that is due. All workers call it after the same steps.

        Parameters
        ----------
        objects : mapping of str to object
            What belongs to the state.
        epoch : int
            How many epochs it includes.
        rows : callable
            Returns how many of this node's rows of the next epoch it includes.
        moment : callable
            Returns when the next state of an epoch is saved, and counts it.

        Raises
        ------
        ValueError
            If the objects have state that is no variable, several workers do not train together, or epoch and rows do
            not fit the rows that came.
        """
        if self._memory is None:
            return
        if self._rounds is None:
            strategy = self._checked(_Variables(objects).strategy)
            self._rounds = StateRounds(strategy, self._request, self._workers, self._write)
            self._rounds.step_begins()
        if self._rounds.step_has_ended():
            self._save(self._rounds, objects, epoch, rows(), moment(epoch))
        self._rounds.step_begins()

    def _checked(self, strategy: Any) -> Any:
        import tensorflow as tf

        if self._workers > 1 and not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                f"in_memory=True is for a single worker, or for workers that train together by ctx.strategy('sync'). "
                f"These {self._workers} have variables of a {type(strategy).__name__}: call ctx.checkpoint without it, "
                "every so many steps"
            )
        return strategy

    def _save(
        self, rounds: StateRounds, objects: Mapping[str, Any], epoch: int, rows: int, moment: StateVersion
    ) -> None:
        rounds.finish()
        began = time.perf_counter()
        variables = _Variables(objects)
        metrics = list(variables.metrics.values())
        if not rounds.can_save or list(map(id, metrics)) != list(map(id, self._summed)):
            self._summed = metrics
            rounds.sum_up(metrics)
        position = self._rows.position(name_of(moment), epoch, rows)
        answer = rounds.save(Snapshot(moment, epoch, variables.own(), variables.rest(), position), epoch, began=began)
        if answer is not None and answer.is_saved and answer.asked:
            self._request.pause()

    def _write(self, snapshot: Snapshot, arrays: list[Any], rest: bytes) -> None:
        assert self._memory is not None, "it was looked at before"
        try:
            self._memory.put(snapshot.moment, snapshot.passes, arrays, rest)
        except OSError as error:
            _log.warning("a state of epoch %d could not be kept in memory: %s", snapshot.moment.epoch + 1, error)
        else:
            self._rows.tell_held(snapshot.position)

    def finish(self) -> None:
        """Wait until the last state was written."""
        if self._rounds is not None:
            self._rounds.finish()

    def restore(self, objects: Mapping[str, Any], after: StateVersion | None) -> StateVersion | None:
        """Restore the latest state of any worker's memory, if one is later than ``after``; return when it was saved.

        All workers call it. Those that have no such state are sent it.

        Raises
        ------
        TfosError
            If it is a state of other objects.
        """
        if self._memory is None:
            return None
        known = [moment_of(name) for name in self._held_states if "/" not in name]  # those of a fit have one
        usable = {one for one in known if one.generation < self._generation and (after is None or one > after)}
        agreed = None
        if usable:
            variables = _Variables(objects)
            agreed = agree(variables.strategy, self._memory.newest(usable.__contains__))
            if agreed is not None:
                _assign(variables, objects, agreed)
        self._memory.drop_after(agreed.moment if agreed is not None else after or StateVersion(0))
        return agreed.moment if agreed is not None else None


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
        places = {id(one): place for place, one in enumerate(self.sources[name] for name in self.names)}
        optimizers = {
            name: [places[id(one)] for one in getattr(optimizer, "_trainable_variables", ()) if id(one) in places]
            for name, optimizer in self.optimizers.items()
            if getattr(optimizer, "built", True)
        }
        return StateMetadata(len(self.shared), optimizers, names=self.names, **random_states(self.strategy))


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
