"""The notebook of a killed worker and of a hang as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.executed import executed

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/10_recovery.ipynb"
RUN_SECONDS = 400


@pytest.mark.slow
def test_a_killed_worker_costs_no_row_and_a_hang_names_its_line(tmp_path: Path) -> None:
    content = executed(NOTEBOOK, tmp_path, RUN_SECONDS)
    shown = {cell.id: text(cell.outputs) for cell in content.cells if cell.cell_type == "code"}
    assert re.search(r"killed process \d+ of worker:1 in epoch [3-8]", shown["kill"])
    assert "DONE in generation 2" in shown["wait"]
    assert re.search(r"fit continues after epoch [2-8], step \d+", shown["wait"])
    assert shown["exact"].count("1797.0  8070.0") == 8
    assert re.search(r"in your program, line \d+ of .*, in read_the_next_file", shown["told"])
    assert "in read_the_next_file" in shown["stacks"].splitlines()[0]
    assert "stuck: stopped: 2 nodes ended, their slots are free" in shown["stop"]


def text(outputs: list[dict[str, Any]]) -> str:
    return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
