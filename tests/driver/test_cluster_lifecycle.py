"""What a user sees a cluster become is what the table says."""

from __future__ import annotations

import itertools

import pytest

from tfos_nb.driver.cluster_lifecycle import CLUSTER_TRANSITIONS, shown_status
from tfos_nb.state.cluster_state import ClusterStatus


def test_each_status_is_reached_and_has_its_row() -> None:
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
def test_what_is_shown_goes_beyond_what_was_decided_only_while_nodes_come(
    decided: ClusterStatus, seen: set[ClusterStatus]
) -> None:
    shown = {
        shown_status(decided, about_to_recover=recovers, all_up=up)
        for recovers, up in itertools.product((False, True), repeat=2)
    }
    assert shown == seen
    assert all(one is decided or one in CLUSTER_TRANSITIONS[decided] for one in shown)
