"""What a node does not import before it is used."""

from __future__ import annotations

import pytest

from tests.conftest import RunScript

SPARED = """
    import sys
    from tfos_nb.runtime.code.on_import import spare_scikit_learn

    spare_scikit_learn()
    spare_scikit_learn()
    import keras
    import tensorflow as tf

    tf.keras.Sequential
    twice = tf.function(lambda x: x if tf.reduce_sum(x) > 0 else -x)
    twice(tf.ones(()))  # AutoGraph looks for the function's module among all
    finders = [type(one).__name__ for one in sys.meta_path]
    print("sklearn" in sys.modules, "scipy.stats" in sys.modules, finders.count("WhenUsed"))
    from keras.wrappers import SKLearnRegressor

    print("sklearn" in sys.modules, tf.keras.wrappers.SKLearnRegressor is SKLearnRegressor)
    model = SKLearnRegressor(lambda X, y: keras.Sequential([keras.layers.Dense(1)]), fit_kwargs={})
    print(model.get_params()["warm_start"])
"""


def test_scikit_learn_is_imported_when_keras_wrappers_are_used(run_script: RunScript) -> None:
    pytest.importorskip("sklearn", reason="Keras wraps scikit-learn where that is installed")
    before, after, works = run_script(SPARED).stdout.splitlines()[-3:]
    assert before == "False False 1"
    assert after == "True True"
    assert works == "False"
