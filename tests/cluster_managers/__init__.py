"""Spark as it is deployed: programs are submitted to standalone, YARN and Connect, and to several hosts, all real.

The daemons are started on this machine. Everything else is run on the ``local-cluster`` of ``tests/conftest.py``.
"""
