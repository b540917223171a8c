"""Manifests with a user's own values: what changes, what does not, and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.docs.manifests import rendered as as_kustomize_renders
from tfos_nb.__main__ import main
from tfos_nb.errors import PlanError
from tfos_nb.kubernetes import Values, render

VERSIONS = ("1.30", kubernetes_validate.latest_version())
OWN = Values(
    "training",
    "registry.example:5000/team/tfos-nb:1.2",
    executors=7,
    executor_cores=4,
    executor_memory="2g",
    executor_overhead="12g",
    shm="6Gi",
    spill="200Gi",
    gpus=2,
    notebook_cpus="500m",
    notebook_memory="8Gi",
    storage="1Ti",
    storage_class="nfs.fast",
    create_namespace=True,
    conf={"spark.task.cpus": "2", "spark.driver.memory": "2g"},
)


def objects(values: Values) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(render(values))}


def settings(made: dict[tuple[str, str], dict[str, Any]]) -> dict[str, str]:
    text = made["ConfigMap", "tfos-nb-spark"]["data"]["spark-defaults.conf"]
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert len({line[0] for line in lines}) == len(lines), "a setting is there twice"
    return {line[0]: line[1] for line in lines}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [Values("n", "i"), OWN])
def test_manifests_are_valid_for_kubernetes(values: Values, version: str) -> None:
    made = objects(values)
    for one in made.values():
        kubernetes_validate.validate(one, version, strict=True)
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] == values.namespace
    for text in made["ConfigMap", "tfos-nb-executors"]["data"].values():
        kubernetes_validate.validate(yaml.safe_load(text), version, strict=True)


def test_default_values_give_the_manifests_of_the_docs() -> None:
    made = objects(Values("training", "registry.example/tfos-nb:1"))
    assert len(made) == len(as_kustomize_renders())
    for theirs in copy.deepcopy(as_kustomize_renders()):
        ours = made[theirs["kind"], theirs["metadata"]["name"]]
        theirs["metadata"]["namespace"] = "training"
        for subject in theirs.get("subjects", ()):
            subject["namespace"] = "training"
        if theirs["metadata"]["name"] == "tfos-nb-executors":
            assert {name: yaml.safe_load(text) for name, text in ours.pop("data").items()} == {
                name: yaml.safe_load(text) for name, text in theirs.pop("data").items()
            }
        assert ours == theirs


def test_each_value_is_in_its_field() -> None:
    made = objects(OWN)
    assert made["Namespace", "training"]["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    assert made["RoleBinding", "tfos-nb"]["subjects"][0]["namespace"] == "training"
    claim = made["PersistentVolumeClaim", "tfos-nb-shared"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("nfs.fast", "1Ti")
    (notebook,) = made["StatefulSet", "notebook"]["spec"]["template"]["spec"]["containers"]
    assert notebook["image"] == OWN.image
    assert notebook["resources"] == {"requests": {"cpu": "500m", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    found = settings(made)
    expected = {
        "spark.kubernetes.container.image": OWN.image,
        "spark.kubernetes.executor.podTemplateFile": "/etc/tfos-nb/executor-gpu.yaml",
        "spark.executor.instances": "7",
        "spark.executor.cores": "4",
        "spark.executor.memory": "2g",
        "spark.executor.memoryOverhead": "12g",
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.cpus": "2",
        "spark.driver.memory": "2g",
    }
    assert found.items() >= expected.items()
    template = yaml.safe_load(made["ConfigMap", "tfos-nb-executors"]["data"]["executor-gpu.yaml"])["spec"]
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in template["volumes"]}
    assert (sizes["shm"], sizes["spark-local-dir-1"]) == ("6Gi", "200Gi")
    assert template["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"namespace": "My_Team"}, "--namespace must be up to 63 small letters, digits and hyphens, .*got 'My_Team'"),
        ({"namespace": "n" * 64}, "--namespace must be"),
        ({"image": "tfos nb"}, "--image must be the name of an image"),
        ({"executors": 0}, "--executors must be 1 or more, got 0"),
        ({"gpus": -1}, "--gpus must be 0 or more"),
        ({"executor_memory": "1Gi"}, "--executor-memory must be a size in Spark's units, such as 3g, got '1Gi'"),
        ({"executor_memory": "400m"}, "--executor-memory must be 450m or more, as Spark demands, got '400m'"),
        ({"storage": "50g"}, "--storage must be a size in Kubernetes' units, such as 4Gi, got '50g'"),
        ({"notebook_cpus": "two"}, "--notebook-cpus must be a number of CPUs"),
        ({"storage_class": "NFS"}, "--storage-class must be the name of a StorageClass: kubectl get storageclass"),
        ({"shm": "3Gi"}, "--shm must be less than --executor-overhead, .* got 3Gi and 3g: raise"),
        ({"conf": {"spark.executor.cores": "4"}}, "--conf spark.executor.cores: .*: give --executor-cores"),
        ({"conf": {"executor.cores": "4"}}, "--conf executor.cores: must be a setting of Spark's"),
        ({"conf": {"spark.a": "b\nspark.ui.port 1"}}, "--conf spark.a: its value must be one line of printable"),
        ({"conf": {"spark.a": ""}}, "--conf spark.a: its value must be one line of printable characters, got ''"),
        (
            {"notebook_memory": "1Gi"},
            "--notebook-memory must be more than spark.driver.memory, .* got 1Gi and 1g: raise",
        ),
        ({"conf": {"spark.driver.memory": "4g"}}, "more than spark.driver.memory, .* got 4Gi and 4g"),
        ({"image": "registry.example/TFOS:1"}, "--image must be the name of an image"),
        ({"image": "r.e/tföös:1"}, "--image must be the name of an image"),
        ({"image": "r.e/a/../b"}, "--image must be the name of an image"),
        ({"storage": "0"}, "--storage must be 1Mi or more, got 0: say the unit"),
        ({"spill": "20"}, "--spill must be 1Mi or more, got 20: say the unit, such as 20Gi"),
        ({"notebook_cpus": "0m"}, "--notebook-cpus must be more than 0, got 0m"),
        (
            {"namespace": "kube-system", "create_namespace": True},
            "--create-namespace: kube-system is a namespace of Kub",
        ),
        ({"conf": {"spark.task.cpus": "banana"}}, "--conf spark.task.cpus must be 1 to 2, .*, got banana"),
        ({"conf": {"spark.task.cpus": "8"}}, "--conf spark.task.cpus must be 1 to 2, the cores of an executor, got 8"),
        ({"conf": {"spark.driver.memory": "100m"}}, "--conf spark.driver.memory must be 450m or more"),
        ({"conf": {"spark.master": "local"}}, "--conf spark.master: this setting cannot be given here"),
        ({"conf": {"spark.port.maxRetries": "50"}}, "cannot be given here: the service and the network policy have"),
        ({"conf": {"spark.driver.memory": "4Gi"}}, "--conf spark.driver.memory must be a size in Spark's units"),
        ({"conf": {"spark.driver.memory": "2gb"}}, "--conf spark.driver.memory must be a size in Spark's units"),
        ({"conf": {"spark.kubernetes.driver.pod.name": "x"}}, "cannot be given here: the notebook's pod says its name"),
        ({"storage": "\uff15Gi"}, "--storage must be a size in Kubernetes' units"),
        ({"notebook_cpus": "\u0663"}, "--notebook-cpus must be a number of CPUs"),
    ],
)
def test_values_that_kubernetes_or_spark_would_refuse_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        render(Values(**{"namespace": "n", "image": "i", **given}))


def test_the_command_prints_yaml_or_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["kubernetes", "render", "--namespace", "n", "--image", "i:1", "--conf", "spark.sql.shuffle.partitions=8"]
    assert main(command) == 0
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(capsys.readouterr().out)}
    assert settings(made)["spark.sql.shuffle.partitions"] == "8"
    assert main([*command, "--shm", "9Gi"]) == 1
    assert capsys.readouterr().err.startswith("--shm must be less than --executor-overhead")
    assert main([*command, "--conf", "spark.x"]) == 1
    assert capsys.readouterr().err.startswith("--conf spark.x: must be a setting of Spark's and its value")


@pytest.mark.parametrize("name", ["y", "n", "1e3", "0o7", "12", "on", "null"])
def test_names_that_yaml_could_take_for_something_else_are_quoted(name: str) -> None:
    made = render(Values(name, "i", storage_class=name, create_namespace=True))
    for key in ("namespace", "storageClassName", "  name"):
        assert re.search(rf"""{key}: (["']){name}\1$""", made, re.MULTILINE)


def test_signs_that_java_would_take_for_its_own_are_escaped() -> None:
    """A backslash at a line's end would take the next setting into this one, and a colon would be lost."""
    conf = {"spark.a": "C:\\new\\", "spark.b": "1", "spark.executor.extraClassPath": ":/opt/a.jar", "spark.c": "=a=b"}
    made = objects(Values("n", "i", conf=conf))
    lines = made["ConfigMap", "tfos-nb-spark"]["data"]["spark-defaults.conf"].splitlines()
    assert lines[-4:] == [
        "spark.a   C:\\\\new\\\\",
        "spark.b   1",
        "spark.executor.extraClassPath   \\:/opt/a.jar",
        "spark.c   \\=a=b",
    ]


@pytest.mark.parametrize(
    "key",
    ["spark.kubernetes.node.selector.kubernetes.io/arch", "spark.kubernetes.executor.annotation.sidecar.io/inject"],
)
def test_names_of_labels_and_annotations_may_have_a_slash(key: str) -> None:
    made = objects(Values("n", "i", conf={key: "arm64"}))
    assert f"{key}   arm64" in made["ConfigMap", "tfos-nb-spark"]["data"]["spark-defaults.conf"].splitlines()
