"""Small models, one for each layer, optimizer, loss, metric and way to train of Keras' public API.

A case builds its model and says on which columns it trains. It is trained full-batch, on several workers and in one
process, so that neither the order nor the split of the rows matters. The results must be the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["Case", "all_cases", "rows"]

L, O, M, C = keras.layers, keras.optimizers, keras.metrics, keras.losses  # noqa: E741


@dataclass(frozen=True)
class Case:
    """A model, the columns that it trains on, and how ``fit`` is called.

    ``near`` is the tolerance; ``policy`` Keras' dtype policy.
    """

    name: str
    build: Callable[[], Any]
    x: Any = "x"
    y: Any = "y"
    sample_weight: str | None = None
    near: float = 1e-5
    policy: str = "float32"
    epochs: int = 3
    fit: dict[str, Any] = field(default_factory=dict)
    per_replica: bool = False  # only check that all workers get the same numbers, by design


def rows(count: int) -> dict[str, np.ndarray]:
    """Return the columns of ``count`` rows, which depend only on ``count``."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(count, 4)).astype("float32")
    sequence = rng.integers(1, 9, size=(count, 6))
    lengths = rng.integers(1, 6, size=count)  # rows of very different length, so that masks weigh unevenly
    sequence[np.arange(6)[None, :] >= lengths[:, None]] = 0
    classes = rng.integers(0, 3, size=count)
    return {
        "x": x,
        "y": (x @ np.array([1.0, -2.0, 0.5, 0.1]) + 0.3).astype("float32"),
        "pair": np.stack([x[:, 0] - x[:, 1], x[:, 2]], axis=1).astype("float32"),
        "cls": classes.astype("int32"),
        "hot": np.eye(3, dtype="float32")[classes],
        "bin": (binary := (rng.random(count) < 0.4).astype("float32")),
        "bins": binary[:, None],
        "count": rng.integers(0, 6, size=count).astype("float32"),
        "w": rng.uniform(0.1, 2.0, size=count).astype("float32"),
        "seq": sequence.astype("int32"),
        "next": np.roll(sequence, -1, axis=1).astype("int32"),
        "image": rng.normal(size=(count, 8, 8, 2)).astype("float32"),
        "video": rng.normal(size=(count, 4, 4, 4, 2)).astype("float32"),
        "spread": np.repeat(x[:, None, :], 6, axis=1).astype("float32"),
        "series": rng.normal(size=(count, 6, 3)).astype("float32"),
        "word": np.array([b"foo", b"bar", b"baz", b"qux"], dtype=object)[rng.integers(0, 4, size=count)],
    }


def seeded(seed: int = 1) -> Any:
    """Return an initializer that gives every process the same weights."""
    return keras.initializers.GlorotUniform(seed=seed)


def dense(units: int, seed: int = 1, **options: Any) -> Any:
    """Return a dense layer with the same weights in every process."""
    return L.Dense(units, kernel_initializer=seeded(seed), **options)


def compiled(inputs: Any, outputs: Any, loss: Any = "mse", optimizer: Any = None, **options: Any) -> Any:
    """Return a compiled functional model."""
    model = keras.Model(inputs, outputs)
    # With this rate, steps of two rows do not diverge. Otherwise the smallest difference would grow.
    model.compile(optimizer or O.SGD(0.01), loss, **options)
    # In one process Keras builds it within the first step, and ScheduleFreeAdamW then restarts with each step.
    model.optimizer.build(model.trainable_variables)
    return model


def plain(loss: Any = "mse", units: int = 1, activation: Any = None, **options: Any) -> Any:
    """Return a small regression or classification."""
    inputs = keras.Input((4,), name="x")
    hidden = dense(5, 2, activation="tanh")(inputs)
    return compiled(inputs, dense(units, 3, activation=activation)(hidden), loss, **options)


def _optimizers() -> list[Case]:
    made: dict[str, Callable[[], Any]] = {
        name: (lambda c=c: c(0.02))
        for name, c in vars(O).items()
        if inspect.isclass(c)
        and issubclass(c, O.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    }
    schedule = O.schedules
    made |= {
        "overridden apply": lambda: ClipsInApply(0.1),
        "overridden apply_gradients": lambda: ClipsInApplyGradients(0.05),
        "SGD momentum": lambda: O.SGD(0.02, momentum=0.9, nesterov=True),
        "clipnorm": lambda: O.SGD(0.05, clipnorm=0.1),
        "global_clipnorm": lambda: O.Adam(0.02, global_clipnorm=0.1),
        "clipvalue": lambda: O.SGD(0.05, clipvalue=0.05),
        "weight_decay": lambda: O.Adam(0.02, weight_decay=0.1),
        "use_ema": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.5),
        "ema_overwrite_frequency": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "gradient_accumulation": lambda: O.SGD(0.05, gradient_accumulation_steps=2),
        "gradient_accumulation Adam": lambda: O.Adam(0.02, gradient_accumulation_steps=2, global_clipnorm=0.3),
        "loss_scale_factor": lambda: O.SGD(0.05, loss_scale_factor=8.0),
        "LossScaleOptimizer": lambda: O.LossScaleOptimizer(O.Adam(0.02), dynamic_growth_steps=2),
        "amsgrad": lambda: O.Adam(0.02, amsgrad=True),
        "centered": lambda: O.RMSprop(0.02, centered=True, momentum=0.5),
        "exponential decay": lambda: O.SGD(schedule.ExponentialDecay(0.1, 1, 0.5)),
        "cosine decay": lambda: O.SGD(schedule.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2)),
    }
    return [
        Case(f"optimizer {name}", lambda make=make: plain(optimizer=make()), epochs=4) for name, make in made.items()
    ]


def _with_loss(kind: Any, **options: Any) -> Any:
    return plain(kind(), **options)


