"""The table of runs for the page: its bounded data, its answers, and the widget with a comm of the test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.widgets.reprs.test_reprs import KERNEL
from tests.widgets.reprs.test_runs import ERROR, a_run, several
from tests.widgets.test_html import NASTY
from tests.widgets.test_panel import Wire
from tfos_nb.errors import PlanError
from tfos_nb.records.run import Run, to_json
from tfos_nb.records.runs import Runs, runs
from tfos_nb.truncate import size
from tfos_nb.widgets.charts.esm import joined
from tfos_nb.widgets.runs import widget as widgets
from tfos_nb.widgets.runs.data import BUDGET, MOST_COMPARED, MOST_RUNS, answer, page_model
from tfos_nb.widgets.runs.display import show_runs
from tfos_nb.widgets.runs.widget import KEPT, RunsTable

WIDGET = "application/vnd.jupyter.widget-view+json"

Messages = list[tuple[str, str, dict[str, Any]]]


def rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(model["fields"], row, strict=True)) for row in model["runs"]]


# --- the data of the page


def test_a_row_has_the_values_to_show_sort_and_search() -> None:
    model = json.loads(json.dumps(page_model(several())))
    assert (model["place"], model["total"], model["empty"]) == ("/models", 4, "")
    assert (model["metrics"], model["arguments"]) == (["loss", "accuracy", "val_loss"], ["lr", "optimizer"])
    assert model["notes"] == ["not read: /models/digits/tfos_runs/notes.json: not a JSON file: Expecting value"]
    killed, failed, bigger, first = rows(model)
    assert (killed["outcome"], killed["tone"]) == ("killed", "warn")
    assert (failed["outcome"], failed["metrics"]) == ("failed", [None, None, None])
    assert (bigger["workers"], bigger["arguments"], bigger["epochs"]) == (4, [0.1, "None"], 5)
    assert (first["id"], first["started"], first["seconds"]) == ("aa11", 1.7e9, 75)
    assert first["search"] == "digits aa11 done lr=0.01 units=64 optimizer=adam loss val_loss accuracy"


def test_non_finite_and_huge_numbers_become_texts() -> None:
    json.dumps(
        page_model(Runs([a_run(arguments={"n": 10**400})])), allow_nan=False
    )  # an argument in a file of another program
    model = page_model(Runs([a_run(arguments={"a": 1}), a_run("b", arguments={"a": float("inf")})]))
    assert sorted(str(row["arguments"][0]) for row in rows(model)) == ["1", "inf"]
    broken = Run("c", "digits", "DONE", 0.0, 1.0, 1.0, epochs=({"epoch": 1, "loss": float("nan")},))
    assert rows(page_model(Runs([broken])))[0]["metrics"] == ["nan"]
    json.dumps(page_model(Runs([broken])), allow_nan=False)


def test_the_message_is_bounded_for_any_number_and_length_of_runs() -> None:
    long = {f"argument_{number}": "x" * 400 for number in range(60)}
    many = Runs([a_run(f"r{number}", started=1e9 + number, arguments=long | {"lr": number}) for number in range(700)])
    model = page_model(many)
    assert (len(model["runs"]), model["total"]) == (MOST_RUNS, 700)
    assert size(model) <= BUDGET
    assert rows(model)[0]["id"] == "r699", "the newest"


def test_without_runs_there_is_a_sentence() -> None:
    assert page_model(Runs([], "/models"))["empty"].startswith("No runs here yet")


def test_several_runs_are_answered_with_curves_and_differences() -> None:
    data = answer(several(), ["aa11", "bb22"], "accuracy", "epoch")
    assert [(line["run"], line["name"]) for line in data["chart"]["lines"]] == [
        ("aa11", "training"),
        ("bb22", "training"),
    ]
    assert data["differences"] == [
        ("arguments", "lr", ["0.01", "0.1"]),
        ("arguments", "optimizer", ["adam", "None"]),
        ("plan", "workers", ["2", "4"]),
    ]
    assert answer(several(), ["aa11", "bb22"], "auc")["chart"]["metric"] == "loss", "one of an earlier choice"


def test_one_run_is_answered_with_facts_curves_and_error() -> None:
    data = answer(several(), ["aa11"])
    assert [line["name"] for line in data["chart"]["lines"]] == ["training", "validation"]
    assert ("Arguments", "lr 0.01, units 64, optimizer adam") in data["facts"]
    assert data["error"] == ["", ""]
    failed = answer(several(), ["cc33"])
    assert failed["error"] == list(ERROR.split("\n", 1))
    assert failed["chart"] == {"message": "This run has reported no metric, so there is no curve."}


def test_an_invalid_choice_of_runs_is_refused() -> None:
    with pytest.raises(PlanError, match="no run has the id 'zz' any more: refresh the table"):
        answer(several(), ["aa11", "zz"])
    many = Runs([a_run(f"r{number}") for number in range(MOST_COMPARED + 1)])
    with pytest.raises(PlanError, match=f"at most {MOST_COMPARED} runs fit in one chart, got {MOST_COMPARED + 1}"):
        answer(many, [run.id for run in many])


def test_the_page_has_a_colour_for_each_run_of_a_chart() -> None:
    hues = set(re.findall(r"\.t-hue-(\d+)\{", joined("chart.css")))
    assert hues == set(map(str, range(MOST_COMPARED)))
    assert f"const HUES = {MOST_COMPARED};" in joined("runs.js")


def test_the_longest_answer_is_small_enough_for_a_message() -> None:
    many = Runs([a_run(f"r{number}", 100, arguments={NASTY: NASTY * 99}) for number in range(MOST_COMPARED)])
    assert size(answer(many, [run.id for run in many], "loss", "step")) < 400_000


# --- the widget


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Messages]:
    """Every message that widgets send to the page: (comm, type, data)."""
    monkeypatch.setattr("comm.create_comm", Wire)
    monkeypatch.setattr(Wire, "messages", [])
    widgets._newest.clear()
    yield Wire.messages
    widgets._newest.clear()


Say = Callable[[RunsTable, dict[str, Any]], dict[str, Any]]


@pytest.fixture
def say(wire: Messages) -> Say:
    """Send a message of the page, and return the kernel's answer."""

    def send(table: RunsTable, content: dict[str, Any]) -> dict[str, Any]:
        before = len(wire)
        table.widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        answers = [data["content"] for _, _, data in wire[before:] if data.get("method") == "custom"]
        (only,) = answers
        return dict(only)

    return send


