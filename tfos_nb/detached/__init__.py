"""Clusters whose driver is a process of its own: they outlive the kernel that has launched them.

In come a launch with ``detach=True`` and, from any kernel of the same user, questions; out go the cluster's states,
logs and results. The process and the kernels speak over a unix socket that only this user can open. What a user calls
is :func:`tfos_nb.attach` and :func:`tfos_nb.clusters`; the magics import the package, and it imports what launches.
"""
