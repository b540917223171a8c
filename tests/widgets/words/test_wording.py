from dataclasses import replace

import pytest

from tfos_nb.state.cluster_state import JOINED, WITHOUT, ClusterStatus, NodeStatus
from tfos_nb.widgets.words.wording import duration, number, rate, sentence


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (-1.23456, "-1.2346"), (1.5e-7, "1.5e-07"), (-123456.78, "-123456.8"), (1e300, "1e+300")],
)
def test_a_number_fits_its_column(value, text):
    assert number(value) == text
    assert len(number(value)) <= 9


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (999.6, "1.00 k"), (9_996, "10.0 k"), (99_960, "100 k"), (999_600, "1.00 M")],
)
def test_a_rate_has_three_digits_at_every_magnitude(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.9, "59 s"), (60, "1 min 00 s"), (3600, "1 h 00 min")])
def test_a_duration_is_written_in_words(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("worker:1 on h: killed", "worker:1 on h: killed. The others wait for its replacement."),
        (f"worker:1 on h: killed{WITHOUT}worker:1", "worker:1 on h: killed; the others continue without worker:1."),
        (f"worker:1{JOINED}", "worker:1 joined."),
    ],
)
def test_the_consequence_of_a_loss_is_stated(running, error, said):
    assert sentence(replace(running, status=ClusterStatus.RECOVERING, error=error)) == said


def test_a_node_that_the_others_continue_without_is_called_gone(running):
    gone = replace(running.nodes[0], status=NodeStatus.LOST)
    assert f"; {gone.node} is gone" in sentence(replace(running, nodes=(gone, *running.nodes[1:])))
