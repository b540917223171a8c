"""What ``%tfos_doctor`` and ``%tfos_spark`` look at, and what a cell is told before it runs.

In come a session and the machine's state; out come lines that say what is well, what is not, and what to do.
"""
