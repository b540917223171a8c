"""Train and apply TensorFlow models on a Spark cluster, from a notebook.

``%load_ext tfos_nb`` gives the cell magic ``%%tfos_cluster``; :func:`launch` does the same from Python. Importing this
package imports neither Spark, TensorFlow nor the notebook's libraries: executors import it too. Users' programs import
it. ``pyproject.toml`` has the order in which its own modules and packages may import each other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfos_nb.version import __version__

__all__ = [
    "Cluster",
    "ClusterPlan",
    "InputMode",
    "KerasEstimator",
    "KerasModel",
    "TFEstimator",
    "TFFeaturizer",
    "TFModel",
    "__version__",
    "attach",
    "clusters",
    "errors",
    "featurize",
    "launch",
    "map_batches",
    "mlflow",
    "parallel",
    "predict",
    "reduce_batches",
    "register_udf",
    "runs",
    "spark_session",
    "tfrecord",
]

_MODULES = ("errors", "mlflow", "parallel", "tfrecord")

_PLACES = {
    "Cluster": "tfos_nb.cluster",
    "ClusterPlan": "tfos_nb.runtime.control.plan",
    "InputMode": "tfos_nb.runtime.control.plan",
    "KerasEstimator": "tfos_nb.pipeline.keras_estimator",
    "KerasModel": "tfos_nb.pipeline.keras_model",
    "TFEstimator": "tfos_nb.pipeline.estimator",
    "TFFeaturizer": "tfos_nb.pipeline.features",
    "TFModel": "tfos_nb.pipeline.model",
    "attach": "tfos_nb.detached.attached",
    "clusters": "tfos_nb.detached.attached",
    "featurize": "tfos_nb.pipeline.features",
    "launch": "tfos_nb.cluster",
    "map_batches": "tfos_nb.inference.blocks",
    "predict": "tfos_nb.inference.frames",
    "reduce_batches": "tfos_nb.inference.blocks",
    "register_udf": "tfos_nb.inference.sql",
    "runs": "tfos_nb.records.runs",
    "spark_session": "tfos_nb.driver.prewarm",
}

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tfos_nb import errors, mlflow, parallel, tfrecord
    from tfos_nb.cluster import Cluster, launch
    from tfos_nb.detached.attached import attach, clusters
    from tfos_nb.driver.prewarm import spark_session
    from tfos_nb.inference.blocks import map_batches, reduce_batches
    from tfos_nb.inference.frames import predict
    from tfos_nb.inference.sql import register_udf
    from tfos_nb.pipeline.estimator import TFEstimator
    from tfos_nb.pipeline.features import TFFeaturizer, featurize
    from tfos_nb.pipeline.keras_estimator import KerasEstimator
    from tfos_nb.pipeline.keras_model import KerasModel
    from tfos_nb.pipeline.model import TFModel
    from tfos_nb.records.runs import runs
    from tfos_nb.runtime.control.plan import ClusterPlan, InputMode


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Answer ``%load_ext tfos_nb``."""
    from tfos_nb.magics import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Answer ``%unload_ext tfos_nb``."""
    from tfos_nb.magics import unload

    unload(ipython)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "tfos_nb.serverext"}]
