"""Apply the mends to a Keras of which one function is not as known; prints what came out, as JSON."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras.src.backend.tensorflow import trainer

from tfos_nb.runtime.strategy import patch_keras_fit


def other_build(self: object, iterator: object = None) -> None:
    """What a later Keras might have here."""


known = trainer.TensorFlowTrainer._maybe_symbolic_build
step = trainer.TensorFlowTrainer._make_function
trainer.TensorFlowTrainer._maybe_symbolic_build = other_build
refused = patch_keras_fit()
untouched = trainer.TensorFlowTrainer._make_function is step
trainer.TensorFlowTrainer._maybe_symbolic_build = known
print(json.dumps({"refused": refused, "untouched": untouched, "done": patch_keras_fit(), "again": patch_keras_fit()}))
