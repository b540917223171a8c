"""Displays of recorded runs at the end of a cell: one run, and a table of several, as HTML and as text."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.widgets.reprs.test_reprs import shown
from tests.widgets.test_html import NASTY, Page
from tfos_nb.records.run import Process, Run, to_json
from tfos_nb.records.runs import Runs, runs
from tfos_nb.state.training_curve import Point
from tfos_nb.widgets.words import runs as words

ERROR = "worker:1 on hdp-c02: ValueError: label 10\nTraceback (most recent call last):\n  in main\nValueError: label 10"


@pytest.fixture(autouse=True)
def _in_html_in_tokyo() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFOS_NB_PROGRESS", "html")
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def a_run(run: str = "aa11", epochs: int = 3, started: float = 1.7e9, **changes: Any) -> Run:
    """Make a run of some epochs of four steps."""
    points, ended = [], []
    for epoch in range(1, epochs + 1):
        for step in range(1, 5):
            metrics = {"loss": 1 / (4 * epoch + step)}
            metrics |= {"val_loss": 2 / epoch, "accuracy": 1 - 1 / (epoch + 1)} if step == 4 else {}
            points.append(Point(epoch, 4 * (epoch - 1) + step, metrics, step == 4))
        ended.append({"epoch": epoch, **metrics})
    made = Run(
        run,
        "digits",
        "DONE",
        started,
        started + 75,
        75.0,
        plan={"workers": 2},
        arguments={"lr": 0.01, "units": 64},
        epochs=tuple(ended),
        points=tuple(points),
        rows=5391,
        versions={"python": "3.11.7"},
        model_dir="/models/digits",
        process=Process("elsewhere", 1, 0.0),
        path="/models/digits/tfos_runs/1.json",
    )
    return replace(made, **changes)


def several() -> Runs:
    return Runs(
        [
            a_run("aa11", arguments={"lr": 0.01, "units": 64, "optimizer": "adam"}),
            a_run("bb22", 5, 1.7e9 + 60, arguments={"lr": 0.1, "units": 64, "optimizer": None}, plan={"workers": 4}),
            a_run("cc33", 0, 1.7e9 + 120, status="FAILED", error=ERROR),
            a_run("dd44", 1, 1.7e9 + 180, status="RUNNING"),
        ],
        "/models",
        {"/models/digits/tfos_runs/notes.json": "not a JSON file: Expecting value"},
    )


# --- one run


def test_a_run_shows_its_facts_its_curves_and_its_last_epochs() -> None:
    bundle = shown(a_run())
    page = Page(bundle["text/html"])
    assert page.open == []
    for told in ("digits", "aa11", "done", "2023-11-15 07:13 · 1 min 15 s", "workers 2", "lr 0.01, units 64", "5,391"):
        assert told in page.text
    assert page.with_attribute("role", "img")[0]["aria-label"].startswith("Loss by epoch; training from")
    assert "EpochLossAccuracyVal loss" in page.text
    assert bundle["text/plain"].splitlines()[:3] == [
        "digits · done · 2023-11-15 07:13 · 1 min 15 s · aa11",
        "plan       workers 2",
        "arguments  lr 0.01, units 64",
    ]


def test_a_failed_run_shows_its_error_and_a_folded_traceback() -> None:
    bundle = shown(a_run(status="FAILED", error=ERROR))
    assert '<div class="t-say t-bad">worker:1 on hdp-c02: ValueError: label 10<details>' in bundle["text/html"]
    assert "error      worker:1 on hdp-c02: ValueError: label 10" in bundle["text/plain"]


def test_a_run_of_a_killed_kernel_shows_what_was_recorded() -> None:
    text = Page(shown(a_run(status="RUNNING"))["text/html"]).text
    assert "killed" in text
    assert "as far as it was recorded" in text
    alive = Process(os.uname().nodename, 1, 0.0)
    text = Page(
        shown(a_run(status="RUNNING", process=replace(alive, host="other"), updated=time.time()))["text/html"]
    ).text
    assert "1 min 15 s so far" in text


def test_a_run_without_reports_has_no_curves() -> None:
    html = shown(a_run(epochs=0))["text/html"]
    assert 'class="t-charts"' not in html
    assert Page(html).open == []


# --- several


def test_runs_are_shown_as_a_table_newest_first() -> None:
    bundle = shown(several())
    page = Page(bundle["text/html"])
    assert page.open == []
    assert "4 runs" in page.text
    assert "RunOutcomeStartedTookEpochsWorkersLossAccuracyVal losslroptimizer" in page.text
    assert page.text.index("dd44") < page.text.index("cc33") < page.text.index("bb22") < page.text.index("aa11")
    for told in ("done", "failed", "killed", "2023-11-15 07:13", "notes.json: not a JSON file: Expecting value"):
        assert told in page.text
    lines = bundle["text/plain"].splitlines()
    assert lines[0] == "Runs: 4 runs in /models"
    assert lines[1].split() == ["run", "outcome", "started", "took", "epochs", "loss", "val", "loss", "lr", "optimizer"]
    assert lines[4].split()[:3] == ["digits", "bb22", "done"]
    assert all(len(line) <= 120 for line in lines)


def test_a_run_without_a_value_leaves_its_cell_empty() -> None:
    html = shown(several())["text/html"]
    assert '<td class="t-num"></td>' in html, "the one that failed has no loss"
    assert "<td>None</td>" in html, "an argument that is None is no missing one"


def test_an_empty_directory_says_what_to_do() -> None:
    bundle = shown(Runs([], "/models"))
    for kind in bundle:
        assert "No runs here yet: each cluster leaves one in its model_dir" in bundle[kind]


def test_of_many_runs_the_first_are_shown_and_the_rest_counted() -> None:
    many = Runs([a_run(f"r{number}", started=1e9 + number) for number in range(1_234)])
    bundle = shown(many)
    assert len(bundle["text/html"]) < 90_000
    assert bundle["text/html"].count("<tr>") == 51
    for kind in bundle:
        assert "and 1,184 more" in bundle[kind]


def test_differing_arguments_without_a_column_are_named() -> None:
    wide = [a_run(run, arguments={f"a{number}": f"{run}{number}" for number in range(20)}) for run in ("x", "y")]
    text = Page(shown(Runs(wide))["text/html"]).text
    assert "also different: a4, a5, a6, a7, a8, a9, a10, a11 and 8 more" in text


def test_texts_from_outside_are_escaped_and_have_no_passwords() -> None:
    nasty = a_run(
        NASTY,
        name=NASTY,
        error=f"{NASTY}\n{NASTY}",
        status="FAILED",
        plan={NASTY: NASTY},
        arguments={NASTY: NASTY, "data": "s3://key:d34d@bucket/rows"},
        versions={NASTY: NASTY},
        model_dir="hdfs://me:d34d@namenode/models",
        path="s3://key:d34d@bucket/run.json",
    )
    points = tuple(Point(epoch, epoch, {NASTY: 1 / epoch}, True) for epoch in (1, 2))
    nasty = replace(nasty, epochs=({"epoch": 1, NASTY: 0.5},), points=points)
    found = Runs([nasty, a_run()], f"s3://key:d34d@bucket/{NASTY}", {f"s3://key:d34d@b/{NASTY}": NASTY})
    for thing in (nasty, found, Runs([nasty])):
        bundle = shown(thing)
        page = Page(bundle["text/html"])
        assert page.open == []
        assert not {"script", "img"} & {tag for tag, _ in page.tags}
        assert "d34d" not in bundle["text/html"] + bundle["text/plain"]


def test_runs_read_from_files_are_shown(tmp_path: Path) -> None:
    (tmp_path / "tfos_runs").mkdir()
    for run in several():
        (tmp_path / "tfos_runs" / f"{run.id}.json").write_text(to_json(run))
    assert "4 runs" in shown(runs(tmp_path))["text/html"]


# --- words


def test_differences_have_their_kind() -> None:
    one = a_run(arguments={"python": "no"}, versions={"python": "3.11"})
    other = a_run("bb22", arguments={}, versions={"python": "3.13"}, plan={"workers": 3})
    assert words.differences([one, other]) == [
        ("arguments", "python", ["no", ""]),
        ("plan", "workers", ["2", "3"]),
        ("versions", "python", ["3.11", "3.13"]),
    ]
    assert words.differences([one]) == words.differences([]) == []


def test_arguments_that_most_runs_have_come_first() -> None:
    found = [a_run(str(number), arguments={"lr": number, **({"odd": 1} if number == 2 else {})}) for number in range(3)]
    assert words.columns([found[2], *found[:2]], 1) == (["lr"], ["odd"])
