"""What Kubernetes says of pods is read from its API's own objects; a test on a real cluster makes them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tfos_nb.spark.contexts.pods import Missing, Pod, explain, pods_in, refusal_in, refusals


def pod(phase: str = "Pending", *, name: str = "p-exec-1", deleted: bool = False, **status: Any) -> Pod:
    metadata = {"name": name, "labels": {"spark-exec-id": name.rpartition("-")[2]}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-11-29T09:00:00Z"
    container = {"name": "executor", "resources": {"limits": {"memory": "4Gi"}}}
    return Pod.of({"metadata": metadata, "spec": {"containers": [container]}, "status": {"phase": phase, **status}})


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "executor", "state": state}]}


NO_HOST = condition("PodScheduled", "False", "Unschedulable", "0/2 nodes are available:\n2 Insufficient cpu.")
NO_IMAGE = container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})
PULLING = container(waiting={"reason": "ContainerCreating"})
OUT_OF_MEMORY = container(terminated={"reason": "OOMKilled", "exitCode": 137})
EVICTED = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")


@pytest.mark.parametrize(
    ("found", "reason", "coming"),
    [
        (pod(**NO_HOST), "Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.", True),
        (pod(**PULLING), "ContainerCreating", True),
        (pod(**NO_IMAGE), "ImagePullBackOff: Back-off pulling image", False),
        (pod("Running", **container(running={})), "", True),
        (pod("Failed", **OUT_OF_MEMORY), "OOMKilled, exit code 137: the pod's memory limit is 4Gi", False),
        (pod("Failed", **container(terminated={"exitCode": 1})), "Error, exit code 1", False),
        (pod("Succeeded", **container(terminated={"reason": "Completed", "exitCode": 0})), "", False),
        (
            pod("Failed", reason="Evicted", message="The node was low on memory."),
            "Evicted: The node was low on memory.",
            False,
        ),
        (pod("Running", **EVICTED), "EvictionByEvictionAPI: Eviction API: evicting", False),
        (pod("Running", deleted=True), "deleted", False),
        (Pod.of({"metadata": {"name": "new"}}), "", True),
    ],
)
def test_a_pods_reason_is_kubernetes_own(found: Pod, reason: str, coming: bool) -> None:
    assert (found.reason, found.coming) == (reason, coming)


def test_pods_of_one_kind_are_named_together() -> None:
    four = [pod(name=f"p-exec-{number}", **NO_HOST) for number in range(1, 5)]
    missing = explain([*four, pod(name="p-exec-5", **NO_IMAGE)], "")
    assert missing.text == (
        "Kubernetes says of pods p-exec-1, p-exec-2, p-exec-3, ...: Unschedulable: 0/2 nodes are available: 2 "
        "Insufficient cpu; Kubernetes says of pod p-exec-5: ImagePullBackOff: Back-off pulling image"
    )
    assert missing.kinds == {"Unschedulable", "ImagePullBackOff"}
    assert missing.coming, "some may start"


def test_pods_that_are_refused_do_not_come_by_themselves() -> None:
    missing = explain([pod(**NO_HOST)], "pods are forbidden: exceeded quota: q")
    assert missing.text.endswith("Kubernetes refuses Spark's pods: pods are forbidden: exceeded quota: q")
    assert not missing.coming


def test_executors_of_pods_that_run_are_about_to_register() -> None:
    running = pod("Running", **container(running={}))
    assert explain([running], "") == Missing(text="", coming=True)
    assert not explain([running, pod(name="p-exec-2", **NO_IMAGE)], "").coming, "the other one is what is missing"
    assert not explain([], "").coming


LOG = """\
Exception when notifying snapshot subscriber.
io.fabric8.kubernetes.client.KubernetesClientException: Failure executing: POST at: https://k/api/v1/pods. \
Message: pods "a-exec-1" is forbidden: exceeded quota: old. Received status: Status(apiVersion=v1, code=403)
\tat io.fabric8.kubernetes.client.dsl.internal.OperationSupport.requestFailure(OperationSupport.java:642)
io.fabric8.kubernetes.client.KubernetesClientException: Failure executing: POST at: https://k/api/v1/pods. \
Message: pods "a-exec-2" is forbidden: exceeded quota: few. Received status: Status(apiVersion=v1, code=403)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def test_the_newest_refusal_is_found_in_sparks_log() -> None:
    assert refusal_in(LOG) == 'pods "a-exec-2" is forbidden: exceeded quota: few'
    assert refusal_in("Message: nothing of Kubernetes") == ""
    assert refusal_in("KubernetesClientException: Message: no more text") == "no more text"
    assert not re.search(r"\n", refusal_in(LOG))


