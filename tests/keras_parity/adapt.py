"""Preprocessing layers that adapt to shared rows, as one worker of several or in one process.

Usage: ``python -m tests.keras_parity.adapt OUT``. The result of each case is written to ``OUT``, as a line of JSON.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tests.keras_parity.workers import as_worker, write_results
from tfos_nb.runtime.feed.passes import Cut
from tfos_nb.runtime.keras.distributed_datasets import divisible

L = keras.layers
ROWS = 37
WORDS = ["foo bar", "bar", "baz qux foo", "qux"]


def shares(worker: int, workers: int, rows: int) -> slice:
    """Return the rows of a worker: those of the second worker begin at the tenth row."""
    bounds = [0, *([min(10, rows)] if workers > 1 else []), rows]
    return slice(bounds[worker], bounds[worker + 1])


def columns(rows: int) -> dict[str, Any]:
    numbers = np.random.default_rng(5).normal(3.0, 2.0, (rows, 4)).astype("float32")
    words = np.array([WORDS[number * number % 7 % 4] for number in range(rows)])
    return {"x": numbers, "t": words, "i": (numbers[:, :1] * 3).astype("int64")}


def normalization(given: dict[str, Any]) -> dict[str, Any]:
    layer = L.Normalization()
    layer.adapt(given["x"])
    return {"mean": np.ravel(layer.mean).tolist(), "variance": np.ravel(layer.variance).tolist()}


def normalization_of_all_axes(given: dict[str, Any]) -> dict[str, Any]:
    layer = L.Normalization(axis=None)
    layer.adapt(given["x"].map(lambda x: x * 2.0).prefetch(2))
    return {"mean": np.ravel(layer.mean).tolist(), "variance": np.ravel(layer.variance).tolist()}


def discretization(given: dict[str, Any]) -> dict[str, Any]:
    layer = L.Discretization(num_bins=5)
    layer.adapt(given["x"].map(lambda x: x[:, :1]))
    return {"boundaries": [float(one) for one in layer.bin_boundaries]}


def vocabulary(given: dict[str, Any]) -> dict[str, Any]:
    layer = L.TextVectorization(output_sequence_length=3)
    layer.adapt(given["t"])
    return {"words": layer.get_vocabulary(), "of": layer(["qux bar foo"]).numpy().tolist()}


def tf_idf(given: dict[str, Any]) -> dict[str, Any]:
    layer = L.TextVectorization(output_mode="tf_idf", ngrams=2, max_tokens=6)
    layer.adapt(given["t"].unbatch().batch(5))
    return {"words": layer.get_vocabulary(), "of": layer(["qux bar foo"]).numpy().tolist()}


def lookups(given: dict[str, Any]) -> dict[str, Any]:
    strings, integers = L.StringLookup(max_tokens=4), L.IntegerLookup()
    strings.adapt(given["t"])
    integers.adapt(given["i"])
    return {"words": strings.get_vocabulary(), "numbers": [int(one) for one in integers.get_vocabulary()]}


CASES = (normalization, normalization_of_all_axes, discretization, vocabulary, tf_idf, lookups)


def of_rows(strategy: Any, worker: int, workers: int, rows: int, case: Any) -> dict[str, Any]:
    given = {
        name: divisible(tf.data.Dataset.from_tensor_slices(values[shares(worker, workers, rows)]).batch(4), Cut(4))
        for name, values in columns(rows).items()
    }
    with strategy.scope():
        result: dict[str, Any] = case(given)
    return result


def main(out: str) -> None:
    """Run each case, with rows on both workers, and with all on the first one."""
    worker, workers, strategy = as_worker()
    run = partial(of_rows, strategy, worker, workers)
    write_results(
        out, [(f"{case.__name__} of {rows}", partial(run, rows, case)) for rows in (ROWS, 9) for case in CASES]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
