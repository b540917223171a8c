"""Apply the patches to a Keras with one unknown function; print the results as JSON."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from tfos_nb.runtime.program.setup import patch_keras_fit


def other_build(self: object, iterator: object = None) -> None:
    """A variant that a later Keras might have here."""


trainer = next(c for c in keras.Model.__mro__ if "_make_function" in vars(c))  # its name differs between versions
known, step = trainer._maybe_symbolic_build, trainer._make_function
trainer._maybe_symbolic_build = other_build
refused = patch_keras_fit()
untouched = trainer._make_function is step
trainer._maybe_symbolic_build = known
print(json.dumps({"refused": refused, "untouched": untouched, "done": patch_keras_fit(), "again": patch_keras_fit()}))
