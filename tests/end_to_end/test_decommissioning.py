"""Spark decommissions an executor while a node trains on it: no step is done twice, and no restart is used."""

from __future__ import annotations

import pytest

from tests.conftest import RunScript
from tests.end_to_end.executors import trained

RIGHT = "gone 2 restarts left 3 epochs sum right 0 repeated 150 steps moved"


def test_a_node_leaves_an_executor_that_spark_decommissions(run_script: RunScript) -> None:
    told = trained(run_script, 'train("one", ["worker:1"], signal.SIGPWR)', 2, {})
    assert told == [f"one {RIGHT}"]


@pytest.mark.faults
def test_the_chief_and_all_nodes_of_an_executor_leave_one_after_another(run_script: RunScript) -> None:
    """The rows are shuffled. The two nodes share an executor after the first one has left the other executor."""
    calls = """
        train("chief", ["worker:0"], signal.SIGPWR, shuffle=300)
        train("both", ["worker:0", "worker:1"], signal.SIGPWR)
    """
    assert trained(run_script, calls, 3, {}) == [f"chief {RIGHT}", f"both {RIGHT}"]


@pytest.mark.faults
def test_sigterm_decommissions_an_executor_and_the_others_continue_meanwhile(run_script: RunScript) -> None:
    """Nodes fill all slots, so no node holds its slot."""
    calls = 'train("term", ["worker:1"], signal.SIGTERM, min_workers=1)'
    told = trained(run_script, calls, 1, {"spark.executor.decommission.signal": "TERM"})
    assert told == [f"term {RIGHT}"]


@pytest.mark.faults
def test_a_lone_worker_and_all_workers_at_once_leave_with_a_state_on_the_disk(run_script: RunScript) -> None:
    calls = """
        train("alone", ["worker:0"], signal.SIGPWR, workers=1, checkpoint_every=3600)
        train("all", ["worker:0", "worker:1"], signal.SIGPWR, checkpoint_every=3600)
    """
    alone, both = trained(run_script, calls, 3, {})
    assert (alone, both) == (f"alone {RIGHT}", f"all {RIGHT}")
