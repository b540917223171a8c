"""Life of a cluster in the driver's process: its members, its Spark jobs, and its outcome.

The input is a plan, and the messages that nodes send to the driver's port. The output is Spark jobs, answers to nodes,
and one outcome that every caller receives. :class:`tfos_nb.Cluster` is built from these parts. The modules here decide
which node gets which rows. The calls of ``train``, and their Spark jobs, are in :mod:`~tfos_nb.driver.feeding`.
``cluster``, ``compat``, ``detached``, ``inference``, ``magics`` and ``parallel`` import this package.
"""