def test_an_empty_list_of_pods_has_no_items() -> None:
    """As Spark's client writes it. A quota that admits no pod leaves such a list."""
    assert pods_in('{"apiVersion":"v1","kind":"PodList","metadata":{"resourceVersion":"812"}}') == ()
    assert [one.name for one in pods_in('{"items":[{"metadata":{"name":"p-exec-1"}}]}')] == ["p-exec-1"]


def test_a_pod_that_has_ended_says_nothing_of_those_that_start() -> None:
    """It was another cluster's, or Spark has made another one for it."""
    old, starts, runs = pod("Running", deleted=True), pod(name="p-exec-2", **PULLING), pod("Running", name="p-exec-3")
    assert explain([old, runs], "") == Missing("", True, frozenset())
    assert explain([old, starts, runs], "").text == "Kubernetes says of pod p-exec-2: ContainerCreating"
    assert explain([old, pod(name="p-exec-2", **NO_IMAGE), runs], "").coming is False
    assert explain([old], "") == Missing("Kubernetes says of pod p-exec-1: deleted", False, frozenset({"deleted"}))


def test_pods_that_fail_at_their_start_are_named_beside_those_that_come_for_them() -> None:
    crashed = pod("Failed", **container(terminated={"exitCode": 1}))
    told = explain([crashed, pod(name="p-exec-2", **PULLING)], "")
    assert "Kubernetes says of pod p-exec-1: Error, exit code 1; spark.kubernetes.executor.delete" in told.text
    assert told.coming
    assert not explain([crashed], "").coming


def test_an_image_of_an_init_container_that_cannot_be_pulled_is_named() -> None:
    waits = {"name": "executor", "state": {"waiting": {"reason": "PodInitializing"}}}
    first = {"name": "data", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    found = pod(initContainerStatuses=[first], containerStatuses=[waits])
    assert (found.reason, found.coming) == ("ErrImagePull: no such image", False)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"reason": "Evicted", "message": "Usage of EmptyDir volume exceeds"},
            "Evicted: Usage of EmptyDir volume exceeds",
        ),
        (EVICTED, "EvictionByEvictionAPI: Eviction API: evicting"),
    ],
)
def test_an_evicted_pod_has_this_reason_also_when_its_container_has_ended(status: dict[str, Any], reason: str) -> None:
    assert pod("Failed", **status, **container(terminated={"reason": "Error", "exitCode": 137})).reason == reason


def test_an_init_container_that_fails_is_named() -> None:
    waits = {"name": "executor", "state": {"waiting": {"reason": "PodInitializing"}}}
    first = {"name": "data", "state": {"terminated": {"reason": "Error", "exitCode": 1}}}
    found = pod("Failed", initContainerStatuses=[first], containerStatuses=[waits])
    assert (found.reason, found.coming) == ("Error, exit code 1", False)


def test_a_refusal_is_heard_at_any_level_of_the_sessions_log(spark: SparkSession) -> None:
    sc = spark.sparkContext
    assert sc._jvm is not None
    name = "org.apache.spark.scheduler.cluster.k8s"
    allocator = sc._jvm.org.apache.logging.log4j.LogManager.getLogger(f"{name}.ExecutorPodsAllocator")
    told = (
        "KubernetesClientException: Failure executing: POST. Message: pods are forbidden: no quota. Received status: S"
    )
    with refusals(sc) as newest:
        allocator.warn(told)
        assert newest() == "pods are forbidden: no quota"
        assert newest() == "", "it is over"
    assert not allocator.isWarnEnabled(), "the session shows errors alone, as before"
    try:
        sc.setLogLevel("WARN")
        assert allocator.isWarnEnabled(), "the session's level holds for it, as before"
    finally:
        sc.setLogLevel("ERROR")
