"""The panel's chart in a real browser, with numbers of ``chart_data`` from a server or by messages of the kernel."""

from __future__ import annotations

import csv
import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.widgets.browser import Server, chromium, serving
from tests.widgets.conftest import node
from tests.widgets.test_panel_page import DEAD, Panel
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.state.chart_data import chart_data
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus
from tfos_nb.state.history import History
from tfos_nb.widgets import render_html

pytestmark = pytest.mark.browser

NODES = ["worker:0", "worker:1"]
EPOCHS = 6
# The coordinates of each piece of a line.
PIECES = """name => [...document.querySelectorAll(`.t-plot polyline.t-stroke-${name}`)]
    .map((line) => line.getAttribute('points').split(' ').map((point) => point.split(',').map(Number)))"""
TICKS = "() => [...document.querySelectorAll('.t-plot .t-tick')].map((one) => one.textContent)"


class Curves(dict[str, Any]):
    """The server's answers to requests for curves, as the kernel would give them."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history
        self.asked: list[dict[str, str]] = []

    def get(self, path: str, default: Any = None) -> Any:
        parts = urlsplit(path)
        if not parts.path.endswith("/curves"):
            return super().get(path, default)
        question = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.asked.append(question)
        return 200, self.answer(**question)

    def answer(self, metric: str = "", by: str = "", node: str = "") -> dict[str, Any]:
        return chart_data(self.history.points(node), metric=metric, by=by, node=node, nodes=NODES)


def trained(epochs: int = EPOCHS, steps: int = 10, lost_after: int = 3) -> History:
    """Two workers' epochs, with a recovery; the losses of worker:1 are twice those of worker:0."""
    history = History("worker:0")
    for epoch in range(1, epochs + 1):
        if epoch == lost_after + 1:
            history.begin_anew()
        for step in range(1, steps + 1):
            record(history, epoch, step, steps, epochs)
    return history


def record(history: History, epoch: int, step: int, steps: int = 10, epochs: int = EPOCHS) -> None:
    loss = 1 / (epoch - 1 + step / steps)
    ends = {"val_loss": loss + 1, "val_accuracy": 0.5} if step == steps else {}
    for name, times in (("worker:0", 1), ("worker:1", 2)):
        metrics = {"loss": times * loss, "accuracy": 1 - loss / 20, **ends}
        history.record(name, StepReport(epoch, epochs, step, steps, metrics, step == steps, phase="fit"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def site() -> Iterator[Server]:
    with serving() as server:
        yield server


class ChartPanel(Panel):
    """A page with a panel whose chart can be opened."""

    def tile(self, label: str) -> Any:
        return self.page.locator("button.t-tile", has_text=label)

    def open(self, label: str = "Loss") -> ChartPanel:
        self.tile(label).click()
        return self.drawn()

    def drawn(self) -> ChartPanel:
        self.page.wait_for_selector(
            ".t-plot polyline, .t-plot circle", state="attached"
        )  # a horizontal line has no height
        return self

    @property
    def plot(self) -> Any:
        return self.page.get_by_role("slider")

    def value(self) -> str:
        return str(self.plot.get_attribute("aria-valuetext"))

    def press_button(self, name: str) -> None:
        self.page.locator(".t-chart").get_by_role("button", name=name, exact=True).click()

    def download(self, kind: str) -> tuple[str, bytes]:
        with self.page.expect_download() as found:
            self.press_button(f"Download as {kind}")
        return found.value.suggested_filename, found.value.path().read_bytes()


@pytest.fixture
def curves(site: Server) -> Curves:
    site.forget()
    site.answers = curves = Curves(trained())
    return curves


@pytest.fixture
def open_panel(browser: Any, site: Server, curves: Curves) -> Iterator[Callable[..., ChartPanel]]:
    opened = []

    def make(theme: str = "light", width: int = 1100) -> ChartPanel:
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900}, timezone_id="UTC")
        opened.append((context, ChartPanel(context, site)))
        return opened[-1][1]

    yield make
    for context, panel in opened:
        assert panel.complaints == []
        context.close()


