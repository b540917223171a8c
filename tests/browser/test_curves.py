"""Curves and displays in JupyterLab: a chart while the cell blocks, over a recovery, and in the saved file."""

from __future__ import annotations

import re
from collections.abc import Callable

import nbformat
import pytest

from tests.browser.conftest import Lab, Tab
from tests.browser.test_pictures import FOLDER, NOT_OF_THE_CELL, SHOWN, size

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

OpenTab = Callable[..., Tab]

DIGITS = """
%load_ext tfos_nb
from sklearn.datasets import load_digits
from tfos_nb import spark_session
spark = spark_session(4, conf={"spark.ui.enabled": "true", "spark.ui.port": "0"})
rows = [(pixels.tolist(), int(label)) for pixels, label in zip(*load_digits(return_X_y=True))]
train = spark.createDataFrame(rows[360:], "pixels array<float>, label long")
held_out = spark.createDataFrame(rows[:360], "pixels array<float>, label long")
"""

FIT = """
%%tfos_cluster digits --workers 2 --data train --validation held_out --epochs {epochs} --restarts 1
def main(args, ctx):
    import os, signal, time
    import keras

    class Watched(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep({pause})

        def on_epoch_begin(self, epoch, logs=None):
            if ctx.generation == 1 and epoch == {lost} and ctx.task_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with ctx.strategy().scope():
        model = keras.Sequential([
            keras.layers.Rescaling(1 / 16),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        ctx.dataset(64, x="pixels", y="label"), validation_data=ctx.validation(64, x="pixels", y="label"),
        epochs={epochs}, callbacks=[Watched()], verbose=0,
    )
"""


def fit(epochs: int, pause: float, lost: int = -1) -> str:
    """Return the cell; worker:1 is lost once, when the epoch with the index ``lost`` begins."""
    return FIT.format(epochs=epochs, pause=pause, lost=lost)


def open_chart(tab: Tab, metric: str = "Loss") -> None:
    tab.panel.locator("button.t-tile", has_text=metric).click()
    expect(tab.panel.locator(".t-plot polyline").first).to_be_attached()


def use_theme(page: Page, name: str) -> None:
    """Change JupyterLab's theme, and wait until its splash screen no longer covers the page."""
    page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {name}'}})")
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", str(name == "Light").lower())
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)


