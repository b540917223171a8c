"""The panel in JupyterLab: live while the cell blocks, stopped from the page, restored after a reload."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable

import nbformat
import pytest

from tests.browser.conftest import BASE, LOAD, Lab, Tab, fit

pytest.importorskip("playwright")
from playwright.sync_api import BrowserContext, expect

pytestmark = pytest.mark.browser

OpenTab = Callable[..., Tab]
WIDGET = "application/vnd.jupyter.widget-view+json"


def test_a_run_is_shown_live_and_kept_in_the_file(open_tab: OpenTab, lab: Lab) -> None:
    tab = open_tab("run.ipynb", LOAD, "%%tfos_cluster mnist --workers 2 --data rows --epochs 4\n" + fit(0.05))
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:1.*training"))).to_be_visible()
    bar = tab.panel.get_by_role("progressbar", name=re.compile("worker:0")).first
    before = bar.get_attribute("aria-valuenow")
    expect(bar).not_to_have_attribute("aria-valuenow", str(before))
    expect(tab.panel.get_by_role("tabpanel")).to_contain_text("main has begun on worker 1")
    tab.until_idle()
    expect(tab.panel).to_contain_text("Done")
    tab.save()
    outputs = [output for outputs in lab.saved("run.ipynb") for output in outputs if "data" in output]
    assert not [output for output in outputs if WIDGET in output["data"]], "no widget is left in the file"
    assert any("tfos-panel" in output["data"].get("text/html", "") for output in outputs)


def test_a_saved_notebook_shows_the_outcome_without_its_kernel(open_tab: OpenTab, lab: Lab) -> None:
    """A colleague who opens the file sees this."""
    assert (lab.work / "run.ipynb").exists(), "the test before has saved it"
    tab = open_tab("run.ipynb")
    expect(tab.panel).to_contain_text("Done")
    expect(tab.page.get_by_text("Error displaying widget")).to_have_count(0)


def test_the_page_stops_a_cluster_whose_cell_blocks_the_kernel(open_tab: OpenTab) -> None:
    tab = open_tab("stop.ipynb", LOAD, "%%tfos_cluster mnist --workers 2 --data rows --epochs 400\n" + fit(0.05, 400))
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    with tab.page.expect_response(lambda answer: "/stop" in answer.url) as answered:
        tab.panel.get_by_role("button", name="Stop").click()
    assert answered.value.status == 200, "it went by HTTP, past the busy kernel"
    assert "stopping mnist" in json.loads(answered.value.text())["said"]
    tab.until_idle()
    expect(tab.panel).to_contain_text("Stopped")
    assert tab.failed == []


@pytest.mark.slow
def test_a_cluster_can_be_stopped_by_keyboard(open_tab: OpenTab) -> None:
    tab = open_tab("keys.ipynb", LOAD, "%%tfos_cluster mnist --workers 1 --data rows --epochs 400\n" + fit(0.05, 400))
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    tab.panel.get_by_role("button", name="Plan").focus()
    tab.page.keyboard.press("Enter")
    expect(tab.panel.get_by_role("button", name="Plan")).to_have_attribute("aria-expanded", "true")
    expect(tab.panel).to_contain_text("input from spark")
    tab.page.keyboard.press("Tab")
    expect(tab.panel.get_by_role("button", name="Stop")).to_be_focused()
    tab.page.keyboard.press("Enter")
    tab.until_idle()
    expect(tab.panel).to_contain_text("Stopped")


def test_a_reload_in_a_background_run_restores_the_live_panel(open_tab: OpenTab, lab: Lab) -> None:
    tab = open_tab(
        "back.ipynb",
        LOAD,
        "%%tfos_cluster mnist --workers 1 --data rows --epochs 400 --background\n" + fit(0.05, 400),
    )
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    tab.save()
    tab.reload()
    bar = tab.panel.get_by_role("progressbar", name=re.compile("worker:0")).first
    expect(bar).to_be_visible()
    before = bar.get_attribute("aria-valuenow")
    expect(bar).not_to_have_attribute("aria-valuenow", str(before))
    shutil.copy(lab.work / "back.ipynb", lab.work / "left.ipynb")  # for the next test
    tab.panel.get_by_role("button", name="Stop").click()
    expect(tab.panel).to_contain_text("Stopped")
    expect(tab.panel).not_to_have_class(re.compile("t-live"))
    tab.save()
    outputs = [output for outputs in lab.saved("back.ipynb") for output in outputs if "data" in output]
    assert not [output for output in outputs if WIDGET in output["data"]], "the outcome is in the widget's place"
    assert any("Stopped after" in output["data"].get("text/html", "") for output in outputs)
    assert "widgets" not in nbformat.read(lab.work / "back.ipynb", as_version=4).metadata, "nothing is left behind"


@pytest.mark.slow
def test_a_notebook_saved_while_the_cluster_ran_shows_the_state_when_saved(open_tab: OpenTab, lab: Lab) -> None:
    """Its kernel has ended since, and it was not saved again."""
    assert (lab.work / "left.ipynb").exists(), "the test before has left it"
    tab = open_tab("left.ipynb")
    expect(tab.panel).to_contain_text(re.compile("When this notebook was saved, .*: worker:0 trains"))
    expect(tab.panel.get_by_role("button", name="Stop")).to_be_hidden()
    expect(tab.page.get_by_text("Error displaying widget")).to_have_count(0)
    tab.save()  # saved by a reader who has no kernel
    tab.reload()
    expect(tab.panel).to_contain_text("When this notebook was saved")


def test_the_kernels_interrupt_stops_the_cluster_and_keeps_the_session(open_tab: OpenTab) -> None:
    tab = open_tab(
        "interrupt.ipynb",
        LOAD,
        "%%tfos_cluster mnist --workers 1 --data rows --epochs 400\n" + fit(0.05, 400),
        "print('the session goes on:', spark.range(3).count(), mnist.state.value)",
    )
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    tab.command("notebook:interrupt-kernel")
    expect(tab.page.get_by_text("stopped by you")).to_be_visible()
    tab.until_idle()
    tab.page.locator(".jp-CodeCell").nth(2).click()
    tab.command("notebook:run-cell")
    expect(tab.page.get_by_text("the session goes on: 3 STOPPED")).to_be_visible()


@pytest.mark.slow
def test_the_panel_has_the_dark_themes_colours(open_tab: OpenTab) -> None:
    tab = open_tab("run.ipynb")
    ground = "element => getComputedStyle(element).backgroundColor"
    light = tab.panel.evaluate(ground)
    tab.page.evaluate("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    expect(tab.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    dark = tab.panel.evaluate(ground)
    assert _brightness(light) > 200 > 80 > _brightness(dark)


def _brightness(colour: str) -> float:
    numbers = [float(part) for part in re.findall(r"[\d.]+", colour)][:3]
    return sum(numbers) / 3 * (255 if colour.startswith("color(srgb") else 1)


def test_requests_without_a_login_get_nothing(browser: object, lab: Lab, context: BrowserContext) -> None:
    stranger = context.browser.new_context()  # type: ignore[union-attr]
    for path in ("tfos-nb/api/version", "tfos-nb/tb/0123456789ab/", "tfos-nb/api/clusters/0123456789ab/log"):
        answer = stranger.request.get(f"http://127.0.0.1:{lab.port}{BASE}{path}", max_redirects=0)
        assert answer.status in (302, 403), path
    stranger.close()


@pytest.mark.slow
def test_a_reload_while_the_cell_blocks_shows_the_outcome_at_the_end(open_tab: OpenTab) -> None:
    """The page has to wait for the kernel, and loses nothing."""
    tab = open_tab("blocked.ipynb", LOAD, "%%tfos_cluster mnist --workers 1 --data rows --epochs 15\n" + fit(0.05, 15))
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    tab.save()
    tab.reload()
    expect(tab.panel).to_contain_text("Done")
