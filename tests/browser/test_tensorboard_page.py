"""TensorBoard in the page: a frame of the notebook draws its curves, and none of its requests fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.browser.conftest import LOAD, Tab, fit

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_a_frame_opened_early_waits_and_then_refreshes_its_numbers(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(
        "early.ipynb",
        LOAD,
        "%%tfos_cluster early --workers 1 --data rows --epochs 600 --tensorboard --background\n" + fit(0.2, 600),
        "early.wait_until_up()\n%tfos_tensorboard early",
    )
    for number in (0, 1, 2):
        tab.page.locator(".jp-CodeCell").nth(number).click()
        tab.command("notebook:run-cell")
    frame = tab.page.locator(".jp-CodeCell").nth(2).frame_locator("iframe")
    expect(frame.get_by_text("epoch_loss").first).to_be_visible()
    assert any(line.startswith("503") for line in tab.failed), "at first there was nothing to show"
    assert not frame.get_by_text("No dashboards are active").count()
    kept = tab.page.evaluate("localStorage.getItem('_tb_global_settings')")
    assert json.loads(kept)["autoReload"] is True
    drawn = _times_that_curves_were_asked_for(tab)
    assert drawn > 0
    with tab.page.expect_response(lambda answer: "/tb/" in answer.url and _CURVES in answer.url, timeout=60_000):
        pass  # without any action in the page
    tab.page.evaluate("localStorage.setItem('_tb_global_settings', JSON.stringify({autoReload: false}))")
    frame.locator("body").evaluate("() => location.reload()")
    expect(frame.get_by_text("epoch_loss").first).to_be_visible()
    kept = tab.page.evaluate("localStorage.getItem('_tb_global_settings')")
    assert json.loads(kept)["autoReload"] is False, "who has switched it off is not overruled"


_CURVES = "/data/plugin/timeseries/timeSeries"


def _times_that_curves_were_asked_for(tab: Tab) -> int:
    return sum(_CURVES in url for url in tab.asked)


def test_scalars_are_drawn_in_the_notebook_during_and_after_the_run(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(
        "board.ipynb",
        LOAD,
        "%%tfos_cluster mnist --workers 2 --data rows --epochs 600 --tensorboard --background\n" + fit(0.02, 600),
        "%tfos_tensorboard mnist",
        "mnist.stop()\nprint('it is', mnist.state.value)",
        "%tfos_tensorboard mnist --height 700",
        "mnist",
    )
    for number in (0, 1):
        tab.page.locator(".jp-CodeCell").nth(number).click()
        tab.command("notebook:run-cell")
    expect(tab.panel).to_contain_text(re.compile(r"Epoch ([3-9]|\d\d) of 600"))  # an empty page stays empty
    for number in (2, 4):
        tab.page.locator(".jp-CodeCell").nth(number).click()
        tab.command("notebook:run-cell")
        frame = tab.page.locator(".jp-CodeCell").nth(number).frame_locator("iframe")
        expect(frame.get_by_text("epoch_loss").first).to_be_visible()
        expect(frame.locator("line-chart svg path, line-chart canvas").first).to_be_attached()
        if number == 2:
            tab.page.locator(".jp-CodeCell").nth(3).click()
            tab.command("notebook:run-cell")
            expect(tab.page.get_by_text("it is STOPPED")).to_be_visible()
    tab.page.locator(".jp-CodeCell").nth(5).click()
    tab.command("notebook:run-cell")
    link = tab.page.locator(".jp-CodeCell").nth(5).get_by_role("link", name="TensorBoard ↗")
    answer = tab.page.request.get(f"http://127.0.0.1:{tab.lab.port}{link.get_attribute('href')}")
    assert (answer.status, "TensorBoard" in answer.text()) == (200, True), "the cluster's own display leads there too"
    shown = [url for url in tab.asked if "/tfos-nb/tb/" in url]
    assert len(shown) > 10
    assert all(url.startswith(f"http://127.0.0.1:{tab.lab.port}/user/alice/tfos-nb/tb/") for url in shown)
    late = [line for line in tab.failed if not line.startswith("503")]  # 503: TensorBoard was not up yet
    assert late == []
