"""Build TensorFlow's strategies for ``ctx.strategy``, configured for this cluster. Refuse those that would hang.

The kinds, and their names in TensorFlow::

    sync       MultiWorkerMirroredStrategy     every worker has the model; gradients are added up in each step
    async      ParameterServerStrategy         the variables are on the ps; the chief gives steps to the workers
    mirrored   MirroredStrategy                this node's own GPUs, or parts of its CPU
    one        OneDeviceStrategy               one device of this node
    default    the current strategy            TensorFlow's default strategy outside of any scope
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tfos_nb.errors import PlanError
from tfos_nb.runtime.code.first_use import note_first_use
from tfos_nb.runtime.control.plan import Node, Role, tf_config
from tfos_nb.runtime.control.processes import greets, run_apart
from tfos_nb.runtime.keras.scope import note_strategy

__all__ = ["KINDS", "PROTOCOL_SCHEMA", "PROTOCOL_VARIABLE", "ClusterTask", "ProtocolProbe", "refuse_what_fails"]

logger = logging.getLogger(__name__)

KINDS = ("auto", "sync", "async", "mirrored", "one", "default")
PROTOCOL_VARIABLE = "TFOS_NB_PROTOCOL"
"""The nodes' environment variable that holds the protocol of the plan."""
PROTOCOL_SCHEMA = "refused string"
_COMMUNICATIONS = ("auto", "ring", "nccl")
_FACTORY = re.compile(r"server factories are: \[ ?([^\]]*?) ?\]")
_ASK_PROTOCOL = (
    "import sys; from tfos_nb.runtime.program.strategies import check_protocol\n"
    "try: check_protocol(sys.argv[1])\n"
    "except Exception as error: print(f'refused: {error}')"
)
_PROBE_SECONDS = 120.0
_AWAITED = 60.0  # seconds for which a node waits for another's server before it leaves the wait to TensorFlow
_LOOKS_EVERY = 0.01

_key_bases = itertools.count(0, 1000)
"""The first key of each synchronous strategy of this process; a strategy uses a few."""