def test_a_request_for_curves_gets_its_answer(say: Say, shell: InteractiveShell) -> None:
    table = RunsTable(several, several())
    told = say(table, {"kind": "curves", "asked": 3, "runs": ["aa11", "bb22"], "metric": "loss", "by": "step"})
    assert (told["kind"], told["asked"]) == ("curves", 3)
    assert len(told["data"]["chart"]["lines"]) == 4
    assert table.widget.table["widget"] == table.widget.model_id


def test_a_refresh_reads_the_directory_again(say: Say, shell: InteractiveShell) -> None:
    found = [several(), Runs([a_run("new")])]
    table = RunsTable(lambda: found.pop(), found.pop(0))
    assert say(table, {"kind": "refresh", "asked": 1})["data"] == {}
    assert [row["id"] for row in rows(table.widget.table)] == ["new"]


def test_an_error_is_sent_to_the_page(say: Say, shell: InteractiveShell) -> None:
    def gone() -> Runs:
        raise PlanError("/models does not exist")

    table = RunsTable(gone, several())
    assert say(table, {"kind": "refresh", "asked": 1})["data"] == {"message": "/models does not exist"}
    assert "refresh the table" in say(table, {"kind": "curves", "asked": 2, "runs": ["zz"]})["data"]["message"]
    assert "refresh the table" in say(table, {"kind": "curves", "asked": 3})["data"]["message"]

    def broken() -> Runs:
        raise OSError("no space")

    table = RunsTable(broken, several())
    told = say(table, {"kind": "refresh", "asked": 1})["data"]["message"]
    assert told == "The runs could not be read: OSError: no space"


@pytest.mark.parametrize("content", ["refresh", None, {}, {"kind": "stop"}, {"asked": 3}])
def test_other_messages_are_ignored(wire: Messages, shell: InteractiveShell, content: object) -> None:
    table = RunsTable(several, several())
    before = len(wire)
    table.widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    assert len(wire) == before


def test_an_old_table_keeps_no_runs_and_reads_them_again(say: Say, shell: InteractiveShell) -> None:
    reads = []

    def read() -> Runs:
        reads.append(1)
        return several()

    tables = [RunsTable(read, several()) for _ in range(KEPT + 1)]
    assert [table._runs is None for table in tables] == [True] + [False] * KEPT
    assert say(tables[0], {"kind": "curves", "asked": 1, "runs": ["aa11"]})["data"]["facts"]
    assert (len(reads), tables[1]._runs) == (1, None)


# --- where it is shown


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "digits/tfos_runs").mkdir(parents=True)
    for run in several():
        (tmp_path / f"digits/tfos_runs/{run.id}.json").write_text(to_json(run))
    return tmp_path


def test_jupyter_gets_the_widget_and_the_static_table(
    wire: Messages, shell: InteractiveShell, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFOS_NB_PROGRESS", "widget")
    monkeypatch.chdir(models)
    with capture_output() as captured:
        show_runs("digits")
    (output,) = captured._outputs
    assert set(output["data"]) == {WIDGET, "text/html", "text/plain"}
    assert "4 runs" in output["data"]["text/html"]
    (table,) = widgets._newest
    monkeypatch.chdir("/")
    assert len(table._read()) == 4, "the directory is the same wherever the notebook goes"


def test_a_host_without_widgets_gets_the_static_table(
    shell: InteractiveShell, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFOS_NB_PROGRESS", "html")
    with capture_output() as captured:
        show_runs(str(models))
    (output,) = captured._outputs
    assert set(output["data"]) == {"text/html", "text/plain"}
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    with capture_output() as captured:
        show_runs(str(models))
    assert captured.stdout.startswith(f"Runs: 4 runs in {models}\n")


def test_databricks_gets_the_static_table(
    shell: InteractiveShell, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfos_nb.widgets.hosts.current_shell", lambda modules: KERNEL)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    monkeypatch.setenv("TFOS_NB_PROGRESS", "auto")
    with capture_output() as captured:
        show_runs(str(models))
    assert set(captured._outputs[0]["data"]) == {"text/html", "text/plain"}


def test_a_missing_directory_is_refused(models: Path) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        show_runs(str(models / "missing"))
    assert len(runs(models)) == 4
