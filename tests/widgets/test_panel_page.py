"""The panel's page in a real browser: the real ``panel.js`` and ``panel.css``, with messages of ``model.py``."""

import re
from dataclasses import replace
from urllib.parse import quote

import pytest

from tests.widgets.browser import BASE, chromium, serving
from tests.widgets.conftest import node
from tfos_nb.state.cluster_state import ClusterStatus, FeedProgress, GpuUse, LogLine, NodeStatus
from tfos_nb.widgets import render_html
from tfos_nb.widgets.model import page_model
from tfos_nb.widgets.words import wording
from tfos_nb.widgets.words.curves import LEVELS

pytestmark = pytest.mark.browser

START = 1_700_000_000
NASTY = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&amp;"'`${1}"""
STOP = "api/clusters/k3f9a2b7c1/stop"
# Only a focused page may use the clipboard, so the text that the panel copies is read in the page.
CURVES = {"loss": (4.0, 2.0, 1.0), "accuracy": (0.1, 0.5), "val_loss": (3.0, 2.0), "val_accuracy": (0.2, 0.4)}
MEASURED = {"metrics": {name: values[-1] for name, values in CURVES.items()}, "curves": CURVES}
GPU = {"gpus": ("0",), "gpu_use": (GpuUse("NVIDIA H100 80GB HBM3", 100.0, 41_100_000_000, 85_000_000_000),)}
# The visible elements that are wider than their place.
CUT = """selector => [...document.querySelectorAll(selector)].filter((e) => e.offsetParent
    && [e, ...e.querySelectorAll('*'), e.closest('th, td') || e].some((one) => one.scrollWidth > one.clientWidth
        && getComputedStyle(one).display !== 'inline')).map((e) => e.textContent)"""
# JupyterLab's treatment of a widget whose kernel was restarted.
DEAD = "void (model.send = () => { throw new Error('Cannot send') })"
CLIPBOARD = "navigator.clipboard.writeText = async (text) => { window.copied = text }"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def site():
    with serving() as server:
        yield server


class Panel:
    """A page with one panel on it; its clock stands still until the test moves it."""

    def __init__(self, context, server):
        self.server = server
        self.page = context.new_page()
        self.complaints = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._listen)
        self.page.clock.install(time=START)
        self.page.goto(server.url)
        self.page.wait_for_function("window.ready")
        self.page.clock.pause_at(START + 60)

    def _listen(self, message):
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def start(self, state, *, served=True, **told):
        self.page.evaluate("([data, base]) => start(data, base)", [page_model(state, **told), BASE if served else None])
        return self

    def receive(self, state, **told):
        self.page.evaluate("data => model.receive(data)", page_model(state, **told))

    def pass_seconds(self, seconds):
        self.page.clock.run_for(int(seconds * 1000))

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()

    def names(self):
        return self.page.locator("tbody .t-who").all_inner_texts()

    def column(self, css):
        return self.page.locator(f"tbody .{css}").all_inner_texts()

    def spoken(self):
        return self.page.locator("[role=status]").text_content()

    def sent(self):
        return self.page.evaluate("model.sent")

    def lines(self):
        return self.page.locator(".t-log .t-line:visible").all_inner_texts()

    def settle(self):
        """Wait until the server has received the page's requests so far."""
        self.page.evaluate("fetch('/marker').then((answer) => answer.text())")
        self.server.requests = [request for request in self.server.requests if request.path != "/marker"]

    def until(self, expression):
        """Wait for a condition that an answer of the server makes true."""
        self.page.wait_for_function(expression)


@pytest.fixture
def open_panel(browser, site):
    """Return a function that opens pages; none of them may log an error."""
    site.forget()
    opened = []

    def make(*, theme="light", width=1100, motion="no-preference"):
        context = browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": 700}, reduced_motion=motion, timezone_id="UTC"
        )
        context.add_cookies([{"name": "_xsrf", "value": quote("2|se cret"), "url": site.url}])
        opened.append((context, Panel(context, site)))
        return opened[-1][1]

    yield make
    for context, panel in opened:
        assert panel.complaints == []
        context.close()


@pytest.fixture
def panel(open_panel):
    return open_panel()


def changed(state, **changes):
    return replace(state, nodes=tuple(replace(one, **changes) for one in state.nodes))


# --- what is shown ---


def test_every_node_is_shown_with_its_numbers(panel, on_gpus):
    panel.start(on_gpus)
    assert panel.names() == ["worker:0", "worker:1", "ps:0"]
    rows = panel.page.locator("tbody tr").all_inner_texts()
    for told in (
        "hdp-b01 · 1",
        "training",
        "2/3 · 412/600",
        "0.1883",
        "0.9430",
        "21.3 k",
        "83%",
        "41.1 / 85.0 GB",
        "71%",
    ):
        assert told in re.sub(r"\s+", " ", rows[0])
    assert "GPU 1" in rows[1]
    assert "serving" in rows[2]
    assert "no GPU" in rows[2]
    assert panel.page.locator("tbody .t-c-gpu").first.get_attribute("title") == "NVIDIA H100 80GB HBM3"


