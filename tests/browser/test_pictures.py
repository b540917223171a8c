"""The pictures of the documentation: screenshots of the README's cell while it trains in JupyterLab, and of a hang.

They go to ``build/pictures``; ``make pictures`` renews those in ``docs/pictures``.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Tab

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

CHECKOUT = Path(__file__).parents[2]
SHOWN = CHECKOUT / "docs/pictures"
FOLDER = CHECKOUT / os.environ.get("TFOS_NB_PICTURES", "build/pictures")

EPOCHS = "[6-9]" if "TFOS_NB_PICTURES" in os.environ else "[2-9]"
"""When it is taken: for the documentation when its curves have something to show."""

ROWS = """
%load_ext tfos_nb
from sklearn.datasets import load_digits
from tfos_nb import spark_session
spark = spark_session(4, conf={"spark.ui.enabled": "false"})
rows = [(pixels.tolist(), int(label)) for pixels, label in zip(*load_digits(return_X_y=True))]
train = spark.createDataFrame(rows, "pixels array<float>, label long")
"""

NOT_OF_THE_CELL = ".Toastify, .jp-cell-toolbar { display: none !important; }"
"""JupyterLab's own question about its news, and the buttons above a cell."""

WITHOUT_PATHS = """(shown, paths) => {
    for (const path of paths) shown.textContent = shown.textContent.replaceAll(path, "");
}"""
"""Where Python and this package are installed, which differs from machine to machine."""


def the_cell_of_the_readme() -> str:
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(%%tfos_cluster .*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def size(picture: bytes) -> tuple[int, int]:
    """Return the width and the height of a PNG."""
    assert picture.startswith(b"\x89PNG"), "it is a PNG"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def photograph(tab: Tab, name: str, part: str = "") -> None:
    """Take a picture of the second cell, or of a part of it, and compare its size with the one in the documentation."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    cell = tab.page.locator(".jp-CodeCell").nth(1)
    taken = (cell.locator(part) if part else cell).screenshot(path=FOLDER / name)
    width, height = size((SHOWN / name).read_bytes())
    assert abs(size(taken)[0] - width) <= 20, f"docs/pictures/{name} is of a page of another width: make pictures"
    assert abs(size(taken)[1] - height) <= 60, f"docs/pictures/{name} is of another cell or panel: make pictures"


@pytest.mark.slow
def test_the_pictures_show_the_readmes_cell_while_it_trains(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab("picture.ipynb", ROWS, the_cell_of_the_readme())
    tab.page.add_style_tag(content=NOT_OF_THE_CELL)
    tab.run_all()
    expect(tab.panel).to_contain_text(re.compile(rf"worker:0 and worker:1 train, epoch ({EPOCHS}|1\d) of 15"))
    expect(tab.panel.get_by_role("row", name=re.compile("worker:1.*training"))).to_be_visible()
    photograph(tab, "panel.png")
    tab.page.evaluate("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    expect(tab.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    expect(tab.panel).to_contain_text("Training")
    photograph(tab, "panel-dark.png")
    tab.until_idle()
    expect(tab.panel).to_contain_text("Done")


def cell_of_the_notebook(notebook: str, name: str) -> str:
    cells = json.loads((CHECKOUT / "notebooks" / notebook).read_text(encoding="utf-8"))["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["id"] == name))


@pytest.mark.slow
def test_the_pictures_show_a_hang_with_its_line(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab("hang.ipynb", ROWS, cell_of_the_notebook("10_recovery.ipynb", "hang"))
    tab.page.add_style_tag(content=NOT_OF_THE_CELL)
    tab.run_all()
    expect(tab.panel).to_contain_text(re.compile(r"Nothing moves: worker:1 is in your program, line \d+"))
    row = tab.panel.get_by_role("row", name=re.compile("worker:1"))
    expect(row).to_contain_text("stuck")
    expect(tab.panel).to_contain_text("this node waits in TensorFlow for the other nodes")
    photograph(tab, "hang.png", ".tfos-panel")
    button = tab.panel.get_by_role("button", name="Stacks")
    button.click()
    tab.panel.get_by_role("tab", name="worker:1").click()
    stacks = tab.panel.get_by_role("region", name=re.compile("^stacks of worker:1"))
    expect(stacks).to_contain_text("in read_the_next_file")
    stacks.evaluate(WITHOUT_PATHS, [f"{sysconfig.get_path('purelib')}/", f"{CHECKOUT}/"])
    photograph(tab, "stacks.png", ".tfos-panel")
    tab.page.evaluate("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    expect(tab.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    photograph(tab, "stacks-dark.png", ".tfos-panel")
    tab.panel.get_by_role("tab", name="all").click()
    button.click()
    photograph(tab, "hang-dark.png", ".tfos-panel")
    for label in ("■ Stop", "Cancel now"):
        tab.panel.get_by_role("button", name=label).click()
    expect(tab.panel).to_contain_text("Stopped")
