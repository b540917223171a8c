"""Find functions that compare the rows of a batch, by their graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfos_nb.runtime.keras.replicas.comparisons import compares_rows
from tfos_nb.runtime.keras.replicas.replica import Replica
from tfos_nb.runtime.keras.replicas.rows_needed import RowsNeeded, can_gather, rows_needed

ops, C, M = keras.ops, keras.losses, keras.metrics
Function = Callable[[Any, Any], Any]

HOT = ((None, 3), (None, 3))
CLASS = ((None,), (None, 3))
ONE = ((None, 1), (None, 1))
WORDS = ((None, 6), (None, 6, 9))
IMAGES = ((None, 16, 16, 3), (None, 16, 16, 3))


def _compares(function: Function, shapes: tuple[Any, Any], label: str = "float32") -> bool:
    traced = []
    for count in (61, 67):
        with FuncGraph("rows").as_default():
            pairs = zip((label, "float32"), shapes, strict=True)
            given = [tf.compat.v1.placeholder(kind, (count, *shape[1:])) for kind, shape in pairs]
            traced.append((given, function(*given)))
    (given, made), (_, of_more) = traced
    return compares_rows(given, made, of_more)


def _masked_words(y: Any, p: Any) -> Any:
    mask = tf.cast(y != 0, tf.float32)
    losses = C.sparse_categorical_crossentropy(y, p) * mask
    return tf.reduce_sum(losses, axis=-1) / tf.maximum(tf.reduce_sum(mask, axis=-1), 1.0)


def _weighted_classes(y: Any, p: Any) -> Any:
    weights = tf.gather(tf.constant([1.0, 2.0, 3.0]), tf.cast(y, tf.int32))
    return weights * C.sparse_categorical_crossentropy(y, p)


def _of_class(y: Any, p: Any) -> Any:
    return -tf.math.log(tf.gather(p, tf.cast(y, tf.int32), batch_dims=1))


def _gaussian(y: Any, p: Any) -> Any:
    mean, scale = tf.split(p[..., :2], 2, axis=-1)
    return tf.squeeze(tf.square(y[:, :1] - mean) / tf.nn.softplus(scale) + tf.math.log(tf.nn.softplus(scale)), -1)


def _edges(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.abs(tf.image.sobel_edges(y) - tf.image.sobel_edges(p)), axis=[1, 2, 3, 4])


def _flattened(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(ops.reshape(y, (ops.shape(y)[0], -1)) - ops.reshape(p, (ops.shape(p)[0], -1))), axis=1)


def _pinball(y: Any, p: Any) -> Any:
    return ops.mean(ops.maximum(ops.array([0.1, 0.5, 0.9]) * (y - p), ops.array([-0.9, -0.5, -0.1]) * (y - p)), axis=1)


def _stacked(y: Any, p: Any) -> Any:
    return ops.squeeze(ops.matmul(y[:, None], p[:, :, None]), (1, 2)) + ops.matmul(y, ops.ones((3, 1)))[:, 0]


def _mahalanobis(y: Any, p: Any) -> Any:
    return tf.einsum("ni,ij,nj->n", y - p, tf.eye(3), y - p) + tf.reduce_sum(tf.matmul(y - p, tf.eye(3)), -1)


BY_ROW: list[tuple[Any, tuple[Any, Any], str]] = [
    *((getattr(C, name), HOT, "float32") for name in (
        "mean_squared_error", "mean_absolute_error", "huber", "log_cosh", "poisson", "kl_divergence",
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_hinge",
        "categorical_crossentropy", "categorical_focal_crossentropy", "cosine_similarity",
        "mean_absolute_percentage_error", "mean_squared_logarithmic_error",
    )),
    (lambda y, p: C.categorical_crossentropy(y, p, from_logits=True, label_smoothing=0.1), HOT, "float32"),
    (lambda y, p: C.binary_crossentropy(y, p, from_logits=True), ONE, "float32"),
    (C.sparse_categorical_crossentropy, CLASS, "int32"),
    (C.sparse_categorical_crossentropy, ((None, 1), (None, 3)), "int32"),
    (C.sparse_categorical_crossentropy, WORDS, "int32"),
    (lambda y, p: C.sparse_categorical_crossentropy(y, p, from_logits=True), WORDS, "int32"),
    (lambda y, p: C.sparse_categorical_crossentropy(y, p, from_logits=True), CLASS, "int32"),
    (lambda y, p: C.MeanSquaredError(reduction="none")(y, p), HOT, "float32"),
    (lambda y, p: C.Dice(axis=(1, 2, 3), reduction="none")(y, p), IMAGES, "float32"),
    *((getattr(M, name), HOT, "float32") for name in (
        "binary_accuracy", "categorical_accuracy", "top_k_categorical_accuracy",
    )),
    (M.sparse_categorical_accuracy, CLASS, "int32"),
    (M.sparse_top_k_categorical_accuracy, ((None,), (None, 9)), "int32"),
    *((one, HOT, "float32") for one in (_pinball, _mahalanobis, _stacked, _gaussian)),
    *((one, CLASS, "int32") for one in (_weighted_classes, _of_class)),
    *((one, IMAGES, "float32") for one in (_edges, _flattened)),
    (lambda y, p: tf.image.ssim(y, p, 1.0), IMAGES, "float32"),
    (_masked_words, WORDS, "int32"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shapes", "label"), BY_ROW)
def test_functions_of_single_rows_are_recognized(function: Any, shapes: Any, label: str) -> None:
    assert not _compares(function, shapes, label)


def _contrastive(y: Any, p: Any) -> Any:
    p = ops.normalize(p, axis=-1)
    return C.sparse_categorical_crossentropy(
        ops.arange(ops.shape(p)[0]), ops.matmul(p, ops.transpose(p)), from_logits=True
    )


def _distances(p: Any) -> Any:
    return ops.sum(ops.square(p[:, None] - p[None]), -1)


def _centered(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(p - ops.mean(p, axis=0)), axis=-1)


OF_BATCH: list[Function] = [
    _contrastive,
    _centered,
    lambda y, p: ops.max(_distances(p), axis=1),
    lambda y, p: ops.square(p[:, 0] - p[::-1, 0]),
    lambda y, p: ops.square(p[:, 0] - ops.roll(p[:, 0], 1, axis=0)),
    lambda y, p: ops.square(p[1:, 0] - p[:-1, 0]),
    lambda y, p: ops.cumsum(p[:, 0]),
    lambda y, p: ops.sort(p[:, 0]),
    lambda y, p: ops.softmax(p, axis=0)[:, 0],
    lambda y, p: ops.sum(p, 1) / ops.cast(ops.shape(p)[0], "float32"),
    lambda y, p: ops.take(p[:, 0], ops.argmin(_distances(p), 1)),
    lambda y, p: ops.mean(y[:, 0] - p[:, :1], axis=-1),
    lambda y, p: ops.sum(ops.reshape(ops.transpose(p), (-1, 3)), 1),
    lambda y, p: ops.sum(ops.reshape(p, (3, -1)), 0),
    lambda y, p: tf.einsum("ni,mi->n", y, p),
    lambda y, p: ops.sum(ops.matmul(p, ops.matmul(ops.transpose(y), y)), axis=1),
    lambda y, p: ops.matmul(y, ops.transpose(p))[:, 0],
    lambda y, p: tf.map_fn(lambda row: tf.reduce_sum(row), p),
    lambda y, p: tf.boolean_mask(p[:, 0], y[:, 0] > 0),
    lambda y, p: ops.sum(p, 1) + tf.random.uniform(tf.shape(p)[:1]),
]


@pytest.mark.parametrize("function", OF_BATCH)
def test_functions_that_compare_rows_are_recognized(function: Function) -> None:
    assert _compares(function, HOT)


def _reads(y: Any, p: Any) -> Any:
    return ops.sum(p, axis=1) * float(tf.reduce_max(y).numpy())


@pytest.mark.parametrize(
    ("function", "labels", "compiled", "todo"),
    [
        (_reads, tf.ones((2, 3)), False, "dense tensors"),
        (_contrastive, tf.constant([["one"], ["two"]]), False, "dense tensors"),
        (_centered, tf.ones((2, 3)), True, "jit_compile=False"),
    ],
)
def test_the_log_says_once_that_a_function_gets_only_a_workers_own_rows(
    function: Function, labels: Any, compiled: bool, todo: str, caplog: pytest.LogCaptureFixture
) -> None:
    loss = C.MeanSquaredError(name="mine")
    here = Replica(tf.ones([]), None, compiled=compiled)
    for _ in range(2):
        needs = rows_needed(loss, False, function, (labels, tf.ones((2, 3))))
        assert not can_gather(here, loss, needs)
    (said,) = caplog.messages
    assert said.startswith("'mine' ")
    assert todo in said


def test_the_check_changes_no_variable() -> None:
    state = keras.Variable(1.0)

    def queue(y: Any, p: Any) -> Any:
        state.assign(state + ops.max(p))
        return ops.sum(p, axis=1) / state

    needs = rows_needed(C.MeanSquaredError(), False, queue, (tf.ones((2, 3)), tf.ones((2, 3))))
    assert needs == RowsNeeded.ROWS
    assert float(state) == 1.0
