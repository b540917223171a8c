"""Clusters whose driver is a process of its own: they outlive the kernel that has launched them.

The input is a launch with ``detach=True``, and calls from any kernel of the same user. The output is the cluster's
states, logs and results. Process and kernels exchange messages over a unix socket that only this user can open. Users
call :func:`tfos_nb.attach` and :func:`tfos_nb.clusters`. ``cluster`` and ``magics`` load the package by its name.
"""
