"""A JupyterLab whose server lacks the extension of tfos_nb: the page uses other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from tests.browser.conftest import Lab, Tab
from tests.jupyter_server import TOKEN

pytest.importorskip("playwright")
from playwright.sync_api import BrowserContext, expect

pytestmark = pytest.mark.browser


class Bare(Lab):
    """JupyterLab without the extension."""

    extensions: ClassVar[dict[str, bool]] = {"tfos_nb.serverext": False, "jupyterlab": True}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    running = Bare(tmp_path_factory.mktemp("lab"))
    yield running
    running.close()


@pytest.mark.slow
def test_a_saved_frame_says_how_to_show_it_again_and_holds_no_address(
    open_tab: Callable[..., Tab], context: BrowserContext, lab: Lab
) -> None:
    tab = open_tab("frame.ipynb", "%load_ext tfos_nb\n%tfos_tensorboard --logdir .")
    tab.run_all()
    expect(tab.page.get_by_text("open in a tab")).to_be_visible()
    tab.save()
    assert "code=" not in (lab.work / "frame.ipynb").read_text()
    assert "127.0.0.1" not in (lab.work / "frame.ipynb").read_text()
    tab.page.goto("about:blank")
    for session in context.request.get(f"{lab.url}api/sessions").json():  # its kernel ends
        context.request.delete(f"{lab.url}api/sessions/{session['id']}?token={TOKEN}")
    reopened = open_tab("frame.ipynb")
    expect(reopened.page.get_by_text("%tfos_tensorboard shows it")).to_be_visible()
    expect(reopened.page.get_by_text("Error displaying widget")).to_have_count(0)
    for complaint in tab.complaints:
        assert "/tfos-nb/api/version" in complaint, "the page asks for the extension, and the browser tells of each 404"
    tab.complaints.clear()