def _losses() -> list[Case]:
    one: dict[str, Any] = {"near": 1e-4}
    softplus, sigmoid = {"activation": "softplus"}, {"activation": "sigmoid"}
    softmax: dict[str, Any] = {"units": 3, "activation": "softmax"}
    table: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((name, {}, one) for name in ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh")),
        *((name, {}, one) for name in ("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError")),
        *((name, softplus, {**one, "y": "count"}) for name in ("Poisson", "KLDivergence")),
        ("CosineSimilarity", {"units": 2}, {"y": "pair"}),
        *((name, sigmoid, {"y": "bin"}) for name in ("Hinge", "SquaredHinge")),
        *((name, sigmoid, {"y": "bin"}) for name in ("BinaryCrossentropy", "BinaryFocalCrossentropy")),
        *((name, softmax, {"y": "hot"}) for name in ("CategoricalHinge", "CategoricalCrossentropy")),
        ("CategoricalFocalCrossentropy", softmax, {"y": "hot"}),
        ("SparseCategoricalCrossentropy", softmax, {"y": "cls"}),
        ("CategoricalGeneralizedCrossEntropy", softmax, {"y": "cls"}),
        *((name, sigmoid, {"y": "bins"}) for name in ("Dice", "Tversky")),
    ]
    return [
        *(Case(f"loss {name}", partial(_with_loss, getattr(C, name), **how), **case) for name, how, case in table),
        *(
            Case(f"reduction {reduction}", partial(_reduced, reduction), sample_weight="w")
            for reduction in ("sum", "mean", "mean_with_sample_weight")
        ),
        Case("loss function", partial(plain, _off)),
        Case("loss function that takes a mean", partial(plain, _mean_loss)),
        Case("loss function that divides by a mask", _masked_words, x="seq", y="next"),
        Case("loss function that takes a mean, weighted", partial(plain, _mean_loss), sample_weight="w"),
        Case("loss function of a loss of Keras", partial(plain, _of_keras)),
        Case("loss class that takes the worst row", partial(_with_loss, _Worst)),
        Case("loss Dice over rows", partial(_with_loss, partial(C.Dice, axis=0), units=3, **sigmoid), y="hot"),
        Case("loss function that compares rows", partial(plain, _contrastive, units=3), y="cls"),
        Case("loss function that compares rows, weighted", partial(plain, _contrastive, units=3), sample_weight="w"),
        Case(
            "loss function that compares rows, by class",
            partial(plain, _contrastive, units=3),
            y="cls",
            fit={"class_weight": {0: 1.0, 1: 4.0, 2: 0.5}},
        ),
        Case("loss function that compares rows, eager", partial(plain, _contrastive, units=3, run_eagerly=True)),
        Case("loss function that compares rows, masked", _contrastive_words, x="seq", y="next"),
        Case("loss class that compares rows", partial(_with_loss, _Triplet, units=3), y="cls"),
        Case("loss class that compares rows, with a variable", partial(_with_loss, _Scaled, units=3)),
        Case("loss function of pairs of rows", partial(plain, _ranking)),
        Case("loss function that centers rows", partial(plain, _centered, units=3), sample_weight="w"),
        Case("loss Circle", _circle, y="cls"),
        Case("loss Circle, weighted", _circle, y="cls", sample_weight="w"),
        Case(
            "loss Dice of half precision",
            partial(_with_loss, C.Dice, **sigmoid),
            y="bins",
            policy="mixed_float16",
            near=0.01,
        ),
        Case("loss Dice, eager", partial(_with_loss, C.Dice, run_eagerly=True, **sigmoid), y="bins"),
        Case("sample_weight", partial(plain, weighted_metrics=["mae"]), sample_weight="w"),
        Case(
            "class_weight",
            partial(plain, "binary_crossentropy", **sigmoid),
            y="bin",
            fit={"class_weight": {0: 1.0, 1: 4.0}},
        ),
    ]


def _reduced(reduction: str) -> Any:
    return plain(C.MeanSquaredError(reduction=reduction), optimizer=O.SGD(0.002))


def _off(y: Any, p: Any) -> Any:
    return keras.ops.abs(keras.ops.reshape(y, (-1,)) - keras.ops.reshape(p, (-1,)))


def _mean_loss(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.reshape(y, (-1,)) - tf.reshape(p, (-1,))))


class _Counts(L.Layer):
    """Counts its steps in whole numbers, notes that it has begun, and returns larger values with each step."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")
        self.begun = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="begun")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
            self.begun.assign(True)
        return inputs * (1.0 + 0.1 * keras.ops.cast(self.steps, "float32"))


def _masked_words() -> Any:
    inputs = keras.Input((6,), dtype="int32", name="seq")
    words = dense(9, 3, activation="softmax")(embedding()(inputs))
    return compiled(inputs, words, _masked_loss, metrics=[_masked_accuracy])


def _masked_loss(y: Any, p: Any) -> Any:
    """Return the mean over the positions that are not padded, as in TensorFlow's tutorials."""
    mask = tf.cast(y != 0, tf.float32)
    losses = C.SparseCategoricalCrossentropy(reduction="none")(y, p)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def _masked_accuracy(y: Any, p: Any) -> Any:
    mask = tf.cast(y != 0, tf.float32)
    right = tf.cast(y == tf.cast(tf.argmax(p, -1), y.dtype), tf.float32)
    return tf.reduce_sum(right * mask) / tf.reduce_sum(mask)


def _of_keras(y: Any, p: Any) -> Any:
    return C.MeanSquaredError()(tf.reshape(y, (-1, 1)), p) + 0.1 * C.Huber()(tf.reshape(y, (-1, 1)), p)


class _Worst(C.Loss):
    """The largest error of a row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(_off(y_true, y_pred))


def _contrastive(y: Any, p: Any) -> Any:
    """Return a loss by which each row must be nearer to itself than to others, as in NT-Xent and CLIP."""
    ops = keras.ops
    p = ops.normalize(p, axis=-1)
    near = ops.matmul(p, ops.transpose(p)) / 0.5
    return C.sparse_categorical_crossentropy(ops.arange(ops.shape(p)[0]), near, from_logits=True)


def _contrastive_words() -> Any:
    inputs = keras.Input((6,), dtype="int32", name="seq")
    return compiled(inputs, dense(9, 3)(embedding()(inputs)), _contrastive_of_words, weighted_metrics=[_nearest_word])


def _contrastive_of_words(y: Any, p: Any) -> Any:
    """Compare the words at each place of the rows, with a number for each word."""
    ops = keras.ops
    near = ops.einsum("nti,mti->ntm", p, p)
    return ops.logsumexp(near, axis=-1) - ops.sum(ops.square(p), axis=-1)


def _nearest_word(y: Any, p: Any) -> Any:
    return keras.ops.max(keras.ops.einsum("nti,mti->ntm", p, p), axis=-1)


class _Triplet(C.Loss):
    """The furthest row of the same class must be nearer than the nearest row of another class."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ops = keras.ops
        y = ops.reshape(y_true, (-1,))
        apart = _apart(y_pred)
        same = ops.cast(ops.equal(y[:, None], y[None]), "float32")
        return ops.maximum(ops.max(apart * same, 1) - ops.min(apart + 1e3 * same, 1) + 1.0, 0.0)


class _Scaled(C.Loss):
    """Compares rows at a temperature that is a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = keras.Variable(0.5, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return _contrastive(y_true, y_pred * self.temperature) * self.temperature


def _apart(p: Any) -> Any:
    return keras.ops.sum(keras.ops.square(p[:, None] - p[None]), -1)


def _ranking(y: Any, p: Any) -> Any:
    """Return a number for each pair of different rows."""
    y, p = tf.reshape(y, (-1,)), tf.reshape(p, (-1,))
    return tf.boolean_mask(tf.nn.softplus(p[None] - p[:, None]), y[:, None] > y[None])


def _centered(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(p - keras.ops.mean(p, axis=0)), axis=-1)


def _recall(y: Any, p: Any) -> Any:
    """Return whether the nearest other row has the same class."""
    ops = keras.ops
    y = ops.reshape(y, (-1,))
    nearest = ops.argmin(_apart(p) + 1e6 * ops.eye(ops.shape(p)[0]), 1)
    return ops.cast(ops.equal(ops.take(y, nearest), y), "float32")


def _circle() -> Any:
    inputs = keras.Input((4,), name="x")
    return compiled(inputs, L.UnitNormalization()(dense(3, 2)(inputs)), C.Circle(), O.SGD(0.001))


class _State(M.Metric):
    """Returns its state as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows = self.add_weight(initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self) -> Any:
        return self.rows


