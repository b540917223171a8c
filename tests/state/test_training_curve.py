"""Training curves as lines: by epoch and step, with gaps where the cluster recovered, and thinned."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from typing import Any

import pytest

from tfos_nb.errors import MissingPackage, PlanError
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.state.history import History
from tfos_nb.state.training_curve import Point, chart, chart_names, thin_points, to_pandas, usual_axis

FELL = [Point(epoch, 10 * epoch, {"loss": 1 / epoch, "val_loss": 2 / epoch}, True) for epoch in (1, 2, 3)]
WENT_ON = [Point(epoch, 10 * epoch, {"loss": 1 / epoch}, True, generation=2) for epoch in (4, 5)]


def test_a_chart_has_training_and_validation() -> None:
    drawn = chart(FELL, "loss")
    assert [(line.name, line.metric, line.xs) for line in drawn.lines] == [
        ("training", "loss", (1.0, 2.0, 3.0)),
        ("validation", "val_loss", (1.0, 2.0, 3.0)),
    ]
    assert drawn.lines[1].ys == (2.0, 1.0, 2 / 3)
    assert (drawn.shown, drawn.total) == (6, 6)
    assert chart(FELL, "loss", "step").lines[0].xs == (10.0, 20.0, 30.0)


def test_a_line_has_a_gap_where_the_cluster_recovered() -> None:
    drawn = chart([*FELL, *WENT_ON], "loss")
    assert drawn.lines[0].xs == (1.0, 2.0, 3.0, 3.5, 4.0, 5.0)
    assert math.isnan(drawn.lines[0].ys[3])
    assert drawn.recovered == (3.5,)
    assert len(drawn.lines[1].xs) == 3, "the validation has no point behind it, so no gap either"


def test_a_loss_of_nan_is_a_gap() -> None:
    points = [*FELL, Point(4, 40, {"loss": math.nan}, True)]
    assert math.isnan(chart(points, "loss").lines[0].ys[3])


def test_steps_within_an_epoch_are_drawn_only_by_step() -> None:
    points = [Point(1, 5, {"loss": 3.0}), *FELL]
    assert chart(points, "loss").lines[0].xs == (1.0, 2.0, 3.0)
    assert chart(points, "loss", "step").lines[0].xs == (5.0, 10.0, 20.0, 30.0)
    assert (usual_axis(points), usual_axis(points[:2]), usual_axis([])) == ("epoch", "step", "step")


def test_a_thinned_line_keeps_its_ends_peaks_and_gap() -> None:
    points = [Point(1, step, {"loss": 1 / step}, generation=1 + (step > 600)) for step in range(1, 1001)]
    points[333] = Point(1, 334, {"loss": 9.0})
    points[700] = Point(1, 701, {"loss": math.nan}, generation=2)
    drawn = chart(points, "loss", "step", most=100)
    (line,) = drawn.lines
    assert len(line.xs) <= 102
    assert (line.xs[0], line.xs[-1], max(y for y in line.ys if y == y)) == (1.0, 1000.0, 9.0)
    assert drawn.total == 1000
    assert sum(map(math.isnan, line.ys)) == 1, "the one gap of the recovery"


def test_a_metric_and_its_validation_share_a_chart() -> None:
    assert chart_names([*FELL, Point(4, 40, {"val_auc": 0.5, "lr": 0.1})]) == ["loss", "auc", "lr"]


def test_thinning_points_keeps_the_ends_of_epochs() -> None:
    points = [Point(1 + step // 100, step, {"loss": 1.0}, step % 100 == 99) for step in range(1000)]
    kept = thin_points(points, 100)
    assert len(kept) == 100
    assert sum(point.ends_epoch for point in kept) == 10
    assert (kept[0].step, thin_points(points[:7], 100)) == (0, points[:7])
    assert len(thin_points(points, 5)) == 5


# --- pandas


def test_the_table_is_by_epoch_or_by_step() -> None:
    table = to_pandas([Point(1, 5, {"loss": 3.0}), *FELL])
    assert (table.index.name, list(table.index), list(table.columns)) == ("epoch", [1, 2, 3], ["loss", "val_loss"])
    assert table.loc[2, "val_loss"] == 1.0
    steps = to_pandas([Point(1, 5, {"loss": 3.0}), *FELL], "step")
    assert (steps.index.name, list(steps.index), list(steps.columns)) == (
        "step", [5, 10, 20, 30], ["epoch", "loss", "val_loss"],
    )  # fmt: skip
    assert math.isnan(steps.loc[5, "val_loss"])


def test_no_reports_give_an_empty_table() -> None:
    assert len(History("worker:0").to_pandas()) == 0


# --- matplotlib


@pytest.fixture
def history() -> History:
    made = History("worker:0")
    for epoch in (1, 2, 3):
        if epoch == 3:
            made.begin_anew()
        metrics = {"loss": 1 / epoch, "val_loss": 2 / epoch, "mae": 0.5}
        made.record("worker:0", StepReport(epoch, 3, 8, 8, metrics, epoch_end=True))
    return made


def test_a_figure_has_a_chart_for_each_metric(history: History) -> None:
    pytest.importorskip("matplotlib")
    figure = history.plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "mae"]
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines) == ["training", "validation", "recovered"]
    assert [value == value for value in lines["training"].get_ydata()] == [True, True, False, True]
    assert figure.axes[0].get_xlabel() == "epoch"


def test_a_figure_can_show_one_metric_by_step_on_a_logarithmic_axis(history: History) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = history.plot("val_loss", by="step", log=True).axes
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_yscale()) == ("loss", "step", "log")


def test_a_notebook_shows_a_figure_without_pyplot(history: History) -> None:
    pytest.importorskip("matplotlib")
    assert history.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_metric_without_a_value_above_0_is_drawn_on_a_linear_axis() -> None:
    pytest.importorskip("matplotlib")
    history = History("worker:0")
    history.record("worker:0", StepReport(1, metrics={"loss": 0.5, "elbo": -3.0, "kl": math.inf}, epoch_end=True))
    loss, elbo, kl = history.plot(log=True).axes
    assert (loss.get_yscale(), elbo.get_yscale(), kl.get_yscale()) == ("log", "linear", "linear")
    assert [text.get_text() for text in elbo.texts] == ["no value above 0: not logarithmic"]


def test_numbers_too_large_for_a_chart_are_gaps() -> None:
    points = [Point(epoch, epoch, {"loss": loss}, True) for epoch, loss in enumerate((1e308, 1.0, -1e308), 1)]
    assert chart(points, "loss").lines[0].ys == (math.inf, 1.0, -math.inf)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"metrics": "acc"}, r"no metric 'acc' was reported; there are loss, mae"),
        ({"metrics": []}, r"names nothing to plot; there are loss, mae"),
        ({"metrics": 5}, r"metrics must be the name of a metric or a list of names, such as 'loss', got 5"),
        ({"metrics": [5]}, r"metrics must be the name of a metric or a list of names, such as 'loss', got \[5\]"),
        ({"metrics": b"loss"}, r"metrics must be .*, got b'loss'"),
        ({"by": "batch"}, r"by must be 'epoch' or 'step', got 'batch'"),
    ],
)
def test_an_argument_that_matches_nothing_is_refused(history: History, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        history.plot(**arguments)


def test_a_history_without_reports_cannot_be_plotted() -> None:
    with pytest.raises(PlanError, match="no metric was reported yet"):
        History("worker:0").plot()
    with pytest.raises(PlanError, match="by must be 'epoch' or 'step', got 'day'"):
        History("worker:0").to_pandas("day")


def test_without_matplotlib_the_error_says_what_to_install(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"plot\(\) needs matplotlib.*pip install 'tfos_nb\[plot\]'"):
        history.plot()


def test_a_history_imports_neither_pandas_nor_matplotlib() -> None:
    heavy = {"pandas", "matplotlib", "IPython", "pyspark"}
    code = f"import sys, tfos_nb.state.history; print(*({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
