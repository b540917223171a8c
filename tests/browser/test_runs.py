"""The table of recorded runs in JupyterLab: sorting, filters, comparison, refresh, and the saved file."""

from __future__ import annotations

import math
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Locator, expect

from tests.browser.conftest import Lab, Tab
from tests.browser.test_curves import photograph, use_theme
from tests.browser.test_pictures import NOT_OF_THE_CELL
from tfos_nb.records.run import Process, Run, to_json
from tfos_nb.state.training_curve import Point

pytestmark = pytest.mark.browser

OpenTab = Callable[..., Tab]
WIDGET = "application/vnd.jupyter.widget-view+json"
EPOCHS, STEPS = 12, 23
STARTED = 1_795_700_000.0  # in November 2026
ERROR = """worker:1 on hdp-c02 (executor 2): ValueError: label 10 is outside 0…9
Traceback (most recent call last):
  File "cell 4", line 9, in main
ValueError: label 10 is outside 0…9"""
RUNS = (
    # learning rate, units, optimizer, workers, status, epochs
    (0.001, 64, "adam", 2, "DONE", EPOCHS),
    (0.003, 64, "adam", 2, "DONE", EPOCHS),
    (0.01, 64, "adam", 2, "FAILED", 3),
    (0.003, 128, "adam", 4, "DONE", EPOCHS),
    (0.01, 128, "sgd", 4, "RUNNING", 8),
    (0.03, 128, "sgd", 4, "STOPPED", 5),
)
"""The runs, the oldest first; the one that runs is of a process that has ended."""


