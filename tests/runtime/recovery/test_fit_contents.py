"""The values of a state: they stay as they were, whatever trains on while they are written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tfos_nb.runtime.control.wire import decode, encode
from tfos_nb.runtime.recovery.fit_contents import FitContents


def trained(kind: str) -> Any:
    """Return a model with a table and dense weights that has trained for one step."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(1000, 64),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        loss="mse", optimizer=keras.optimizers.Adam(0.1), jit_compile=kind == "jit", run_eagerly=kind == "eager"
    )
    model.fit(*rows(), batch_size=4, verbose=0)
    return model


def rows() -> tuple[Any, Any]:
    return np.arange(16).reshape(8, 2), np.arange(8.0).reshape(8, 1)


@pytest.mark.parametrize("kind", ["graph", "eager", "jit"])
def test_values_that_were_taken_do_not_change_with_later_steps(kind: str) -> None:
    model = trained(kind)
    contents = FitContents(model, [])
    variables = contents.variables()
    taken = contents.own(variables)
    before = [np.array(one) for one in taken]
    model.fit(*rows(), batch_size=4, epochs=3, verbose=0)
    assert len(taken) == 1 + 3 + 1 + 2 * 3, "the table, the layer's two, Adam's two numbers and its slots of the three"
    assert all(np.array_equal(one, copy) for one, copy in zip(taken, before, strict=True))
    now = contents.own(variables)
    changed = [not np.array_equal(one, copy) for one, copy in zip(now, before, strict=True)]
    assert sum(changed) >= 10, "the steps have changed all but the learning rate"
    assert not any(one.flags.writeable for one in now)


@pytest.fixture
def no_global_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.ops import stateful_random_ops

    monkeypatch.setattr(stateful_random_ops, "global_generator", None)


@pytest.mark.usefixtures("no_global_generator")
@pytest.mark.parametrize("is_made_again", [False, True])
def test_random_numbers_go_on_where_the_state_was_saved(is_made_again: bool) -> None:
    import keras
    import tensorflow as tf
    from tensorflow.python.ops import stateful_random_ops

    contents = FitContents(keras.Sequential(), [])
    assert contents.rest([], 0).generator == (), "it is not made for a program that does not use it"
    tf.random.set_global_generator(tf.random.Generator.from_seed(7))
    tf.random.get_global_generator().normal([3])
    saved = decode(encode(contents.rest([], 0)))
    wanted = [random.random(), float(np.random.random()), tf.random.get_global_generator().normal([2]).numpy().tolist()]
    stateful_random_ops.global_generator = tf.random.Generator.from_seed(1) if is_made_again else None
    FitContents(keras.Sequential(), []).restore(saved)
    found = [random.random(), float(np.random.random()), tf.random.get_global_generator().normal([2]).numpy().tolist()]
    assert found == wanted
