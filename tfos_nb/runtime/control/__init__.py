"""Communication: the driver's one port, its messages, and channels between processes.

The input is messages, which are frozen dataclasses (:mod:`~tfos_nb.runtime.control.wire`). The output is the same
messages in another process. Both ends of a connection are in one module. This is the lowest package of the runtime: it
imports no other. ``cluster``, ``compat``, ``detached``, ``driver``, ``inference``, ``jupyter``, ``magics``, ``mlflow``,
``parallel``, ``pipeline``, ``records``, ``runtime``, ``spark``, ``state``, ``tfrecord`` and ``widgets`` import this
package.
"""