def _with_metric(make: Any, **options: Any) -> Any:
    return plain(metrics=[make()], **options)


def _metrics() -> list[Case]:
    binary: dict[str, Any] = {"loss": "binary_crossentropy", "activation": "sigmoid"}
    hot: dict[str, Any] = {"loss": "categorical_crossentropy", "units": 3, "activation": "softmax"}
    sparse = {**hot, "loss": "sparse_categorical_crossentropy"}
    table: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        *((n, {}, binary, {"y": "bin"}) for n in ("BinaryAccuracy", "AUC", "Precision", "Recall")),
        *((n, {}, binary, {"y": "bin"}) for n in ("TruePositives", "TrueNegatives")),
        # With labels of shape (rows,) Keras multiplies each row's label by every row's output.
        *((n, {}, binary, {"y": "bins"}) for n in ("Hinge", "SquaredHinge")),
        *((n, {}, binary, {"y": "bin"}) for n in ("FalsePositives", "FalseNegatives")),
        ("SensitivityAtSpecificity", {"specificity": 0.5}, binary, {"y": "bin"}),
        ("SpecificityAtSensitivity", {"sensitivity": 0.5}, binary, {"y": "bin"}),
        ("PrecisionAtRecall", {"recall": 0.5}, binary, {"y": "bin"}),
        ("RecallAtPrecision", {"precision": 0.5}, binary, {"y": "bin"}),
        *((n, {}, {}, {"near": 1e-4}) for n in ("MeanSquaredError", "MeanAbsoluteError", "RootMeanSquaredError")),
        *((n, {}, {}, {"near": 1e-4}) for n in ("MeanAbsolutePercentageError", "LogCoshError", "R2Score")),
        *((n, {}, hot, {"y": "hot"}) for n in ("CategoricalAccuracy", "CategoricalCrossentropy", "F1Score")),
        ("CategoricalHinge", {}, hot, {"y": "hot"}),
        ("TopKCategoricalAccuracy", {"k": 2}, hot, {"y": "hot"}),
        ("OneHotMeanIoU", {"num_classes": 3}, hot, {"y": "hot"}),
        *((n, {}, sparse, {"y": "cls"}) for n in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")),
        ("SparseTopKCategoricalAccuracy", {"k": 2}, sparse, {"y": "cls"}),
        ("CosineSimilarity", {}, {"units": 2}, {"y": "pair"}),
        *((n, {}, binary, {"y": "bins"}) for n in ("Accuracy", "BinaryCrossentropy", "KLDivergence", "Poisson")),
        ("BinaryIoU", {"target_class_ids": [0, 1]}, binary, {"y": "bin"}),
        ("MeanSquaredLogarithmicError", {}, binary, {"y": "bin"}),
        *((n, {}, {"units": 2}, {"y": "pair"}) for n in ("ConcordanceCorrelation", "PearsonCorrelation")),
        ("FBetaScore", {"beta": 2.0}, hot, {"y": "hot"}),
        ("OneHotIoU", {"num_classes": 3, "target_class_ids": [0, 2]}, hot, {"y": "hot"}),
        ("IoU", {"num_classes": 3, "target_class_ids": [1], "sparse_y_pred": False}, sparse, {"y": "cls"}),
        ("MeanIoU", {"num_classes": 3, "sparse_y_pred": False}, sparse, {"y": "cls"}),
    ]
    return [
        *(
            Case(f"metric {name}", partial(_with_metric, partial(getattr(M, name), **of), **how), **case)
            for name, of, how, case in table
        ),
        Case("metric function", partial(plain, metrics=[_close]), near=1e-4),
        Case("metric function that gives a number", partial(plain, metrics=[_r_squared]), near=1e-4),
        Case("metric function that compares rows", partial(plain, **sparse, metrics=[_recall]), y="cls"),
        Case(
            "metric function that compares rows, weighted",
            partial(plain, **sparse, weighted_metrics=[_recall, _contrastive]),
            y="cls",
            sample_weight="w",
        ),
        Case("metric function of pairs of rows", partial(plain, metrics=[_ranking])),
        Case("metric that returns its state", partial(_with_metric, _State)),
        Case(
            "weighted metrics",
            partial(_weighted_metrics, **binary),
            y="bin",
            sample_weight="w",
        ),
    ]


def _weighted_metrics(**options: Any) -> Any:
    made = [M.AUC(), M.Precision(), M.RecallAtPrecision(0.5), M.MeanSquaredError()]
    return plain(weighted_metrics=made, **options)


def _r_squared(y: Any, p: Any) -> Any:
    y, p = tf.reshape(y, (-1,)), tf.reshape(p, (-1,))
    return 1 - tf.math.divide_no_nan(tf.reduce_sum(tf.square(y - p)), tf.reduce_sum(tf.square(y - tf.reduce_mean(y))))


def _close(y: Any, p: Any) -> Any:
    return keras.ops.cast(_off(y, p) < 0.5, "float32")


def _headed(column: str, shape: tuple[int, ...], layers: Callable[[], list[Any]], dtype: str = "float32") -> Any:
    inputs = keras.Input(shape, dtype=dtype, name=column)
    z: Any = inputs
    for layer in layers():
        z = layer(z)
    if len(z.shape) > 2:
        z = L.Flatten()(z)
    return compiled(inputs, dense(1, 9)(z))


def embedding(mask: bool = False) -> Any:
    """Return an embedding of the tokens of ``seq``."""
    return L.Embedding(9, 4, mask_zero=mask, embeddings_initializer=seeded(5))


class Positions(L.Layer):
    """Adds an embedding of each place of a sequence, and with ``tokens`` one of each token from the same table."""

    def __init__(self, tokens: bool = False, known: bool = True) -> None:
        super().__init__()
        self.table = L.Embedding(9, 4, embeddings_initializer=seeded(6))
        self.tokens, self.known = tokens, known

    def call(self, x: Any) -> Any:
        length = x.shape[1] if self.known else tf.shape(x)[1]
        return x * 0.1 + self.table(tf.range(length)) + (self.table(tf.ones_like(x[:, :, 0])) if self.tokens else 0.0)


def _positions(optimizer: Any, tokens: bool = False, known: bool = True) -> Any:
    inputs = keras.Input((6 if known else None, 4), name="x")
    hidden = L.GlobalAveragePooling1D()(L.Activation("tanh")(Positions(tokens, known)(inputs)))
    return compiled(inputs, dense(1)(hidden), "mse", optimizer)


class ClipsInApply(O.SGD):
    """A custom optimizer that changes the gradients before Keras applies them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        clipped, _ = tf.clip_by_global_norm(grads, 0.1)
        return super().apply(clipped, trainable_variables)


class ClipsInApplyGradients(O.Adam):
    """The same with the method ``apply_gradients``."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        return super().apply_gradients([(tf.clip_by_norm(grad, 0.05), variable) for grad, variable in pairs])


