"""Which entries of a sparse gradient all replicas share, and how these entries are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfos_nb.runtime.keras.replicas import sparse_gradients
from tfos_nb.runtime.keras.replicas.sparse_gradients import sum_gradients


def kinds(make: Callable[[Any], Any]) -> list[str]:
    """Return the kind of each part of the gradient of a table that is read at these indices."""
    table, found = tf.Variable(tf.ones((9, 2))), []

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int64)])
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            taken = make(batch)
            loss = sum(tf.reduce_sum(tf.gather(table, one)) for one in (taken if isinstance(taken, list) else [taken]))
        gradient = tape.gradient(loss, table)
        found.extend(part.kind for part in sparse_gradients._parts(gradient))
        return gradient.values

    step.get_concrete_function()
    return found


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda batch: batch, ["rows"]),
        (lambda batch: batch[:, :3] % 2 + 1, ["rows"]),
        (lambda batch: tf.constant([0, 1, 2]), ["same"]),
        (lambda batch: tf.range(4), ["same"]),
        (lambda batch: tf.range(tf.shape(batch)[1]), ["unique"]),
        (lambda batch: tf.range(tf.shape(batch)[0]), ["rows"]),
        (lambda batch: tf.zeros_like(batch), ["rows"]),
        (lambda batch: tf.random.uniform((3,), 0, 9, "int64"), ["rows"]),
        (lambda batch: [batch, tf.range(4, dtype="int64")], ["rows", "same"]),
    ],
    ids=["tokens", "made of tokens", "numbers", "positions", "later", "a place a row", "alike", "at random", "both"],
)
def test_entries_are_shared_if_their_indices_do_not_depend_on_the_rows(
    make: Callable[[Any], Any], kind: list[str]
) -> None:
    assert sorted(kinds(make)) == kind


def test_entries_of_positions_are_summed_and_those_of_tokens_concatenated() -> None:
    def of_two_replicas(values: list[Any]) -> list[Any]:
        def twice(one: Any) -> Any:
            if not isinstance(one, tf.IndexedSlices):
                return 2 * one
            both = tf.concat([one.values, one.values], 0), tf.concat([one.indices, one.indices], 0)
            return tf.IndexedSlices(*both, one.dense_shape)

        return [twice(one) for one in values]

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int64)])
    def step(batch: Any) -> Any:
        places = batch, tf.range(2), tf.range(tf.shape(batch)[1])
        given = [tf.IndexedSlices(tf.ones((tf.size(at), 1)), tf.reshape(at, [-1]), (9, 1)) for at in places]
        whole = sum_gradients(of_two_replicas, [*given, tf.ones(2)])
        return [(one.indices, one.values) for one in whole[:3]], whole[3]

    sparse, dense = step(np.array([[5, 5, 7]]))
    found = [(indices.numpy().tolist(), values.numpy()[:, 0].tolist()) for indices, values in sparse]
    assert found == [([5, 5, 7, 5, 5, 7], [1.0] * 6), ([0, 1], [2.0, 2.0]), ([0, 1, 2], [2.0, 2.0, 2.0])]
    assert dense.numpy().tolist() == [2.0, 2.0]