def training_curve(rate: float, units: int, epochs: int, seed: int) -> list[Point]:
    """Return points like those of a training: the loss falls faster with a higher rate, and validation's is higher."""
    noise, points = random.Random(seed), []
    for step in range(1, epochs * STEPS + 1):
        loss = 2.2 * math.exp(-step * rate**0.7 * units**0.5 / 22) + 0.04 + 0.03 * noise.random()
        ends = step % STEPS == 0
        metrics = {"loss": loss, "accuracy": 1 - loss / 2.6}
        metrics |= {"val_loss": 1.08 * loss + 0.05, "val_accuracy": 0.97 - loss / 2.6} if ends else {}
        points.append(Point((step - 1) // STEPS + 1, step, metrics, ends))
    return points


def record(number: int, folder: Path) -> None:
    rate, units, optimizer, workers, status, epochs = RUNS[number]
    points = training_curve(rate, units, epochs, number)
    seconds = 31.0 + 4 * epochs / workers + number
    started = STARTED + 700 * number
    run = Run(
        f"{random.Random(number).getrandbits(40):010x}",
        "digits",
        status,
        started,
        started + seconds,
        seconds,
        error=ERROR if status == "FAILED" else "",
        plan={"workers": workers},
        arguments={"learning_rate": rate, "units": units, "optimizer": optimizer, "batch_size": 64},
        epochs=tuple({"epoch": point.epoch, **point.metrics} for point in points if point.ends_epoch),
        points=tuple(points),
        rows=1437 * epochs,
        versions={"python": "3.11.7", "tensorflow": "2.21.0"},
        spark={"application": "app-20261127", "master": "yarn"},
        model_dir="models/digits",
        process=Process(socket.gethostname(), 1, 0.0),
    )
    (folder / f"{number}.json").write_text(to_json(run), encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def records(lab: Lab) -> Path:
    """Write the records of all runs but the newest, and a file that is not a record."""
    folder = lab.work / "models/digits/tfos_runs"
    folder.mkdir(parents=True)
    for number in range(len(RUNS) - 1):
        record(number, folder)
    (folder / "notes.json").write_text("[]")
    return folder


def box(tab: Tab, number: int) -> Locator:
    return tab.panel.get_by_role("checkbox", name=f"digits {random.Random(number).getrandbits(40):010x}")


def ids(tab: Tab) -> list[str]:
    return tab.panel.locator(".t-runs tbody tr:not([hidden]) .t-mono").all_inner_texts()


def rates(tab: Tab) -> list[str]:
    place = tab.panel.locator(".t-runs thead th").all_inner_texts().index("learning_rate")
    return tab.panel.locator(f".t-runs tbody tr:not([hidden]) > :nth-child({place + 1})").all_inner_texts()


def open_runs(open_tab: OpenTab, name: str, *more: str) -> Tab:
    tab = open_tab(name, "%load_ext tfos_nb", "%tfos_runs models", *more)
    tab.page.add_style_tag(content=NOT_OF_THE_CELL)
    tab.run_all()
    expect(tab.panel.get_by_role("row")).to_have_count(len(RUNS))
    return tab


def test_runs_can_be_sorted_filtered_and_compared(open_tab: OpenTab, records: Path) -> None:
    tab = open_runs(open_tab, "runs.ipynb")
    _look_at_the_rows(tab)
    _sort(tab)
    _filter(tab)
    _compare_by_keyboard(tab)
    for theme, name in (("Light", "runs.png"), ("Dark", "runs-dark.png")):
        use_theme(tab.page, theme)
        _point_at(tab)
        photograph(tab, name)
    use_theme(tab.page, "Light")
    _look_at_the_chart(tab)
    _look_at_one_that_failed(tab)
    record(len(RUNS) - 1, records)
    tab.panel.get_by_role("button", name="Refresh").click()
    expect(tab.panel.get_by_role("row", name=re.compile("stopped"))).to_be_visible()
    expect(tab.panel).to_contain_text("6 runs")
    (records / f"{len(RUNS) - 1}.json").unlink()


def _look_at_the_rows(tab: Tab) -> None:
    assert len(ids(tab)) == len(RUNS) - 1
    newest = tab.panel.get_by_role("row").nth(1)
    for told in ("killed", "2026-11-2", "43 s", "0.01", "128", "sgd"):
        expect(newest).to_contain_text(told)
    expect(tab.panel).to_contain_text("notes.json: not the record of a run: the key 'tfos_nb_run' is missing")
    expect(tab.panel.get_by_role("columnheader", name="Started")).to_have_attribute("aria-sort", "descending")


def _sort(tab: Tab) -> None:
    head = tab.panel.get_by_role("columnheader", name="learning_rate")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert rates(tab) == ["0.001", "0.003", "0.003", "0.01", "0.01"]
    tab.page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert rates(tab) == ["0.01", "0.01", "0.003", "0.003", "0.001"]
    tab.panel.get_by_role("columnheader", name="Started").get_by_role("button").click()


def _filter(tab: Tab) -> None:
    words = tab.panel.get_by_role("searchbox", name="Filter the runs")
    words.fill("units=64 DONE")
    assert rates(tab) == ["0.003", "0.001"]
    expect(tab.panel).to_contain_text("2 of 5")
    words.fill("no such thing")
    assert ids(tab) == []
    words.press("Escape")
    assert len(ids(tab)) == len(RUNS) - 1


def _compare_by_keyboard(tab: Tab) -> None:
    """Compare runs by keyboard: JupyterLab must not take the keys, which would scroll or add a cell."""
    cells = tab.page.locator(".jp-CodeCell").count()
    box(tab, 3).focus()
    tab.page.keyboard.press("Space")
    expect(box(tab, 3)).to_be_checked()
    expect(tab.panel.get_by_role("row", name=re.compile("Arguments.*units 128"))).to_be_visible()
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("ArrowDown")
    expect(box(tab, 1)).to_be_focused()
    tab.page.keyboard.press("Space")
    tab.page.keyboard.press("a")
    expect(tab.panel.locator(".t-plot polyline")).to_have_count(4)
    expect(tab.panel.locator(".t-plot polyline.t-stroke-validation")).to_have_count(2)
    expect(tab.panel.get_by_role("row", name=re.compile("units argument 128 64"))).to_be_visible()
    expect(tab.panel.get_by_role("row", name=re.compile("workers plan 4 2"))).to_be_visible()
    expect(tab.panel.get_by_role("row", name=re.compile("learning_rate argument"))).to_have_count(0)
    assert tab.page.locator(".jp-CodeCell").count() == cells
    box(tab, 0).check()
    expect(tab.panel.locator(".t-plot polyline")).to_have_count(6)


def _point_at(tab: Tab) -> None:
    plot = tab.panel.get_by_role("slider")
    tab.panel.scroll_into_view_if_needed()
    place = plot.bounding_box()
    assert place is not None
    tab.page.mouse.move(2, 2)
    tab.page.mouse.move(place["x"] + place["width"] * 0.36, place["y"] + 130)
    expect(tab.panel.locator(".t-tip > div")).to_have_count(4)  # a row for the epoch, and for each of three runs


def _look_at_the_chart(tab: Tab) -> None:
    plot = tab.panel.get_by_role("slider")
    plot.focus()
    tab.page.keyboard.press("Home")
    told = str(plot.get_attribute("aria-valuetext"))
    assert told.startswith("epoch 1: digits ")
    assert told.count("validation") == 3
    tab.panel.get_by_role("button", name="Step", exact=True).click()
    expect(plot).to_have_attribute("aria-valuemax", str(EPOCHS * STEPS))
    tab.panel.get_by_role("button", name="Log", exact=True).click()
    expect(tab.panel.get_by_role("button", name="Log", exact=True)).to_have_attribute("aria-pressed", "true")
    tab.panel.get_by_role("combobox", name="Metric").select_option("accuracy")
    expect(plot).to_have_attribute("aria-label", re.compile("^Accuracy of runs by step: digits "))
    with tab.page.expect_download() as download:
        tab.panel.get_by_role("button", name="Download as CSV").click()
    head, *lines = download.value.path().read_text(encoding="utf-8").splitlines()
    assert (len(head.split(",")), len(lines)) == (7, EPOCHS * STEPS)
    assert head.startswith("step,digits ")
    with tab.page.expect_download() as download:
        tab.panel.get_by_role("button", name="Download as SVG").click()
    picture = download.value.path().read_text(encoding="utf-8")
    assert len(re.findall(r">digits \w{10}</text>", picture)) == 3, "it names the runs by itself"
    tab.panel.get_by_role("button", name="Linear").click()


def _look_at_one_that_failed(tab: Tab) -> None:
    tab.panel.get_by_role("button", name="Choose none").click()
    expect(tab.panel.get_by_role("slider")).to_be_hidden()
    box(tab, 2).check()
    expect(tab.panel.locator(".t-say.t-bad")).to_contain_text("worker:1 on hdp-c02 (executor 2): ValueError: label 10")
    expect(tab.panel.locator(".t-plot polyline")).to_have_count(2)


def test_curves_are_shown_while_a_cell_blocks_the_kernel(open_tab: OpenTab) -> None:
    tab = open_runs(open_tab, "busy.ipynb", "import time\nprint('begins', flush=True)\ntime.sleep(45)")
    expect(tab.page.get_by_text("begins", exact=True)).to_be_visible()
    asked = time.monotonic()
    box(tab, 0).check()
    expect(tab.panel.locator(".t-plot polyline")).to_have_count(2)
    assert time.monotonic() - asked < 20
    tab.command("notebook:interrupt-kernel")


def test_a_reloaded_page_has_the_table_and_its_curves(open_tab: OpenTab, lab: Lab) -> None:
    tab = open_runs(open_tab, "kept.ipynb")
    tab.save()
    tab.reload()
    expect(tab.panel.get_by_role("row")).to_have_count(len(RUNS))
    box(tab, 0).check()
    box(tab, 1).check()
    expect(tab.panel.locator(".t-plot polyline")).to_have_count(4)
    (output,) = (output for outputs in lab.saved("kept.ipynb") for output in outputs if "data" in output)
    assert set(output["data"]) == {WIDGET, "text/html", "text/plain"}
    assert "Runs: 5 runs in" in output["data"]["text/plain"]


def test_a_saved_notebook_shows_the_table_without_its_kernel(open_tab: OpenTab, lab: Lab) -> None:
    assert (lab.work / "kept.ipynb").exists(), "the test before has saved it"
    tab = open_tab("kept.ipynb")
    expect(tab.panel.get_by_role("row")).to_have_count(len(RUNS))
    expect(tab.page.get_by_text("Error displaying widget")).to_have_count(0)
    tab.panel.get_by_role("columnheader", name="learning_rate").get_by_role("button").click()
    assert rates(tab)[0] == "0.001"
    box(tab, 0).check()
    expect(tab.panel).to_contain_text("as it was when the notebook was saved")
    expect(tab.panel.get_by_role("button", name="Refresh")).to_be_hidden()


def test_an_empty_directory_says_what_to_do(open_tab: OpenTab, lab: Lab) -> None:
    (lab.work / "nothing").mkdir()
    tab = open_tab("empty.ipynb", "%load_ext tfos_nb", "%tfos_runs nothing", "%tfos_runs missing")
    tab.run_all()
    expect(tab.panel).to_contain_text("No runs here yet: each cluster leaves one in its model_dir")
    tab.until_idle()
    assert "missing does not exist" in tab.output(2)
