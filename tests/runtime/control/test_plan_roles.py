"""Plans with parameter servers, evaluators and chiefs of either name; invalid ones are refused before the start."""

from __future__ import annotations

from typing import Any

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import ClusterPlan


def test_parameter_servers_on_the_driver_are_not_spark_nodes() -> None:
    plan = ClusterPlan(2, ps=2, driver_ps_nodes=True)
    assert [str(node) for node in plan.spark_nodes] == ["chief:0", "worker:0", "worker:1"]
    assert [str(node) for node in plan.driver_nodes] == ["ps:0", "ps:1"]
    assert str(plan).count("on the driver") == 2
    assert ClusterPlan(2, ps=2).driver_nodes == ()


@pytest.mark.parametrize("name", ["chief", "master"])
def test_a_master_node_of_either_name_is_the_chief(name: str) -> None:
    plan = ClusterPlan(1, master_node=name)
    assert str(plan.chief_node) == "chief:0"
    assert ("TensorFlow 2 calls it chief" in str(plan)) == (name == "master")


def test_a_training_chief_with_parameter_servers_is_fed_and_needs_no_worker() -> None:
    assert [str(node) for node in ClusterPlan(1, ps=1, chief="trains").fed_nodes] == ["chief:0", "worker:0"]
    assert [str(node) for node in ClusterPlan(1, ps=1).fed_nodes] == ["worker:0"]
    assert [str(node) for node in ClusterPlan(0, ps=1, chief="trains").fed_nodes] == ["chief:0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chief": "leads"}, "chief must be True, False or 'trains', got 'leads'"),
        ({"workers": 0, "ps": 1}, "ps=1 needs at least one worker to serve: ask for workers=1"),
        ({"driver_ps_nodes": True}, "driver_ps_nodes needs parameter servers"),
        ({"ps": 1, "driver_ps_nodes": 1}, "driver_ps_nodes must be True or False"),
        ({"master_node": "boss"}, "master_node must be 'chief', or 'master'"),
        ({"master_node": "chief", "chief": False}, "asks for a chief, and chief=False for none"),
        ({"evaluator_may_fail": True}, "evaluator_may_fail needs an evaluator"),
        ({"protocol": ""}, "protocol must be 'grpc'"),
        ({"protocol": None}, "protocol must be 'grpc'"),
    ],
    ids=str,
)
def test_impossible_combinations_of_roles_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        ClusterPlan(**options)
    assert message in str(caught.value)
