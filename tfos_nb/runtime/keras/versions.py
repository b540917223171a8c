"""Versions of Keras that all tests were run with, and advice for other versions."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["TESTED", "advice", "installed_keras", "is_tested", "uses_tf_keras"]

TESTED = ("3.12", "3.15")
"""The versions with which the tests of the synchronous strategies pass (docs/versions.md)."""


def uses_tf_keras(env: Mapping[str, str]) -> bool:
    """Return whether these environment variables ask TensorFlow for Keras 2."""
    return env.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def is_tested(version: str) -> bool:
    """Return whether a version of Keras is one with which all tests were run."""
    return ".".join(version.split(".")[:2]) in TESTED and "dev" not in version


def advice(version: str, unlike: str) -> str:
    """Return the message for a Keras that differs from the tested versions, or that computes wrong numbers."""
    return (
        f"Keras {version} is not as known ({unlike}), so its fit, evaluate and predict are refused on several workers: "
        f"they would fail or give wrong numbers. Install Keras {' or '.join(TESTED)}, or use tf_keras (pip install "
        "tf_keras, env={'TF_USE_LEGACY_KERAS': '1'}) or a training loop of your own"
    )


def installed_keras() -> str:
    """Return the version of the installed Keras, read from its files without an import; empty if there is none."""
    found = importlib.util.find_spec("keras")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        with contextlib.suppress(OSError):
            told = re.search(r"__version__ = \"([^\"]+)\"", Path(folder, "src", "version.py").read_text())
            if told:
                return told[1]
    return ""
