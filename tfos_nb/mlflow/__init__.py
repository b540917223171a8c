"""Log runs to MLflow: while they run, by ``launch(…, mlflow=…)``, or afterwards, by :func:`log`.

The input is runs (:mod:`tfos_nb.records`). The output is runs of MLflow, with their models. ``pip install
'tfos_nb[mlflow]'`` installs MLflow. Only the driver connects to the tracking server: nodes need neither MLflow nor
access to the server. ``pipeline`` imports this package. ``launch`` loads it by its name.
"""

from __future__ import annotations

from tfos_nb.mlflow.following import log

__all__ = ["log"]
