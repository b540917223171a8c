"""Training functions of the tests: in a module of their own, as those that are saved have to be."""

from __future__ import annotations

from typing import Any


def build(rate: float = 0.02) -> Any:
    import keras

    given = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(12, activation="tanh")(given)
    model = keras.Model(given, keras.layers.Dense(3, activation="softmax", name="kind")(hidden))
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(args: Any, ctx: Any) -> str:
    """Two nodes, fed from Spark, with weights and validation rows."""
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = build(0.05)  # 0.96 or more after 12 epochs, whatever it starts from; with 0.02 it is 0.84 at times
    names = {"x": "x", "y": "y", "sample_weight": args.weightCol}
    rows = ctx.dataset(args.batch_size, **names, shuffle=200, seed=args.seed)
    model.fit(rows, validation_data=ctx.validation(args.batch_size, **names), epochs=args.epochs, verbose=2)
    return str(ctx.save(model))


def train_from_files(args: Any, ctx: Any) -> dict[str, Any]:
    """One node, which reads the records that the fit wrote, and exports nothing itself."""
    import os

    import tensorflow as tf

    model = build()
    options = {"x": "x", "y": "y"}
    rows = ctx.read(args.tfrecord_dir, args.batch_size, shuffle=100, **options)
    model.fit(rows, validation_data=ctx.read(args.validation_dir, 32, **options), epochs=args.epochs, verbose=2)
    ctx.save(model, "between.keras")
    return {
        "process": os.getpid(),
        "steps": args.steps,
        "mine": args.mine,
        "records": args.tfrecord_dir,
        "devices": len(tf.config.list_physical_devices()),
    }


def export(args: Any) -> None:
    import keras

    model = keras.models.load_model(f"{args.model_dir}/between.keras")
    model.export(args.export_dir, verbose=False)


def fail(args: Any, ctx: Any) -> None:
    raise ValueError(f"no good {args.mine}")
