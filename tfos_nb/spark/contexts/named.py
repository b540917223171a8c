"""Find the Spark that the environment specifies, before a session exists."""

from __future__ import annotations

import os
import re
import socket

from tfos_nb.errors import PlanError
from tfos_nb.redaction import without_password

__all__ = ["check_server", "named_spark", "server_of"]

_KNOCK_SECONDS = 5.0
_PORT = 15002  # Spark Connect's default
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def named_spark() -> str:
    """Return a text that names the Spark chosen by spark-submit, its arguments or ``SPARK_REMOTE``.

    It is empty if an embedded Spark would be started. It contains no password: of a URL of Spark Connect it has only
    the host and the port.
    """
    remote = os.environ.get("SPARK_REMOTE", "")
    if server := server_of(remote):
        return f"the server of Spark Connect at {server[0]}:{server[1]} (SPARK_REMOTE)"
    if "SPARK_REMOTE" in os.environ:
        return "Spark Connect (SPARK_REMOTE)"
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        return "Spark Connect (SPARK_CONNECT_MODE_ENABLED)"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "the Spark that has started this program"
    master = re.search(r"--master[\s=]+(\S+)", os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    return f"{without_password(master[1])} (PYSPARK_SUBMIT_ARGS)" if master else ""


def server_of(remote: str) -> tuple[str, int] | None:
    """Return the host and the port in ``SPARK_REMOTE``, whose other parts may be secret; None if it has no host.

    Examples
    --------
    >>> server_of("sc://spark.example.org:443/;token=secret"), server_of("sc://[::1]"), server_of("local[2]")
    (('spark.example.org', 443), ('::1', 15002), None)
    """
    found = re.match(r"sc://(\[[^\]]+\]|[^:/;]+)(?::(\d+))?(?:[/;]|$)", remote.strip())
    return (found[1].strip("[]"), int(found[2] or _PORT)) if found else None


def check_server() -> None:
    """Check that the server in ``SPARK_REMOTE`` accepts connections; PySpark would retry silently for minutes.

    Behind a proxy nothing is checked.

    Raises
    ------
    PlanError
        If no server accepts a connection.
    """
    server = server_of(os.environ.get("SPARK_REMOTE", ""))
    if server is None or any(os.environ.get(name) for name in _PROXIES):
        return
    try:
        socket.create_connection(server, _KNOCK_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise PlanError(
            f"SPARK_REMOTE names a server of Spark Connect at {server[0]}:{server[1]}, and no server answers there "
            f"({error}). Start it, or correct or unset SPARK_REMOTE"
        ) from None
