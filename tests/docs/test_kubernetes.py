"""The manifests of docs/kubernetes: every field is valid, and values in several places agree.

``tests/cluster_managers/test_kubernetes.py`` applies them to a Kubernetes.
"""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pyspark
import pytest
import yaml

from tests.docs.manifests import (
    FOLDER,
    TEMPLATES,
    Object,
    Pod,
    container,
    dockerfile,
    executor,
    get,
    mounts,
    notebook,
    ports_open,
    read,
    rendered,
    settings,
    variables,
)
from tests.docs.reading import CHECKOUT, PAGES, blocks_of
from tfos_nb.ports import allowed_ports
from tfos_nb.spark.contexts.named import named_spark

VERSIONS = ("1.30", kubernetes_validate.latest_version())
SPARK_ROLE = {"spark-role": "executor"}
"""Of the labels that Spark puts on executors' pods, the one that the policies go by."""
PODS = [notebook(), *map(executor, TEMPLATES)]


# --- the schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_and_pod_template_is_valid_for_kubernetes(version: str) -> None:
    assert len(rendered()) == 10
    for one in (*rendered(), *map(executor, TEMPLATES)):
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("StatefulSet", "notebook", ("spec", "template", "spec", "hostNetwrk"), True),
        ("NetworkPolicy", "executors", ("spec", "ingress"), {"from": []}),
        ("Service", "notebook", ("spec", "ports", 0, "port"), "driver"),
    ],
)
def test_a_wrong_field_is_detected(kind: str, name: str, path: tuple[Any, ...], value: object) -> None:
    one = inner = copy.deepcopy(get(kind, name))
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)


def test_no_file_names_the_namespace() -> None:
    metadata_of_all = [one["metadata"] for one in (*rendered(), *map(executor, TEMPLATES))]
    assert [one for one in metadata_of_all if "namespace" in one] == []
    assert not any("spark.kubernetes.namespace" in key for key in settings())


def test_kustomize_renders_the_same_objects() -> None:
    known = (["kustomize", "build"], ["kubectl", "kustomize"])
    command = next((words for words in known if shutil.which(words[0])), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is here")
    text = subprocess.run([*command, str(FOLDER)], capture_output=True, text=True, timeout=60, check=True).stdout

    def by_name(objects: list[Object]) -> list[Object]:
        return sorted(objects, key=lambda one: (one["kind"], one["metadata"]["name"]))

    assert by_name(list(yaml.safe_load_all(text))) == by_name(rendered())


# --- who may connect to whom

NOTEBOOK, STRANGER, PROXY = (
    Pod.of(labels) for labels in (notebook()["metadata"]["labels"], {"app": "stranger"}, {"tfos-nb-access": "jupyter"})
)
EXECUTORS = [Pod.of({**executor(name)["metadata"]["labels"], **SPARK_ROLE}) for name in TEMPLATES]
FREE = set(range(32768, 61000))
"""The ports that Linux gives who asks for any: TensorFlow's, the nodes' for rows, and those of outgoing connections."""


def spark_ports(key: str) -> range:
    """Return the ports that Spark may use: the first, and one for each retry."""
    first = int(settings()[key])
    return range(first, first + int(settings()["spark.port.maxRetries"]) + 1)


DRIVER, BLOCKS = spark_ports("spark.driver.port"), spark_ports("spark.blockManager.port")
DOOR = allowed_ports("TFOS_SERVER_PORT", variables())


@pytest.mark.parametrize("node", EXECUTORS)
def test_executors_reach_each_other_and_only_the_needed_ports_of_the_notebook(node: Pod) -> None:
    assert ports_open(node, NOTEBOOK) == {*DRIVER, *BLOCKS, *DOOR}
    assert all(ports_open(node, other) >= FREE | set(BLOCKS) for other in EXECUTORS)


@pytest.mark.parametrize("node", EXECUTORS)
def test_the_driver_connects_only_to_the_block_managers_of_executors(node: Pod) -> None:
    assert ports_open(NOTEBOOK, node) == {BLOCKS[0]}


def test_other_pods_reach_nothing_and_a_proxy_reaches_only_jupyter() -> None:
    assert not any(ports_open(STRANGER, target) for target in (NOTEBOOK, *EXECUTORS))
    assert not any(ports_open(PROXY, node) for node in EXECUTORS)
    assert ports_open(PROXY, NOTEBOOK) == {8888} == {port["containerPort"] for port in container(notebook())["ports"]}
    assert "--port=8888" in container(notebook())["args"]


def test_the_service_and_the_page_name_the_ports_in_use() -> None:
    taken = [*DRIVER, *BLOCKS, *DOOR]
    assert len(set(taken)) == len(taken)
    assert not FREE & set(taken), "another connection may have taken it"
    assert [one["port"] for one in get("Service", "notebook")["spec"]["ports"]] == taken
    page = PAGES["kubernetes"].read_text(encoding="utf-8")
    for ports, key in ((DRIVER, "spark.driver.port"), (BLOCKS, "spark.blockManager.port"), (DOOR, "TFOS_SERVER_PORT")):
        assert f"| executors | notebook | {ports[0]}-{ports[-1]}, `{key}` |" in page
    assert f"| notebook | executors | {BLOCKS[0]}, `spark.blockManager.port` |" in page


def test_a_selector_matches_either_the_notebook_or_the_executors() -> None:
    own = get("StatefulSet", "notebook")["spec"]["selector"]
    assert get("Service", "notebook")["spec"]["selector"] == own["matchLabels"]
    for selector in (own, get("NetworkPolicy", "notebook")["spec"]["podSelector"]):
        assert NOTEBOOK.wears(selector)
        assert not any(node.wears(selector) for node in EXECUTORS)
    selector = get("NetworkPolicy", "executors")["spec"]["podSelector"]
    assert all(node.wears(selector) for node in EXECUTORS)
    assert not NOTEBOOK.wears(selector)


# --- values in several places


def test_the_driver_is_reached_by_the_name_of_the_service() -> None:
    assert settings()["spark.driver.host"] == get("Service", "notebook")["metadata"]["name"]
    assert settings()["spark.driver.host"] == get("StatefulSet", "notebook")["spec"]["serviceName"]
    assert "TFOS_SERVER_HOST" not in variables()


def test_the_pod_names_its_place_and_its_session_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    given = variables()["PYSPARK_SUBMIT_ARGS"]
    assert re.fullmatch(
        r"--master k8s://https://\S+:\d+ --conf spark\.kubernetes\.namespace=<metadata\.namespace> "
        r"--conf spark\.kubernetes\.driver\.pod\.name=<metadata\.name> pyspark-shell",
        given,
    )
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", given)
    assert named_spark()


def test_objects_refer_to_existing_objects() -> None:
    account = get("ServiceAccount", notebook()["spec"]["serviceAccountName"])["metadata"]
    (subject,) = get("RoleBinding", "tfos-nb")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account["name"]}
    assert get("Role", get("RoleBinding", "tfos-nb")["roleRef"]["name"])
    for pod in PODS:
        volumes = {one.pop("name"): one for one in copy.deepcopy(pod["spec"]["volumes"])}
        assert mounts(pod).keys() == volumes.keys()
        assert all(get("ConfigMap", one["configMap"]["name"]) for one in volumes.values() if "configMap" in one)
        claims = [one["persistentVolumeClaim"] for one in volumes.values() if "persistentVolumeClaim" in one]
        assert [get("PersistentVolumeClaim", claim["claimName"])["spec"]["accessModes"] for claim in claims] == [
            ["ReadWriteMany"]
        ]