@dataclass(frozen=True)
class ClusterTask:
    """This process as a task of TensorFlow's cluster, with what the strategies need to know of it.

    Parameters
    ----------
    node : Node
        The node.
    cluster_spec : mapping of str to sequence of str
        All nodes' addresses, by role.
    gpus : sequence of str
        The GPUs that Spark gave it. Every node that trains has the same number.
    chief_trains : bool
        Whether a chief trains like the workers, even with parameter servers.

    Examples
    --------
    >>> task = ClusterTask(Node.parse("worker:1"), {"chief": ["h:1"], "worker": ["h:2", "h:3"]})
    >>> task.is_chief, task.num_workers, task.place_among_readers
    (False, 3, (2, 3))
    """

    node: Node
    cluster_spec: Mapping[str, Sequence[str]]
    gpus: Sequence[str] = ()
    chief_trains: bool = False

    @property
    def address(self) -> str:
        """This node's address, ``host:port``."""
        return self.cluster_spec[self.node.role.value][self.node.index]

    @property
    def is_chief(self) -> bool:
        """Whether this node saves, and its result is the cluster's: the chief, or ``worker:0`` without a chief."""
        has_chief = Role.CHIEF.value in self.cluster_spec
        return self.node.role is Role.CHIEF or (self.node == Node(Role.WORKER, 0) and not has_chief)

    @property
    def number(self) -> int:
        """The node's number among all: parameter servers first, then chief, evaluator and workers."""
        roles = (Role.PS, Role.CHIEF, Role.EVALUATOR, Role.WORKER)
        return sum(map(self._count, roles[: roles.index(self.node.role)])) + self.node.index

    @property
    def num_workers(self) -> int:
        """Number of nodes that train: the workers, and the chief if it trains too."""
        return self._training_chiefs + self._count(Role.WORKER)

    @property
    def may_be_synchronous(self) -> bool:
        """Whether this node can be one of several workers of a ``MultiWorkerMirroredStrategy``."""
        return self.num_workers > 1 and Role.PS.value not in self.cluster_spec and self.node.role.computes

    @property
    def place_among_readers(self) -> tuple[int, int]:
        """This node's index among the nodes that train, and their count; (0, 1) for any other node, which reads all."""
        if self.node.role is Role.WORKER:
            return self._training_chiefs + self.node.index, self.num_workers
        return (0, self.num_workers if self.node.role is Role.CHIEF and self._training_chiefs else 1)

    def await_leader(self) -> None:
        """Wait for the server of the first node that trains, to which the others connect."""
        leaders = self.cluster_spec.get(Role.CHIEF.value) or self.cluster_spec.get(Role.WORKER.value, ())
        if self.node.role.computes and not self.is_chief:
            await_servers(leaders[:1])

    @property
    def _training_chiefs(self) -> int:
        coordinates = Role.PS.value in self.cluster_spec and not self.chief_trains
        return 0 if coordinates else self._count(Role.CHIEF)

    def _count(self, role: Role) -> int:
        return len(self.cluster_spec.get(role.value, ()))

    def kind_of(self, asked: str) -> str:
        """Return the kind that applies on this node; refuse one that is not possible.

        Raises
        ------
        PlanError
            If the kind is not known, or does not fit the cluster's roles: TensorFlow would wait forever.
        """
        if asked not in KINDS:
            raise PlanError(f"strategy must be one of {', '.join(KINDS)}, got {asked!r}")
        has_ps = Role.PS.value in self.cluster_spec
        kind = ("async" if has_ps else "sync") if asked == "auto" else asked
        if kind == "async" and not has_ps:
            raise PlanError(
                "strategy('async') keeps the variables on parameter servers, and this cluster has none: launch it with "
                "ps=1 (--ps 1)"
            )
        if kind == "sync" and has_ps:
            raise PlanError(_SYNC_WITH_PS)
        if kind == "async" and self.node.role is not Role.CHIEF:
            raise PlanError(self._not_the_chief("strategy('async')"))
        return "one" if kind == "sync" and self.node.role.evaluates else kind

    def _not_the_chief(self, call: str) -> str:
        if Role.CHIEF.value not in self.cluster_spec:
            return f"{call} needs a chief that coordinates: launch with parameter servers and leave chief out"
        remedy = "evaluates with a strategy of its own: ctx.strategy('one')"
        if not self.node.role.evaluates:
            remedy = "serves it: begin main with `if not ctx.is_chief: return ctx.serve()`"
        return f"{call}: only the chief coordinates, and {self.node} {remedy}"

    def strategy(self, kind: str, options: Mapping[str, Any]) -> Any:
        """Build the strategy; ``options`` are those of :meth:`NodeContext.strategy`."""
        import tensorflow as tf

        if kind == "sync":
            return self._sync(**options)
        if kind == "async":
            return self._async(**options)
        if kind == "mirrored":
            return mirrored(**options)
        if options:
            raise PlanError(f"strategy({kind!r}) takes no {', '.join(options)}: leave it out")
        if kind == "one":
            gpus = tf.config.list_physical_devices("GPU")
            return tf.distribute.OneDeviceStrategy("/gpu:0" if gpus else "/cpu:0")
        return tf.distribute.get_strategy()

    def _sync(self, communication: str = "auto", timeout: float | None = None, protocol: str = "") -> Any:
        import tensorflow as tf

        collectives = tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=timeout, implementation=self._implementation(communication)
        )
        resolver = self.resolver(protocol) if (protocol or plans_protocol()) != "grpc" else None
        if resolver is not None:
            self.await_leader()
        return tf.distribute.MultiWorkerMirroredStrategy(resolver, collectives)

    def _implementation(self, communication: str) -> Any:
        import tensorflow as tf

        asked = str(communication).lower()
        if asked not in _COMMUNICATIONS:
            raise PlanError(f"communication must be one of {', '.join(_COMMUNICATIONS)}, got {communication!r}")
        seen = bool(tf.config.list_physical_devices("GPU"))
        if asked == "nccl" and not (self.gpus and seen):
            lacks = "TensorFlow sees no GPU here" if self.gpus else "this cluster's nodes have no GPUs (gpus=1)"
            raise PlanError(
                f"communication='nccl' connects GPUs, and {lacks}: use 'auto', which chooses by the available devices"
            )
        if asked == "auto" and self.gpus and not seen:
            logger.warning("Spark gave this node GPU %s, but TensorFlow sees none", ", ".join(self.gpus))
        chosen = "nccl" if asked == "auto" and self.gpus and seen else asked
        logger.info("sync: %s of %s", chosen, ", ".join(f"{role} x {len(a)}" for role, a in self.cluster_spec.items()))
        return tf.distribute.experimental.CommunicationImplementation[chosen.upper()]

    def _async(self, variable_partitioner: Any = None, protocol: str = "") -> Any:
        import tensorflow as tf

        resolver = self.resolver(protocol)
        await_servers([*self.cluster_spec[Role.PS.value], *self.cluster_spec.get(Role.WORKER.value, ())])
        return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner)

    def resolver(self, protocol: str = "") -> Any:
        """Return TensorFlow's resolver of this cluster, without the evaluators, which do not train."""
        import tensorflow as tf

        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.training_spec),
            task_type=self.node.role.value,
            task_id=self.node.index,
            rpc_layer=check_protocol(protocol or plans_protocol()),
        )

    @property
    def training_spec(self) -> dict[str, list[str]]:
        """The addresses of the nodes that train and serve."""
        return {role: list(at) for role, at in self.cluster_spec.items() if not Role(role).evaluates}

    def server(self, protocol: str = "", config: Any = None) -> Any:
        """Start TensorFlow's server on this node's address."""
        import tensorflow as tf

        if self.node.role.evaluates:
            raise PlanError(f"{self.node} does not train, so it cannot serve: call serve() on the other nodes only")
        return tf.distribute.Server(
            self.training_spec,
            job_name=self.node.role.value,
            task_index=self.node.index,
            protocol=check_protocol(protocol or plans_protocol()),
            config=config or tf.compat.v1.ConfigProto(inter_op_parallelism_threads=max(4, os.cpu_count() or 1)),
        )

    def connect(self, protocol: str = "") -> list[str]:
        """Make the devices of the serving nodes usable on this node; return the names of all devices."""
        import tensorflow as tf

        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(self.training_spec),
            job_name=self.node.role.value,
            task_index=self.node.index,
            protocol=check_protocol(protocol or plans_protocol()),
        )
        return [device.name for device in tf.config.list_logical_devices()]