def _of_positions() -> list[Case]:
    optimizers = {
        "Adam": lambda: O.Adam(0.05), "RMSprop": lambda: O.RMSprop(0.05), "Adagrad": lambda: O.Adagrad(0.05),
        "Ftrl": lambda: O.Ftrl(0.05), "Nadam": lambda: O.Nadam(0.05), "Adafactor": lambda: O.Adafactor(0.05),
        "clipnorm": lambda: O.SGD(0.5, clipnorm=0.05),
        "accumulation": lambda: O.Adam(0.05, gradient_accumulation_steps=2),
    }  # fmt: skip
    made = [Case(f"positions, {n}", partial(lambda o: _positions(o()), o), "spread") for n, o in optimizers.items()]
    adam = optimizers["Adam"]
    kinds: dict[str, dict[str, Any]] = {
        "with tokens of the same table": {"tokens": True},
        "of a length that is known later": {"known": False},
        "of a later length, with tokens": {"tokens": True, "known": False},
    }
    made += [
        Case(f"positions {name}", partial(lambda o: _positions(adam(), **o), options), "spread")
        for name, options in kinds.items()
    ]
    return made


def _layers() -> list[Case]:
    k = {"kernel_initializer": seeded(4)}
    r = {**k, "recurrent_initializer": seeded(6)}
    d = {"depthwise_initializer": seeded(4)}
    images: dict[str, Callable[[], list[Any]]] = {
        "Conv2D": lambda: [L.Conv2D(3, 3, **k)],
        "Conv2DTranspose": lambda: [L.Conv2DTranspose(3, 3, **k)],
        "DepthwiseConv2D": lambda: [L.DepthwiseConv2D(3, **d)],
        "SeparableConv2D": lambda: [L.SeparableConv2D(3, 3, pointwise_initializer=seeded(5), **d)],
        "MaxPooling2D": lambda: [L.MaxPooling2D()],
        "AveragePooling2D": lambda: [L.AveragePooling2D(2)],
        "GlobalMaxPooling2D": lambda: [L.GlobalMaxPooling2D()],
        "GlobalAveragePooling2D": lambda: [L.GlobalAveragePooling2D()],
        "UpSampling2D": lambda: [L.UpSampling2D(), L.AveragePooling2D(4)],
        "ZeroPadding2D": lambda: [L.ZeroPadding2D()],
        "Cropping2D": lambda: [L.Cropping2D()],
        "Rescaling": lambda: [L.Rescaling(0.5, 0.1)],
        "Resizing": lambda: [L.Resizing(4, 4)],
        "CenterCrop": lambda: [L.CenterCrop(4, 4)],
        "SpatialDropout2D": lambda: [L.SpatialDropout2D(0.0)],
        "GroupNormalization": lambda: [L.GroupNormalization(2)],
        "SpectralNormalization": lambda: [L.SpectralNormalization(L.Conv2D(3, 3, **k))],
        "BatchNormalization synchronized": lambda: [L.BatchNormalization(synchronized=True)],
    }
    series: dict[str, Callable[[], list[Any]]] = {
        "Conv1D": lambda: [L.Conv1D(3, 2, **k)],
        "Conv1D causal": lambda: [L.Conv1D(3, 2, padding="causal", **k)],
        "Conv1DTranspose": lambda: [L.Conv1DTranspose(3, 2, **k)],
        "DepthwiseConv1D": lambda: [L.DepthwiseConv1D(2, **d)],
        "SeparableConv1D": lambda: [L.SeparableConv1D(3, 2, pointwise_initializer=seeded(5), **d)],
        "MaxPooling1D": lambda: [L.MaxPooling1D()],
        "AveragePooling1D": lambda: [L.AveragePooling1D(2)],
        "GlobalMaxPooling1D": lambda: [L.GlobalMaxPooling1D()],
        "SimpleRNN": lambda: [L.SimpleRNN(3, **r)],
        "LSTM": lambda: [L.LSTM(3, **r)],
        "GRU": lambda: [L.GRU(3, **r)],
        "Bidirectional": lambda: [L.Bidirectional(L.GRU(3, **r))],
        "RNN of cells": lambda: [L.RNN(L.StackedRNNCells([L.LSTMCell(3, **r), L.GRUCell(3, **r)]))],
        "TimeDistributed": lambda: [L.TimeDistributed(dense(2, 4))],
        "LayerNormalization": lambda: [L.LayerNormalization()],
        "UnitNormalization": lambda: [L.UnitNormalization()],
        "EinsumDense": lambda: [L.EinsumDense("abc,cd->abd", output_shape=(6, 2), **k)],
        "Permute": lambda: [L.Permute((2, 1))],
        "Reshape": lambda: [L.Reshape((3, 6))],
        "ZeroPadding1D": lambda: [L.ZeroPadding1D()],
        "Cropping1D": lambda: [L.Cropping1D()],
        "UpSampling1D": lambda: [L.UpSampling1D()],
        "Masking": lambda: [L.Masking(), L.LSTM(3, **r)],
        "ConvLSTM1D": lambda: [L.Reshape((2, 3, 3)), L.ConvLSTM1D(2, 2, **r)],
    }
    flat: dict[str, Callable[[], list[Any]]] = {
        "Dense": lambda: [dense(3, 4)],
        "PReLU": lambda: [L.PReLU()],
        "LeakyReLU": lambda: [dense(3, 4), L.LeakyReLU()],
        "ELU": lambda: [dense(3, 4), L.ELU()],
        "Softmax": lambda: [dense(3, 4), L.Softmax()],
        "Dropout": lambda: [L.Dropout(0.0)],
        "GaussianNoise": lambda: [L.GaussianNoise(0.0)],
        "ActivityRegularization": lambda: [dense(3, 4), L.ActivityRegularization(0.01, 0.02)],
        "kernel regularizer": lambda: [dense(3, 4, kernel_regularizer="l2", bias_regularizer="l1")],
        "kernel constraint": lambda: [dense(3, 4, kernel_constraint=keras.constraints.UnitNorm())],
        "Lambda": lambda: [L.Lambda(lambda t: t * t)],
        "RepeatVector": lambda: [L.RepeatVector(2)],
        "Normalization": lambda: [L.Normalization(mean=0.5, variance=2.0)],
        "Discretization": lambda: [L.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")],
        "normalizes a row": lambda: [L.Lambda(lambda t: t / keras.ops.sum(t, axis=-1, keepdims=True))],
        "divides by the sum of the batch": lambda: [_OfBatch()],
        "adds a loss": lambda: [_AddsLoss()],
        "counts its steps": lambda: [_Counts()],
    }
    texts: dict[str, Callable[[], list[Any]]] = {
        "Embedding": lambda: [embedding()],
        "masked pooling": lambda: [embedding(True), L.GlobalAveragePooling1D()],
        "masked LSTM": lambda: [embedding(True), L.LSTM(3, **r)],
        "CategoryEncoding": lambda: [L.CategoryEncoding(9, output_mode="count")],
        "Hashing": lambda: [L.Hashing(5, output_mode="multi_hot")],
        "IntegerLookup": lambda: [L.IntegerLookup(vocabulary=list(range(1, 9)), output_mode="multi_hot")],
    }
    cases = [Case(f"layer {n}", lambda f=f: _headed("image", (8, 8, 2), f), x="image") for n, f in images.items()]
    cases += [Case(f"layer {n}", lambda f=f: _headed("series", (6, 3), f), x="series") for n, f in series.items()]
    cases += [
        Case(f"layer {n}", lambda f=f: _headed("x", (4,), f), near=2e-5)
        for n, f in flat.items()
        if n != "divides by the sum of the batch"
    ]
    cases += [Case(f"layer {n}", lambda f=f: _headed("seq", (6,), f, "int32"), x="seq") for n, f in texts.items()]
    video = {
        "Conv3D": lambda: [L.Conv3D(2, 2, **k)],
        "MaxPooling3D": lambda: [L.MaxPooling3D()],
        "GlobalAveragePooling3D": lambda: [L.GlobalAveragePooling3D()],
        "ConvLSTM2D": lambda: [L.ConvLSTM2D(2, 2, **r)],
    }
    cases += [Case(f"layer {n}", lambda f=f: _headed("video", (4, 4, 4, 2), f), x="video") for n, f in video.items()]
    cases += [
        Case(
            "layer BatchNormalization", lambda: _headed("x", (4,), lambda: [L.BatchNormalization()]), per_replica=True
        ),
        Case("layer Dropout by chance", lambda: _headed("x", (4,), lambda: [L.Dropout(0.5, seed=3)]), per_replica=True),
        Case("layer that divides by the batch", lambda: _headed("x", (4,), lambda: [_OfBatch()]), per_replica=True),
    ]
    return cases


class _OfBatch(keras.layers.Layer):
    """Divides by a number of a batch, as a custom layer may; NaN for a batch without rows or of zeros."""

    def call(self, x: Any) -> Any:
        return x / keras.ops.sum(keras.ops.square(x)) + keras.ops.log(keras.ops.sum(keras.ops.square(x)))


class _AddsLoss(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class _AddsSum(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x)))
        return x


