"""The life of a cluster in the driver's process: who is a member, what Spark is asked for, and how it ends.

In come a plan and what nodes say at the door; out come jobs of Spark's, answers to nodes, and one outcome that every
caller hears. :class:`tfos_nb.Cluster` is made of it. Rows have a package of their own, :mod:`~tfos_nb.driver.feeding`.
"""
