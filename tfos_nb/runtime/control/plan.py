"""Plan of a cluster: roles, counts and resources, before anything runs.

A :class:`ClusterPlan` is a value. It validates itself when it is made, and prints as the table that the user sees
before any node starts.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import PlanError, check_count
from tfos_nb.rich import Rich

__all__ = ["ClusterPlan", "InputMode", "Node", "Role", "tf_config", "training_addresses"]


_TRAINS = "trains"


class Role(str, enum.Enum):
    """TensorFlow's job names, in the order in which a cluster lists them."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"

    @property
    def computes(self) -> bool:
        """Whether such a node computes steps, or gives them out: it can have GPUs, and reports progress."""
        return self in (Role.CHIEF, Role.WORKER)

    @property
    def evaluates(self) -> bool:
        """Whether such a node only reads the training's checkpoints, and no other node waits for it."""
        return self is Role.EVALUATOR

    @property
    def must_return(self) -> bool:
        """Whether the cluster is done only when ``main`` has returned on such a node: a server's need not."""
        return self is not Role.PS


class InputMode(str, enum.Enum):
    """Source of a node's data."""

    SPARK = "spark"
    """Rows of a DataFrame or RDD, pushed to the nodes by :meth:`tfos_nb.Cluster.train`."""
    TENSORFLOW = "tensorflow"
    """The nodes read files by themselves."""


@dataclass(frozen=True, order=True)
class Node:
    """One TensorFlow process of the cluster: a role and its index in that role.

    Examples
    --------
    >>> str(Node(Role.WORKER, 1))
    'worker:1'
    >>> Node.parse("ps:0")
    Node(role=<Role.PS: 'ps'>, index=0)
    """

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Node:
        """Read ``"worker:1"``."""
        role, _, index = text.partition(":")
        return cls(Role(role), int(index))