def test_the_head_shows_name_state_size_time_and_generation(panel, running):
    panel.start(running)
    assert re.split(r"\s*\n\s*", panel.text(".t-head")) == [
        "mnist", "Training", "2 workers", "2 min 11 s", "Plan", "TensorBoard ↗", "■ Stop",
    ]  # fmt: skip
    panel.receive(replace(running, generation=2))
    assert "generation 2" in panel.text(".t-head")


def test_the_tiles_show_progress_metrics_rate_and_time_left(panel, running):
    panel.start(running, left=58.0)
    tiles = [tile.split("\n") for tile in panel.page.locator(".t-tile:visible").all_inner_texts()]
    assert tiles == [
        ["Epoch 2 of 3", "69 %"],
        ["Feed · 3 passes · 71 %", "30,720 rows"],
        ["Loss", "0.1883"],
        ["Accuracy", "0.9430"],
        ["Rows/s", "42.4 k"],
        ["Time left", "~ 58 s"],
    ]


def test_a_failure_shows_the_users_line_and_folds_the_traceback(panel, failed):
    panel.start(failed)
    said = panel.text(".t-say:visible")
    assert "ValueError: label 10 is outside 0…9" in said
    assert "cell 4, line 12, in main\nmodel.fit(ctx.dataset(batch_size=128), epochs=3)" in said
    assert "1 other node was stopped because of it" in said
    assert "Traceback" not in said
    panel.page.get_by_text("traceback", exact=True).click()
    assert "Traceback (most recent call last)" in panel.text(".t-say:visible")
    assert not panel.button("■ Stop").is_visible()


def test_before_the_launch_the_plan_is_shown_instead_of_numbers(panel, planned):
    panel.start(planned)
    assert panel.page.locator("thead th:visible").all_inner_texts() == ["Node", "Slot"]
    assert panel.column("t-c-step")[0].strip() == "1 CPU, fed from Spark"
    assert not panel.page.locator(".t-sum, .t-log, .t-grid").locator("visible=true").count()


def test_the_plan_can_be_expanded(panel, running):
    panel.start(running)
    assert panel.button("Plan").get_attribute("aria-expanded") == "false"
    panel.button("Plan").click()
    assert panel.button("Plan").get_attribute("aria-expanded") == "true"
    assert panel.text(".t-plan") == "cluster mnist: 2 nodes, input from spark"


def test_64_nodes_have_a_cell_each_and_those_in_trouble_a_row(panel, many):
    panel.start(many)
    cells = panel.page.locator(".t-cell")
    assert cells.count() == 64
    assert (cells.nth(37).inner_text(), cells.nth(37).get_attribute("title")) == ("✕ 37", "worker:37 lost")
    assert cells.nth(11).inner_text() == "! 11"
    assert panel.page.locator(".t-grid").get_attribute("aria-label") == "64 nodes: 61 training, 2 slow, 1 lost"
    assert panel.names()[:3] == ["worker:37", "worker:11", "worker:52"]
    assert len(panel.names()) == 5
    panel.button("Show all").click()
    assert len(panel.names()) == 64
    assert panel.page.get_by_role("button", name="Show 5").get_attribute("aria-expanded") == "true"


def test_of_1000_nodes_each_has_a_cell_and_the_worst_64_can_be_shown(panel, many):
    nodes = tuple(node(f"worker:{i}", number=i % 60) for i in range(1000))
    lost = replace(nodes[977], status=NodeStatus.LOST)
    panel.start(replace(many, nodes=(*nodes[:977], lost, *nodes[978:])))
    assert panel.page.locator(".t-cell").count() == 1000
    assert panel.page.locator(".t-cell").nth(977).get_attribute("title") == "worker:977 lost"
    assert panel.names()[0] == "worker:977"
    panel.button("Show 64").click()
    assert len(panel.names()) == 64


@pytest.mark.parametrize("width", [1100, 700, 460])
@pytest.mark.parametrize("kind", ["planned", "running", "on_gpus", "failed", "many"])
def test_nothing_is_wider_than_the_page(open_panel, kind, width, request):
    panel = open_panel(width=width)
    panel.start(request.getfixturevalue(kind))
    assert panel.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert panel.page.evaluate("document.querySelector('.tfos-panel').clientWidth") > width - 50


def test_columns_and_tiles_do_not_move_when_numbers_change(panel, on_gpus):
    places = """[...document.querySelectorAll('th, .t-tile, .t-head > *, .t-end > *:not(:first-child)')].map((e) => {
        const box = e.getBoundingClientRect(); return [box.left, box.top, box.width, box.height] })"""
    panel.start(on_gpus, left=5.0)
    before = panel.page.evaluate(places)
    big = {"loss": -12345.67, "accuracy": 1.5e-7}
    use = (GpuUse("NVIDIA H100 80GB HBM3", 100.0, 485_100_000_000, 485_100_000_000),)
    grown = changed(on_gpus, metrics=big, rows_per_second=2e6, memory_bytes=999_900_000_000, gpu_use=use, gpus=("0",))
    panel.receive(replace(grown, feed=FeedProgress(7, 7, 10**12, 3)), left=90_000.0)
    assert panel.page.evaluate(places) == before