class OwnStep(keras.Model):
    """A custom train_step, which takes a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.last = dense(1, 3)
        self.tracker = M.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.last(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.squeeze(self(x, training=True), -1) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class SumStep(OwnStep):
    """Makes its loss from sums and means over rows, and tracks a count."""

    def __init__(self, loss_of: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.loss_of = loss_of
        self.close = M.Sum(name="close")
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, name="average")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.close]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            p = tf.squeeze(self(x, training=True), -1)
            loss = self.loss_of(y, p, self)
            scaled = self.optimizer.scale_loss(loss)
            loss = tf.reduce_sum(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        near = tf.cast(tf.abs(y - p) < 1.0, tf.float32)
        self.close.update_state(tf.reduce_sum(near))
        self.seen.assign_add(tf.shape(x)[0])
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_sum(y))
        return {
            "loss": self.tracker.result(),
            "close": self.close.result(),
            "part": tf.sqrt(tf.reduce_mean(near)),
            "rows": tf.shape(x)[0],
            "near": tf.reduce_sum(tf.cast(near, tf.int32)),
        }

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": tf.reduce_sum(self.loss_of(y, tf.squeeze(self(x), -1), self))}


class GuideStep(keras.Model):
    """The train_step and test_step of Keras' guide: a result of ``self.metrics`` is a dictionary of results."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=p)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.noted(y, p, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        p = self(x, training=False)
        return self.noted(y, p, self.compute_loss(y=y, y_pred=p))

    def noted(self, y: Any, p: Any, loss: Any) -> dict[str, Any]:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, p)
        return {m.name: m.result() for m in self.metrics}


class DerivedStep(GuideStep):
    """Returns numbers derived from results: one by one, nested, and of metrics that Keras does not track."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses_seen = M.Mean(name="losses")
        self.known = [M.Precision(name="p", thresholds=0.4), M.Recall(name="r", thresholds=0.4), M.AUC(name="auc")]
        self.at = M.SensitivityAtSpecificity(0.5, name="at")
        vars(self)["elsewhere"] = {"f1": _F1(), "iou": M.BinaryIoU(), "rows": _State(name="rows")}

    @property
    def metrics(self) -> list[Any]:
        return [self.losses_seen, *self.known, self.at, *self.elsewhere.values()]

    def noted(self, y: Any, p: Any, loss: Any) -> dict[str, Any]:
        self.losses_seen.update_state(loss)
        before = self.losses_seen.result()
        for metric in self.metrics[1:]:
            metric.update_state(y, p)
        precision, recall, auc = (one.result() for one in self.known)
        return {
            "perplexity": tf.exp(self.losses_seen.result()),
            "f1": 2 * precision * recall / (precision + recall + 1e-7),
            "at": tf.sqrt(self.at.result()) + before,
            "nested": {"deep": {"auc_gap": auc * (tf.reduce_max(p) - tf.reduce_min(p))}, "auc": auc},
            "elsewhere": {name: metric.result() for name, metric in self.elsewhere.items()},
            "direct": self.losses_seen.total / self.losses_seen.count,
            "called": self.loss_of_call(loss),
        }

    def loss_of_call(self, loss: Any) -> Any:
        return tf.cond(tf.reduce_sum(self.losses_seen.result()) > 0, lambda: tf.constant(1.0), lambda: tf.constant(2.0))


class _F1(M.Metric):
    """Uses the results of other metrics."""

    def __init__(self) -> None:
        super().__init__(name="f1")
        self.of = [M.Precision(thresholds=0.4), M.Recall(thresholds=0.4)]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for one in self.of:
            one.update_state(y_true, y_pred, sample_weight)

    def result(self) -> Any:
        precision, recall = (one.result() for one in self.of)
        return 2 * precision * recall / (precision + recall + 1e-7)


class DerivedMetrics(keras.Model):
    """Adds numbers to the results of Keras' own steps."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results["gap"] = keras.ops.max(y_pred) - keras.ops.min(y_pred)
        results["mean"] = keras.ops.mean(y_pred)
        results["twice"] = 2 * results["auc"]
        return results


def _with_results(kind: Any, **options: Any) -> Any:
    inputs = keras.Input((4,), name="x")
    model = kind(inputs, dense(1, 3, activation="sigmoid")(dense(5, 2, activation="tanh")(inputs)))
    metrics = ["mae", M.RootMeanSquaredError(name="rmse"), M.AUC(name="auc")]
    model.compile(O.SGD(0.05), "binary_crossentropy", metrics=metrics, **options)
    return model


class _Moves(L.Layer):
    """Changes its states on every call, in training or not."""

    def __init__(self, roots: bool) -> None:
        super().__init__()
        self.roots = roots  # the mean of the workers' roots is not the root of the mean

    def build(self, shape: Any) -> None:
        new = partial(self.add_weight, trainable=False)
        self.center = new(shape=(shape[-1],), initializer="zeros", name="center")
        self.root = new(shape=(), initializer="zeros", name="root")
        self.calls = new(shape=(), dtype="int32", initializer="zeros", name="calls")

    def call(self, inputs: Any) -> Any:
        self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(inputs, axis=0))
        if self.roots:
            self.root.assign(0.5 * self.root + 0.1 * keras.ops.sqrt(keras.ops.mean(inputs**2)))
        self.calls.assign(self.calls + 1)
        return inputs


