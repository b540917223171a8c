"""Slots of nodes that Spark was asked for, and of tasks that are about to end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts import pending_slots
from tfos_nb.spark.contexts.pending_slots import PendingSlots, expect, still_ending, still_pending
from tfos_nb.spark.session import Busy, check_slots


def test_tasks_of_a_second_failing_job_are_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pending_slots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = (Busy("collect at cell.py:3", 1, 1, 0, ends=True, number=number) for number in (7, 9))
    assert still_ending((first,))
    now[0] += 20.0
    assert not still_ending((first,)), "it is waited for no longer"
    assert still_ending((second,)), "it has the same description, and has just failed"
    assert not still_ending(())


def test_requested_nodes_hold_their_slots_before_they_run(spark: SparkSession) -> None:
    asked = {"missing": 3, "over": False}
    expect(PendingSlots("cluster a", 3, 1, 0, lambda: asked["missing"], lambda: 0, lambda: bool(asked["over"])))
    with pytest.raises(PlanError, match=r"3 tasks of 'cluster a, about to start'.*stop what runs, or ask for 1 node,"):
        check_slots(spark, 2, feeding=False)
    running = (Busy("cluster a", 2, 2, 0), Busy("other", 2, 2, 0))
    assert [busy.tasks for busy in still_pending(running)] == [1]
    asked["missing"] = 1  # two nodes have arrived, and their two tasks still run
    assert [busy.tasks for busy in still_pending(running)] == [1]
    asked["missing"] = 0
    assert check_slots(spark, 4, feeding=False).free == 4
    expect(PendingSlots("cluster b", 3, 2, 0, lambda: 3, lambda: 0, lambda: bool(asked["over"])))
    assert still_pending(())[0].cpus == 6
    asked["over"] = True
    assert still_pending(()) == ()
