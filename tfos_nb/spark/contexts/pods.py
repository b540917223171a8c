"""What Kubernetes says of the pods of Spark's executors, in Kubernetes' own words.

Spark asks the API server by a client of its own, which may list and read pods (docs/kubernetes/rbac.yaml); it is used
here too. A pod that the API server refuses to make exists nowhere: only the log of Spark's allocator says so. It tries
again every second, so listening to it for a while is enough::

    why_ended(pods_of(sc), "3")             OOMKilled, Evicted, ... of the pod of executor 3
    with refusals(sc) as newest:
        explain(pods_of(sc), newest())      pending pods, and what they wait for; refused pods
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark import SparkContext

__all__ = ["Missing", "Pod", "explain", "pods_in", "pods_of", "refusal_in", "refusals", "why_ended"]

_ALLOCATOR = "org.apache.spark.scheduler.cluster.k8s"
_REFUSED = re.compile(r"KubernetesClientException: .*?Message: (.*?)(?:\. Received status:|$)", re.MULTILINE)
_EXIT_CODE = "exit code"  # in the reason of a pod whose container has failed
_HOPELESS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff",
     "ImageInspectError", "InvalidImageName", "RunContainerError"}
)  # fmt: skip
"""States of a waiting container that somebody has to mend."""


@dataclass(frozen=True)
class Pod:
    """One executor's pod.

    Attributes
    ----------
    name, executor : str
        The pod's name, and Spark's number of the executor.
    reason : str
        What Kubernetes says: why it does not run, or why it has ended. Empty if it runs.
    coming : bool
        Whether it runs, or may still start without anybody's help: it waits for a host, or for its image.
    ended : bool
        Whether it has ended or is about to. Spark makes another pod for it, if one is needed.
    """

    name: str
    executor: str
    reason: str
    coming: bool
    ended: bool = False

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Pod:
        """Read a pod as the API server gives it.

        Examples
        --------
        >>> no_host = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}
        >>> Pod.of({"metadata": {"name": "p"}, "status": {"phase": "Pending", "conditions": [no_host]}}).reason
        'Unschedulable: no cpu'
        """
        metadata, status = found["metadata"], found.get("status", {})
        waiting = _waiting(status)
        reason = _ended(found) or waiting or _unscheduled(status)
        hopeless = waiting.partition(":")[0] in _HOPELESS
        ended = bool(_ended(found)) or status.get("phase", "Pending") not in ("Pending", "Running")
        executor = metadata.get("labels", {}).get("spark-exec-id", "")
        return cls(metadata["name"], executor, reason, not hopeless and not ended, ended)


def _unscheduled(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _said(condition)
    return ""


def _waiting(status: Mapping[str, Any]) -> str:
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if "waiting" in container.get("state", {}):
            return _said(container["state"]["waiting"])
    return ""


def _ended(found: Mapping[str, Any]) -> str:
    """Return why a pod has ended or is about to: Kubernetes' own reason, and only without one its container's code."""
    status = found.get("status", {})
    disrupted = [one for one in status.get("conditions", ()) if one["type"] == "DisruptionTarget"]
    if status.get("reason") or disrupted:
        return _said(status if status.get("reason") else disrupted[0])
    for container in (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())):
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            limit = _memory_limit(found, container["name"]) if ended.get("reason") == "OOMKilled" else ""
            return f"{ended.get('reason') or 'Error'}, {_EXIT_CODE} {ended['exitCode']}" + limit
    return "deleted" if found["metadata"].get("deletionTimestamp") else ""


def _memory_limit(found: Mapping[str, Any], container: str) -> str:
    limits = {one["name"]: one.get("resources", {}).get("limits", {}) for one in found["spec"]["containers"]}
    limit = limits.get(container, {}).get("memory")
    return f": the pod's memory limit is {limit}" if limit else ""


def _said(one: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (one.get("reason", ""), " ".join(str(one.get("message", "")).split()))))


def refusal_in(log: str) -> str:
    """Return the newest message in Spark's log with which the API server has refused a request; empty without one.

    Examples
    --------
    >>> refusal_in("KubernetesClientException: Failure. Message: pods are forbidden: no quota. Received status: S")
    'pods are forbidden: no quota'
    """
    found = _REFUSED.findall(log)
    return str(found[-1]).strip() if found else ""


@dataclass(frozen=True)
class Missing:
    """Why executors do not run.

    Attributes
    ----------
    text : str
        The reasons; empty if none is known.
    coming : bool
        Whether they may still come by themselves.
    kinds : frozenset of str
        The words with which the reasons begin.
    """

    text: str = ""
    coming: bool = False
    kinds: frozenset[str] = frozenset()


def explain(pods: Sequence[Pod], refused: str) -> Missing:
    """Return why executors do not run, of all their pods and the newest refusal of a pod.

    A pod that has ended says nothing about those that start: Spark replaces it, or it was another cluster's.

    Examples
    --------
    >>> explain([Pod(f"p-exec-{n}", str(n), "Unschedulable: no room", True) for n in (1, 2)], "").text
    'Kubernetes says of pods p-exec-1, p-exec-2: Unschedulable: no room'
    """
    alive = [pod for pod in pods if not pod.ended]
    stuck = [pod for pod in alive if pod.reason]
    failed = [pod for pod in pods if pod.ended and (not alive or _EXIT_CODE in pod.reason)]
    by_reason: dict[str, list[Pod]] = {}  # by the word with which a reason begins: what follows may name a port
    for pod in (*stuck, *failed):
        if pod.reason:
            by_reason.setdefault(pod.reason.partition(":")[0], []).append(pod)
    said = [f"Kubernetes says of {_named(several)}: {several[0].reason.rstrip('.')}" for several in by_reason.values()]
    if refused:
        said.append(f"Kubernetes refuses Spark's pods: {refused}")
    if any(_EXIT_CODE in pod.reason for pod in failed):
        said.append("spark.kubernetes.executor.deleteOnTermination=false keeps such a pod, for kubectl logs")
    # If all run, their executors are about to register: the image may have come just now.
    coming = not refused and any(pod.coming for pod in stuck or alive)
    return Missing("; ".join(said), coming, frozenset(by_reason) | ({"refused"} if refused else frozenset()))


def _named(pods: list[Pod]) -> str:
    names = [pod.name for pod in pods[:3]] + (["..."] if len(pods) > 3 else [])
    return f"pod{'s' if len(pods) > 1 else ''} {', '.join(names)}"


def why_ended(pods: Sequence[Pod], executor: str) -> str:
    """Return why the pod of an executor has ended or is about to; empty if it runs or is gone.

    Examples
    --------
    >>> why_ended([Pod("p-exec-3", "3", "Evicted: the host has no memory", False)], "3")
    'Kubernetes says of pod p-exec-3: Evicted: the host has no memory'
    """
    for pod in pods:
        if pod.executor == executor and pod.reason:
            return f"Kubernetes says of pod {pod.name}: {pod.reason}"
    return ""


def pods_of(sc: SparkContext) -> tuple[Pod, ...]:
    """Return the pods of an application's executors."""
    namespace = sc.getConf().get("spark.kubernetes.namespace", "default")
    asked = _client(sc).pods().inNamespace(namespace)
    labelled = asked.withLabel("spark-role", "executor").withLabel("spark-app-selector", sc.applicationId)
    return pods_in(str(_jvm(sc).io.fabric8.kubernetes.client.utils.Serialization.asJson(labelled.list())))


