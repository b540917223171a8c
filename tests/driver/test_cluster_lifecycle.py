"""The status of a cluster that users see: it changes only as the table of transitions allows."""

from __future__ import annotations

import itertools

import pytest

from tfos_nb.driver.cluster_lifecycle import CLUSTER_TRANSITIONS, shown_status
from tfos_nb.state.cluster_state import ClusterStatus


def test_each_status_can_be_reached_and_has_a_row_in_the_table() -> None:
    assert set(CLUSTER_TRANSITIONS) == set(ClusterStatus)
    reached = {ClusterStatus.PLANNED} | {status for after in CLUSTER_TRANSITIONS.values() for status in after}
    assert reached == set(ClusterStatus)
    assert {one for one, after in CLUSTER_TRANSITIONS.items() if not after} == {one for one in reached if one.ended}


@pytest.mark.parametrize(
    ("decided", "seen"),
    [
        (ClusterStatus.PLANNED, {ClusterStatus.PLANNED}),
        (ClusterStatus.STARTING, {ClusterStatus.STARTING, ClusterStatus.RUNNING, ClusterStatus.RECOVERING}),
        (ClusterStatus.RECOVERING, {ClusterStatus.RUNNING, ClusterStatus.RECOVERING}),
        (ClusterStatus.STOPPING, {ClusterStatus.STOPPING}),
        (ClusterStatus.DONE, {ClusterStatus.DONE}),
    ],
)
def test_the_shown_status_differs_from_the_decided_one_only_while_nodes_start(
    decided: ClusterStatus, seen: set[ClusterStatus]
) -> None:
    shown = {
        shown_status(decided, about_to_recover=recovers, all_up=up)
        for recovers, up in itertools.product((False, True), repeat=2)
    }
    assert shown == seen
    assert all(one is decided or one in CLUSTER_TRANSITIONS[decided] for one in shown)
