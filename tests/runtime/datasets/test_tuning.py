"""TensorFlow's autotuning must not delay the end of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfos_nb.runtime.datasets.tuning import tune_no_devices


def test_a_strategys_wrapper_around_a_dataset_is_not_tuned_but_the_users_dataset_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorflow.python.data.ops import multi_device_iterator_ops as owner

    monkeypatch.setattr(owner, "_create_device_dataset", owner._create_device_dataset)  # restored at the end
    tune_no_devices()
    made = owner._create_device_dataset
    tune_no_devices()
    assert owner._create_device_dataset is made, "once is enough"

    devices: list[bool] = []

    def noted(found: Any) -> Any:
        devices.append(found.options().autotune.enabled)
        return iter(found)

    monkeypatch.setattr(owner, "iter", noted, raising=False)
    own = tf.data.Dataset.range(10).batch(4)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    rows = [int(row) for batch in strategy.experimental_distribute_dataset(own) for row in batch]
    assert rows == list(range(10))
    assert devices == [False]
    assert own.options().autotune.enabled is not False
