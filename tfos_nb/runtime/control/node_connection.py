"""Connect a Spark task to a node's Flight server."""

from __future__ import annotations

from typing import Any

import pyarrow.flight as flight

from tfos_nb.runtime.control.identity import SERVER_NAME
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.processes import host_and_port

__all__ = ["connect"]


def connect(place: FeedPlace, near: bool) -> Any:
    """Return a Flight client: by the unix socket on the node's own host, else by TLS with the node's pinned key."""
    if near:
        return flight.FlightClient(f"grpc+unix://{place.socket}")
    return flight.FlightClient(
        f"grpc+tls://{host_and_port(place.host, place.port)}",
        tls_root_certs=place.certificate,
        override_hostname=SERVER_NAME,
        generic_options=[("grpc.enable_http_proxy", 0)],
    )
