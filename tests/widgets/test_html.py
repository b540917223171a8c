import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tfos_nb import widgets
from tfos_nb.state.cluster_state import ClusterStatus, FeedProgress, GpuUse, LogLine
from tfos_nb.widgets import render_html

NASTY = """<script>alert("1")</script>&'"""


class Page(HTMLParser):
    """Reads a page like a browser: the tags in order, the tags that are not closed, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("col", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def with_attribute(self, name: str, value: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if attrs.get(name) == value]


@pytest.fixture(params=["planned", "running", "on_gpus", "failed", "many"])
def any_state(request):
    return request.getfixturevalue(request.param)


def test_the_html_is_balanced_and_has_no_scripts_or_requests(any_state):
    html = render_html(any_state, note="a note", left=12.0)
    page = Page(html)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "button"}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html


def test_everything_from_outside_is_escaped(running):
    node = replace(running.nodes[0], node=NASTY, host=NASTY, executor=NASTY, detail=NASTY, step=None, gpus=(NASTY,))
    node = replace(node, metrics={NASTY: 1.0, "loss": 2.0}, gpu_use=(GpuUse(NASTY, 1.0),))
    state = replace(
        running, name=NASTY, nodes=(node,), spark_master=NASTY, error=f"{NASTY}\n{NASTY}", status=ClusterStatus.FAILED
    )
    own = f'{NASTY}\n  File "Cell In[1]", line 1, in {NASTY}\n    {NASTY}'
    state = replace(state, error=own, log=(LogLine(0.0, NASTY, NASTY),), plan=NASTY, log_dir=NASTY)
    for shown in (state, replace(state, status=ClusterStatus.PLANNED), replace(state, nodes=(node,) * 20)):
        page = Page(render_html(shown, note=NASTY))
        assert page.open == []
        assert "script" not in {tag for tag, _ in page.tags}
        assert NASTY in page.text


def test_the_sentence_comes_before_the_numbers(running):
    text = Page(render_html(running)).text
    assert text.index("worker:0 and worker:1 train, epoch 2 of 3.") < text.index("30,720 rows")


def test_a_state_is_shown_by_a_word_not_only_a_colour(failed):
    text = Page(render_html(failed)).text
    assert "Failed" in text
    assert re.search(r"worker:0.*stopped.*worker:1.*failed", text, re.DOTALL)


def test_the_failure_comes_first_and_its_traceback_is_folded(failed):
    html = render_html(failed)
    page = Page(html)
    assert page.text.index("label 10 is outside") < page.text.index("epoch".capitalize())
    assert html.index("<details>") < html.index("Traceback (most recent call last)")
    own = html.index("<code>model.fit(ctx.dataset(batch_size=128), epochs=3)</code>")
    assert html.index("cell 4, line 12, in main") < own < html.index("<details>")
    assert "1 other node was stopped because of it" in page.text


def test_a_screen_reader_finds_caption_headers_and_progress(running):
    page = Page(render_html(running))
    tags = [tag for tag, _ in page.tags]
    assert "caption" in tags
    assert len(page.with_attribute("scope", "row")) == 2
    assert len(page.with_attribute("scope", "col")) == 8
    assert "NodeStateEpoch · stepLossAccuracyRows/sTime leftCPU · mem" in page.text
    epoch = page.with_attribute("aria-label", "epoch")[0]
    assert (epoch["role"], epoch["aria-valuenow"]) == ("progressbar", "69")
    assert page.with_attribute("aria-label", "TensorFlow cluster mnist")


def test_a_share_above_one_hundred_percent_is_limited(running):
    state = replace(running, feed=FeedProgress(partitions_done=9, partitions=7))
    assert Page(render_html(state)).with_attribute("aria-label", "feed")[0]["aria-valuenow"] == "100"


def test_many_nodes_have_a_cell_each_and_those_in_trouble_a_row(many):
    page = Page(render_html(many))
    cells = [attrs for _, attrs in page.tags if "t-cell" in (attrs.get("class") or "")]
    assert len(cells) == 64
    assert cells[37]["title"] == "worker:37 lost"
    assert cells[11]["title"] == "worker:11 slow"
    assert page.with_attribute("aria-label", "64 nodes: 61 training, 2 slow, 1 lost")
    assert len(page.with_attribute("scope", "row")) == 5
    assert len(Page(render_html(many, every_node=True)).with_attribute("scope", "row")) == 64


def test_the_plan_shows_slots_and_no_numbers(planned):
    text = Page(render_html(planned)).text
    assert "1 CPU, fed from Spark" in text
    assert "Rows/s" not in text


def test_the_time_left_is_shown_only_if_known(running):
    assert "~ 58 s" in render_html(running, left=58.0)
    assert "~" not in Page(render_html(running)).text


def test_colours_are_the_notebooks_own_with_fallbacks_for_both_schemes(running):
    html = render_html(running)
    for variable in ("--jp-layout-color1", "--jp-content-font-color1", "--jp-brand-color1", "--jp-error-color1"):
        assert re.search(rf"var\({variable},var\(", html)
    assert "prefers-color-scheme:dark" in html


def test_every_rule_of_the_style_is_confined_to_the_panel(running):
    style = re.search(r"<style>(.*?)</style>", render_html(running), re.DOTALL).group(1)
    inner = re.sub(r"@(?:media|container)[^{]*\{((?:[^{}]*\{[^{}]*\})*)\}", r"\1", style)
    selectors = [part for rule in re.findall(r"([^{}]+)\{", inner) for part in re.split(r",(?![^(]*\))", rule)]
    assert selectors
    assert all(selector.strip().startswith(".tfos-panel") for selector in selectors)


def test_an_update_of_64_nodes_is_small(many):
    assert len(render_html(many).encode()) < 35_000


def test_the_style_is_the_live_panels(running):
    rule = ".tfos-panel .t-dim{color:var(--t-dim)}"
    assert rule in Path(widgets.__file__).with_name("panel.css").read_text()
    assert rule in render_html(running)


def test_without_the_style_no_colours_remain(failed):
    without = re.sub(r"<style>.*?</style>", "", render_html(failed), flags=re.DOTALL)
    assert not re.findall(r"#[0-9a-f]{3}|rgb|(?:color|background)\s*[:=]", without)
    assert set(re.findall(r'style="([^"]*)"', without)) == {"width:69%", "width:71%"}
    assert set(re.findall(r'stroke="([^"]*)"', without)) == {"currentColor"}


def test_gpus_have_a_column_only_if_nodes_have_any(running, on_gpus):
    assert "GPU" not in Page(render_html(running)).text
    text = Page(render_html(on_gpus)).text
    assert re.search(r"GPU.*83%.*41\.1 / 85\.0 GB.*GPU 1.*no GPU", text, re.DOTALL)
    assert "NVIDIA H100 80GB HBM3" in render_html(on_gpus)


def test_each_metric_has_its_curve(running):
    tags = [tag for tag, _ in Page(render_html(running)).tags]
    assert tags.count("polyline") == 6  # loss and accuracy, each of two nodes and of the tiles


def test_the_log_is_folded_and_names_the_node_of_each_line(running):
    text = Page(render_html(running)).text
    assert "the log's last 8 lines" in text
    assert re.search(r"\d\d:\d\d:\d\d worker:1\s+line 7 of the log", text)


def test_the_generation_is_shown_from_the_second_on(running):
    assert "generation" not in Page(render_html(running)).text
    assert "generation 2" in Page(render_html(replace(running, generation=2))).text


def test_each_node_shows_its_time_left(running):
    nodes = (replace(running.nodes[0], seconds_left=42.0), replace(running.nodes[1], seconds_left=400.0))
    text = Page(render_html(replace(running, nodes=nodes))).text
    assert "~ 42 s" in text
    assert "~ 7 min" in text
    assert "~ 6 min 40 s" in text  # the cluster's time left is its slowest node's


def test_a_lone_surrogate_in_an_error_can_be_encoded(failed):
    render_html(replace(failed, error="worker:0: \ud800")).encode()


def test_a_long_message_is_shortened_and_folded_in_full_below(failed):
    long = "worker:1 on hdp-c02 (executor 2): ValueError: " + "a number 0.125 " * 300
    html = render_html(replace(failed, error=f"{long}\nTraceback (most recent call last):\n  frames\nValueError: no"))
    said, folded = html.split('<div class="t-say', 1)[1].split("<details>", 1)
    assert len(re.sub("<[^>]*>", "", said)) < 900
    assert folded.startswith("<summary>the whole message</summary>")
    assert long.rstrip() in Page(html).text
    assert "Traceback (most recent call last)" in Page(html).text


def test_the_html_of_an_error_of_any_length_is_small(failed):
    short = len(render_html(failed))
    frames = "\n".join(f'  File "Cell In[4]", line {i}, in f{i}\n    f({i})' for i in range(20_000))
    state = replace(failed, error=f"worker:1: ValueError: {'x' * 10**6}\n{frames}\nValueError: {'y' * 10**6} the end")
    html = render_html(state)
    assert len(html) - short < 30_000
    assert "more characters)" in html
    assert "in f19999" in html  # the end of a traceback is kept


def test_a_column_without_values_is_omitted_at_the_end(running):
    ended = tuple(replace(node, cpu_percent=None, memory_bytes=None) for node in running.nodes)
    assert "CPU · mem" not in Page(render_html(replace(running, status=ClusterStatus.DONE, nodes=ended))).text
    assert "CPU · mem" in Page(render_html(replace(running, nodes=ended))).text  # values may still come


def test_the_gpus_short_name_is_text_with_its_full_name_as_title(on_gpus):
    page = Page(render_html(on_gpus))
    assert re.search(r"H100\s+83%", page.text)
    assert ("abbr", {"title": "NVIDIA H100 80GB HBM3"}) in page.tags


def test_the_gpus_name_is_kept_when_its_use_is_unknown(running):
    nodes = tuple(replace(node, gpus=("0",), gpu_use=(GpuUse("NVIDIA H100 80GB HBM3"),) * 8) for node in running.nodes)
    assert "8 x H100" in Page(render_html(replace(running, status=ClusterStatus.DONE, nodes=nodes))).text


def test_the_loss_and_three_metrics_each_have_a_column_with_a_curve(running):
    values = {"val_loss": 0.2, "loss": 0.1, "val_accuracy": 0.8, "accuracy": 0.9, "lr": 0.1}
    curves = dict.fromkeys(values, (1.0, 2.0))
    nodes = tuple(replace(node, metrics=values, curves=curves) for node in running.nodes)
    page = Page(render_html(replace(running, nodes=nodes)))
    assert "LossAccuracyVal lossVal accuracyRows/s" in page.text
    assert [tag for tag, _ in page.tags].count("polyline") == 10  # four of each of two nodes, and two tiles


def test_a_shortened_line_of_the_log_says_so(running):
    log = (LogLine(1.7e9, "worker:0", "x" * 5000),)
    assert re.search(r"xxx… \(4,\d\d\d more characters\)", Page(render_html(replace(running, log=log))).text)