def pods_in(listed: str) -> tuple[Pod, ...]:
    """Read the list of pods that Spark's client has written as JSON: an empty one has no ``items``.

    Examples
    --------
    >>> pods_in('{"apiVersion":"v1","kind":"PodList","metadata":{"resourceVersion":"8"}}')
    ()
    """
    return tuple(Pod.of(found) for found in json.loads(listed).get("items", ()))


@contextmanager
def refusals(sc: SparkContext) -> Iterator[Callable[[], str]]:
    """Keep in a block, in Spark's JVM, what its allocator of pods logs.

    Yields a function of the newest refusal since it was called last. Spark asks again every second, so one that is
    over, such as that of a quota, is not returned any more. Spark warns of it: where the session shows errors alone,
    the warnings are made for this block, and shown to nobody else.
    """
    jvm = _jvm(sc)
    log4j, kept = jvm.org.apache.logging.log4j, jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%m%n%throwable{full}%n").build()
    appender = log4j.core.appender.WriterAppender.createAppender(layout, None, kept, f"tfos_nb-{id(kept)}", False, True)
    appender.start()
    logger = log4j.LogManager.getLogger(_ALLOCATOR)
    configuration = logger.getContext().getConfiguration()
    is_new = not configuration.getLoggers().containsKey(_ALLOCATOR)
    logger.addAppender(appender)
    settings = configuration.getLoggerConfig(_ALLOCATOR)  # also of the loggers below it
    level, shown, is_deaf = settings.getLevel(), settings.isAdditive(), not logger.isWarnEnabled()
    if is_deaf:
        settings.setLevel(log4j.Level.WARN)
        settings.setAdditive(False)
        logger.getContext().updateLoggers()

    def newest() -> str:
        said = str(kept.toString())
        kept.getBuffer().setLength(0)
        return refusal_in(said)

    try:
        yield newest
    finally:
        logger.removeAppender(appender)
        if is_deaf:
            settings.setLevel(level)
            settings.setAdditive(shown)
        if is_new and settings.getAppenders().isEmpty():  # otherwise another block still listens
            configuration.removeLogger(_ALLOCATOR)  # it has a level of its own: sc.setLogLevel would not change it
        logger.getContext().updateLoggers()
        appender.stop()


def _jvm(sc: SparkContext) -> Any:
    assert sc._jvm is not None, "a classic session has one"
    return sc._jvm


def _client(sc: SparkContext) -> JavaObject:
    """Return Spark's own client, which has the session's login. Spark offers it to nobody."""
    backend = sc._jsc.sc().schedulerBackend()
    for field in backend.getClass().getDeclaredFields():
        if field.getName() == "kubernetesClient":
            field.setAccessible(True)
            return field.get(backend)
    raise LookupError(f"{backend.getClass().getName()} has no client of Kubernetes")
