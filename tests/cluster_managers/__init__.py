"""Spark as it is deployed: programs are submitted to real standalone, YARN and Connect clusters, and to several hosts.

The daemons are started on this machine. All other tests use the ``local-cluster`` of ``tests/conftest.py``.
"""
