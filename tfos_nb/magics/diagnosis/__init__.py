"""Checks of ``%tfos_doctor`` and ``%tfos_spark``, and the checks before a cell runs.

The input is a session and the machine's state. The output is lines that say what is right, what is wrong, and what to
do.
"""
