"""Runs found in a directory, and their comparison."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tfos_nb
from tests.records.test_run import a_run
from tfos_nb.errors import PlanError
from tfos_nb.records.run import Run, to_json
from tfos_nb.records.runs import Runs
from tfos_nb.state.chart_data import comparison_data
from tfos_nb.state.training_curve import Point


def trained(run: str, losses: list[float], **changes: object) -> Run:
    points = tuple(
        Point(number, number, {"loss": loss, "val_loss": loss + 1}, True) for number, loss in enumerate(losses, 1)
    )
    epochs = tuple({"epoch": point.epoch, **point.metrics} for point in points)
    return replace(a_run(), id=run, points=points, epochs=epochs, **changes)  # type: ignore[arg-type]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    runs = {
        "mnist/tfos_runs/1.json": trained("aa11", [3.0, 2.0], started=10.0, arguments={"lr": 0.1}),
        "mnist/tfos_runs/2.json": trained("aa22", [3.0, 1.0], started=30.0, arguments={"lr": 0.2}),
        "cifar/v1/tfos_runs/3.json": trained("bb33", [5.0], started=20.0, name="cifar", arguments={"lr": 0.1, "x": 1}),
    }
    for place, run in runs.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(to_json(run))
    (tmp_path / "mnist/tfos_runs/notes.json").write_text("[]")
    (tmp_path / "mnist/tfos_runs/.half.json").write_text("{")
    (tmp_path / "mnist/other.json").write_text("{")
    return tmp_path


def test_all_runs_below_a_directory_are_found_newest_first(models: Path) -> None:
    found = tfos_nb.runs(models)
    assert [run.id for run in found] == ["aa22", "bb33", "aa11"]
    ((name, why),) = found.unreadable.items()
    assert name == str(models / "mnist/tfos_runs/notes.json")
    assert why.startswith("not the record of a run")
    assert [run.id for run in tfos_nb.runs(models / "mnist")] == ["aa22", "aa11"]
    assert [run.id for run in tfos_nb.runs(str(models / "mnist/tfos_runs"))] == ["aa22", "aa11"]
    assert [run.id for run in tfos_nb.runs(f"file://{models}/cifar")] == ["bb33"]
    assert repr(found) == f"<Runs: 3 runs in {models}>"


def test_a_pipe_is_not_read_and_the_newest_of_two_files_of_a_run_counts(models: Path) -> None:
    os.mkfifo(models / "mnist/tfos_runs/pipe.json")
    newer = trained("aa11", [3.0, 2.0, 1.0], started=10.0, updated=time.time())
    (models / "mnist/tfos_runs/copy.json").write_text(to_json(newer))
    found = tfos_nb.runs(models / "mnist")
    assert [run.id for run in found] == ["aa22", "aa11"]
    assert found["aa11"]["loss"] == [3.0, 2.0, 1.0]
    assert found.unreadable[str(models / "mnist/tfos_runs/pipe.json")] == "not a file"


def test_a_directory_may_have_any_name_or_be_a_link(models: Path, tmp_path: Path) -> None:
    odd = tmp_path / "m[1]*"
    odd.mkdir()
    (odd / "linked").symlink_to(models / "mnist")
    assert [run.id for run in tfos_nb.runs(odd)] == ["aa22", "aa11"]
    assert [run.id for run in tfos_nb.runs(odd / "linked")] == ["aa22", "aa11"]
    (models / "mnist" / "again").symlink_to(models)
    assert [run.id for run in tfos_nb.runs(models)] == ["aa22", "bb33", "aa11"]


def test_a_run_is_chosen_by_number_id_or_name(models: Path) -> None:
    found = tfos_nb.runs(models)
    assert found[0] is found["aa22"] is found["mnist"] is found["aa2"]
    assert [run.id for run in found[["aa11", "cifar"]]] == ["bb33", "aa11"]
    assert [run.id for run in found[:2]] == ["aa22", "bb33"]
    with pytest.raises(KeyError, match="2 runs have an id that begins with 'aa'"):
        found["aa"]
    with pytest.raises(KeyError, match=r"no run has the id or the name 'zz'; the newest are aa22 \(mnist\)"):
        found["zz"]
    with pytest.raises(KeyError):
        found[""]
    with pytest.raises(IndexError, match="there is no run 9: there are 3"):
        found[9]
    assert len({found[0], found["mnist"]}) == 1


def test_differences_cover_arguments_plans_and_versions(models: Path) -> None:
    assert tfos_nb.runs(models).differences() == {"lr": [0.2, 0.1, 0.1], "x": [None, 1, None]}
    one, other = trained("a", [1.0], started=2.0), trained("b", [1.0], started=1.0)
    other = replace(other, plan={"workers": 3}, versions={"keras": "3.15"})
    assert Runs([one, other]).differences() == {"plan workers": [2, 3], "version keras": [None, "3.15"]}
    assert Runs([one]).differences() == Runs([]).differences() == {}


def test_the_table_has_a_row_for_each_run(models: Path) -> None:
    table = tfos_nb.runs(models).to_pandas()
    assert list(table.index) == ["aa22", "bb33", "aa11"]
    assert list(table["args.lr"]) == [0.2, 0.1, 0.1]
    assert list(table["val_loss"]) == [2.0, 6.0, 3.0]
    assert list(table["epochs"]) == [2, 1, 2]
    assert list(Runs([]).to_pandas().index) == []


def test_curves_of_several_runs_share_a_chart(models: Path) -> None:
    found = tfos_nb.runs(models)
    data = comparison_data({run.id: run.points for run in found})
    assert (data["metric"], data["by"], data["metrics"]) == ("loss", "step", ["loss"]), "one run has one epoch only"
    lines = [(line["run"], line["name"], line["y"]) for line in data["lines"]]
    assert lines[:2] == [("aa22", "training", [3, 1]), ("aa22", "validation", [4, 2])]
    assert len(lines) == 6
    both = found[["aa11", "aa22"]]
    assert comparison_data({run.id: run.points for run in both})["by"] == "epoch"
    with pytest.raises(PlanError, match="metric: no run has 'auc'; there are loss"):
        comparison_data({run.id: run.points for run in both}, metric="auc")
    with pytest.raises(PlanError, match=r"metric must be the name of one metric, got \['loss'\]"):
        both.plot(["loss"])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="none of these runs has reported a metric"):
        comparison_data({})


def test_a_figure_has_a_line_for_each_run(models: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = tfos_nb.runs(models / "mnist").plot().axes
    assert [line.get_label() for line in axes.lines] == [
        *("mnist aa22", "mnist aa22, validation", "mnist aa11", "mnist aa11, validation"),
    ]
    assert axes.get_xlabel() == "epoch"


def test_a_missing_directory_is_refused(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="missing does not exist: give the model_dir of a cluster"):
        tfos_nb.runs(tmp_path / "missing")
    with pytest.raises(PlanError, match=r"other.json is a file"):
        tfos_nb.runs(models / "mnist/other.json")
    for wrong in (7, "", ["a"]):
        with pytest.raises(PlanError, match="directory must be a path or a URL"):
            tfos_nb.runs(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"hdfs:/…: a URL has two slashes"):
        tfos_nb.runs("hdfs:/models")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert list(tfos_nb.runs()) == [], "there may be none yet in the usual place"
