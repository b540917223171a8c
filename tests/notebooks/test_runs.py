"""The notebook of recorded runs as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.executed import executed

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/09_runs.ipynb"
RUN_SECONDS = 400

Shown = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Return the outputs of each cell."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("runs")
    content = executed(NOTEBOOK, folder, RUN_SECONDS)
    return {cell.id: cell.outputs for cell in content.cells if cell.cell_type == "code"}


def text(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs)


@pytest.mark.slow
def test_three_runs_are_trained_listed_and_compared(shown: Shown) -> None:
    assert text(shown["train"]).count(" done 0.") == 3
    (table,) = shown["list"]
    assert set(table["data"]) == {"text/html", "text/plain"}
    assert "Runs: 3 runs in models" in table["data"]["text/plain"]
    assert "{'learning_rate': [0.01, 0.01, 0.001], 'units': [128, 32, 32]}" in text(shown["compare"])
    assert "0.9" in text(shown["best"])
    assert "tfos-panel" in shown["best"][-1]["data"]["text/html"]
    assert "args.units" in text(shown["pandas"])
    assert "image/png" in shown["plot"][0]["data"]


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
