"""The notebook of batch inference as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.executed import executed

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/05_batch_inference.ipynb"
RUN_SECONDS = 400


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the outputs of each cell."""
    folder = tmp_path_factory.mktemp("inference")
    content = executed(NOTEBOOK, folder, RUN_SECONDS)
    return {cell.id: cell.outputs for cell in content.cells if cell.cell_type == "code"}


def said(outputs: list[dict[str, Any]]) -> str:
    texts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    return "".join(texts)


def test_the_notebook_scores_the_held_out_digits_as_keras_does(shown: dict[str, Any]) -> None:
    by_keras = float(re.search(r"'accuracy': ([\d.]+)", said(shown["train"]))[1])  # type: ignore[index]
    by_spark = float(re.search(r"\|\s*(0\.\d+)\|", said(shown["predict"]))[1])  # type: ignore[index]
    assert by_keras > 0.85
    assert by_spark == pytest.approx(by_keras, abs=1e-3)


def test_the_cells_outputs_match_the_texts_of_the_notebook(shown: dict[str, Any]) -> None:
    (mistake,) = shown["mistake"]
    assert mistake["ename"] == "PlanError"
    assert len(mistake["traceback"]) == 1
    assert "it has no tensor 'digit'" in mistake["evalue"]
    assert said(shown["nulls"]).split() == ["skip", "1779", "fill", "1797"]
    assert float(said(shown["features"]).split()[0]) > 0.85
    assert said(shown["stream"]).strip().endswith("1797")
    assert said(shown["blocks"]).count("|") > 40


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell.id for cell in cells if cell.get("outputs") or cell.get("execution_count")]
