"""The data of a metric's chart that a page gets."""

from __future__ import annotations

import json
import math

from tfos_nb.state.chart_data import MOST_NODES, MOST_POINTS, chart_data
from tfos_nb.state.training_curve import Point

POINTS = [
    Point(1, 8, {"loss": 1 / 3, "val_loss": 2.0, "auc": 0.5}, True),
    Point(2, 16, {"loss": math.nan, "val_loss": 1.0, "auc": 0.75}, True),
    Point(3, 24, {"loss": 0.25, "val_loss": math.inf, "auc": 1.0}, True, generation=2),
]


def test_the_first_metric_by_epoch_is_the_default() -> None:
    data = chart_data(POINTS, nodes=["worker:0", "worker:1"])
    assert (data["metrics"], data["metric"], data["by"]) == (["loss", "auc"], "loss", "epoch")
    assert (data["nodes"], data["recovered"], data["shown"], data["total"]) == (["worker:0", "worker:1"], [2.5], 4, 6)
    assert data["lines"] == [
        {"name": "training", "metric": "loss", "x": [1, 2, 2.5, 3], "y": [0.3333333, None, None, 0.25]},
        {"name": "validation", "metric": "val_loss", "x": [1, 2, 2.5, 3], "y": [2.0, 1.0, None, None]},
    ]
    assert chart_data(POINTS, metric="auc", by="step")["lines"][0]["x"] == [8, 16, 16 + 4, 24]


def test_a_validation_metric_and_a_truncated_name_find_their_metric() -> None:
    assert chart_data(POINTS, metric="val_auc")["metric"] == "auc"
    name = "m" * 100
    assert chart_data([Point(1, 1, {"loss": 1.0, name: 1.0}, True)], metric=f"{name[:50]}…")["metric"] == name


def test_unknown_choices_give_the_first_metric_and_the_usual_axis() -> None:
    data = chart_data(POINTS, metric="f1", by="century")
    assert (data["metric"], data["by"]) == ("loss", "epoch")
    assert chart_data([])["lines"] == []


def test_a_message_is_valid_json_of_bounded_size() -> None:
    points = [Point(1 + step // 1000, step, {"loss": 1 / (step + 1)}, step % 1000 == 999) for step in range(10_000)]
    data = chart_data(points, by="step", nodes=[f"worker:{number}" for number in range(5000)])
    assert data["shown"] <= MOST_POINTS + 2
    assert len(data["nodes"]) == MOST_NODES
    assert len(json.dumps(data, allow_nan=False)) < 40_000