@pytest.mark.parametrize("kind", ["few", "many"])
@pytest.mark.parametrize(
    ("width", "gpu", "shown"), [(1100, False, 4), (880, False, 4), (1100, True, 4), (880, True, 2)]
)
def test_as_many_metrics_with_curves_are_shown_as_fit(open_panel, running, many, kind, width, gpu, shown):
    state = changed(many if kind == "many" else running, **MEASURED, **(GPU if gpu else {}))
    panel = open_panel(width=width)
    panel.start(state)
    heads = panel.page.locator("thead .t-c-metric:visible").all_inner_texts()
    assert heads == ["Loss", "Accuracy", "Val loss", "Val accuracy"][:shown]
    first = panel.page.locator("tbody tr").first
    assert first.locator(".t-c-metric:visible polyline").count() == shown
    for cells in ("thead .t-sort", "tbody .t-c-metric", "tbody .t-c-gpu", "tbody .t-who"):
        assert panel.page.evaluate(CUT, cells) == []


@pytest.mark.parametrize("width", [1100, 925, 880])
def test_the_time_left_of_a_node_is_visible_with_its_unit(open_panel, running, width):
    panel = open_panel(width=width)
    panel.start(changed(running, seconds_left=5920.0))
    assert panel.column("t-c-left") == ["~ 99 min", "~ 99 min"]
    assert panel.page.evaluate(CUT, "tbody .t-c-left") == []


def test_a_metric_without_a_curve_is_centred_in_its_cell(panel, running):
    panel.start(changed(running, curves={}))
    middles = """(() => { const cell = document.querySelector('tbody .t-c-metric');
        const middle = (box) => (box.top + box.bottom) / 2;
        return middle(cell.firstElementChild.getBoundingClientRect()) - middle(cell.getBoundingClientRect()) })()"""
    assert abs(panel.page.evaluate(middles)) < 2


def test_a_number_is_not_wider_than_its_tile(open_panel, running):
    panel = open_panel(width=420)
    panel.start(replace(running, feed=FeedProgress(5, 7, 30_720_000, 3)))
    assert panel.page.evaluate(CUT, ".t-tile b") == []


def test_the_gpus_short_name_is_visible_and_its_full_name_is_spoken(panel, on_gpus):
    panel.start(on_gpus)
    assert panel.page.locator("tbody .t-c-gpu").first.inner_text().split("\n")[0] == "H100"
    assert panel.page.locator("tbody .t-c-gpu abbr").first.get_attribute("title") == "NVIDIA H100 80GB HBM3"
    said = panel.page.get_by_role("progressbar", name="GPU use of worker:0").get_attribute("aria-valuetext")
    assert said == "NVIDIA H100 80GB HBM3: 83 percent"


def test_the_html_that_replaces_the_panel_has_the_same_width(panel, running):
    """JupyterLab adds this padding beside HTML."""
    panel.page.set_content(f"""<main style="width:800px"><style>.jp-RenderedHTMLCommon {{ padding-right: 20px }}</style>
        <div class="jp-RenderedHTMLCommon">{render_html(running)}</div></main>""")
    assert panel.page.evaluate("document.querySelector('.tfos-panel').offsetWidth") == 800


# --- changed in place ---


def test_an_update_keeps_focus_search_selection_and_scroll(panel, running):
    many_lines = tuple(LogLine(1.7e9 + i, "worker:0", f"line {i}") for i in range(60))
    panel.start(replace(running, log=many_lines))
    panel.page.evaluate("document.querySelectorAll('tr, .t-line').forEach((e) => { e.mine = true })")
    panel.page.get_by_label("Search the log").fill("line 1")
    panel.page.evaluate("document.querySelector('.t-log').scrollTop = 33")
    panel.page.evaluate("getSelection().selectAllChildren(document.querySelector('.t-line:not([hidden])'))")
    panel.page.get_by_label("Search the log").focus()
    panel.page.get_by_label("Search the log").evaluate("e => e.setSelectionRange(2, 4)")
    newer = (*many_lines[5:], LogLine(1.7e9 + 60, "worker:1", "line 100"))
    panel.receive(replace(changed(running, step=500), log=newer))
    assert "500/600" in panel.column("t-c-step")[0]
    focused = "document.activeElement"
    assert panel.page.evaluate(f"[{focused}.value, {focused}.selectionStart, {focused}.selectionEnd]") == [
        "line 1",
        2,
        4,
    ]
    assert panel.page.evaluate("document.querySelector('.t-log').scrollTop") == 33
    assert panel.page.evaluate("[...document.querySelectorAll('tr')].every((e) => e.mine)")
    assert len([line for line in panel.lines() if "line 1" in line]) == len(panel.lines()) == 12


