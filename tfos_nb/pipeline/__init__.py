"""Spark ML and DataFrames: models as Transformers, TensorFlow functions over blocks of rows, models in SQL.

The input is DataFrames, models and Params. The output is trained models, and DataFrames with additional columns. Only
``compat`` imports this package. ``tfos_nb`` loads its modules by their names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "KerasEstimator": "tfos_nb.pipeline.keras_estimator",
    "KerasModel": "tfos_nb.pipeline.keras_model",
    "TFEstimator": "tfos_nb.pipeline.estimator",
    "TFFeaturizer": "tfos_nb.pipeline.features",
    "TFModel": "tfos_nb.pipeline.model",
    "featurize": "tfos_nb.pipeline.features",
    "map_batches": "tfos_nb.inference.blocks",
    "reduce_batches": "tfos_nb.inference.blocks",
    "register_udf": "tfos_nb.inference.sql",
}

__all__ = [
    "KerasEstimator",
    "KerasModel",
    "TFEstimator",
    "TFFeaturizer",
    "TFModel",
    "featurize",
    "map_batches",
    "reduce_batches",
    "register_udf",
]

if TYPE_CHECKING:
    from tfos_nb.inference.blocks import map_batches, reduce_batches
    from tfos_nb.inference.sql import register_udf
    from tfos_nb.pipeline.estimator import TFEstimator
    from tfos_nb.pipeline.features import TFFeaturizer, featurize
    from tfos_nb.pipeline.keras_estimator import KerasEstimator
    from tfos_nb.pipeline.keras_model import KerasModel
    from tfos_nb.pipeline.model import TFModel


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
