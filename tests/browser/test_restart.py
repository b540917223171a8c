"""The panel after a restart of its kernel: it stays on the page, but its cluster is gone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.browser.conftest import LOAD, Lab, Tab, fit

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def restart(tab: Tab) -> None:
    """Restart the kernel, and wait until the page is connected to it again."""
    tab.page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    tab.page.wait_for_function(
        "jupyterapp.shell.currentWidget.sessionContext.session.kernel.connectionStatus === 'connected'"
    )


@pytest.mark.slow
def test_stop_after_a_restart_says_that_the_kernel_has_ended(open_tab: Callable[..., Tab]) -> None:
    cell = "%%tfos_cluster mnist --workers 1 --data rows --epochs 400 --background\n" + fit(0.05, 400)
    tab = open_tab("restart.ipynb", LOAD, cell)
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    tab.until_idle()
    restart(tab)
    stop = tab.panel.get_by_role("button", name="■ Stop")
    with tab.page.expect_response(lambda answer: "/stop" in answer.url) as answered:
        stop.click()
    assert answered.value.status == 410
    expect(tab.panel).to_contain_text("The kernel that held this cluster has ended")
    expect(stop).not_to_have_attribute("aria-disabled", "true")
    # The browser itself logs each answer with an error status.
    tab.complaints[:] = [said for said in tab.complaints if "410" not in said]


def run_unseen(tab: Tab, code: str) -> None:
    """Run code in the kernel, in no cell."""
    tab.page.evaluate(
        "code => jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code: code}).done", code
    )


READER = """
def read(spark):
    return spark.range(0, 64, 1, 2).selectExpr("array(float(id) / 64) as x", "float(id) / 64 as y")
"""


@pytest.mark.slow
def test_a_detached_cluster_is_shown_and_stopped_by_the_kernel_after_a_restart(
    open_tab: Callable[..., Tab], lab: Lab
) -> None:
    launch = "%%tfos_cluster night --workers 1 --detach --data read --epochs 400\n" + fit(0.05, 400)
    tab = open_tab("detached.ipynb", LOAD, READER, launch, "'later'")
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    expect(tab.panel).to_contain_text("night outlives this kernel: %tfos_attach night shows it in another")
    tab.until_idle()
    tab.page.screenshot(path=lab.folder / "detached-before.png")
    restart(tab)
    run_unseen(tab, "%load_ext tfos_nb")
    try:
        tab.page.evaluate(
            "jupyterapp.shell.currentWidget.content.widgets[3].model.sharedModel.setSource('%tfos_attach night');"
            "jupyterapp.shell.currentWidget.content.activeCellIndex = 3"
        )
        tab.command("notebook:run-cell")
        panel = tab.page.locator(".jp-CodeCell").nth(3).locator(".tfos-panel").last
        expect(panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
        tab.page.screenshot(path=lab.folder / "detached-after.png")
        panel.get_by_role("button", name="■ Stop").click()
        expect(panel).to_contain_text(re.compile("Stopped"))
        tab.page.screenshot(path=lab.folder / "detached-stopped.png")
    finally:  # its process would keep the results for a day
        run_unseen(tab, "import tfos_nb; tfos_nb.attach('night').close()")