def test_the_log_follows_its_end_until_the_reader_scrolls_up(panel, running):
    lines = tuple(LogLine(1.7e9 + i, "worker:0", f"line {i}") for i in range(100))
    panel.start(replace(running, log=lines[:50]))
    panel.receive(replace(running, log=lines[:70]))
    at_end = """(() => { const log = document.querySelector('.t-log');
        return log.scrollHeight - log.scrollTop - log.clientHeight < 2 })()"""
    assert panel.page.evaluate(at_end)
    panel.page.evaluate("document.querySelector('.t-log').scrollTop = 0")
    panel.receive(replace(running, log=lines[20:]))
    assert panel.page.evaluate("document.querySelector('.t-log').scrollTop") == 0
    assert len(panel.lines()) == 100


AT_END = """(() => { const log = document.querySelector('.t-log');
    return log.scrollHeight - log.scrollTop - log.clientHeight < 2 && log.scrollTop > 0 })()"""


def test_the_log_follows_its_end_when_the_width_changes(panel, running):
    lines = tuple(LogLine(1.7e9 + i, "worker:0", f"line {i} " + "word " * 30) for i in range(100))
    panel.start(replace(running, log=lines[:30]))
    for width, count in ((500, 40), (1100, 50), (700, 60)):
        panel.page.set_viewport_size({"width": width, "height": 700})
        panel.until(AT_END)
        panel.receive(replace(running, log=lines[:count]))
        panel.until(AT_END)
    panel.page.evaluate("document.querySelector('.t-log').scrollTop = 100")
    panel.receive(replace(running, log=lines[:70]))
    panel.page.set_viewport_size({"width": 1100, "height": 700})
    panel.receive(replace(running, log=lines[:80]))
    assert not panel.page.evaluate(AT_END)


def test_the_log_follows_its_end_again_after_being_hidden_or_searched(panel, running):
    lines = tuple(LogLine(1.7e9 + i, "worker:0", f"line {i}") for i in range(100))
    panel.start(replace(running, log=lines[:50]))
    cell = "document.getElementById('cell')"
    panel.page.evaluate(f"{cell}.style.display = 'none'")
    panel.receive(replace(running, log=lines[:60]))
    panel.page.evaluate(f"{cell}.style.display = ''")
    panel.receive(replace(running, log=lines[:65]))
    panel.until(AT_END)
    panel.page.get_by_label("Search the log").fill("line 1")
    panel.page.get_by_label("Search the log").fill("")
    panel.receive(replace(running, log=lines[:70]))
    panel.until(AT_END)


def test_a_focused_row_stays_when_others_move_before_it(panel, many):
    panel.start(many)
    panel.page.get_by_role("button", name="worker:52", exact=True).focus()
    worse = tuple(
        replace(one, status=NodeStatus.LOST) if i in range(20, 26) else one for i, one in enumerate(many.nodes)
    )
    panel.receive(replace(many, nodes=worse))
    assert panel.page.evaluate("document.activeElement.textContent") == "worker:52"
    assert "worker:52" in panel.names()


def test_healthy_rows_do_not_move_at_every_step(panel, many):
    healthy = changed(replace(many, nodes=many.nodes[12:30]), status=NodeStatus.TRAINING, rows_per_second=2e4)
    panel.start(healthy)
    before = panel.names()
    panel.receive(replace(healthy, nodes=tuple(replace(one, step=413 + i % 5) for i, one in enumerate(healthy.nodes))))
    assert panel.names() == before


def test_a_reloaded_page_shows_the_same_from_the_synced_state(panel, running):
    panel.start(running)
    before = panel.text(".tfos-panel")
    panel.page.reload()
    panel.page.wait_for_function("window.ready")
    panel.start(running)
    assert panel.text(".tfos-panel") == before


# --- time ---


def test_the_page_counts_time_between_messages(panel, running):
    panel.start(running, left=58.0)
    panel.pass_seconds(4)
    assert "2 min 15 s" in panel.text(".t-head")
    assert panel.page.locator(".t-tile").last.inner_text() == "Time left\n~ 54 s"
    assert panel.column("t-c-beat") == ["now", "now"]  # the page knows nothing of the time since the message


def test_a_node_without_heartbeats_is_stale_and_its_age_increases(panel, running):
    silent = (running.nodes[0], replace(running.nodes[1], heartbeat_age=9.0))
    panel.start(replace(running, nodes=silent))
    assert panel.column("t-c-beat") == ["now", "stale 9 s"]
    assert panel.column("t-c-state") == ["training", "silent"]
    panel.pass_seconds(3)
    assert panel.column("t-c-beat") == ["now", "stale 12 s"]


@pytest.mark.parametrize("width", [1100, 880])
def test_the_age_of_a_silent_node_is_fully_visible(open_panel, running, width):
    panel = open_panel(width=width)
    panel.start(running)
    for age in (12.0, 99.0, 5_990.0, 400_000.0):
        panel.receive(changed(running, heartbeat_age=age))
        assert panel.column("t-c-beat")[0] == f"stale {wording.about(age)}"
        assert panel.page.evaluate(CUT, "tbody .t-c-beat") == []
        assert (
            panel.page.locator("tbody .t-c-beat span")
            .first.get_attribute("title")
            .endswith(f"{wording.about(age)} ago")
        )