class OwnPrediction(keras.Model):
    """A custom predict_step."""

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data[0], training=False)


def _moves(kind: Any = keras.Model, roots: bool = True, **options: Any) -> Any:
    inputs = keras.Input((4,), name="x")
    model = kind(inputs, dense(1, 3)(_Moves(roots)(dense(4, 2)(inputs))))
    model.compile(O.SGD(0.05), "mse", **options)
    return model


def _dice(y: Any, p: Any, model: Any) -> Any:
    y, p = tf.cast(y > 0, tf.float32), tf.sigmoid(p)
    return 1 - (2 * tf.reduce_sum(y * p) + 1) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)


def _uncertain(y: Any, p: Any, model: Any) -> Any:
    """A plain mean, a part of a sum, a loss of Keras and a regularizer together."""
    kl = -0.001 * tf.reduce_sum(1 + p - tf.square(p) - tf.exp(p))
    size = tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])
    return tf.reduce_mean(tf.abs(y - p)) + kl + 0.01 * size + C.Huber()(y[:, None], p[:, None])


def _masked_mean(y: Any, p: Any, model: Any) -> Any:
    mask = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(tf.square(y - p) * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)


def _by_class(y: Any, e: Any) -> Any:
    """Return the mean of each of three classes; a worker may have no row of a class."""
    which = tf.cast(tf.clip_by_value(y, -1.0, 1.0) > 0, tf.int32)
    sums, counts = (tf.math.unsorted_segment_sum(v, which, 2) for v in (e, tf.ones_like(e)))
    return tf.math.divide_no_nan(sums, counts)


SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a norm": lambda y, p, _: tf.norm(y - p) / 6,
    "squeezed sums": lambda y, p, _: tf.squeeze(tf.sqrt(tf.reduce_mean(tf.square(y - p)[:, None], axis=0))),
    "tensordot": lambda y, p, _: tf.tensordot(y - p, y - p, 1) / 37,
    "einsum": lambda y, p, _: tf.einsum("i,i->", y - p, y - p) / 37,
    "a matrix of rows": lambda y, p, _: tf.reduce_sum(
        tf.square(tf.matmul(tf.stack([y, p], 1), tf.stack([y - p, p], 1), transpose_a=True) / 37)
    ),
    "unstacked sizes": lambda y, p, _: tf.reduce_sum(tf.square(y - p)) / tf.cast(tf.unstack(tf.shape(y))[0], "float32"),
    "the last size": lambda y, p, _: tf.reduce_sum(tf.square(y - p)) / tf.cast(tf.shape(y)[-1] // 2 + 1, "float32"),
    "checked sums": lambda y, p, _: tf.debugging.check_numerics(_masked_mean(y, p, _), "of the loss"),
    "the worst class": lambda y, p, _: tf.reduce_max(_by_class(y, tf.square(y - p))),
    "classes that are weighed": lambda y, p, _: tf.tensordot(_by_class(y, tf.square(y - p)), [0.3, 0.7], 1),
    "one of the classes": lambda y, p, _: tf.gather(_by_class(y, tf.square(y - p)), 1) + tf.reduce_mean(tf.abs(p)),
    "the worst row": lambda y, p, _: tf.reduce_max(tf.square(y - p)),
    "a mean if there is one": lambda y, p, _: (
        tf.where(
            tf.reduce_any(y > 2.0),
            tf.reduce_sum((y - p) ** 2 * tf.cast(y > 2.0, "float32")),
            tf.reduce_mean(tf.abs(y - p)),
        )
        / 10
    ),
    "a mean of few": lambda y, p, _: (
        0.1 * tf.reduce_mean((y - p) ** 2)
        + tf.reduce_sum(tf.math.divide_no_nan(tf.reduce_sum(tf.boolean_mask((y - p) ** 2, y > 2.5)), 3.0))
    ),
    "values of a sparse tensor": lambda y, p, _: tf.reduce_mean(tf.sparse.from_dense(tf.square(y - p)).values),
    "a number a row": lambda y, p, _: 0.02 * tf.square(y - p),
    "a loss of some rows": lambda y, p, _: C.MeanSquaredError()(
        tf.boolean_mask(y, y > -1.0)[:, None], tf.boolean_mask(p, y > -1.0)[:, None]
    ),
    "a sum": lambda y, p, _: 0.02 * tf.reduce_sum(tf.square(y - p)),
    "a sum by a number": lambda y, p, _: tf.reduce_sum(tf.square(y - p)) / 37,
    "a sum by the rows": lambda y, p, _: tf.reduce_sum(tf.square(y - p)) / tf.cast(tf.shape(y)[0], tf.float32),
    "a sum by the size": lambda y, p, _: keras.ops.sum((y - p) ** 2) / keras.ops.cast(keras.ops.size(p), "float32"),
    "l2_loss": lambda y, p, _: 0.02 * tf.nn.l2_loss(y - p),
    "a sum by column": lambda y, p, _: tf.reduce_mean(tf.reduce_sum(tf.stack([y - p, y * p], 1) ** 2, 0)) / 40,
    "a masked mean": _masked_mean,
    "a mean of some": lambda y, p, _: tf.reduce_mean(
        tf.boolean_mask(tf.concat([tf.square(y - p), tf.abs(y - p)], 0), tf.concat([y > 0.2, y > -99.0], 0))
    ),
    "the root of a mean": lambda y, p, _: tf.sqrt(tf.reduce_mean(tf.square(y - p))),
    "Dice": _dice,
    "a sum, means and a regularizer": _uncertain,
}


