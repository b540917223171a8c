"""The notebook on TFRecord files as a user runs it, in a separate kernel with a local Spark and TensorFlow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.executed import executed

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "notebooks/06_tfrecords.ipynb"
RUN_SECONDS = 400


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the outputs of each cell as text."""
    folder = tmp_path_factory.mktemp("tfrecords")
    content = executed(NOTEBOOK, folder, RUN_SECONDS, TMPDIR=os.fspath(folder))
    assert not list(folder.glob("tfrecords-*"))
    return {cell.id: "".join(map(_text, cell.outputs)) for cell in content.cells if cell.cell_type == "code"}


def _text(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    return str(output.get("text") or output["data"]["text/plain"])


def test_tensorflow_reads_the_rows_that_spark_wrote(shown: dict[str, str]) -> None:
    assert re.match(r"Saved\(path='.*/digits', files=4, rows=1797, size=\d+\)", shown["write"])
    theirs, ours = shown["plain"].strip().splitlines()
    assert theirs == ours.removesuffix(": the same here") == "1797 rows, 561718 ink in all, 178 zeros"


def test_a_declared_schema_gives_the_same_rows(shown: dict[str, str]) -> None:
    assert "label: long" in shown["inferred"]
    assert "element: float" in shown["inferred"]
    assert shown["declared"].strip() == "True 0 0"
    assert shown["format"].startswith("183 ['label=0', 'label=1'")


def test_each_mistake_is_reported_in_one_line_with_the_remedy(shown: dict[str, str]) -> None:
    assert "did you mean 'label'?" in shown["mistake"]
    assert "cast it to double" in shown["decimal"]
    assert "byte 0: it is not" not in shown["fail"]
    assert re.search(r"byte \d+: the (checksum|file)", shown["fail"])
    for cell in ("mistake", "decimal", "fail"):
        assert re.match(r"(\x1b\[31m)?PlanError: ", shown[cell]), "one line, red or not"
        assert "\n" not in shown[cell]


def test_damaged_records_are_counted_and_located(shown: dict[str, str]) -> None:
    rest, places, *told = shown["skip"].splitlines()
    assert 1790 < int(rest.split()[0]) < 1797
    assert places == "2 damaged places in 2 files"
    assert "the checksum of the record is wrong" in "".join(told)
    assert "the file ends within a record" in "".join(told)
    assert shown["column"].count("byte ") == 2


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
