"""Read the ports to listen on from an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tfos_nb.errors import PlanError

__all__ = ["allowed_ports"]


def allowed_ports(variable: str, environ: Mapping[str, str] | None = None) -> range:
    """Read one port or a range, such as ``40000-40100``, from an environment variable; unset: any that is free.

    Raises
    ------
    PlanError
        If it is neither.
    """
    text = (os.environ if environ is None else environ).get(variable, "").strip()
    if not text:
        return range(0, 1)
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]) < 65536:
        raise PlanError(f"{variable} must be one port, or a range such as 40000-40100, got {text}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