def test_a_node_among_thousands_is_stale_after_missing_its_heartbeat(panel, running):
    many = [replace(running.nodes[1], node=f"worker:{number}", heartbeat_age=7.0) for number in range(6000)]
    many[3] = replace(many[3], heartbeat_age=9.0)
    panel.start(replace(running, nodes=tuple(many)))
    assert panel.column("t-c-beat") == ["stale 9 s", "7 s", "7 s", "7 s", "7 s"]


def test_a_node_is_not_stale_because_the_kernel_sent_nothing(panel, running):
    panel.start(running)
    panel.pass_seconds(6)
    assert panel.page.locator(".t-stale").count() == 0


def test_a_silent_kernel_is_reported(panel, running):
    panel.start(running)
    panel.pass_seconds(20)
    assert "no news from the kernel for 20 s" in panel.text(".t-head")
    panel.receive(replace(running, elapsed=151.4))
    assert "2 min 31 s" in panel.text(".t-head")


def test_the_time_of_an_ended_cluster_does_not_change(panel, failed):
    panel.start(failed)
    panel.pass_seconds(30)
    assert "2 min 11 s" in panel.text(".t-head")


@pytest.mark.parametrize("seconds", [0, 4.2, 59.9, 60, 99.4, 99.6, 131, 3599, 3600, 5999, 6001, 7980, 86_400])
def test_the_page_formats_times_like_the_other_renderings(panel, seconds):
    said = panel.page.evaluate(
        "async (s) => { const { duration, about } = await import('/page.js'); return [duration(s), about(s)] }",
        seconds,
    )
    assert said == [wording.duration(seconds), wording.about(seconds)]


def test_the_page_decodes_curves_as_they_are_encoded(panel, running):
    assert LEVELS in panel.page.request.get(f"{panel.server.url}panel.js").text()
    panel.start(running)
    assert panel.page.locator("tbody polyline").count() == 4
    points = panel.page.locator("tbody polyline").first.get_attribute("points").split()
    assert (points[0], points[-1]) == ("0.0,1.5", "100.0,14.5")


# --- Stop ---


def test_nothing_is_sent_while_the_panel_is_created_and_updated(panel, running):
    panel.start(running)
    panel.receive(changed(running, step=500))
    panel.pass_seconds(30)
    panel.settle()
    assert panel.sent() == []
    assert panel.server.requests == []


def test_stop_asks_the_server_and_the_second_press_cancels(panel, running):
    panel.server.answer(STOP, {"said": "Stopping: 10 s to save."})
    panel.start(running)
    panel.button("■ Stop").click()
    assert panel.page.locator(".t-stop").inner_text() == "Stopping…"
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === 'Cancel now'")
    assert "Stopping: 10 s to save." in panel.text(".tfos-panel")
    with panel.page.expect_response("**/stop"):
        panel.button("Cancel now").click()
    assert panel.page.locator(".t-stop").inner_text() == "Cancelling…"
    assert [request.method for request in panel.server.asked("/stop")] == ["POST", "POST"]
    assert panel.sent() == []


def test_the_server_gets_the_xsrf_token_but_not_jupyters_token(panel, running):
    panel.server.answer(STOP, {})
    panel.start(running)
    panel.button("■ Stop").click()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === 'Cancel now'")
    (request,) = panel.server.asked("/stop")
    assert request.headers["X-XSRFToken"] == "2|se cret"
    assert "not-to-be-sent" not in str(request) + panel.page.content().split('"token"')[0]


@pytest.mark.parametrize("served", [True, False])
def test_stop_is_a_message_if_the_server_does_not_know_the_cluster(panel, running, served):
    panel.start(running, served=served)
    panel.button("■ Stop").click()
    panel.until("model.sent.length > 0")
    assert panel.sent() == [{"content": {"kind": "stop"}}]
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === 'Cancel now'")
    panel.button("Cancel now").click()
    panel.until("model.sent.length > 1")
    assert panel.sent() == [{"content": {"kind": "stop"}}] * 2


def test_stop_is_a_message_if_the_server_cannot_be_reached(panel, running):
    panel.start(running)
    panel.page.route("**/stop", lambda route: route.abort())
    panel.button("■ Stop").click()
    panel.until("model.sent.length > 0")
    assert panel.sent() == [{"content": {"kind": "stop"}}]


def test_after_the_kernels_end_stop_shows_the_servers_sentence(panel, running):
    panel.server.answer(STOP, {"message": "The kernel that held this cluster has ended."}, status=410)
    panel.start(running)
    panel.page.evaluate(DEAD)
    panel.button("■ Stop").click()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === '■ Stop'")
    assert "The kernel that held this cluster has ended." in panel.text(".tfos-panel")
    assert panel.button("■ Stop").get_attribute("aria-disabled") in (None, "false")


