"""Log runs to MLflow: while they run, by ``launch(…, mlflow=…)``, or afterwards, by :func:`log`.

``pip install 'tfos_nb[mlflow]'`` installs MLflow. Only the driver connects to the tracking server: nodes need neither
MLflow nor access to the server. The input is runs (:mod:`tfos_nb.records`). The output is runs of MLflow, with their
models. ``pipeline`` imports this package, and
``launch`` loads it by its name.

::

    launch(mlflow=…) ──▶ destination: which server, experiment and run     (in the caller's thread)
                         RunWriter: parameters, metrics by epoch, outcome  (in a thread of its own)
                         models: the model with its signature              (TensorFlow runs in another process)
"""

from __future__ import annotations

from tfos_nb.mlflow.following import log

__all__ = ["log"]
