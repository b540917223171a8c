"""A cluster plan is checked when it is created."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode, Node, Role


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [str(node) for node in nodes]


@pytest.mark.parametrize(
    ("plan", "nodes", "chief", "fed", "finishing"),
    [
        (ClusterPlan(), ["worker:0"], "worker:0", ["worker:0"], ["worker:0"]),
        (ClusterPlan(2), ["worker:0", "worker:1"], "worker:0", ["worker:0", "worker:1"], ["worker:0", "worker:1"]),
        (
            ClusterPlan(2, ps=1),
            ["chief:0", "worker:0", "worker:1", "ps:0"],
            "chief:0",
            ["worker:0", "worker:1"],  # the chief coordinates
            ["chief:0", "worker:0", "worker:1"],
        ),
        (
            ClusterPlan(1, chief=True),
            ["chief:0", "worker:0"],
            "chief:0",
            ["chief:0", "worker:0"],
            ["chief:0", "worker:0"],
        ),
        (ClusterPlan(0, chief=True), ["chief:0"], "chief:0", ["chief:0"], ["chief:0"]),
        (
            ClusterPlan(1, evaluator=True),
            ["worker:0", "evaluator:0"],
            "worker:0",
            ["worker:0"],
            ["worker:0", "evaluator:0"],
        ),
        (ClusterPlan(1, ps=1, chief=False), ["worker:0", "ps:0"], "worker:0", ["worker:0"], ["worker:0"]),
        (ClusterPlan(2, input_mode="tensorflow"), ["worker:0", "worker:1"], "worker:0", [], ["worker:0", "worker:1"]),
    ],
    ids=str,
)
def test_a_plan_lists_its_nodes_and_their_roles(
    plan: ClusterPlan, nodes: list[str], chief: str, fed: list[str], finishing: list[str]
) -> None:
    assert names(plan.nodes) == nodes
    assert str(plan.chief_node) == chief
    assert names(plan.fed_nodes) == fed
    assert names(plan.finishing_nodes) == finishing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be a whole number, 0 or more, got -1"),
        ({"workers": 1.5}, r"workers must be a whole number"),
        ({"workers": True}, "workers must be .*, got True"),
        ({"workers": "2"}, "workers must be .*, got '2'"),
        ({"ps": -1}, "ps must be .*, got -1"),
        ({"cpus": 0}, "cpus must be a whole number, 1 or more, got 0"),
        ({"gpus": None}, "gpus must be .*, got None"),
        ({"workers": 0}, "at least one worker or a chief"),
        ({"chief": "yes"}, "chief must be True, False or '.*', got 'yes'"),
        ({"evaluator": None}, "evaluator must be True or False, got None"),
        ({"input_mode": "sparc"}, "input_mode must be 'spark' .* or 'tensorflow'"),
        ({"name": ""}, "name must have .* letters, .* got ''"),
        ({"name": "a/b"}, "name must have .* got 'a/b'"),
        ({"name": "a\n"}, "name must have .* got "),
        ({"name": "x" * 65}, "name must have at most 64"),
        ({"name": None}, "name must have .* got None"),
    ],
    ids=str,
)
def test_invalid_plans_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ClusterPlan(**options)


def test_a_plan_is_immutable_and_compares_by_value() -> None:
    assert ClusterPlan(2) == ClusterPlan(workers=2, chief=False, input_mode=InputMode.SPARK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterPlan(2).workers = 3  # type: ignore[misc]
    assert dataclasses.replace(ClusterPlan(2), workers=3) == ClusterPlan(3)


def test_parameter_servers_and_evaluators_get_no_gpu() -> None:
    plan = ClusterPlan(1, ps=1, evaluator=True, gpus=2)
    assert {str(node): plan.gpus_of(node) for node in plan.nodes} == {
        "chief:0": 2, "worker:0": 2, "ps:0": 0, "evaluator:0": 0,
    }  # fmt: skip


def test_str_gives_the_table_that_the_user_sees() -> None:
    assert str(ClusterPlan(1, ps=1, cpus=2, gpus=1, name="mnist")).splitlines() == [
        "cluster mnist: 3 nodes, input from spark",
        "node      slot            fed from Spark",
        "chief:0   2 CPUs + 1 GPU  no",
        "worker:0  2 CPUs + 1 GPU  yes",
        "ps:0      2 CPUs          no",
    ]


@pytest.mark.parametrize("node", [Node(Role.WORKER, 0), Node(Role.PS, 12), Node(Role.CHIEF, 0)], ids=str)
def test_a_nodes_name_parses_to_the_same_node(node: Node) -> None:
    assert Node.parse(str(node)) == node


@pytest.mark.parametrize("text", ["worker", "worker:", "boss:0", "worker:x", ""], ids=repr)
def test_an_invalid_node_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid Role|invalid literal for int"):
        Node.parse(text)


def test_the_field_names_are_parameters_of_launch() -> None:
    import inspect

    from tfos_nb import launch

    assert set(ClusterPlan.field_names()) <= set(inspect.signature(launch).parameters)