def test_stop_without_server_and_kernel_shows_that_the_kernel_has_ended(panel, running):
    panel.start(running, served=False)
    panel.page.evaluate(DEAD)
    panel.button("■ Stop").click()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === '■ Stop'")
    assert "The kernel that held this cluster has ended" in panel.text(".tfos-panel")


def test_a_missing_answer_is_not_treated_as_a_refusal(panel, running):
    panel.server.answer(STOP, {}, status=504)
    panel.start(running)
    panel.button("■ Stop").click()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === '■ Stop'")
    assert "has not answered yet" in panel.text(".tfos-panel")
    assert panel.sent() == []


def test_a_double_click_is_one_press(panel, running):
    panel.start(running, served=False)
    panel.button("■ Stop").dblclick()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === 'Cancel now'")
    assert panel.sent() == [{"content": {"kind": "stop"}}]


def test_the_kernels_answer_to_a_message_is_shown(panel, running):
    panel.start(running, served=False)
    panel.receive(running, said="Stopping: 10 s to save.")
    assert "Stopping: 10 s to save." in panel.text(".tfos-panel")


def test_the_focus_is_not_lost_when_the_button_disappears(panel, running):
    panel.start(running)
    panel.button("■ Stop").focus()
    panel.receive(replace(running, status=ClusterStatus.DONE))
    assert panel.page.evaluate("document.activeElement.className").startswith("tfos-panel")


# --- sorting, keyboard, screen reader ---


def test_heads_sort_in_one_direction_then_the_other_then_not(panel, many):
    panel.start(many)
    panel.button("Show all").click()
    for sort, first in (("ascending", "worker:11"), ("descending", "worker:0"), (None, "worker:37")):
        panel.button("Rows/s").click()
        assert panel.page.get_by_role("columnheader", name="Rows/s").get_attribute("aria-sort") == sort
        assert panel.names()[0] == first
        if sort:  # unknown values come last in either direction
            assert panel.names()[-1] == "worker:37"
    panel.button("Node").click()
    assert panel.names()[:3] == ["worker:0", "worker:1", "worker:2"]


def test_everything_can_be_done_by_keyboard(panel, running):
    panel.start(running, served=False)
    press = panel.page.keyboard.press
    reached = []
    for _ in range(24):
        press("Tab")
        reached.append(panel.page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent"))
    for name in (
        "Plan",
        "TensorBoard ↗",
        "■ Stop",
        "Loss",
        "worker:1",
        "All",
        "Search the log",
        "Copy",
        "log of all nodes",
    ):
        assert name in reached
    panel.button("Plan").focus()
    press("Enter")
    assert panel.page.locator(".t-plan").is_visible()
    panel.button("Node").focus()
    press("Space")
    press("Space")
    assert panel.names() == ["worker:1", "worker:0"]
    panel.page.get_by_role("tab", name="All").focus()
    press("ArrowRight")
    press("ArrowRight")
    assert panel.page.get_by_role("tab", selected=True).inner_text() == "worker:1"
    assert panel.page.evaluate("document.activeElement.textContent") == "worker:1"
    press("Home")
    assert panel.page.get_by_role("tab", selected=True).inner_text() == "All"
    panel.button("■ Stop").focus()
    press("Enter")
    panel.until("model.sent.length > 0")


def test_the_focused_element_is_visible(panel, running):
    panel.start(running)
    for _ in range(15):
        panel.page.keyboard.press("Tab")
        assert panel.page.evaluate("document.activeElement.closest('.tfos-panel') !== null")
        style = (
            "(() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth] })()"
        )
        assert panel.page.evaluate(style) == ["solid", "2px"]


def test_a_screen_reader_finds_the_parts_by_their_roles(panel, running):
    panel.start(running)
    assert panel.page.get_by_role("region", name="TensorFlow cluster mnist").count() == 1
    assert panel.page.get_by_role("table", name="mnist: the nodes").count() == 1
    assert panel.page.get_by_role("rowheader").count() == 2
    assert panel.page.locator("thead th:not([scope=col])").count() == 0
    assert panel.page.get_by_role("tabpanel", name="log of all nodes").count() == 1
    assert panel.page.locator("[aria-live=polite]").count() == 1


def test_each_bar_has_a_name_a_value_and_bounds(panel, on_gpus):
    panel.start(on_gpus)
    bars = panel.page.get_by_role("progressbar").evaluate_all(
        """bars => bars.map((b) =>
            [b.ariaLabel, b.ariaValueNow, b.ariaValueMin, b.ariaValueMax, b.firstChild.style.width])"""
    )
    assert bars == [
        ["epoch", "69", "0", "100", "69%"],
        ["feed", "71", "0", "100", "71%"],
        ["steps of worker:0", "69", "0", "100", "69%"],
        ["GPU use of worker:0", "83", "0", "100", "83%"],
        ["steps of worker:1", "69", "0", "100", "69%"],
    ]


def test_states_are_spoken_but_steps_are_not(panel, running):
    panel.start(running)
    for step in (450, 500, 550):
        panel.receive(changed(running, step=step, epoch=3))
    assert panel.spoken() == ""
    panel.receive(replace(running, status=ClusterStatus.STOPPING))
    assert panel.spoken() == "mnist: Stopping. Stopping: worker:0 and worker:1 to end."


def test_a_silent_node_is_spoken_only_once(panel, running):
    panel.start(running)
    spoken = []
    for age in (6.0, 7.0, 8.0):
        panel.receive(replace(running, nodes=(running.nodes[0], replace(running.nodes[1], heartbeat_age=age))))
        spoken.append(panel.spoken())
    assert spoken == ["mnist: Training. worker:0 and worker:1 train, epoch 2 of 3. worker:1 is silent."] * 3


def test_of_many_changes_at_once_only_the_last_is_spoken(panel, running):
    panel.start(running)
    panel.receive(replace(running, status=ClusterStatus.RECOVERING))
    panel.receive(replace(running, status=ClusterStatus.RUNNING))
    panel.receive(replace(running, status=ClusterStatus.STOPPING))
    assert "Recovering" in panel.spoken()
    panel.pass_seconds(5)
    assert "Stopping" in panel.spoken()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["running", "on_gpus", "failed", "many", "planned"])