@dataclass(frozen=True)
class ClusterPlan(Rich):
    """Number of nodes of each role, and the resources of each node.

    Parameters
    ----------
    workers : int
        Nodes with the role ``worker``. Without a chief, ``worker:0`` is the chief.
    ps : int
        Parameter servers.
    chief : bool, "trains" or None
        Whether the cluster has a node with the role ``chief`` beside the workers. None: only with parameter servers,
        since their coordinator is the chief. ``"trains"``: with parameter servers the chief does not coordinate, but is
        fed and trains like the workers, as in TensorFlow 1.
    evaluator : bool
        Whether the cluster has a node that evaluates checkpoints beside the training. After the others have finished,
        it has ``grace`` seconds to end.
    input_mode : InputMode or str
        ``"spark"`` or ``"tensorflow"``.
    cpus, gpus : int
        Spark CPUs and GPUs of each node. Parameter servers and evaluators get no GPU.
    name : str
        The cluster's name in the notebook, the Spark UI and the logs.
    driver_ps_nodes : bool
        Whether the parameter servers run on the driver's host, outside Spark, without a Spark slot.
    master_node : str or None
        TensorFlowOnSpark's argument for a chief: ``"chief"``, or ``"master"``, the old name for the same role, which
        TensorFlow 2 does not have.
    protocol : str
        The protocol between TensorFlow's nodes. Released TensorFlow has only ``"grpc"``; a custom build may have others
        such as ``"grpc+verbs"``.
    evaluator_may_fail : bool
        Whether the training continues when the evaluator fails.

    Raises
    ------
    PlanError
        If a value is not possible; the message names it.

    Examples
    --------
    >>> plan = ClusterPlan(workers=2, name="mnist")
    >>> [str(node) for node in plan.nodes]
    ['worker:0', 'worker:1']
    """

    _rich = "plan"

    workers: int = 1
    ps: int = 0
    chief: bool | str | None = None
    evaluator: bool = False
    input_mode: InputMode | str = InputMode.SPARK
    cpus: int = 1
    gpus: int = 0
    name: str = "tfos"
    driver_ps_nodes: bool = False
    master_node: str | None = None
    protocol: str = "grpc"
    evaluator_may_fail: bool = False

    def __post_init__(self) -> None:
        for field, least in (("workers", 0), ("ps", 0), ("cpus", 1), ("gpus", 0)):
            check_count(field, getattr(self, field), least)
        if type(self.chief) not in (bool, type(None)) and self.chief != _TRAINS:
            raise PlanError(f"chief must be True, False or {_TRAINS!r}, got {self.chief!r}")
        if type(self.evaluator) is not bool:
            raise PlanError(f"evaluator must be True or False, got {self.evaluator!r}")
        self._take_master_node()
        try:
            object.__setattr__(self, "input_mode", InputMode(self.input_mode))
        except ValueError:
            raise PlanError(
                "input_mode must be 'spark' (rows of a DataFrame are fed) or 'tensorflow' (the nodes read files "
                f"themselves), got {self.input_mode!r}"
            ) from None
        if self.chief is None:
            object.__setattr__(self, "chief", self.ps > 0)
        if type(self.name) is not str or not re.fullmatch(r"(?=.*[^\W_])[\w .-]{1,64}", self.name):
            raise PlanError(
                "name must have at most 64 letters, digits, ' ', '_', '-' and '.', and a letter or digit among them, "
                f"got {self.name!r}"
            )
        if not self.workers and not self.chief:
            raise PlanError("a cluster needs at least one worker or a chief: workers=1")
        self._check_servers()

    def _take_master_node(self) -> None:
        if self.master_node is None:
            return
        if self.master_node not in ("chief", "master"):
            raise PlanError(f"master_node must be 'chief', or 'master', which means the same, got {self.master_node!r}")
        if self.chief is False:
            raise PlanError(
                f"master_node={self.master_node!r} asks for a chief, and chief=False for none: leave one out"
            )
        object.__setattr__(self, "chief", self.chief or True)

    def _check_servers(self) -> None:
        for field in ("driver_ps_nodes", "evaluator_may_fail"):
            if type(getattr(self, field)) is not bool:
                raise PlanError(f"{field} must be True or False, got {getattr(self, field)!r}")
        if self.ps and not self.workers and self.chief != _TRAINS:
            raise PlanError(f"ps={self.ps} needs at least one worker to serve: ask for workers=1 or more")
        if self.driver_ps_nodes and not self.ps:
            raise PlanError("driver_ps_nodes needs parameter servers, and the plan has none: ask for ps=1 or more")
        if self.evaluator_may_fail and not self.evaluator:
            raise PlanError("evaluator_may_fail needs an evaluator, and the plan has none: ask for evaluator=True")
        if type(self.protocol) is not str or not re.fullmatch(r"[a-z][a-z0-9_+]*", self.protocol):
            raise PlanError(
                f"protocol must be 'grpc', or the name of one that TensorFlow was built with, got {self.protocol!r}"
            )

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, in the order of the ranks."""
        counts = (
            (Role.CHIEF, int(bool(self.chief))),
            (Role.WORKER, self.workers),
            (Role.PS, self.ps),
            (Role.EVALUATOR, int(self.evaluator)),
        )
        return tuple(Node(role, index) for role, count in counts for index in range(count))

    @property
    def chief_node(self) -> Node:
        """The node that saves and whose result is the cluster's."""
        return self.nodes[0]

    @property
    def chief_trains(self) -> bool:
        """Whether a chief does as the workers do; otherwise it coordinates them."""
        return not self.ps or self.chief == _TRAINS

    @property
    def fed_nodes(self) -> tuple[Node, ...]:
        """The nodes that get rows from Spark."""
        if self.input_mode is InputMode.TENSORFLOW:
            return ()
        fed = {Role.CHIEF, Role.WORKER} if self.chief_trains else {Role.WORKER}
        return tuple(node for node in self.nodes if node.role in fed) or (self.chief_node,)

    @property
    def training_nodes(self) -> tuple[Node, ...]:
        """The nodes that train, or coordinate: when they are through, the training is over."""
        return tuple(node for node in self.nodes if node.role.computes)

    @property
    def finishing_nodes(self) -> tuple[Node, ...]:
        """The nodes whose ``main`` must return for the cluster to be done; the others serve them."""
        return tuple(node for node in self.nodes if node.role.must_return)

    @property
    def spark_nodes(self) -> tuple[Node, ...]:
        """The nodes that use a Spark slot."""
        return tuple(node for node in self.nodes if not self._is_on_driver(node))

    @property
    def driver_nodes(self) -> tuple[Node, ...]:
        """The nodes that run on the driver's host, outside Spark."""
        return tuple(node for node in self.nodes if self._is_on_driver(node))

    def _is_on_driver(self, node: Node) -> bool:
        return self.driver_ps_nodes and node.role is Role.PS

    def gpus_of(self, node: Node) -> int:
        """GPUs of one node: none for parameter servers and evaluators."""
        return self.gpus if node.role.computes else 0

    def __str__(self) -> str:
        rows = [("node", "slot", "fed from Spark")]
        nodes, fed = self.nodes, frozenset(self.fed_nodes)  # made once: a panel prints the plan of any cluster
        for node in nodes:
            gpus = self.gpus_of(node)
            slot = f"{self.cpus} CPU" + ("s" if self.cpus > 1 else "") + (f" + {gpus} GPU" if gpus else "")
            slot = "on the driver" if self._is_on_driver(node) else slot
            rows.append((str(node), slot, "yes" if node in fed else "no"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.master_node == "master":
            lines.append("chief:0 is the master that was asked for: TensorFlow 2 calls it chief")
        return "\n".join(
            [f"cluster {self.name}: {len(nodes)} nodes, input from {InputMode(self.input_mode).value}", *lines]
        )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names that :func:`tfos_nb.launch` takes for the plan."""
        return tuple(field.name for field in dataclasses.fields(cls))


def tf_config() -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the cluster and the task that TensorFlow's ``TF_CONFIG`` names for this process; empty without it.

    Examples
    --------
    >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}'
    >>> tf_config()
    ({'worker': ['h:1']}, {'type': 'worker', 'index': 0})
    >>> del os.environ["TF_CONFIG"]
    >>> tf_config()
    ({}, {})
    """
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return config.get("cluster", {}), config.get("task", {})


def training_addresses(cluster: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the addresses of the nodes that compute steps, in their order, from the cluster of ``TF_CONFIG``.

    Examples
    --------
    >>> training_addresses({"worker": ["h:2"], "chief": ["h:1"], "ps": ["h:3"]})
    ['h:1', 'h:2']
    """
    return [address for role in Role if role.computes for address in cluster.get(role.value, ())]
