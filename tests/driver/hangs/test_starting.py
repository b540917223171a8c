"""Explanation of a start that does not come to its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.driver.hangs.test_explanation import EXECUTE, PYTHON, SOCKET, USERS, stacks
from tfos_nb.driver.hangs.explanation import Situation
from tfos_nb.driver.hangs.starting import Look, are_still, explain_start

CONNECTS = Situation("worker:0", cpu_percent=0.0, stacks=stacks())
DOWNLOADS = Situation("worker:1", waits_for_rows=True, cpu_percent=0.0, stacks=stacks(SOCKET, USERS))
FOR_ROWS = stacks((f"{PYTHON}/threading.py", 320, "wait"), ("/home/ann/tfos_nb/runtime/feed/row_queue.py", 9, "_wait"))


def looks(before: list[Situation], now: list[Situation], worked: float = 0.1) -> tuple[Look, Look]:
    return Look(2.0, before, dict.fromkeys(("worker:0", "worker:1"), 7.0)), Look(
        12.0, now, {"worker:0": 7.0, "worker:1": 7.0 + worked}
    )


def told(*nodes: Situation) -> str:
    return explain_start(*looks(list(nodes), list(nodes)))[0]


def test_the_node_that_waits_before_its_first_step_is_named_with_the_evidence() -> None:
    assert told(CONNECTS, DOWNLOADS) == (
        "worker:1 is behind: it waits for an answer from the network, line 31 of clicks.py, in load; for 10 s it has "
        "been at the same line, and used no CPU"
    )
    both = told(replace(DOWNLOADS, node="worker:0"), DOWNLOADS)
    assert both.endswith("; for 10 s they have been at the same line, and used no CPU")


def test_a_node_that_does_not_answer_waits_only_if_another_one_is_behind() -> None:
    assert [one.waits for one in explain_start(*looks([CONNECTS, DOWNLOADS], [CONNECTS, DOWNLOADS]))[1]] == [
        True,
        False,
    ]
    assert told(CONNECTS).startswith("worker:0 is behind: it did not answer when it was asked for its stack; for 10 s")


def test_nodes_that_wait_for_rows_which_spark_has_not_read_yet_are_not_reported() -> None:
    rows = Situation("worker:0", waits_for_rows=True, cpu_percent=0.0, stacks=FOR_ROWS)
    assert not told(rows, replace(rows, node="worker:1"))
    assert not told(rows, replace(rows, node="worker:1", stacks=stacks(EXECUTE, USERS)))
    assert told(rows, DOWNLOADS).startswith("worker:1 is behind")


def test_nodes_that_compute_are_not_reported() -> None:
    compiles = replace(CONNECTS, cpu_percent=90.0, stacks=stacks(EXECUTE, USERS))
    assert not told(compiles, DOWNLOADS)


@pytest.mark.parametrize(
    ("now", "worked"),
    [
        (DOWNLOADS, 0.6),
        (replace(DOWNLOADS, gpu_percent=80.0), 0.0),
        (replace(DOWNLOADS, stacks=stacks(SOCKET, ("/home/ann/clicks.py", 32, "load"))), 0.0),
        (replace(DOWNLOADS, stacks=replace(stacks(SOCKET, USERS), waits=60)), 0.0),
        (replace(DOWNLOADS, node="worker:2"), 0.0),
    ],
)
def test_a_node_that_goes_on_is_not_still(now: Situation, worked: float) -> None:
    assert are_still(*looks([CONNECTS, DOWNLOADS], [CONNECTS, DOWNLOADS]))
    assert not are_still(*looks([CONNECTS, DOWNLOADS], [CONNECTS, now], worked))
