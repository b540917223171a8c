"""What the tests of strategies ask of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfos_nb import errors


def refusal(build: Callable[[], Any]) -> str:
    """What tfos_nb says against it."""
    try:
        build()
    except errors.TfosError as refused:
        return str(refused)
    return "it was taken"
