"""The quickstart and the tour of panel and TensorBoard, in separate kernels with a local Spark and TensorFlow."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nbconvert import HTMLExporter
from sklearn.datasets import load_digits

from tests.conftest import ENVIRONMENT
from tests.notebooks.executed import executed
from tfos_nb.demo import OUTCOME

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "notebooks/01_quickstart.ipynb"
TOUR = CHECKOUT / "notebooks/02_panel_and_tensorboard.ipynb"
EPOCHS = 15
RUN_SECONDS = 400


class Run:
    """One run of ``python -m tfos_nb.demo``: its output, and the notebook that it wrote."""

    def __init__(self, ended: subprocess.CompletedProcess[str], out: Path) -> None:
        self.ended = ended
        self.out = out
        self.page = (out / NOTEBOOK.name).with_suffix(".html").read_text(encoding="utf-8")
        self.cells: list[dict[str, Any]] = json.loads((out / NOTEBOOK.name).read_text(encoding="utf-8"))["cells"]
        self.figures: dict[str, Any] = next(
            output["data"][OUTCOME]
            for cell in self.cells
            for output in cell.get("outputs", ())
            if OUTCOME in output.get("data", {})
        )

    def outputs_of(self, identifier: str) -> list[dict[str, Any]]:
        return next(cell["outputs"] for cell in self.cells if cell["id"] == identifier)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("demo")
    environment = {**ENVIRONMENT, "PYSPARK_PYTHON": sys.executable}
    environment.pop("TFOS_NB_PROGRESS", None)
    ended = subprocess.run(
        [sys.executable, "-m", "tfos_nb.demo", "--out", os.fspath(out)],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return Run(ended, out)


@pytest.mark.slow  # make demo runs it too
def test_the_clusters_model_is_right_for_97_percent_of_held_out_digits(run: Run) -> None:
    assert run.figures["held_out"] > 250
    assert run.figures["accuracy"] >= 0.97


@pytest.mark.slow  # make demo runs it too
def test_fewer_than_ten_lines_differ_from_one_machine(run: Run) -> None:
    assert 0 < run.figures["differing_lines"] < 10


@pytest.mark.slow  # make demo runs it too
def test_the_saved_model_can_be_loaded_and_classifies_digits(run: Run) -> None:
    import keras

    digits = load_digits()
    model = keras.saving.load_model(run.figures["model"])
    predicted = model.predict(digits.data.astype("float32"), verbose=0).argmax(axis=1)
    assert np.mean(predicted == digits.target) >= 0.97


@pytest.mark.slow  # make demo runs it too
def test_every_epoch_is_in_the_history_and_the_loss_falls(run: Run) -> None:
    epochs = run.figures["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, EPOCHS + 1))
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 4


@pytest.mark.slow  # make demo runs it too
def test_the_table_ends_with_both_workers_done(run: Run) -> None:
    table = next(output["data"] for output in run.outputs_of("cluster") if "data" in output)
    assert "".join(table["text/plain"]).count(" done ") == 2
    assert "tfos-panel" in "".join(table["text/html"])


@pytest.mark.slow  # make demo runs it too
def test_a_wrong_option_is_refused_in_one_line_with_the_right_one(run: Run) -> None:
    (error,) = run.outputs_of("mistake")
    told = "PlanError: --wokers: no such option; did you mean --workers?"
    assert error["traceback"] == [f"\x1b[31m{told}\x1b[39m"], "one line, and it is red"


@pytest.mark.slow  # make demo runs it too
def test_the_command_prints_the_plan_the_nodes_the_epochs_and_the_files(run: Run) -> None:
    said = run.ended.stdout
    assert "cluster digits: 2 nodes, input from spark" in said
    assert "worker:1      127.0.0.1" in said
    for epoch in run.figures["epochs"]:
        assert f"{epoch['epoch']:>5}  {epoch['loss']:.4f}  {epoch['accuracy']:.4f}" in said
    assert f"{run.figures['accuracy']:.1%} of {run.figures['held_out']} held-out digits are right" in said
    assert str(run.out / NOTEBOOK.name) in said
    assert "tfos-panel" in run.page


@pytest.mark.parametrize("notebook", [NOTEBOOK, TOUR], ids=lambda notebook: notebook.stem)
def test_the_notebook_is_shipped_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]


Shown = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Run the second notebook by nbclient; return the outputs of each cell."""
    folder = tmp_path_factory.mktemp("tour")
    content = executed(TOUR, folder, RUN_SECONDS)
    html, _ = HTMLExporter().from_notebook_node(content)
    (folder / "tour.html").write_text(html, encoding="utf-8")
    shown = {cell.id: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    return {**shown, "as a page": [{"html": html}]}


@pytest.mark.slow
def test_the_outcomes_of_the_tours_clusters_are_saved_as_html(tour: Shown) -> None:
    for cell, outcome in (("cluster", "Done in"), ("loop", "Stopped after"), ("train", "Stopped after")):
        (panel,) = tour[cell]
        assert set(panel["data"]) == {"text/html", "text/plain"}
        assert "tfos-panel" in panel["data"]["text/html"]
        assert outcome in panel["data"]["text/plain"]


@pytest.mark.slow
def test_the_tour_converts_to_a_page_with_its_clusters(tour: Shown) -> None:
    html = tour["as a page"][0]["html"]
    assert html.count('aria-label="TensorFlow cluster digits"') >= 1
    assert "Done in" in html
    assert "Stopped after" in html
    assert "Error displaying widget" not in html


@pytest.mark.slow
def test_the_other_cells_of_the_tour_show_a_running_cluster(tour: Shown) -> None:
    assert "The plan fits: it needs 2 of 4 slots" in tour["plan"][0]["data"]["text/plain"]
    assert "worker:1" in tour["look"][0]["data"]["text/plain"]
    assert "TensorBoard of digits: no page to show it in; the logs are in" in _said(tour["board"])
    assert "val_accuracy" in tour["wait"][0]["data"]["text/plain"]
    assert "All requirements of tfos_nb are met" in tour["doctor"][0]["data"]["text/plain"]


@pytest.mark.slow
def test_the_tours_stop_with_grace_leaves_a_model(tour: Shown) -> None:
    said = _said(tour["stop"])
    assert "loop: stopped: 1 node ended, its slot is free" in said
    result = ast.literal_eval(next(line for line in said.splitlines() if line.startswith("{")))
    assert result["steps"] > 0
    assert Path(result["model"]).is_file()


@pytest.mark.slow
def test_the_loop_of_the_tour_writes_for_tensorboard(tour: Shown) -> None:
    result = ast.literal_eval(next(line for line in _said(tour["stop"]).splitlines() if line.startswith("{")))
    events = list(Path(result["model"]).parent.glob("logs/loop/events*"))
    assert events
    assert b"loss" in events[0].read_bytes()


def _said(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")
