"""Life of a cluster in the driver's process: its members, its Spark jobs, and its outcome.

The input is a plan, and the messages that nodes send to the driver's port. The output is Spark jobs, answers to nodes,
and one outcome that every caller receives. :class:`tfos_nb.Cluster` is built from these parts. Rows have a package of
their own, :mod:`~tfos_nb.driver.feeding`. ``tfos_nb``'s modules ``cluster`` and ``parallel`` import this package, and
so do ``inference``, ``magics`` and ``compat``.
"""