@pytest.fixture
def panel(open_panel: Callable[..., ChartPanel], running: ClusterState) -> ChartPanel:
    panel = open_panel()
    panel.start(running)
    return panel


# --- what is drawn


def test_a_click_on_a_metric_opens_its_chart_and_a_second_closes_it(panel: ChartPanel) -> None:
    loss = panel.tile("Loss")
    assert loss.get_attribute("aria-expanded") == "false"
    panel.open()
    assert loss.get_attribute("aria-expanded") == "true"
    assert panel.page.locator(f"#{loss.get_attribute('aria-controls')}").is_visible()
    assert panel.page.locator(".t-chart svg").last.bounding_box()["height"] == 300
    loss.click()
    assert not panel.page.locator(".t-chart").is_visible()
    assert loss.get_attribute("aria-expanded") == "false"


def test_training_and_validation_share_a_chart_with_a_gap_at_a_recovery(panel: ChartPanel) -> None:
    panel.open()
    for line in ("training", "validation"):
        first, second = panel.page.evaluate(PIECES, line)
        assert (len(first), len(second)) == (3, 3)
        assert first[-1][0] < second[0][0], "from left to right"
    (training, _), (validation, _) = (panel.page.evaluate(PIECES, line) for line in ("training", "validation"))
    assert all(below[1] > above[1] for below, above in zip(training, validation, strict=True)), "1 less is lower"
    assert "recovered" in panel.page.evaluate(TICKS)
    assert panel.page.locator(".t-keys").inner_text().split() == ["training", "0.1667", "validation", "1.1667"]


def test_the_axes_have_ticks_within_the_values(panel: ChartPanel) -> None:
    panel.open()
    across = panel.page.locator(".t-plot .t-tick[text-anchor=middle]").all_text_contents()
    up = panel.page.locator(".t-plot .t-tick[text-anchor=end]").all_text_contents()
    assert across == ["1", "2", "3", "4", "5", "6", "recovered"]
    assert up == ["0.5", "1", "1.5", "2", "Epoch"]


def test_by_step_a_line_has_every_reported_step(panel: ChartPanel, curves: Curves) -> None:
    panel.open()
    panel.press_button("Step")
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '60'")
    assert [len(piece) for piece in panel.page.evaluate(PIECES, "training")] == [30, 30]
    assert [len(piece) for piece in panel.page.evaluate(PIECES, "validation")] == [3, 3]
    assert curves.asked[-1] == {"metric": "loss", "by": "step"}
    pressed = panel.page.locator(".t-chart [aria-pressed=true]").all_inner_texts()
    assert pressed == ["Step", "Linear"]