def test_sparks_settings_and_the_templates_are_mounted_where_spark_reads_them() -> None:
    maps = {one["name"]: one["configMap"]["name"] for one in notebook()["spec"]["volumes"] if "configMap" in one}
    there = {f"{mounts(notebook())[name]}/{file}" for name, of in maps.items() for file in get("ConfigMap", of)["data"]}
    asked = [given["spark.kubernetes.executor.podTemplateFile"] for given in (settings(), of_gpus())]
    assert there == {f"{dockerfile()[1]['SPARK_HOME']}/conf/spark-defaults.conf", *asked}
    assert [Path(path).name for path in asked] == list(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_agrees_with_the_settings(name: str) -> None:
    pod = executor(name)
    assert container(pod)["name"] == settings()["spark.kubernetes.executor.podTemplateContainerName"]
    grace = settings()["spark.kubernetes.executor.terminationGracePeriodSeconds"]
    assert f"{pod['spec']['terminationGracePeriodSeconds']}s" == grace
    assert mounts(pod)["shm"] == "/dev/shm"
    assert [volume for volume in mounts(pod) if volume.startswith("spark-local-dir-")] == ["spark-local-dir-1"]


def test_the_templates_differ_only_in_what_a_gpu_needs() -> None:
    plain, gpu = map(executor, TEMPLATES)
    resource = f"{of_gpus()['spark.executor.resource.gpu.vendor']}/gpu"
    amount = int(of_gpus()["spark.executor.resource.gpu.amount"])
    assert gpu["spec"]["containers"][0].pop("resources") == {"limits": {resource: amount}}
    assert [one["key"] for one in gpu["spec"].pop("tolerations")] == [resource]
    assert gpu["spec"].pop("nodeSelector")
    assert gpu == plain


def test_all_pods_have_the_same_user_image_and_shared_path() -> None:
    (security,) = {yaml.safe_dump(pod["spec"]["securityContext"]) for pod in PODS}
    user, group = (yaml.safe_load(security)[key] for key in ("runAsUser", "runAsGroup"))
    assert f"useradd --uid {user} --gid {group} " in dockerfile()[0]
    assert f"\nUSER {user}:{group}\n" in dockerfile()[0]
    assert container(notebook())["image"] == settings()["spark.kubernetes.container.image"]
    assert {mounts(pod)["shared"] for pod in PODS} == {"/shared"}
    assert "--ServerApp.root_dir=/shared" in container(notebook())["args"]


def test_sparks_requests_to_the_api_server_are_allowed_by_the_role() -> None:
    allowed = {resource for rule in get("Role", "tfos-nb")["rules"] for resource in rule["resources"]}
    assert allowed == {"pods", "configmaps"}
    for key in ("service.deleteOnTermination", "ownPersistentVolumeClaim", "reusePersistentVolumeClaim"):
        assert settings()[f"spark.kubernetes.driver.{key}"] == "false"
    assert not any(executor(name)["spec"]["automountServiceAccountToken"] for name in TEMPLATES)


# --- what Spark knows


def of_block(having: str, without: str = "(none)") -> dict[str, str]:
    """Return the settings of the one block of the page in which the one text is and the other is not."""
    (block,) = [one for one in blocks_of("kubernetes") if having in one.text and without not in one.text]
    return dict(re.findall(r'config\("([\w.]+)", "?([^")]+)"?\)', block.text))


def of_gpus() -> dict[str, str]:
    """Return the settings with which each executor has a GPU."""
    return of_block("resource.gpu", "dynamicAllocation")


@functools.cache
def spark_constants() -> bytes:
    """Return the bytes of Spark's classes that name its settings and its pods' labels and volumes."""
    found = []
    for jar in sorted((Path(pyspark.__file__).parent / "jars").glob("spark-*.jar")):
        with zipfile.ZipFile(jar) as opened:
            names = [name for name in opened.namelist() if re.search(r"[cC]onf|/resource/|/k8s/|/network/util/", name)]
            found += [opened.read(name) for name in names if name.endswith(".class")]
    return b"".join(found)


def is_constant(text: str) -> bool:
    """Whether a class file has this constant: the kind of entry, the length, and the text."""
    return b"\x01" + len(text).to_bytes(2, "big") + text.encode() in spark_constants()


def is_setting(key: str) -> bool:
    """Whether Spark has a setting of this name; Spark composes the names of a resource's settings."""
    head, of_a_resource, tail = key.partition(".resource.gpu.")
    return is_constant(head) and is_constant(tail) if of_a_resource else is_constant(key)


def test_spark_knows_every_setting() -> None:
    submitted = re.findall(r"--conf (\S+?)=", variables()["PYSPARK_SUBMIT_ARGS"])
    of_the_page = *of_gpus(), *of_block("dynamicAllocation"), *of_block("api.example")
    assert len(of_the_page) > 15
    assert [key for key in (*settings(), *submitted, *of_the_page) if not is_setting(key)] == []
    assert not is_setting("spark.kubernetes.executor.podTemplate")
    assert not is_setting("spark.executor.resource.gpu.amounts")


def test_the_policies_label_and_the_volumes_name_are_sparks_own() -> None:
    assert all(is_constant(part) for part in (*SPARK_ROLE, *SPARK_ROLE.values(), "spark-local-dir-"))
    for name in TEMPLATES:
        (template,) = read(name)
        assert not template["metadata"]["labels"].keys() & SPARK_ROLE.keys(), "Spark reserves it"


# --- the image


def test_the_image_has_supported_versions() -> None:
    """Debian 12 has Python 3.11 and Java 17. All else is what constraints.txt allows."""
    text, _ = dockerfile()
    assert text.count("FROM ") == 1
    assert "FROM docker.io/library/debian:bookworm-slim\n" in text
    assert "Programming Language :: Python :: 3.11" in (metadata.metadata("tfos_nb").get_all("Classifier") or [])
    installs = re.findall(r"pip install .*", text)
    assert installs
    assert all("--constraint /build/constraints.txt" in line for line in installs)


def test_the_image_copies_existing_files_and_its_scripts_are_where_spark_looks() -> None:
    text, _ = dockerfile()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in line.split()[:-1]}
    assert {"setup.py", "pyproject.toml", "tfos_nb", "jupyter-config"} <= copied
    assert all((CHECKOUT / name).exists() for name in copied)
    scripts = [Path(name).name for name in copied if name.endswith(".sh")]
    assert all((FOLDER / name).stat().st_mode & 0o111 for name in scripts), "they are executable"
    assert "decom.sh" in scripts, "Spark runs /opt/decom.sh in a pod that is about to end"
    assert text.endswith('\nENTRYPOINT ["/opt/entrypoint.sh"]\n')
    assert of_gpus()["spark.executor.resource.gpu.discoveryScript"] in [f"/opt/{name}" for name in scripts]


@pytest.mark.parametrize("name", ["entrypoint.sh", "decom.sh", "gpus.sh"])
def test_a_script_of_the_image_is_valid(name: str) -> None:
    interpreter = (FOLDER / name).read_text().splitlines()[0].removeprefix("#!")
    subprocess.run([interpreter, "-n", str(FOLDER / name)], check=True)


@pytest.mark.parametrize(
    ("said", "told"),
    [("0\\n1\\n", '{"name": "gpu", "addresses": ["0", "1"]}'), ("3\\n", '{"name": "gpu", "addresses": ["3"]}')],
)
def test_the_gpus_of_a_pod_are_told_in_sparks_form(tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{said}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    search = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([str(FOLDER / "gpus.sh")], env=search, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == told