_SYNC_WITH_PS = (
    "strategy('sync') would wait without end in a cluster with parameter servers (MultiWorkerMirroredStrategy): launch "
    "the cluster with ps=0, or use ctx.strategy('async')"
)


def mirrored(devices: int | Sequence[str] | None = None) -> Any:
    """Build a MirroredStrategy over this node's devices.

    Parameters
    ----------
    devices : int or sequence of str, optional
        Their names, or a number: of GPUs or, on a node without GPUs, of parts into which the CPU is divided.

    Raises
    ------
    PlanError
        If the node has too few GPUs, or the CPU can no longer be divided.
    """
    import tensorflow as tf

    if devices is None or not isinstance(devices, int):
        return tf.distribute.MirroredStrategy(devices)
    gpus = tf.config.list_physical_devices("GPU")
    if devices < 1 or (gpus and devices > len(gpus)):
        most = f", and at most {len(gpus)}, the number of this node's GPUs" if gpus else ""
        raise PlanError(f"devices must be 1 or more{most}, got {devices}")
    if gpus:
        return tf.distribute.MirroredStrategy([f"/gpu:{index}" for index in range(devices)])
    cut_cpu(devices)
    return tf.distribute.MirroredStrategy([f"/cpu:{index}" for index in range(devices)])


def cut_cpu(parts: int) -> None:
    """Divide the CPU into ``parts`` devices for TensorFlow; possible only before TensorFlow has used it."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    before = tf.config.get_logical_device_configuration(cpu)
    if before is not None and len(before) == parts:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * parts)
    except RuntimeError as error:
        raise PlanError(
            f"devices={parts}: TensorFlow has used the CPU already, so it cannot be divided. Build the strategy first "
            f"in main ({error})"
        ) from error


def mesh(task: ClusterTask, dimensions: Mapping[str, int], kind: str) -> Any:
    """Build a DTensor mesh over the devices of all workers; see ``NodeContext.mesh``."""
    import tensorflow as tf

    dtensor = tf.experimental.dtensor
    roles = [role for role in (Role.CHIEF.value, Role.WORKER.value) if role in task.cluster_spec]
    jobs = [address for role in roles for address in task.cluster_spec[role]]
    if task.node.role.value not in roles:
        raise PlanError(f"mesh must be called on nodes that train, and {task.node} does not train")
    position = jobs.index(task.cluster_spec[task.node.role.value][task.node.index])
    os.environ["DTENSOR_CLIENT_ID"] = str(position)
    os.environ["DTENSOR_NUM_CLIENTS"] = str(len(jobs))
    os.environ["DTENSOR_JOBS"] = ",".join(jobs)
    os.environ["DTENSOR_JOB_NAME"] = Role.WORKER.value
    total = functools.reduce(lambda product, size: product * size, dimensions.values(), 1)
    if total % len(jobs):
        raise PlanError(
            f"mesh {dict(dimensions)}: {total} devices cannot be shared out among {len(jobs)} nodes; make the product "
            f"of the dimensions a multiple of {len(jobs)}"
        )
    if kind == "CPU" and total > len(jobs):
        cut_cpu(total // len(jobs))
    task.await_leader()
    dtensor.initialize_accelerator_system(kind)
    return dtensor.create_distributed_mesh(list(dimensions.items()), device_type=kind)


def await_servers(addresses: Sequence[str]) -> None:
    """Wait until TensorFlow's servers at these addresses run, at most a minute.

    TensorFlow waits for them too, but if a server does not listen yet, it tries again only after a second (measured
    with 2.21).
    """
    deadline, pause = time.monotonic() + _AWAITED, threading.Event()
    for address in addresses:
        while not greets(address) and time.monotonic() < deadline:
            pause.wait(_LOOKS_EVERY)


def _await_leader() -> None:
    """Wait for the server of the first node that trains, to which a synchronous strategy of this process connects."""
    cluster, task = tf_config()
    if task.get("type") in (Role.CHIEF.value, Role.WORKER.value):
        ClusterTask(Node(Role(task["type"]), int(task.get("index", 0))), cluster).await_leader()


def plans_protocol() -> str:
    """Return the protocol from the plan of this node's cluster."""
    return os.environ.get(PROTOCOL_VARIABLE, "grpc")


