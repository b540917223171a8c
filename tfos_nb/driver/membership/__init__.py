"""Membership of a cluster: a state machine, without lock, clock, thread or stream.

An event enters :meth:`Membership.apply <tfos_nb.driver.membership.machine.Membership.apply>`, which changes the members
and returns commands. ``members`` has the state of one node, ``present`` the nodes that are counted on, ``supervisors``
the processes that speak for them, and ``ending_executors`` who leaves an executor before its end.
:class:`~tfos_nb.driver.cluster_controller.ClusterController` is the one owner: it makes the events and executes the
commands. ``cluster`` and ``driver`` import this package. Nothing here imports another module of the driver.
"""