def test_every_text_has_sufficient_contrast(open_panel, kind, theme, request):
    """WCAG AA requires a contrast of 4.5 between a text and its background."""
    panel = open_panel(theme=theme)
    panel.start(request.getfixturevalue(kind), note="a note", said="an answer")
    assert panel.page.evaluate(CONTRASTS) > 10
    assert panel.page.evaluate(POOR) == []


COMMON = """
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, below) => top.slice(0, 3).map((v, i) => (v * top[3] + below[i] * (255 - top[3])) / 255);
    const behind = (e) => {
      if (!e) return rgba(matchMedia('(prefers-color-scheme: dark)').matches ? '#121212' : '#fff').slice(0, 3);
      const own = rgba(getComputedStyle(e).backgroundColor);
      return own[3] === 255 ? own.slice(0, 3) : over(own, behind(e.parentElement));
    };
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const part = [0.2126, 0.7152, 0.0722];
    const light = (rgb) => rgb.reduce((sum, v, i) => sum + linear(v / 255) * part[i], 0);
    const texts = [...document.querySelectorAll('.tfos-panel *')].filter((e) => e.offsetParent
      && !e.closest('.t-unseen') && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
    const contrast = (e) => {
      const back = behind(e), front = light(over(rgba(getComputedStyle(e).color), back)), b = light(back);
      return (Math.max(front, b) + 0.05) / (Math.min(front, b) + 0.05);
    };
"""
CONTRASTS = f"(() => {{ {COMMON} return texts.length }})()"
POOR = (
    f"(() => {{ {COMMON} return texts.filter((e) => contrast(e) < 4.5).map((e) => [e.textContent, contrast(e)]) }})()"
)


def test_nothing_moves_with_reduced_motion(open_panel, running):
    moves = "getComputedStyle(document.querySelector('.t-track > div')).transitionDuration"
    assert open_panel().start(running).page.evaluate(moves) == "0.3s"
    assert open_panel(motion="reduce").start(running).page.evaluate(moves) == "0s"


# --- texts from outside ---


def test_texts_from_outside_are_not_markup(panel, running):
    odd = node("worker:0", number=1, host=NASTY, executor=NASTY, detail=NASTY, step=None, gpu_use=(GpuUse(NASTY, 5.0),))
    odd = replace(odd, node=NASTY, metrics={NASTY: 1.0}, curves={NASTY: (1.0, 2.0)})
    traceback = f'x\n  File "Cell In[1]", line 1, in {NASTY}\n    {NASTY}\n{NASTY}'
    state = replace(
        running, name=NASTY, nodes=(odd,), error=f"{NASTY}: {traceback}", plan=NASTY, log_dir=NASTY, spark_master=NASTY,
        log=(LogLine(0.0, NASTY, NASTY),),
    )  # fmt: skip
    panel.server.answer(STOP, {"said": NASTY})
    panel.start(state, note=NASTY)
    for status in ClusterStatus:
        panel.receive(replace(state, status=status), note=NASTY, said=NASTY)
        panel.receive(replace(state, status=status, nodes=(odd,) * 20), note=NASTY)
    panel.receive(state)
    panel.button("■ Stop").click()
    panel.pass_seconds(1)
    panel.until("document.querySelector('.t-stop').textContent === 'Cancel now'")
    assert panel.page.evaluate("[window.hacked, document.querySelectorAll('.tfos-panel :is(img, script)').length]") == [
        None,
        0,
    ]
    assert NASTY[:20] in panel.text(".tfos-panel")


# --- the log ---


def answer_log(panel, node_name, count):
    lines = [[1.7e9 + i, node_name, f"served {i}"] for i in range(count)]
    panel.server.answer(f"api/clusters/k3f9a2b7c1/log?node={quote(node_name, safe='')}", {"lines": lines})