def check_protocol(protocol: str) -> str:
    """Return ``protocol`` if this TensorFlow has it.

    Raises
    ------
    PlanError
        If it does not have it. The message names the protocols that it has.
    """
    import tensorflow as tf

    if protocol == "grpc":
        return protocol
    try:
        tf.distribute.Server({"worker": ["127.0.0.1:0"]}, protocol=protocol, start=False)
    except tf.errors.NotFoundError as error:
        found = _FACTORY.search(str(error))
        names = [name.removesuffix("_SERVER").lower().replace("_", "+") for name in found[1].split()] if found else []
        raise PlanError(
            f"protocol={protocol!r}: TensorFlow {tf.__version__} was built without it; use one of "
            f"{', '.join(names) or 'grpc'}. NCCL uses the fast network between GPUs with any protocol"
        ) from None
    return protocol


@dataclass(frozen=True)
class ProtocolProbe:
    """Spark task that checks an executor's TensorFlow for a protocol: one row, with the reason for a refusal or ''."""

    protocol: str
    python_path: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check in a separate process, since Spark continues to use this one, and yield the row."""
        for _ in batches:
            pass
        question = ("-c", _ASK_PROTOCOL, self.protocol)
        ended = run_apart(*question, path=self.python_path, seconds=_PROBE_SECONDS)
        refused = re.search(r"^refused: (.*)", ended.stdout, re.MULTILINE)
        told = refused[1] if refused else ended.stderr[-2000:] if ended.returncode else ""
        yield pa.RecordBatch.from_pydict({"refused": pa.array([told], pa.string())})


def refuse_what_fails() -> None:
    """Patch TensorFlow and Keras to refuse, with a reason, calls that would hang or fail without one.

    MultiWorkerMirroredStrategy in a cluster with parameter servers waits forever. Keras 3's ``fit`` under
    ParameterServerStrategy fails with advice that does not help. MultiWorkerMirroredStrategy after the first operation
    of TensorFlow fails with a message that does not mention that operation. A second MultiWorkerMirroredStrategy works
    (:func:`_keep_collectives`).
    """
    import tensorflow as tf

    note_first_use()
    _keep_collectives()
    _before(tf.distribute.MultiWorkerMirroredStrategy, "__init__", _before_synchronous)
    if importlib.util.find_spec("keras") is None:
        return
    import keras

    model: Any = keras.Model
    if hasattr(model, "distribute_strategy"):  # another backend's model has none, and does not run under a strategy
        for name in ("fit", "evaluate", "predict"):
            _before(model, name, _refuse_keras3)


def _before(owner: Any, name: str, check: Any) -> None:
    original = getattr(owner, name)
    if hasattr(original, "tfos_nb_checked"):
        return

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    checked.tfos_nb_checked = True  # type: ignore[attr-defined]
    setattr(owner, name, checked)


def _before_synchronous(strategy: Any, cluster_resolver: Any = None, *args: Any, **kwargs: Any) -> None:
    if Role.PS.value in tf_config()[0]:
        raise PlanError(_SYNC_WITH_PS)
    note_strategy(strategy)
    strategy._collective_key_base = next(_key_bases)
    if cluster_resolver is None:  # another resolver may name a cluster of its own
        _await_leader()


def _keep_collectives() -> None:
    """Patch TensorFlow to set up a process's collectives once, however many synchronous strategies it makes.

    Each ``MultiWorkerMirroredStrategy`` would set them up anew. That aborts the collectives in which other workers wait
    that are faster: one worker fails with "Delete called on non-empty BufRendezvous", the others wait forever. Instead,
    the strategies share them, and each has keys of its own for its collectives (:func:`_before_synchronous`).
    """
    from tensorflow.python.eager.context import Context

    enable = Context.enable_collective_ops
    if hasattr(enable, "tfos_nb_checked"):
        return

    @functools.wraps(enable)
    def enable_once(self: Any, server_def: Any) -> None:
        before = self._collective_ops_server_def
        if before is None or not self._initialized:
            enable(self, server_def)
            return
        if before.cluster != server_def.cluster:
            raise PlanError(
                "this process has a MultiWorkerMirroredStrategy of another cluster already: make all of them with the "
                "same resolver, or without one"
            )

    enable_once.tfos_nb_checked = True  # type: ignore[attr-defined]
    Context.enable_collective_ops = enable_once


def _refuse_keras3(model: Any, *args: Any, **kwargs: Any) -> None:
    import tensorflow as tf

    strategies = model.distribute_strategy, tf.distribute.get_strategy()
    if any(isinstance(strategy, tf.distribute.ParameterServerStrategy) for strategy in strategies):
        raise PlanError(
            "Keras 3's fit, evaluate and predict do not run under ParameterServerStrategy. Use tf_keras, which does "
            "(launch with env={'TF_USE_LEGACY_KERAS': '1'} and import tf_keras), or a loop of your own: "
            "ctx.coordinator_dataset(…).steps(train_step)"
        )
