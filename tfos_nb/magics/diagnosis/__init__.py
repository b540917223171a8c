"""Checks of ``%tfos_doctor``, ``%tfos_spark`` and ``%tfos_plan``.

The input is a session and the machine's state. The output is lines that say what is right, what is wrong, and what to
do. Only ``magics`` imports this package.
"""