def test_a_logarithmic_axis_gives_equal_ratios_equal_heights(panel: ChartPanel) -> None:
    panel.open()
    panel.press_button("Step")
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '60'")
    panel.press_button("Log")
    (points, _) = panel.page.evaluate(PIECES, "training")
    heights = [points[place][1] for place in (0, 1, 3, 7)]  # losses of 10, 5, 2.5 and 1.25
    steps = [after - before for before, after in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.3
    assert {"0.2", "0.5", "1", "2", "5", "10"} <= set(panel.page.evaluate(TICKS))


def test_a_metric_without_positive_values_stays_linear(panel: ChartPanel, curves: Curves) -> None:
    for epoch in range(1, 4):
        curves.history.record("worker:0", StepReport(EPOCHS + epoch, metrics={"reward": -float(epoch)}, epoch_end=True))
    panel.open()
    panel.press_button("Log")
    panel.page.get_by_label("Metric").select_option("reward")
    panel.page.wait_for_function("document.querySelector('.t-chart').getAttribute('aria-label').includes('Reward')")
    assert panel.page.get_by_role("button", name="Log", exact=True).get_attribute("aria-disabled") == "true"
    assert [len(piece) for piece in panel.page.evaluate(PIECES, "training")] == [3]
    panel.page.get_by_role("button", name="Log", exact=True).click(force=True)
    assert panel.page.locator(".t-chart [aria-pressed=true]").all_inner_texts() == ["Epoch", "Linear"]


def test_a_single_value_is_a_dot_and_nan_is_a_gap(panel: ChartPanel, curves: Curves) -> None:
    curves.history = History("worker:0")
    for step, loss in enumerate((1.0, float("nan"), 0.5, 0.4, float("nan")), 1):
        curves.history.record("worker:0", StepReport(step=step, metrics={"loss": loss}))
    panel.open()
    assert [len(piece) for piece in panel.page.evaluate(PIECES, "training")] == [2]
    assert panel.page.locator(".t-plot circle").count() == 3


def test_a_rows_chart_shows_its_node(panel: ChartPanel, curves: Curves) -> None:
    panel.page.locator("tbody tr").nth(1).locator(".t-c-metric").nth(1).click()
    panel.drawn()
    assert curves.asked[-1] == {"metric": "accuracy", "node": "worker:1"}
    assert "Accuracy of worker:1 by epoch" in panel.plot.get_attribute("aria-label")
    panel.page.get_by_label("Metric").select_option("loss")
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-label').startsWith('Loss')")
    assert "training from 2.0000 to 0.3333" in panel.plot.get_attribute("aria-label")
    panel.page.get_by_label("Node", exact=True).select_option("")
    panel.page.wait_for_function("document.querySelector('.t-keys').textContent.includes('0.1667')")
    assert panel.tile("Loss").get_attribute("aria-expanded") == "true"


# --- its values


def test_the_values_under_the_pointer_are_shown(panel: ChartPanel) -> None:
    panel.open()
    third = panel.page.evaluate(PIECES, "training")[0][2]
    box = panel.plot.bounding_box()
    panel.page.mouse.move(box["x"] + third[0] + 8, box["y"] + 200)
    assert panel.text(".t-tip").split("\n") == ["Epoch 3", "training 0.3333", "validation 1.3333"]
    assert panel.page.locator(".t-marked").count() == 2
    panel.page.mouse.move(5, 5)
    assert not panel.page.locator(".t-tip").is_visible()


def test_the_chart_can_be_opened_read_and_closed_by_keyboard(panel: ChartPanel) -> None:
    panel.tile("Loss").focus()
    panel.page.keyboard.press("Enter")
    panel.drawn()
    assert panel.page.evaluate("document.activeElement.getAttribute('role')") == "slider"
    panel.page.keyboard.press("ArrowRight")
    assert panel.value() == "epoch 1: training 1.0000, validation 2.0000"
    panel.page.keyboard.press("ArrowRight")
    panel.page.keyboard.press("ArrowRight")
    assert panel.value() == "epoch 3: training 0.3333, validation 1.3333"
    assert panel.plot.get_attribute("aria-valuenow") == "3"
    panel.page.keyboard.press("End")
    assert panel.value() == "epoch 6: training 0.1667, validation 1.1667"
    panel.page.keyboard.press("ArrowRight")
    panel.page.keyboard.press("PageDown")
    assert panel.value() == "epoch 1: training 1.0000, validation 2.0000"
    panel.page.keyboard.press("Escape")
    assert not panel.page.locator(".t-chart").is_visible()
    assert panel.tile("Loss").evaluate("tile => tile === document.activeElement")


def test_a_screen_reader_gets_a_description_of_the_chart(panel: ChartPanel) -> None:
    panel.open()
    assert panel.plot.get_attribute("aria-label") == (
        "Loss of mnist by epoch: training from 1.0000 to 0.1667; validation from 2.0000 to 1.1667; "
        "the cluster recovered after epoch 3. The arrow keys read the values."
    )
    assert panel.page.locator(".t-plot svg").get_attribute("aria-hidden") == "true"


def test_a_table_shows_the_values_of_the_chart(panel: ChartPanel, curves: Curves) -> None:
    panel.open()
    panel.press_button("Table")
    table = panel.page.get_by_role("region", name="Values of Loss")
    assert table.locator("thead th").all_inner_texts() == ["Epoch", "Training", "Validation"]
    assert table.locator("tbody tr").all_inner_texts()[:2] == ["1\t1.0000\t2.0000", "2\t0.5000\t1.5000"]
    assert table.get_by_role("row").count() == 7
    record(curves.history, 7, 10)
    panel.pass_seconds(3)
    panel.page.wait_for_function("document.querySelectorAll('.t-values tbody tr').length === 7")


# --- downloads


def test_the_numbers_are_downloaded_as_csv(panel: ChartPanel) -> None:
    panel.open()
    name, content = panel.download("CSV")
    assert name == "mnist-loss-by-epoch.csv"
    rows = list(csv.DictReader(content.decode().splitlines()))
    assert list(rows[0]) == ["epoch", "loss", "val_loss"]
    assert [float(row["loss"]) for row in rows] == [pytest.approx(1 / epoch, rel=1e-6) for epoch in range(1, 7)]
    panel.press_button("Step")
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '60'")
    name, content = panel.download("CSV")
    rows = list(csv.DictReader(content.decode().splitlines()))
    assert (name, len(rows)) == ("mnist-loss-by-step.csv", 60)
    assert (rows[0]["val_loss"], float(rows[9]["val_loss"])) == ("", 2.0)


def test_the_picture_is_downloaded_as_svg_and_png_without_the_page(
    open_panel: Callable[..., ChartPanel], running: ClusterState
) -> None:
    panel = open_panel("dark")
    panel.start(running)
    panel.open()
    name, content = panel.download("SVG")
    text = content.decode()
    assert name == "mnist-loss-by-epoch.svg"
    assert 'xmlns="http://www.w3.org/2000/svg"' in text
    assert "<title>Loss of mnist by epoch" in text
    assert "var(" not in text
    assert "class=" not in text
    assert text.count("<polyline") == 4
    name, content = panel.download("PNG")
    assert (name, content[:8]) == ("mnist-loss-by-epoch.png", b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (2 * round(panel.plot.bounding_box()["width"]), 600)
    dark = panel.page.evaluate(
        """async (bytes) => {
            const picture = await createImageBitmap(new Blob([new Uint8Array(bytes)], {type: 'image/png'}));
            const canvas = new OffscreenCanvas(picture.width, picture.height);
            canvas.getContext('2d').drawImage(picture, 0, 0);
            return [...canvas.getContext('2d').getImageData(2, 2, 1, 1).data];
        }""",
        list(content),
    )
    assert (max(dark[:3]) < 60, dark[3]) == (True, 255), "it has the page's background"


# --- where the numbers come from


def test_an_open_chart_is_updated_during_training(panel: ChartPanel, curves: Curves) -> None:
    panel.open()
    panel.plot.focus()
    panel.page.keyboard.press("End")
    record(curves.history, 7, 10)
    panel.pass_seconds(3)
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '7'")
    assert panel.value().startswith("epoch 6"), "the mark stays where the reader has put it"
    asked = len(curves.asked)
    panel.tile("Loss").click()
    panel.pass_seconds(10)
    panel.settle()
    assert len(curves.asked) == asked, "a closed one asks no more"


def test_an_ended_cluster_is_asked_once_more(panel: ChartPanel, curves: Curves, running: ClusterState) -> None:
    panel.open()
    record(curves.history, 7, 10)
    panel.receive(replace(running, status=ClusterStatus.DONE))
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '7'")
    asked = len(curves.asked)
    panel.pass_seconds(10)
    panel.settle()
    assert len(curves.asked) == asked


def test_without_a_server_the_page_requests_curves_by_a_message(
    open_panel: Callable[..., ChartPanel], running: ClusterState, curves: Curves
) -> None:
    panel = open_panel()
    panel.start(running, served=False)
    panel.tile("Accuracy").click()
    panel.page.wait_for_function("model.sent.length === 1")
    (sent,) = panel.sent()
    assert sent["content"] == {"kind": "curves", "asked": 1, "metric": "accuracy", "node": "", "by": ""}
    assert panel.text(".t-chart .t-foot") == "Waiting for the numbers…"
    panel.page.evaluate("message => model.hear(message)", {"kind": "curves", "asked": 9, "data": {}})
    answer = {"kind": "curves", "asked": 1, "data": curves.answer("accuracy")}
    panel.page.evaluate("message => model.hear(message)", answer)
    panel.drawn()
    assert "Accuracy of mnist by epoch" in panel.plot.get_attribute("aria-label")


def test_an_ended_or_silent_kernel_is_reported(open_panel: Callable[..., ChartPanel], running: ClusterState) -> None:
    panel = open_panel()
    panel.start(running, served=False)
    panel.tile("Loss").click()
    panel.page.wait_for_function("model.sent.length === 1")
    panel.pass_seconds(121)
    assert panel.text(".t-chart .t-foot") == "The kernel has not answered."
    panel.tile("Loss").click()
    panel.page.evaluate(DEAD)
    panel.tile("Loss").click()
    panel.page.wait_for_function("document.querySelector('.t-chart .t-foot').textContent.includes('has ended')")


def test_a_metric_without_reports_shows_a_note(panel: ChartPanel, curves: Curves) -> None:
    curves.history = History("worker:0")
    panel.tile("Loss").click()
    panel.page.locator(".t-chart .t-foot", has_text="Nothing was reported yet.").wait_for()
    panel.pass_seconds(6)
    assert panel.spoken() == "Nothing was reported yet."


def test_a_thinned_line_is_marked_as_thinned(panel: ChartPanel, curves: Curves) -> None:
    curves.history = trained(epochs=30, steps=100)
    panel.open()
    panel.press_button("Step")
    panel.page.wait_for_function("document.querySelector('.t-plot').getAttribute('aria-valuemax') === '3000'")
    assert panel.text(".t-chart .t-foot").endswith('3030 points, with every peak. All: history.to_pandas("step")')


# --- how it looks


@pytest.mark.parametrize("width", [420, 700, 1100])
def test_the_chart_is_as_wide_as_the_panel(
    open_panel: Callable[..., ChartPanel], running: ClusterState, width: int
) -> None:
    panel = open_panel(width=width)
    panel.start(running)
    panel.open()
    drawn, whole = panel.page.locator(".t-plot > svg").bounding_box(), panel.page.locator(".tfos-panel").bounding_box()
    assert abs(drawn["width"] - whole["width"]) < 8
    assert panel.page.evaluate("document.documentElement.scrollWidth") <= width
    for line in ("training", "validation"):
        assert all(50 < x < drawn["width"] for piece in panel.page.evaluate(PIECES, line) for x, _ in piece)


def test_the_theme_changes_the_colours_of_an_open_chart(panel: ChartPanel) -> None:
    panel.open()
    colour = "() => getComputedStyle(document.querySelector('.t-tick')).fill"
    light = panel.page.evaluate(colour)
    panel.page.emulate_media(color_scheme="dark")
    assert panel.page.evaluate(colour) != light


def test_names_from_outside_are_text(panel: ChartPanel, curves: Curves) -> None:
    nasty = '<img src=x onerror="window.hacked=1">'
    curves.history = History("worker:0")
    for epoch in (1, 2):
        curves.history.record("worker:0", StepReport(epoch, metrics={nasty: 1.0 / epoch}, epoch_end=True))
    panel.open()
    panel.press_button("Table")
    assert panel.page.get_by_label("Metric").locator("option").all_inner_texts() == [nasty.capitalize()]
    assert panel.page.evaluate("window.hacked") is None
    name, content = panel.download("CSV")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert next(csv.reader(content.decode().splitlines())) == ["epoch", nasty]


# --- static


def test_the_static_panel_draws_the_same_lines(browser: Any, site: Server, running: ClusterState) -> None:
    page = browser.new_context(viewport={"width": 1000, "height": 900}).new_page()
    state = replace(running, status=ClusterStatus.DONE, points=tuple(trained().points()), nodes=(node("worker:0"),))
    page.set_content(render_html(state))
    page.get_by_text("curves", exact=True).click()
    box = page.locator(".t-graph svg").first.bounding_box()
    assert (box["width"] > 400, box["height"] > 160) == (True, True)
    assert page.locator(".t-figure").first.locator("polyline").count() == 4
    assert page.get_by_role("img", name="Loss by epoch").count() == 1
    assert page.evaluate("document.scripts.length") == 0
    page.context.close()