def photograph(tab: Tab, name: str, cell: int = 1) -> None:
    """Take a picture of a cell's panel, and compare its size with the one in the documentation."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    panel = tab.page.locator(".jp-CodeCell").nth(cell).locator(".tfos-panel").last
    width, height = size(panel.screenshot(path=FOLDER / name))
    shown = size((SHOWN / name).read_bytes())
    assert abs(width - shown[0]) <= 20, f"docs/pictures/{name} is of a page of another width: make pictures"
    assert abs(height - shown[1]) <= 60, f"docs/pictures/{name} is of another panel: make pictures"


def test_a_chart_shows_a_real_training_while_its_cell_blocks_the_kernel(open_tab: OpenTab, lab: Lab) -> None:
    # Slow enough for all that is looked at while it trains: the recovery itself takes little more than a second.
    tab = open_tab("curves.ipynb", DIGITS, fit(14, 0.05, lost=6), "digits", "digits.history", "digits.plan")
    tab.page.add_style_tag(content=NOT_OF_THE_CELL)
    tab.run_all()
    expect(tab.panel).to_contain_text(re.compile("train, epoch ([3-9]|1\\d) of 14"))
    open_chart(tab)
    plot = tab.panel.get_by_role("slider")
    before = int(plot.get_attribute("aria-valuemax") or 0)
    tab.page.wait_for_function(f"document.querySelector('.t-plot').getAttribute('aria-valuemax') > {before}")
    assert any("/curves?" in url for url in tab.asked), "the numbers came past the busy kernel"
    _look_at_stacks(tab)
    _read_by_keyboard(tab)
    expect(tab.panel.locator(".t-plot .t-recovered")).to_have_count(1)
    expect(tab.panel).to_contain_text(re.compile("train, epoch (1[0-3]) of 14"))
    plot.blur()
    for theme, name in (("Light", "chart.png"), ("Dark", "chart-dark.png")):
        use_theme(tab.page, theme)
        _point_at(tab)
        photograph(tab, name)
    tab.until_idle()
    _look_at_displays(tab)
    assert tab.failed == []
    tab.save()
    for output in (output for outputs in lab.saved("curves.ipynb") for output in outputs if "data" in output):
        assert not any("widget" in kind for kind in output["data"])
        assert "text/plain" in output["data"]


def _look_at_stacks(tab: Tab) -> None:
    """Open the stacks of all programs, then of one."""
    tab.panel.get_by_role("button", name="Stacks").click()
    stacks = tab.panel.get_by_role("region", name=re.compile("^stacks of"))
    expect(stacks).to_contain_text(re.compile(r"worker:0.*in main.*worker:1.*in main", re.DOTALL))
    assert any("/stacks?" in url for url in tab.asked), "they came past the busy kernel"
    tab.panel.get_by_role("tab", name="worker:1").click()
    expect(stacks).not_to_contain_text("worker:0")
    tab.panel.get_by_role("tab", name="All").click()
    tab.panel.get_by_role("button", name="Stacks").click()
    expect(stacks).to_be_hidden()


def _point_at(tab: Tab) -> None:
    tab.panel.scroll_into_view_if_needed()  # the screenshot scrolls, which moves the pointer to another place
    box = tab.panel.get_by_role("slider").bounding_box()
    assert box is not None
    tab.page.mouse.move(2, 2)
    tab.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 130)
    expect(tab.panel.locator(".t-tip")).to_contain_text(re.compile(r"Epoch \d.*training \d.*validation \d"))


def _read_by_keyboard(tab: Tab) -> None:
    """Use the chart by keyboard: JupyterLab must not take the keys, which would leave the cell or fold a heading."""
    plot = tab.panel.get_by_role("slider")
    plot.focus()
    active = tab.page.evaluate("jupyterapp.shell.currentWidget.content.activeCellIndex")
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp"):
        tab.page.keyboard.press(key)
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^epoch 3: training \d\.\d+, validation \d\.\d+$"))
    assert tab.page.evaluate("jupyterapp.shell.currentWidget.content.activeCellIndex") == active
    assert tab.panel.get_by_role("slider").evaluate("plot => plot === document.activeElement")
    cells = tab.page.locator(".jp-CodeCell").count()
    tab.panel.get_by_role("button", name="Log", exact=True).focus()
    for key in ("a", "b", "ArrowDown"):
        tab.page.keyboard.press(key)
    assert tab.page.locator(".jp-CodeCell").count() == cells, "a letter on a button of the panel is no shortcut"
    plot.focus()


def _look_at_displays(tab: Tab) -> None:
    """Check the values at the ends of the later cells, in the dark theme."""
    cells = tab.page.locator(".jp-CodeCell")
    ended = cells.nth(1).locator(".tfos-panel")
    expect(ended).not_to_have_class(re.compile("t-live"))
    ended.get_by_text("curves", exact=True).click()
    expect(ended.get_by_role("img", name=re.compile("Loss by epoch.*recovered after epoch 6"))).to_be_visible()
    cluster = cells.nth(2).locator(".tfos-panel")
    expect(cluster).to_contain_text("Done in")
    expect(cluster).not_to_have_class(re.compile("t-live"))
    address = str(cluster.get_by_role("link", name="Spark UI ↗").get_attribute("href"))
    assert re.fullmatch(r"/user/alice/proxy/\d+/jobs/", address)
    answer = tab.page.request.get(f"http://127.0.0.1:{tab.lab.port}{address}")
    assert (answer.status, "Spark Jobs" in answer.text()) == (200, True), "the link leads to Spark's UI"
    history = cells.nth(3).locator(".tfos-panel")
    expect(history.get_by_role("img", name=re.compile("Accuracy by epoch"))).to_be_visible()
    expect(history.get_by_role("row")).to_have_count(13)  # the header and the last twelve epochs
    expect(cells.nth(4).locator(".tfos-panel")).to_contain_text("fed from Spark")
    photograph(tab, "history-dark.png", 3)
    use_theme(tab.page, "Light")
    photograph(tab, "history.png", 3)


def test_an_untrusted_notebook_keeps_its_sentences_and_tables(open_tab: OpenTab, lab: Lab) -> None:
    """JupyterLab sanitizes its HTML and removes the style sheet."""
    assert (lab.work / "curves.ipynb").exists(), "the test before has saved it"
    notebook = nbformat.read(lab.work / "curves.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("from somebody else"))  # so that its signature does not match
    for cell in notebook.cells:
        cell.metadata.pop("trusted", None)
    nbformat.write(notebook, lab.work / "stranger.ipynb")
    tab = open_tab("stranger.ipynb")
    page = tab.page
    cluster = page.locator(".jp-CodeCell").nth(2)
    expect(cluster).to_contain_text("Done in")
    expect(cluster.get_by_role("row", name=re.compile("worker:1"))).to_be_visible()
    expect(cluster.get_by_role("link", name="Spark UI ↗")).to_be_visible()
    assert page.locator("style", has_text=".tfos-panel").count() == 0
    assert "tfos-panel{" not in page.locator(".jp-Notebook").inner_text()
    history = page.locator(".jp-CodeCell").nth(3)
    expect(history.get_by_role("row", name=re.compile("^14 "))).to_be_visible()
    expect(history.get_by_text(re.compile("epoch 5, training"))).to_have_count(0)  # no text of the drawing is left
    cluster.screenshot(path=lab.folder / "untrusted.png")  # a picture to look at
    history.screenshot(path=lab.folder / "untrusted-history.png")


def test_lines_return_html_in_a_notebook(open_tab: OpenTab) -> None:
    tab = open_tab("lines.ipynb", "%load_ext tfos_nb", "%tfos_plan --workers 2 --ps 1", "%tfos_doctor")
    tab.run_all()
    tab.until_idle()
    cells = tab.page.locator(".jp-CodeCell")
    expect(cells.nth(1).get_by_role("row", name=re.compile("ps:0.*1 CPU"))).to_be_visible()
    expect(cells.nth(1)).to_contain_text("there is no session yet")
    expect(cells.nth(2).get_by_role("row", name=re.compile("Java.*ok"))).to_be_visible()
    light = cells.nth(2).locator(".tfos-panel").evaluate("panel => getComputedStyle(panel).backgroundColor")
    use_theme(tab.page, "Dark")
    changed = cells.nth(2).locator(".tfos-panel").evaluate("panel => getComputedStyle(panel).backgroundColor")
    assert light != changed
