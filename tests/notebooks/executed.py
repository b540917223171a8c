"""Run a notebook from its first cell to its last, like ``jupyter execute``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.conftest import ENVIRONMENT

__all__ = ["executed"]

CHECKOUT = Path(__file__).parents[2]


def executed(notebook: Path, folder: Path, seconds: float, **variables: str) -> Any:
    """Run a notebook in ``folder``, with a limit of seconds for each cell; return it with its outputs.

    ``variables`` are additional environment variables of its kernel.
    """
    content = nbformat.read(notebook, as_version=4)
    environment = {**ENVIRONMENT, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.fspath(CHECKOUT), **variables}
    environment.pop("TFOS_NB_PROGRESS", None)
    client = NotebookClient(content, timeout=seconds, resources={"metadata": {"path": os.fspath(folder)}})
    with (folder / "kernel.log").open("wb") as log:
        client.execute(env=environment, stdout=log, stderr=log)
    return content
