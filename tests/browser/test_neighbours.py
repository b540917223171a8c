"""sparkmonitor beside the panel, and a restart of the kernel of both."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.browser.conftest import LOAD, SECONDS, Lab, Tab, fit

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab whose kernels load sparkmonitor, enabled by the command in the documentation."""
    running = Lab(tmp_path_factory.mktemp("lab"))
    command = [sys.executable, "-m", "tfos_nb", "enable-sparkmonitor"]
    subprocess.run(command, env=running.environment, check=True, capture_output=True, timeout=SECONDS)
    yield running
    running.close()


def test_sparkmonitor_shows_sparks_jobs_beside_the_panel(open_tab: OpenTab) -> None:
    tab = open_tab("both.ipynb", LOAD, "%%tfos_cluster mnist --workers 1 --data rows --epochs 60\n" + fit(0.05, 60))
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    monitor = tab.page.locator(".jp-CodeCell").nth(1).locator(".pm, .sparkMonitorCellRoot, [class*=parkmonitor]").first
    expect(monitor).to_be_visible()
    expect(monitor).to_contain_text("tfos_nb_cluster_mnist:_worker:0")
    tab.panel.get_by_role("button", name="Stop").click()
    tab.until_idle()
    expect(tab.panel).to_contain_text("Stopped")


def test_a_restarted_kernel_leaves_no_process_and_its_pages_say_so(open_tab: OpenTab, lab: Lab) -> None:
    tab = open_tab(
        "restart.ipynb",
        LOAD,
        "%%tfos_cluster mnist --workers 1 --data rows --epochs 600 --tensorboard --background\n" + fit(0.05, 600),
    )
    tab.run_all()
    expect(tab.panel.get_by_role("row", name=re.compile("worker:0.*training"))).to_be_visible()
    published = (lab.folder / "JUPYTER_RUNTIME_DIR" / "tfos_nb").glob("*.json")
    newest = max(published, key=lambda file: file.stat().st_mtime)
    nodes = _nodes_of(lab)
    assert nodes
    tab.page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    alive = psutil.wait_procs(nodes, timeout=SECONDS)[1]
    assert not alive, "no node outlives its kernel"
    answer = tab.page.request.get(f"{lab.url}tfos-nb/tb/{newest.stem}/")
    assert (answer.status, "kernel that held this cluster has ended" in answer.text()) == (410, True)


def _nodes_of(lab: Lab) -> list[psutil.Process]:
    """Return the supervisors, TensorFlow processes and TensorBoards of this JupyterLab's kernels."""
    mine = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or ())
        environment = process.info["environ"] or {}
        if "tfos_nb.runtime." in command and environment.get("JUPYTER_RUNTIME_DIR", "").startswith(str(lab.folder)):
            mine.append(process)
    return mine
