"""Control access to a port of the kernel that is not behind a Jupyter server.

A link contains a code that works once and for a short time. The first request exchanges it for a pass, which is part of
the address to which the request is redirected. So a link in a saved notebook is useless to others.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time

__all__ = ["AccessLinks"]

_CODE_SECONDS = 600.0


class AccessLinks:
    """The codes and passes of one kernel, by cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[str, tuple[str, float]] = {}
        self._passes: dict[str, str] = {}

    def new_code(self, cluster_id: str) -> str:
        """Return a new code for a cluster's pages."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._codes[code] = (cluster_id, time.monotonic() + _CODE_SECONDS)
        return code

    def enter(self, cluster_id: str, code: str) -> str | None:
        """Exchange a code for the cluster's pass; None if it was used, is too old, or belongs to another cluster."""
        with self._lock:
            known, until = self._codes.pop(code, ("", 0.0))
            if known != cluster_id or time.monotonic() > until:
                return None
            return self._passes.setdefault(cluster_id, secrets.token_urlsafe(32))

    def knows(self, cluster_id: str, shown: str) -> bool:
        """Return whether ``shown`` is the pass of the cluster."""
        with self._lock:
            expected = self._passes.get(cluster_id)
        return expected is not None and hmac.compare_digest(expected.encode(), shown.encode())
