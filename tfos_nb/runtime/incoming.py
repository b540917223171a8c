"""How many connections the driver's port takes, and how long it waits for one that says nothing.

Whoever reaches the port can connect to it, and is a stranger until TLS has been agreed on and a token been sent. Each
connection is a descriptor of the driver's process, which is the kernel of a notebook: it keeps some for itself.
"""

from __future__ import annotations

import os
import resource

__all__ = ["server_options"]

_HANDSHAKE_SECONDS = 20  # thousands of nodes that come at once wait for each other's; gRPC's own limit is 120
_KEPT = 256  # descriptors for the process itself
_FEWEST = 64


def server_options() -> list[tuple[str, int]]:
    """Return what a gRPC server is told of them, by the descriptors that this process has left."""
    return [
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        ("grpc.max_allowed_incoming_connections", _descriptors_left()),
        # gRPC would turn away nodes that come while a thousand others wait to be let in, or that have waited for 30 s.
        ("grpc.server.max_pending_requests", 1_000_000),
        ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
        ("grpc.server_max_unrequested_time_in_server", 300),
    ]


def _descriptors_left() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 20
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _KEPT
    # The other half is for what the kernel opens later: files, Spark's connections, other clusters' doors.
    return max(_FEWEST, (most - used - _KEPT) // 2)
