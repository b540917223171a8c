"""States of a loop in memory: what belongs to them, and what is restored from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfos_nb.errors import TfosError
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.recovery.loop_states import LoopStates, name_in_memory
from tfos_nb.runtime.recovery.memory_state import LastState, StateMemory, StateVersion
from tfos_nb.runtime.recovery.save_request import SaveRequest


class Node:
    """A node of a cluster with one worker, whose rows know any position."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory
        self.held: list[str] = []

    def states(self, generation: int = 1, workers: int = 1) -> LoopStates:
        rows: Any = SimpleNamespace(
            position=lambda name, epoch, rows: PositionHeld("worker:0", 1, name, {0: rows}),
            tell_held=lambda position: self.held.append(position.state),
        )
        given = {"workers": workers, "generation": generation, "held_states": tuple(self.held)}
        return LoopStates(LastState(self._memory.places), rows, SaveRequest(), **given)

    def save(self, objects: dict[str, Any], step: int, states: LoopStates | None = None) -> None:
        """Save after the second step, which is the first one after which a state is due."""
        states = states or self.states()
        for _ in range(2):
            states.step_has_ended(objects, 3, step, lambda epoch: StateVersion(epoch, 1, step))
        states.finish()


@pytest.fixture
def node() -> Iterator[Node]:
    memory = StateMemory()
    yield Node(memory)
    memory.close()


def trained(steps: int, units: int = 3) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer after so many steps, and a generator of random numbers."""
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant([[1.0, 2.0], [3.0, 5.0]]), training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model, optimizer, tf.random.Generator.from_seed(steps)


def objects_of(model: Any, optimizer: Any, generator: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "generator": generator, "model": model}


def values(model: Any, optimizer: Any, generator: Any) -> list[Any]:
    return [*model.get_weights(), *(np.asarray(one) for one in optimizer.variables), generator.state.numpy()]


def test_the_next_generation_has_all_variables_also_those_that_the_first_step_makes(node: Node) -> None:
    first, second = trained(4), trained(0)
    node.save(objects_of(*first), 40)
    assert not second[1].built
    restored = node.states(2).restore(objects_of(*second), None)
    assert restored == StateVersion(3, 1, 40)
    for got, wanted in zip(values(*second), values(*first), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_only_a_state_counts_that_is_known_and_later_than_that_on_the_disk(node: Node) -> None:
    objects = objects_of(*trained(1))
    node.save(objects, 40)
    assert node.states(2).restore(objects, StateVersion(3, 1, 39)) == StateVersion(3, 1, 40)
    assert node.states(1).restore(objects, None) is None, "it is of this generation"
    node.save(objects, 40)
    assert node.states(2).restore(objects, StateVersion(4)) is None
    for name in ("fit/00000003-0001-00000040", "00000003-0001-00000040"):
        node.held = [name]
        assert node.states(2).restore(objects, None) is None, "it is of a fit, or on the disk"
    node.held = [name_in_memory(StateVersion(3, 1, 40))]
    assert node.states(2).restore(objects, None) is None, "it was dropped as training went on from an earlier one"


def test_another_program_cannot_restore_the_state(node: Node) -> None:
    import tensorflow as tf

    node.save(objects_of(*trained(2)), 40)
    model, optimizer, generator = trained(0, units=4)
    with pytest.raises(TfosError, match=r"model/\S+ has the type and shape .*\[2, 4\].* and .*\[2, 3\].* in the state"):
        node.states(2).restore(objects_of(model, optimizer, generator), None)
    model, optimizer, generator = trained(0)
    more = objects_of(model, optimizer, generator) | {"extra": tf.Variable(0)}
    with pytest.raises(TfosError, match=r"only the objects given to ctx\.resume has extra\. Build the same objects"):
        node.states(2).restore(more, None)
    with pytest.raises(TfosError, match=r"only the state in memory has generator/_state_var"):
        node.states(2).restore({"model": model, "optimizer": optimizer}, None)


def test_what_cannot_be_kept_in_memory_is_refused_at_once(node: Node) -> None:
    import tensorflow as tf

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    for objects, said in (
        ({"table": table}, "table is a MutableHashTable, which has other state: leave it out"),
        ({"text": tf.Variable("a")}, "in_memory=True keeps numbers, and text is a variable of string"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            node.save(objects, 1)
    said = r"this one of 2 have variables of a \w*Strategy\w*, or none yet: make them under ctx\.strategy\('sync'\)"
    with pytest.raises(ValueError, match=said):
        node.save({"count": tf.Variable(0)}, 1, node.states(workers=2))


def test_objects_that_the_disk_alone_can_keep_are_restored_from_there(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    import tensorflow as tf

    node.save({"count": tf.Variable(1)}, 40)
    table = {"table": tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)}
    assert node.states(2).restore(table, StateVersion(3)) is None
    assert "Training continues from the state on the disk" in caplog.text
    with pytest.raises(ValueError, match="table is a MutableHashTable"):
        node.states(2).restore(table, None)
    node.held = ["00000003-0001-00000040"]
    assert node.states(2).restore(table, None) is None, "no state in memory is known"


def test_a_variable_that_ctx_resume_has_not_seen_is_refused_before_a_loss(node: Node) -> None:
    import tensorflow as tf

    model, optimizer, _ = trained(0)
    states = node.states()
    assert states.restore({"model": model, "optimizer": optimizer}, None) is None
    optimizer.build(model.trainable_variables)
    node.save({"model": model, "optimizer": optimizer}, 1, states)
    assert len(node.held) == 1, "what the optimizer makes with the first step can be restored"
    with pytest.raises(ValueError, match="late was not among the objects given to ctx.resume"):
        other = node.states()
        other.restore({"model": model}, None)
        node.save({"model": model, "late": tf.Variable(0)}, 1, other)


def test_without_restarts_nothing_is_kept_but_objects_are_looked_at() -> None:
    import tensorflow as tf

    given: dict[str, Any] = {"workers": 1, "generation": 1, "held_states": ()}
    states = LoopStates(None, SimpleNamespace(), SaveRequest(), **given)
    states.step_has_ended({"count": tf.Variable(0)}, 0, 1, lambda epoch: StateVersion(epoch, 1, 1))
    assert states.restore({}, None) is None
    states = LoopStates(None, SimpleNamespace(), SaveRequest(), **given)
    with pytest.raises(ValueError, match="text is a variable of string"):
        states.step_has_ended({"text": tf.Variable("a")}, 0, 1, lambda epoch: StateVersion(epoch, 1, 1))
