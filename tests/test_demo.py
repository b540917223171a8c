"""The command behind ``make demo``, with small notebooks in real kernels; tests/notebooks has the quickstart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.conftest import ENVIRONMENT
from tfos_nb.demo import OUTCOME, run_notebook
from tfos_nb.errors import PlanError

CHECKOUT = Path(__file__).parents[1]

FIGURES = {
    "epochs": [{"epoch": 1, "loss": 0.5, "accuracy": 0.75}],
    "accuracy": 0.98,
    "accuracy_alone": 0.97,
    "held_out": 50,
    "differing_lines": 7,
    "model": "somewhere/model.keras",
}
SHOWS_FIGURES = f"display({{{OUTCOME!r}: {FIGURES!r}, 'text/plain': 'figures'}}, raw=True)"


def write(folder: Path, *cells: str) -> Path:
    """Write a notebook: a text beginning with ## becomes a heading."""
    made = [new_markdown_cell(text) if text.startswith("## ") else new_code_cell(text) for text in cells]
    file = folder / "small.ipynb"
    nbformat.write(new_notebook(cells=made), file)
    return file


def demo(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfos_nb.demo", *map(os.fspath, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def test_headings_output_of_cells_and_figures_are_printed(tmp_path: Path) -> None:
    file = write(tmp_path, "## First", "print('hello')", "print('again')", "## Last", SHOWS_FIGURES)
    ended = demo("--notebook", file, "--out", tmp_path / "out", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[:4] == ["[1/2] First", "      hello", "      again", "[2/2] Last"]
    assert "    1  0.5000  0.7500" in lines
    assert any(line.startswith("98.0% of 50 held-out digits are right") for line in lines)
    executed = json.loads((tmp_path / "out/small.ipynb").read_text())
    assert executed["cells"][1]["outputs"][0]["text"] == ["hello\n"]
    assert "hello" in (tmp_path / "out/small.html").read_text()


def test_a_failing_cell_ends_the_demo_with_its_heading_the_error_and_code_1(tmp_path: Path) -> None:
    file = write(tmp_path, "## Divide", "divisor = 0\n1 / divisor", "## Never", "print('unreached')")
    ended = demo("--notebook", file, "--out", tmp_path / "out", cwd=tmp_path)
    assert ended.returncode == 1
    assert "Divide: ZeroDivisionError: division by zero" in ended.stderr
    assert "1 / divisor" in ended.stderr
    assert "\x1b" not in ended.stderr
    assert "unreached" not in ended.stdout
    executed = json.loads((tmp_path / "out/small.ipynb").read_text())
    assert executed["cells"][1]["outputs"][0]["ename"] == "ZeroDivisionError"


def test_a_dead_kernel_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path, "## Die", "import os; os._exit(3)")
    ended = demo("--notebook", file, "--out", tmp_path / "out", cwd=tmp_path)
    assert ended.returncode == 1
    assert "Die: Kernel died" in ended.stderr


def test_a_notebook_without_figures_fails(tmp_path: Path) -> None:
    file = write(tmp_path, "## Nothing", "pass")
    ended = demo("--notebook", file, "--out", tmp_path / "out", cwd=tmp_path)
    assert ended.returncode == 1
    assert "displayed nothing of type" in ended.stderr


def test_a_missing_notebook_is_reported_with_the_folder(tmp_path: Path) -> None:
    ended = demo("--notebook", "quick.ipynb", "--out", tmp_path / "out", cwd=tmp_path)
    assert ended.returncode == 2
    assert "quick.ipynb: no such notebook in" in ended.stderr
    assert str(tmp_path) in ended.stderr
    assert not (tmp_path / "out").exists()


def test_the_notebook_is_copied_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first = demo("--copy", tmp_path / "my own", cwd=CHECKOUT)
    there = tmp_path / "my own" / "01_quickstart.ipynb"
    assert (first.returncode, first.stdout) == (0, f"jupyter lab '{there}'\n")
    assert there.read_bytes() == (CHECKOUT / "notebooks" / "01_quickstart.ipynb").read_bytes()
    there.write_text("mine")
    again = demo("--copy", tmp_path / "my own", cwd=CHECKOUT)
    assert (again.returncode, again.stdout) == (2, "")
    assert f"{there} exists already" in again.stderr
    assert there.read_text() == "mine"


def test_the_notebook_is_found_outside_the_checkout(tmp_path: Path) -> None:
    copied = demo("--copy", "here", cwd=tmp_path)
    assert (copied.returncode, copied.stderr) == (0, "")
    there = tmp_path / "here" / "01_quickstart.ipynb"
    assert there.read_bytes() == (CHECKOUT / "notebooks" / "01_quickstart.ipynb").read_bytes()


@pytest.mark.parametrize("option", ["--copy", "--out"])
def test_a_file_in_place_of_a_folder_is_reported_in_one_line(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = demo("--notebook", write(tmp_path, "pass"), option, "file", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "file cannot be created: File exists\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# A heading\n", "given.md is not a notebook: Notebook does not appear to be JSON"),
        pytest.param("{}", "given.md is not a notebook: ", marks=pytest.mark.slow),
        ("[]", "given.md is not a notebook: its JSON has another structure"),
    ],
)
def test_an_invalid_notebook_is_reported_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "given.md").write_text(text)
    ended = demo("--notebook", "given.md", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(told)
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "build").exists()


def test_without_nbclient_the_demo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbclient", None)
    with pytest.raises(PlanError, match="nbclient is not installed: pip install jupyterlab nbclient") as refused:
        run_notebook(write(tmp_path, "pass"), tmp_path / "out", str)
    assert str(refused.value).endswith("in a checkout, pip install '.[demo]'")
