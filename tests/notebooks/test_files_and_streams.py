"""The notebook on validation, files and streams as a user runs it, in a separate kernel with a local Spark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.notebooks.executed import executed

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/07_files_and_streams.ipynb"
RUN_SECONDS = 400


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the notebook by nbclient; return what each cell prints."""
    folder = tmp_path_factory.mktemp("feeding")
    content = executed(NOTEBOOK, folder, RUN_SECONDS)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    return {cell.id: "".join(output.get("text", "") for output in cell.outputs) for cell in cells}


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_validation_ends_the_training_early_with_a_good_model(said: dict[str, str]) -> None:
    epochs, of, *_ = numbers_of(said["validated-outcome"])
    assert epochs < of == 40
    assert float(said["validated-outcome"].split()[-1]) > 0.9


def test_two_nodes_read_all_rows_of_the_files_in_equal_shares(said: dict[str, str]) -> None:
    _, one, _, two, total, count = numbers_of(said["from_files-outcome"])
    assert (one + two, abs(one - two) <= 1) == (count, True)
    assert total == count


def test_the_second_run_of_the_stream_continues_after_the_first(said: dict[str, str]) -> None:
    batch, rows, last, all_rows, written = numbers_of(said["stream-outcome"])
    assert (batch, last) == (1, 3)
    assert rows < all_rows == written


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
