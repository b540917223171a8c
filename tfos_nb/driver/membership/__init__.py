"""Membership of a cluster: a state machine, without lock, clock, thread or stream.

An event enters :meth:`Membership.apply <tfos_nb.driver.membership.machine.Membership.apply>`, which changes the members
and returns commands. :class:`~tfos_nb.driver.cluster_controller.ClusterController` is its one owner: it makes the
events and executes the commands. Nothing here imports another module of the driver.
"""
