"""Slots under dynamic allocation, and what is refused where a client does not see which tasks run."""

from __future__ import annotations

from typing import Any

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.spark import slots


class Session:
    """A fake context of a Spark with dynamic allocation."""

    is_local = False
    has_dynamic_allocation = True
    key = "application"
    gpus = 0
    master = "k8s://https://api"

    def __init__(self, *, grows: bool = True, cores: int | None = 2, most: int = 3, here: int = 0, **conf: str) -> None:
        self.grows, self.executor_cores, self.most_executors, self._here, self._conf = grows, cores, most, here, conf

    def setting(self, name: str, default: str = "") -> str:
        return self._conf.get(name.rpartition(".")[2], default)

    def places(self, profile: object) -> int:
        return self._here


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "context_of", lambda session: session)


OWN: Any = object()


@pytest.mark.parametrize(
    ("session", "need", "found"),
    [
        (Session(), {}, 6),
        (Session(here=8), {}, 8),
        (Session(cores=None), {}, 3),
        (Session(cores=5), {"cpus": 2}, 6),
        (Session(cores=4), {"profile": OWN, "gpus": 1}, 3),
    ],
    ids=["most", "has more already", "cores unknown", "two cpus", "one node an executor with GPUs"],
)
def test_slots_are_those_of_all_executors_that_spark_may_start(session: Any, need: Any, found: int) -> None:
    assert slots.most_slots(session, **need) == found


@pytest.mark.parametrize("minimum", ["1", "3"])
def test_over_spark_connect_the_executors_that_stay_must_be_enough(minimum: str) -> None:
    session: Any = Session(grows=False, minExecutors=minimum)
    if minimum == "3":
        slots.check_dynamic_allocation(session, 5)
        return
    with pytest.raises(PlanError, match="keeps 1 executors for certain; 5 slots need 3 of 2") as refused:
        slots.check_dynamic_allocation(session, 5)
    assert "spark.dynamicAllocation.minExecutors=3" in str(refused.value)


def test_a_spark_that_grows_needs_no_executor_that_stays() -> None:
    session: Any = Session()
    slots.check_dynamic_allocation(session, 1000)


def test_gpus_come_where_a_script_finds_them_and_kubernetes_knows_their_name() -> None:
    without: Any = Session()
    assert not slots.gives_gpus(without)
    with pytest.raises(PlanError, match=r"gpus=1: an executor has 0.*Or set spark.executor.resource.gpu.amount=0"):
        slots.resource_profile(without, gpus=1)
    unnamed: Any = Session(discoveryScript="/opt/gpus.sh")
    assert slots.gives_gpus(unnamed)
    with pytest.raises(PlanError, match=r"start Spark with spark.executor.resource.gpu.vendor=nvidia.com"):
        slots.resource_profile(unnamed, gpus=1)
