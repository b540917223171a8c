"""Use TensorFlow before the strategy is built: a dataset of rows is allowed, any other operation is named.

Usage: ``order_cases.py``, with a ``TF_CONFIG`` of two workers; this one never connects to the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pyarrow as pa
import tensorflow as tf

from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.code.first_use import has_begun
from tfos_nb.runtime.datasets.dataset import DatasetOptions
from tfos_nb.runtime.datasets.deferred_dataset import dataset_of
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.passes import Readers
from tfos_nb.runtime.program.setup import patch_keras_fit

ROWS = pa.RecordBatch.from_pydict({"x": pa.array([1.0, 2.0, 3.0]), "y": pa.array([1, 0, 1])})


class Rows:
    def schema(self) -> FeedSchema:
        return FeedSchema(0, ROWS.schema.serialize().to_pybytes(), {})

    def next_pass(self, readers: Readers | None = None) -> Iterator[pa.RecordBatch]:
        return iter([ROWS])


def dataset(**options: Any) -> tf.data.Dataset:
    return dataset_of(Rows(), DatasetOptions(2, **options), print, waits=True)


def message_of(call: Any) -> str:
    try:
        call()
    except (FeedFailed, PlanError) as error:
        return str(error)
    return ""


def main() -> None:
    patch_keras_fit()
    made = dataset(x="x", y="y")
    report: dict[str, Any] = {"unknown": message_of(lambda: dataset(x="z")), "begun": has_begun()}
    one = tf.constant(1)  # the first operation
    report["late"] = message_of(lambda: tf.distribute.MultiWorkerMirroredStrategy())
    report["is_dataset"] = isinstance(made, tf.data.Dataset)
    report["batches"] = [[x.numpy().tolist(), y.numpy().tolist()] for x, y in made]
    report["mapped"] = [int(y) for y in made.map(lambda x, y: y + tf.cast(one, y.dtype)).unbatch()]
    report["spec"] = str(made.element_spec)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
