"""A user's custom Keras code in a separate module: some of it registered, some not."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="shop")
class Shift(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 1


@keras.saving.register_keras_serializable()
def shrunk(x: Any) -> Any:
    return x / 2


class Plain(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x * 4
