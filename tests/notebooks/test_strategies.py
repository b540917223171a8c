"""The notebooks on strategies and parameter servers, as a user runs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ENVIRONMENT

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
NOTEBOOKS = ("03_strategies", "04_parameter_servers")
RUN_SECONDS = 400


def shown(name: str, folder: Path) -> dict[str, str]:
    """Run a notebook; return the text that each cell prints or shows."""
    content: Any = nbformat.read(CHECKOUT / f"notebooks/{name}.ipynb", as_version=4)
    environment = {**ENVIRONMENT, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.fspath(CHECKOUT)}
    environment.pop("TFOS_NB_PROGRESS", None)
    client = NotebookClient(content, timeout=RUN_SECONDS, resources={"metadata": {"path": os.fspath(folder)}})
    with (folder / "kernel.log").open("wb") as log:
        client.execute(env=environment, stdout=log, stderr=log)
    return {cell.id: "".join(map(_text, cell.outputs)) for cell in content.cells if cell.cell_type == "code"}


def _text(output: Any) -> str:
    data = output.get("data", {})
    return "".join([output.get("text", ""), data.get("text/plain", ""), *output.get("traceback", ())])


def test_all_strategies_of_the_notebook_train_and_the_mixture_is_refused(tmp_path: Path) -> None:
    said = shown("03_strategies", tmp_path)
    assert "'devices': 2" in said["mirrored-result"]
    assert "/job:worker/replica:0/task:1" in said["across-result"]
    assert "held-out loss by checkpoint" in said["evaluator-result"]
    assert "would wait without end in a cluster with parameter servers" in said["refused"]


def test_the_notebook_of_parameter_servers_trains_in_every_way(tmp_path: Path) -> None:
    said = shown("04_parameter_servers", tmp_path)
    assert "/job:ps/" in said["loop-result"]
    assert "ps:0" in said["keras"]
    assert "worker:1" in said["sessions-result"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_shipped_without_outputs(name: str) -> None:
    cells = json.loads((CHECKOUT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
