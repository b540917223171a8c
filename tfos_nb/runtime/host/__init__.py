"""Resources of a process on its host: GPUs, CPU, memory, and its output.

The input is a process id and the resources that Spark gave its task. The output is GPUs that it may use, usage figures,
and lines of output. ``driver``, ``runtime.feed``, ``runtime.models``, ``runtime.node`` and ``runtime.recovery`` import
this package. It imports only :mod:`~tfos_nb.runtime.control`.
"""
