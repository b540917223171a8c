"""No thread of TensorFlow's that tunes a pipeline makes an epoch end late."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfos_nb.runtime.datasets.tuning import tune_no_devices


def test_what_a_strategy_lays_over_a_dataset_is_not_tuned_and_the_users_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.data.ops import multi_device_iterator_ops as owner

    monkeypatch.setattr(owner, "_create_device_dataset", owner._create_device_dataset)  # so that it is put back
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
