"""Measure TensorFlowOnSpark 2.2.5's ``TFModel.transform`` with the same model and rows; print one line of JSON.

Runs in its own environment, so it imports only the standard library at its top. TensorFlowOnSpark runs in
its best configuration: a SavedModel whose signature is named, flat arrays, the model loaded in each Python worker
before the clock starts. Its ``transform`` is not lazy: to find the schema, it applies the model to a whole partition.
The rate is reported with that time and without.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.data import SHAPES, cached_frame
from benchmarks.session import spark_session

__all__ = ["main"]


def main(shape_name: str, rows: int, partitions: int, repeat: int, *, place: str, batch: int) -> dict[str, Any]:
    """Apply the SavedModel at `place` to the first column, `repeat` times."""
    shape = next(shape for shape in SHAPES if shape.name == shape_name)
    found: dict[str, Any] = {"rows": rows, "partitions": partitions, "transform": [], "whole": [], "wall": []}
    with spark_session(cores=1) as spark:
        frame = cached_frame(spark, shape, rows, partitions)
        for number in range(repeat + 1):
            started = time.perf_counter()
            scored = _model(place, frame.columns[0], batch).transform(frame)
            transformed = time.perf_counter()
            scored.write.format("noop").mode("overwrite").save()
            if number:  # the first one loads the model
                ended = time.perf_counter()
                found["transform"].append(transformed - started)
                found["whole"].append(rows / (ended - started))
                found["wall"].append(rows / (ended - transformed))
        if scored.count() != rows:
            raise RuntimeError("not every row has a result")
    return found


def _model(place: str, column: str, batch: int) -> Any:
    from tensorflowonspark.pipeline import TFModel

    taken, given = _names(place)
    model = TFModel({"num_gpus": 0}).setExportDir(place).setSignatureDefKey("serving_default").setTagSet("serve")
    return model.setInputMapping({column: taken}).setOutputMapping({given: "prediction"}).setBatchSize(batch)


def _names(place: str) -> tuple[str, str]:
    """Return the names of the signature's input and output."""
    import tensorflow as tf

    signature = tf.saved_model.load(place).signatures["serving_default"]
    (taken,), (given,) = signature.structured_input_signature[1], signature.structured_outputs
    return taken, given


if __name__ == "__main__":
    numbers = (int(number) for number in sys.argv[2:5])
    print(json.dumps(main(sys.argv[1], *numbers, place=sys.argv[5], batch=int(sys.argv[6]))))
