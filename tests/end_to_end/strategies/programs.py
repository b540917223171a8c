"""Helpers that the tests of strategies run in a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfos_nb import errors


def refusal(build: Callable[[], Any]) -> str:
    """Return the error message with which tfos_nb refuses a call."""
    try:
        build()
    except errors.TfosError as refused:
        return str(refused)
    return "it was taken"
