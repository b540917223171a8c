"""Displays of objects at the end of a cell: by IPython's protocol, in its shell, and sanitized."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell

from tests.widgets.test_html import NASTY, Page
from tfos_nb.pipeline.history import History as FittedHistory
from tfos_nb.rich import Rich
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.runtime.tfrecord.reading import Damage
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus
from tfos_nb.state.history import History
from tfos_nb.tfrecord.outcome import Saved
from tfos_nb.tfrecord.skipped import Skipped
from tfos_nb.widgets import cluster_display, render_html
from tfos_nb.widgets.reprs import RENDERINGS

KERNEL = type("InKernel", (), {"has_trait": staticmethod(lambda name: name == "kernel"), "user_ns": {}})


class Watched(Rich):
    """A cluster with the parts that its display needs."""

    _rich = "cluster"

    def __init__(self, state: ClusterState, history: History | None = None) -> None:
        self.state = state
        self.history = history

    def snapshot(self) -> ClusterState:
        return self.state


@pytest.fixture(autouse=True)
def _in_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFOS_NB_PROGRESS", "html")


@pytest.fixture
def history() -> History:
    """Six epochs, with a recovery after the third."""
    made = History("worker:0")
    for epoch in range(1, 7):
        if epoch == 4:
            made.begin_anew()
        metrics = {"loss": 1 / epoch, "accuracy": 1 - 1 / epoch, "val_loss": 1.5 / epoch}
        made.record("worker:0", StepReport(epoch, 6, 8, 8, metrics, epoch_end=True, phase="fit"))
    return made


def skipped(files: dict[str, Damage]) -> Skipped:
    """Make a Skipped without Spark, whose accumulator it usually reads."""
    made = Skipped.__new__(Skipped)
    made.accumulator = type("Accumulated", (), {"value": files})
    return made


def shown(thing: object) -> dict[str, str]:
    """Return what IPython shows of an object."""
    data, _ = DisplayFormatter().format(thing)
    return dict(data)


@pytest.fixture
def things(running: ClusterState, history: History) -> dict[str, Any]:
    return {
        "cluster": Watched(running, history),
        "plan": ClusterPlan(workers=2, ps=1, gpus=1, name="clicks"),
        "history": history,
        "fitted": FittedHistory([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}]),
        "saved": Saved("/data/digits", 4, 1797, 493_562),
        "skipped": skipped({"file:///data/digits/part-0": Damage(1, 3021, "the checksum of the record is wrong")}),
    }


NAMES = ("cluster", "plan", "history", "fitted", "saved", "skipped")


@pytest.mark.parametrize("name", NAMES)
def test_ipython_shows_html_and_text(things: dict[str, Any], name: str) -> None:
    bundle = shown(things[name])
    assert set(bundle) == {"text/html", "text/plain"}
    page = Page(bundle["text/html"])
    assert page.open == [], "every tag is closed"
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "button", "input"}
    assert not any(attribute.startswith("on") for _, attributes in page.tags for attribute in attributes)
    assert "url(" not in bundle["text/html"]
    assert things[name]._repr_html_() == bundle["text/html"]


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_gets_only_text(things: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    assert set(shown(things[name])) == {"text/plain"}
    assert all(len(line) <= 120 for line in shown(things[name])["text/plain"].splitlines())


def test_every_class_with_a_display_has_a_rendering() -> None:
    import tfos_nb.cluster
    import tfos_nb.detached.attached  # noqa: F401 - two of the classes

    kinds = [kind for kind in Rich.__subclasses__() if kind.__module__.startswith("tfos_nb.")]
    assert {kind.__name__ for kind in kinds} == {
        *("AttachedCluster", "Cluster", "ClusterPlan", "History", "Run", "Runs", "Saved", "Skipped"),
    }
    assert {kind._rich for kind in kinds} == set(RENDERINGS)


def test_a_shell_shows_a_value_at_the_end_of_its_cell(shell: InteractiveShell, things: dict[str, Any]) -> None:
    shell.user_ns["plan"] = things["plan"]
    published: list[Any] = []
    shell.display_pub.publish = lambda data, *args, **more: published.append(data)  # type: ignore[method-assign]
    assert shell.run_cell("from IPython.display import display; display(plan)").success
    assert "TensorFlow cluster" not in published[0]["text/plain"]
    assert published[0]["text/plain"] == str(things["plan"])
    assert "tfos-panel" in published[0]["text/html"]


def test_a_display_imports_no_heavy_package() -> None:
    heavy = ("pyspark", "tensorflow", "keras", "pandas", "matplotlib", "aiohttp", "ipywidgets", "anywidget", "grpc")
    code = (
        "import sys; from tfos_nb import ClusterPlan; plan = ClusterPlan(workers=2);"
        "assert 'tfos_nb.widgets' not in sys.modules; assert '<table' in plan._repr_html_();"
        f"print(*(set({heavy}) & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("\n", "")


# --- a cluster


def test_a_cluster_is_shown_as_its_panel_with_curves(running: ClusterState, history: History) -> None:
    html = shown(Watched(running, history))["text/html"]
    page = Page(html)
    assert "worker:0 and worker:1 train, epoch 2 of 3." in page.text
    assert "<summary>curves</summary>" in html
    assert len(page.with_attribute("class", "t-graph")) == 2
    assert shown(Watched(running))["text/plain"].startswith("mnist · Training · 2 workers")


def test_the_links_lead_through_the_servers_proxy(running: ClusterState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.widgets.hosts.current_shell", lambda modules: KERNEL)
    monkeypatch.setenv("JPY_SESSION_NAME", "/work/run.ipynb")
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/alice/")
    state = replace(running, spark_ui="http://driver:4040", log_dir="")
    assert cluster_display.links_to(Watched(state), state) == [("Spark UI", "/user/alice/proxy/4040/jobs/")]
    html = shown(Watched(state))["text/html"]
    assert '<a class="t-button" href="/user/alice/proxy/4040/jobs/" target="_blank" rel="noopener noreferrer">' in html


def test_there_is_no_link_without_a_spark_ui_or_on_databricks(
    running: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster_display.links_to(Watched(running), running) == []
    state = replace(running, spark_ui="http://driver:4040")
    assert cluster_display.links_to(Watched(state), state) == [("Spark UI", "http://driver:4040")], (
        "its own address, by itself"
    )
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert cluster_display.links_to(Watched(state), state) == []
    state = replace(running, spark_ui="javascript:alert(1)")
    assert cluster_display.links_to(Watched(state), state) == []


# --- a plan


def test_a_plan_shows_the_resources_of_each_node() -> None:
    plan = ClusterPlan(workers=1, ps=1, gpus=2, driver_ps_nodes=True, name="clicks")
    text = Page(shown(plan)["text/html"]).text
    assert "worker:01 CPU and 2 GPU, fed from Spark" in text
    assert "ps:0on the driver, outside Spark" in text
    assert "Rows come from Spark (input_mode='spark')." in text
    assert shown(plan)["text/plain"] == str(plan)
    assert "The nodes read files themselves" in shown(ClusterPlan(input_mode="tensorflow"))["text/html"]


# --- a history


def test_a_history_shows_its_charts_and_its_last_epochs(history: History) -> None:
    bundle = shown(history)
    page = Page(bundle["text/html"])
    labels = [attributes["aria-label"] for attributes in page.with_attribute("role", "img")]
    assert labels[0] == (
        "Loss by epoch; training from 1.0000 to 0.1667, lowest 0.1667 at epoch 6, highest 1.0000 at 1; validation from "
        "1.5000 to 0.2500, lowest 0.2500 at epoch 6, highest 1.5000 at 1; the cluster recovered after epoch 3"
    )
    assert page.with_attribute("title", "epoch 5, validation: 0.3000"), "a point tells its value"
    assert "EpochLossAccuracyVal loss" in page.text
    assert bundle["text/html"].count('<polyline class="t-line-training"') == 4, "two charts, each with a gap"
    assert bundle["text/plain"].splitlines()[:3] == [
        "History: 6 epochs",
        "epoch    loss  accuracy  val_loss",
        "    1  1.0000    0.0000    1.5000",
    ]


def test_a_history_without_reports_says_so() -> None:
    bundle = shown(History("worker:0"))
    assert "nothing was reported yet" in bundle["text/html"]
    assert bundle["text/plain"] == "History: nothing was reported yet"


def test_a_long_history_shows_its_last_epochs() -> None:
    bundle = shown(FittedHistory([{"loss": 1 / epoch} for epoch in range(1, 501)]))
    assert len(bundle["text/html"]) < 40_000
    assert "the last 12 of 500 epochs" in bundle["text/html"]


@pytest.mark.parametrize(
    "values", [(math.nan, math.nan), (1.0, math.inf), (1e300, -1e300), (1e308, -1e308), (0.0, 0.0), (1e-320, 0.0)]
)
def test_a_chart_accepts_any_numbers(values: tuple[float, ...]) -> None:
    history = FittedHistory([{"loss": value} for value in values])
    html = shown(history)["text/html"]
    history.plot()._repr_png_()
    assert Page(html).open == []
    assert "nan" not in "".join(part for part in html.split('points="')[1:])


def test_names_from_outside_are_escaped(running: ClusterState) -> None:
    made = History("worker:0")
    for epoch in (1, 2):
        made.record("worker:0", StepReport(epoch, metrics={NASTY: 1 / epoch}, epoch_end=True))
    for thing in (made, Watched(replace(running, spark_ui=f"http://h/{NASTY}"), made), Saved(NASTY, 1, 1, 1)):
        page = Page(shown(thing)["text/html"])
        assert page.open == []
        assert "script" not in {tag for tag, _ in page.tags}


# --- TFRecord files


def test_a_write_shows_its_size_and_its_path() -> None:
    text = Page(shown(Saved("/data/digits", 4, 1797, 493_562))["text/html"]).text
    for told in ("/data/digits", "Files 4", "Rows 1,797", "Size 494 kB", "123 kB on average"):
        assert told in text
    assert "nothing was written" in shown(Saved("/data/digits", 0, 0, 0))["text/html"]
    assert "secret" not in shown(Saved("s3://key:secret@bucket/x", 1, 1, 1))["text/html"]


def test_skipped_records_are_listed_by_file() -> None:
    files = {f"file:///data/part-{number:02}": Damage(2, 40, "too short") for number in range(25)}
    text = Page(shown(skipped(files))["text/html"]).text
    assert "50 damaged places" in text
    assert "/data/part-19240too short" in text
    assert "and 5 files more" in text
    assert "nothing was left out" in shown(skipped({}))["text/html"]


# --- hosts that remove styles

KEPT_BY_GITHUB = ("a", "b", "br", "caption", "code", "details", "div", "figcaption", "figure", "pre", "span", "summary")
KEPT_TABLES = ("table", "tbody", "td", "th", "thead", "tr")


def test_a_sanitized_panel_keeps_its_sentence_tables_and_links(running: ClusterState, history: History) -> None:
    """GitHub's view of a notebook removes styles and drawings."""
    bleach = pytest.importorskip("bleach")
    state = replace(running, status=ClusterStatus.DONE, points=tuple(history.points()))
    html = render_html(state, links=[("Spark UI", "http://driver:4040")])
    html = re.sub("<style>.*?</style>", "", html, flags=re.DOTALL)
    html = bleach.clean(html, tags={*KEPT_BY_GITHUB, *KEPT_TABLES}, attributes={"a": ["href"]}, strip=True)
    for told in ("Done in 2 min 11 s", "worker:1", 'href="http://driver:4040"', "0.1883", "<th>6</th>", "1.5000"):
        assert told in html
    assert html.count("<table") == 2
    assert "svg" not in html
    assert "epoch 5" not in html, "nothing is left of a drawing but its line of values"