def test_a_nodes_tab_shows_the_servers_lines_and_polls_every_second(panel, running):
    answer_log(panel, "worker:1", 30)
    panel.start(running)
    panel.page.get_by_role("tab", name="worker:1").click()
    panel.until("document.querySelectorAll('.t-line').length >= 30")
    answer_log(panel, "worker:1", 40)
    panel.pass_seconds(1)
    panel.until("document.querySelectorAll('.t-line').length >= 40")
    assert panel.lines()[-1].endswith("served 39")
    assert len(panel.server.asked("/log")) == 2


def test_a_click_on_a_node_opens_its_log(panel, running):
    panel.start(running, served=False)
    panel.page.get_by_role("button", name="worker:1", exact=True).click()
    assert panel.page.get_by_role("tab", selected=True).inner_text() == "worker:1"
    assert [line.split("  ")[-1][9:] for line in panel.lines()] == [f"line {i} of the log" for i in (1, 3, 5, 7)]


def test_without_a_server_the_tail_is_shown(panel, running):
    panel.start(running)
    with panel.page.expect_response("**/log?*"):
        panel.page.get_by_role("tab", name="worker:0").click()
    panel.pass_seconds(10)
    panel.settle()
    assert len(panel.lines()) == 4
    assert len(panel.server.asked("/log")) == 1
    panel.receive(replace(running, log=(*running.log, LogLine(1.7e9 + 9, "worker:0", "one more"))))
    assert panel.lines()[-1].endswith("one more")


@pytest.mark.parametrize("why", ["hidden", "removed", "ended"])
def test_no_log_is_requested_when_invisible_or_complete(panel, running, why):
    answer_log(panel, "worker:1", 3)
    panel.start(running)
    with panel.page.expect_response("**/log?*"):
        panel.page.get_by_role("tab", name="worker:1").click()
    if why == "hidden":
        panel.page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    elif why == "removed":
        panel.page.evaluate("stop()")
    else:
        panel.receive(replace(running, status=ClusterStatus.DONE))
    panel.pass_seconds(20)
    panel.settle()
    assert len(panel.server.asked("/log")) == 1


def test_the_search_filters_and_counts_and_copy_copies_visible_lines(panel, running):
    panel.start(running)
    panel.page.evaluate(CLIPBOARD)
    panel.page.get_by_label("Search the log").fill("WORKER:1")
    assert len(panel.lines()) == 4
    assert panel.text(".t-found") == "4 of 8"
    panel.button("Copy").click()
    panel.until("window.copied !== undefined")
    assert [line.split()[2:4] for line in panel.page.evaluate("copied").splitlines()] == [
        ["line", str(i)] for i in (1, 3, 5, 7)
    ]


def test_for_many_nodes_the_log_is_chosen_from_a_list(panel, many):
    panel.start(many)
    assert panel.page.get_by_role("tab").count() == 0
    choice = panel.page.get_by_label("Log of", exact=True)
    assert choice.locator("option").count() == 65
    choice.select_option("worker:1")
    assert panel.page.get_by_role("region", name="log of worker:1").count() == 1
    assert len(panel.lines()) == 4


@pytest.mark.parametrize(
    ("known", "tail", "merged"),
    [
        ("", "abc", "abc"),
        ("abc", "", "abc"),
        ("abc", "abc", "abc"),
        ("abc", "bcd", "abcd"),
        ("abc", "cde", "abcde"),
        ("bc", "abc", "abc"),
        ("bc", "abcd", "abcd"),
        ("abcd", "bc", "abcd"),
        ("abc", "xyz", "abcxyz"),
        ("aaa", "aaaa", "aaaa"),
    ],
)
def test_repeated_lines_are_not_shown_again(panel, known, tail, merged):
    script = """async ([known, tail]) => { const { mergeLines } = await import('/panel.js');
        return mergeLines([...known], [...tail]).join('') }"""
    assert panel.page.evaluate(script, [known, tail]) == merged


# --- TensorBoard ---


def test_tensorboard_opens_in_a_new_tab_with_the_last_slash(panel, running):
    panel.server.answer("api/version", {"version": "1"})
    panel.server.answer("tb/k3f9a2b7c1/", "TensorBoard")
    panel.start(running)
    with panel.page.context.expect_page() as opened:
        panel.button("TensorBoard ↗").click()
    assert opened.value.url.endswith(f"{BASE}tfos-nb/tb/k3f9a2b7c1/")
    assert opened.value.evaluate("window.opener") is None


@pytest.mark.parametrize("served", [True, False])
def test_if_tensorboard_cannot_be_reached_the_alternative_is_shown(panel, running, served):
    panel.start(running, served=served)
    panel.button("TensorBoard ↗").click()
    panel.until("document.querySelector('.tfos-panel').innerText.includes('run %tfos_tensorboard in a cell')")
    assert len(panel.page.context.pages) == 1


def test_without_a_log_directory_there_is_no_tensorboard_button(panel, running):
    panel.start(replace(running, log_dir=""))
    assert not panel.button("TensorBoard ↗").is_visible()
