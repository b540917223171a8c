"""The notebook of pipelines as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.executed import executed
from tests.notebooks.test_batch_inference import said

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/08_pipeline.ipynb"
RUN_SECONDS = 600


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the outputs of each cell."""
    folder = tmp_path_factory.mktemp("pipeline")
    content = executed(NOTEBOOK, folder, RUN_SECONDS)
    return {cell.id: cell.outputs for cell in content.cells if cell.cell_type == "code"}


def number(shown: dict[str, Any], cell: str, before: str) -> float:
    found = re.search(before + r"\s*([\d.]+)", said(shown[cell]))
    assert found is not None, said(shown[cell])
    return float(found[1])


def test_the_pipeline_classifies_held_out_wines(shown: dict[str, Any]) -> None:
    assert number(shown, "evaluate", "accuracy") > 0.85
    assert number(shown, "own-use", "three columns") > 0.7


def test_the_better_learning_rate_wins_and_a_loaded_pipeline_is_the_same(shown: dict[str, Any]) -> None:
    good = number(shown, "best", "learning_rate 0.02 *accuracy")
    assert good > number(shown, "best", "learning_rate 0.0002 *accuracy")
    assert number(shown, "best", "held out:") == number(shown, "save", "after loading:") > 0.85


def test_a_fit_shows_the_panel_and_each_fit_of_a_tuner_prints_a_line(shown: dict[str, Any]) -> None:
    for cell in ("pipeline", "tune", "own"):
        panels = [output for output in shown[cell] if "text/html" in output.get("data", {})]
        assert len(panels) == 1, cell
        assert "worker:0" in panels[0]["data"]["text/html"] or "chief:0" in panels[0]["data"]["text/html"]
    lines = re.findall(r"KerasEstimator-\d+ \((.*?)\): done in [\d.]+ s, loss", said(shown["tune"]))
    assert len(lines) == 4
    assert {re.search(r"learning_rate=([\d.]+)", line)[1] for line in lines} == {"0.02", "0.0002"}  # type: ignore[index]


def test_a_mistake_is_reported_in_one_line(shown: dict[str, Any]) -> None:
    (mistake,) = shown["mistake"]
    assert mistake["ename"] == "PlanError"
    assert len(mistake["traceback"]) == 1
    assert "index it with StringIndexer" in mistake["evalue"]


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell.id for cell in cells if cell.get("outputs") or cell.get("execution_count")]