class DecoratedStep(OwnStep):
    """A ``train_step`` and a ``call`` that are functions of TensorFlow, with a condition and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = M.Sum(name="batches")
        self.norm = L.BatchNormalization(synchronized=True)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.batches]

    @tf.function
    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.norm(x, training=training))

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            off = tf.squeeze(self(x, training=True), -1) - y
            loss = tf.reduce_sum(tf.square(off)) / tf.cast(tf.shape(x)[0], tf.float32)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if loss > 0.0:
            self.batches.update_state(1.0)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "batches": self.batches.result()}


class GradientStep(OwnStep):
    """Scales its gradients by numbers of its rows, and adds up those of two steps before it applies them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [self.add_weight(shape=s, initializer="zeros", trainable=False) for s in ((4, 1), (1,))]
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.squeeze(self(x, training=True), -1) - y))
        mask = tf.reduce_mean(tf.cast(y > 0, tf.float32))
        gradients = [one / tf.cast(tf.shape(x)[0], tf.float32) for one in tape.gradient(loss, self.trainable_variables)]
        for total, one in zip(self.sums, gradients, strict=True):
            total.assign(0.5 * total + one * (0.5 + mask))
        self.count.assign_add(1)
        steps = [total * tf.cast(self.count % 2 + 1, tf.float32) for total in self.sums]
        self.optimizer.apply_gradients(zip(steps, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class AccumulatingStep(GradientStep):
    """Applies the accumulated gradients under a condition."""

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y[:, None], self(x, training=True))
        for total, one in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(one)
        self.count.assign_add(1)
        if self.count.value % 2 == 0:
            self.optimizer.apply_gradients(
                zip([total.value for total in self.sums], self.trainable_variables, strict=True)
            )
            for total in self.sums:
                total.assign(tf.zeros_like(total.value))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def _balanced(y: Any, p: Any) -> Any:
    """Return a number per row, weighted by the number of rows of its class."""
    y, p = tf.reshape(y, (-1,)), tf.reshape(p, (-1,))
    positive = tf.reduce_mean(tf.cast(y > 0, tf.float32))
    return tf.square(y - p) * tf.where(y > 0, 1.0 - positive, positive)


class LoopStep(OwnStep):
    """Takes losses of Keras in a loop of TensorFlow's, and counts under a condition."""

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            p, loss = self(x, training=True), tf.constant(0.0)
            for _ in tf.range(2):
                loss += 0.5 * C.MeanSquaredError()(y[:, None], p)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if loss < 1000.0:
            self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class _OfOthers(C.Loss):
    """A number per row that depends on the other rows, as detectors divide by the number of positives."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        y, p = tf.reshape(y_true, (-1,)), tf.reshape(y_pred, (-1,))
        mask = tf.cast(y > -1.0, tf.float32)
        return tf.square(y - p) * mask / tf.reduce_sum(mask)


class SumLoss(keras.Model):
    """A custom ``compute_loss`` that takes the mean of the values that are not masked, for Keras' own step."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                     training: bool = True) -> Any:  # fmt: skip
        return _masked_mean(y, tf.squeeze(y_pred, -1), self) + sum(self.losses)


class ScaledStep(OwnStep):
    """A train_step that scales its loss as in TensorFlow's guide."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            of_row = tf.square(tf.squeeze(self(x, training=True), -1) - y)
            loss = tf.nn.compute_average_loss(of_row, global_batch_size=37)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(tf.reduce_mean(of_row))
        return {"loss": self.tracker.result()}


class ClippedStep(OwnStep):
    """Clips all gradients together before the optimizer gets them; returns their norm and a variable unchanged."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y[:, None], self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "norm": norm, "rate": self.optimizer.learning_rate}


class SharpnessStep(OwnStep):
    """Takes the gradient where the loss is highest nearby (SAM)."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y[:, None], self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        steps = [0.1 * gradient / norm for gradient in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y[:, None], self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class MetaStep(OwnStep):
    """Takes the gradient of the loss after a step along the gradient (MAML)."""

    @staticmethod
    def loss_of(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.square(p - y))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self(x)  # builds it
        kernel, bias = self.last.kernel, self.last.bias
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                before = self.loss_of(y, tf.squeeze(x @ kernel.value + bias.value, -1))
            first, second = inner.gradient(before, [kernel, bias])
            after = tf.squeeze(x @ (kernel - 0.1 * first) + (bias - 0.1 * second), -1)
            loss = self.loss_of(y, after)
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class SumMetaStep(MetaStep):
    """The same with sums: the gradient of a gradient."""

    @staticmethod
    def loss_of(y: Any, p: Any) -> Any:
        return tf.sqrt(0.02 * tf.reduce_sum(tf.square(p - y)))


class TwoOptimizers(OwnStep):
    """Two parts, each with an optimizer and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = dense(4, 4)
        self.second = O.Adam(0.02)
        self.loss_of = C.MeanSquaredError()

    def call(self, x: Any) -> Any:
        return self.last(self.other(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(y[:, None], self(x, training=True))
            size = tf.square(self.loss_of(tf.zeros_like(x), self.other(x)))
            both = loss + size
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.last.trainable_variables), self.last.trainable_variables, strict=True)
        )
        self.second.apply_gradients(
            zip(tape.gradient(both, self.other.trainable_variables), self.other.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "size": size}


class OwnArguments(OwnStep):
    """Its steps make the arguments of ``call`` from the rows."""

    def call(self, parts: Any) -> Any:
        left, right = parts
        return self.last(tf.concat([left, right], axis=1))

    def _loss(self, x: Any, y: Any) -> Any:
        loss = tf.reduce_mean(tf.square(tf.squeeze(self((x[:, :2], x[:, 2:])), -1) - y))
        self.tracker.update_state(loss)
        return loss

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": self.tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self._loss(*data)
        return {"loss": self.tracker.result()}

    def predict_step(self, data: Any) -> Any:
        return self((data[0][:, :2], data[0][:, 2:]))


class OwnTargets(keras.Model):
    """Its steps make the targets of compile's loss from the rows, which have no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = embedding(False), dense(9, 3)

    def call(self, x: Any) -> Any:
        return self.last(self.table(x))

    def _loss(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        targets, weights = tf.one_hot(x[:, 1:], 9), tf.cast(x[:, 1:] != 0, tf.float32)
        return self.compute_loss(None, targets, self(x[:, :-1], training=True), sample_weight=weights)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": self._loss(data)}


def _own_targets() -> Any:
    model = OwnTargets()
    model.compile(O.Adam(0.02), C.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1))
    return model


def _own_arguments() -> Any:
    model = OwnArguments()
    model.compile(O.SGD(0.05))
    return model


class Adversarial(keras.Model):
    """No ``call``: a generator and a critic with their own optimizers, as in Keras' WGAN-GP example."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), dense(6, 2, activation="tanh"), dense(4, 3)])
        self.critic = keras.Sequential([keras.Input((4,)), dense(6, 4, activation="tanh"), dense(1, 5)])
        self.tracker = M.Mean(name="cost")

    def compile(self, **options: Any) -> None:
        super().compile(O.SGD(0.0), **options)
        self.of_generator, self.of_critic = O.Adam(0.01), O.Adam(0.01)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        real = data[0]
        with tf.GradientTape() as tape:
            made = self.generator(real[:, ::-1], training=True)
            cost = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(real))
            between = real + 0.3 * (made - real)
            with tf.GradientTape() as inner:
                inner.watch(between)
                judged = self.critic(between, training=True)
            norm = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(judged, [between])[0]), axis=1) + 1e-8)
            cost += 10.0 * tf.reduce_mean((norm - 1.0) ** 2)
        gradients = tape.gradient(cost, self.critic.trainable_variables)
        self.of_critic.apply_gradients(zip(gradients, self.critic.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(real[:, ::-1], training=True)))
        gradients = tape.gradient(loss, self.generator.trainable_variables)
        self.of_generator.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        self.tracker.update_state(cost)
        return {"cost": self.tracker.result(), "loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(tf.reduce_mean(self.critic(data[0])))
        return {"cost": self.tracker.result()}

    def predict_step(self, data: Any) -> Any:
        return self.generator(data[0] if isinstance(data, tuple) else data)


def _adversarial() -> Any:
    model = Adversarial()
    model.compile()
    return model


class OwnLoss(keras.Model):
    """Custom ``compute_loss`` and ``compute_metrics``."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                     training: bool = True) -> Any:  # fmt: skip
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * tf.reduce_sum(
            [tf.reduce_sum(tf.square(v)) for v in self.trainable_variables]
        )


def own(kind: Callable[[], Any], optimizer: Any = None, **options: Any) -> Any:
    """Return a compiled model of a custom class."""
    model = kind()
    model.compile(optimizer or O.SGD(0.05), "mse", **options)
    model.build((None, 4))
    return model


def several(nested: str) -> Any:
    """Return a model of several inputs and outputs, as a list, a dictionary or both."""
    x, seq = keras.Input((4,), name="x"), keras.Input((6,), dtype="int32", name="seq")
    z = L.Concatenate()([dense(4, 2)(x), L.GlobalAveragePooling1D()(embedding(True)(seq))])
    cls, reg = dense(3, 3, activation="softmax", name="cls")(z), dense(1, 4, name="y")(z)
    outputs: Any = [cls, reg] if nested == "list" else {"cls": cls, "y": reg}
    losses: Any = {"cls": "sparse_categorical_crossentropy", "y": "mae"}
    weights: Any = {"cls": 1.0, "y": 0.5}
    metrics: Any = {"cls": ["accuracy"], "y": ["mse"]}
    if nested == "list":
        losses, weights, metrics = (list(part.values()) for part in (losses, weights, metrics))
    return compiled([x, seq], outputs, losses, loss_weights=weights, metrics=metrics, weighted_metrics=metrics)


def _mixed_strings() -> Any:
    x, word = keras.Input((4,), name="x"), keras.Input((), dtype="string", name="word")
    look = L.StringLookup(vocabulary=["foo", "bar", "baz", "qux"], output_mode="one_hot")(L.Reshape((1,))(word))
    return compiled([x, word], dense(1, 3)(L.Concatenate()([x, look])))


def _sequence_to_sequence() -> Any:
    inputs = keras.Input((6,), dtype="int32", name="seq")
    z = L.LSTM(4, return_sequences=True, kernel_initializer=seeded(4), recurrent_initializer=seeded(6))(
        embedding(True)(inputs)
    )
    return compiled(inputs, dense(9, 3, activation="softmax")(z), "sparse_categorical_crossentropy", O.Adam(0.02),
                    metrics=["accuracy"])  # fmt: skip


def _attention(kind: str) -> Any:
    inputs = keras.Input((6,), dtype="int32", name="seq")
    e = embedding(True)(inputs)
    attention = {
        "MultiHeadAttention": lambda: L.MultiHeadAttention(2, 4, kernel_initializer=seeded(4))(e, e),
        "GroupQueryAttention": lambda: L.GroupQueryAttention(4, 2, 1, kernel_initializer=seeded(4))(e, e),
        "Attention": lambda: L.Attention()([e, e]),
        "AdditiveAttention": lambda: L.AdditiveAttention(use_scale=False)([e, e]),
    }[kind]()
    return compiled(inputs, dense(1, 3)(L.GlobalAveragePooling1D()(attention)))


def _ways() -> list[Case]:
    two = {"x": ["x", "seq"], "y": ["cls", "y"]}
    return [
        Case("own train_step", lambda: own(OwnStep)),
        Case("own train_step that scales", lambda: own(ScaledStep)),
        Case("own train_step that clips", lambda: own(ClippedStep)),
        Case("own train_step with clipping, eager", lambda: own(ClippedStep, run_eagerly=True)),
        Case("own train_step of SAM", lambda: own(SharpnessStep)),
        Case("own train_step of MAML", lambda: own(MetaStep)),
        *(Case(f"a step with {name}", lambda of=of: own(partial(SumStep, of))) for name, of in SUMS.items()),
        Case(
            "a step with a sum, scaled",
            lambda: own(partial(SumStep, SUMS["a sum"]), optimizer=O.LossScaleOptimizer(O.SGD(0.05), 64.0)),
        ),
        Case("a step that is a tf.function", lambda: own(DecoratedStep)),
        Case("a step that changes gradients", lambda: own(GradientStep)),
        Case("a step with losses in a loop", lambda: own(LoopStep)),
        Case("a step that accumulates", lambda: own(AccumulatingStep)),
        Case("a balanced loss and metric", lambda: plain(_balanced, metrics=[_balanced])),
        Case("a loss of each row that depends on the others", lambda: plain(_OfOthers(reduction="sum"))),
        Case("a step of MAML with sums", lambda: own(SumMetaStep)),
        Case("a compute_loss with a masked mean", lambda: _own_loss(SumLoss, _AddsSum())),
        Case("adds a sum", lambda: _headed("x", (4,), lambda: [_AddsSum()])),
        Case("two optimizers", lambda: own(TwoOptimizers)),
        Case("two optimizers and no call", _adversarial),
        Case("own arguments of call", _own_arguments),
        Case("own targets, no labels", _own_targets, x="seq", y=None),
        Case("results of the guide's step", lambda: _with_results(GuideStep), y="bins"),
        Case("results of the guide's step, eager", lambda: _with_results(GuideStep, run_eagerly=True), y="bins"),
        Case("results that a step derives", lambda: _with_results(DerivedStep), y="bins"),
        Case("results that a compute_metrics derives", lambda: _with_results(DerivedMetrics), y="bins"),
        Case("a layer that always moves", _moves),
        Case("a layer that always moves, eager", lambda: _moves(roots=False, run_eagerly=True)),
        Case("a layer that always moves, own predict_step", lambda: _moves(OwnPrediction)),
        Case("own compute_loss", _own_loss),
        Case("run_eagerly", lambda: plain(metrics=["mae"], run_eagerly=True)),
        Case("steps_per_execution", lambda: plain(metrics=["mae"], steps_per_execution=2)),
        Case("outputs in a list", lambda: several("list"), **two),
        Case("outputs in a dictionary", lambda: several("dict"), **two),
        Case("outputs with weights", lambda: several("dict"), sample_weight="w", **two),
        Case("strings beside numbers", _mixed_strings, x=["x", "word"]),
        Case("masked sequences", _sequence_to_sequence, x="seq", y="next"),
        Case("mixed_float16", lambda: plain(optimizer=_scaled()), policy="mixed_float16", near=5e-3),
        Case("mixed_bfloat16", lambda: plain(optimizer=O.Adam(0.02)), policy="mixed_bfloat16", near=5e-2),
        *(
            Case(f"layer {kind}", lambda kind=kind: _attention(kind), x="seq")
            for kind in ("MultiHeadAttention", "GroupQueryAttention", "Attention", "AdditiveAttention")
        ),
    ]


def _scaled() -> Any:
    # With the default initial scale the first gradients overflow or not, depending on the number of rows.
    return O.LossScaleOptimizer(O.Adam(0.02), initial_scale=256.0)


def _own_loss(kind: Any = OwnLoss, *layers: Any) -> Any:
    inputs = z = keras.Input((4,), name="x")
    for layer in layers:
        z = layer(dense(4, 2)(z))
    model = kind(inputs, dense(1, 3)(z))
    model.compile(O.SGD(0.05), "mse", metrics=["mae"])
    return model


def all_cases() -> list[Case]:
    """Return all cases."""
    return [*_optimizers(), *_losses(), *_metrics(), *_layers(), *_of_positions(), *_ways()]
