"""The files of docs/kubernetes as kustomize renders them, and the connections that their policies allow."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from tests.docs.reading import CHECKOUT

__all__ = [
    "FOLDER",
    "TEMPLATES",
    "Object",
    "Pod",
    "container",
    "dockerfile",
    "executor",
    "get",
    "mounts",
    "notebook",
    "ports_open",
    "read",
    "rendered",
    "settings",
    "variables",
]

Object = dict[str, Any]
FOLDER = CHECKOUT / "docs" / "kubernetes"
TEMPLATES = ("executor.yaml", "executor-gpu.yaml")


class _Strictly(yaml.SafeLoader):
    """A loader that treats a duplicate key as an error, like the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice among {keys}{node.start_mark}"
        return super().construct_mapping(node, deep=deep)


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def read(name: str) -> list[Object]:
    """Return the objects of a file."""
    return list(yaml.load_all(text_of(name), Loader=_Strictly))


@functools.cache
def rendered() -> list[Object]:
    """Render the folder as kustomize does; only the features that the folder uses are supported."""
    (told,) = read("kustomization.yaml")
    assert told.keys() <= {"apiVersion", "kind", "resources", "generatorOptions", "configMapGenerator"}
    assert told["generatorOptions"] == {"disableNameSuffixHash": True}
    objects = [one for name in told["resources"] for one in read(name)]
    for made in told["configMapGenerator"]:
        assert made.keys() == {"name", "files"}
        data = {name: text_of(name) for name in made["files"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    return objects


def get(kind: str, name: str) -> Object:
    """Return the one object of a kind and a name."""
    (one,) = [one for one in rendered() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


@functools.cache
def settings() -> dict[str, str]:
    """Return the settings of spark-defaults.conf."""
    lines = [line for line in text_of("spark-defaults.conf").splitlines() if line and not line.startswith("#")]
    found = {line.split()[0]: line.split(None, 1)[1] for line in lines}
    assert len(found) == len(lines), "a setting is there twice"
    return found


# --- the pods


def notebook() -> Object:
    """Return the notebook's pod."""
    template: Object = get("StatefulSet", "notebook")["spec"]["template"]
    return template


def executor(template: str) -> Object:
    """Return an executor's pod from its template."""
    (pod,) = read(template)
    return pod


def container(pod: Object) -> Object:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def mounts(pod: Object) -> dict[str, str]:
    """Return the path of each volume of a pod."""
    return {one["name"]: one["mountPath"] for one in container(pod)["volumeMounts"]}


def variables() -> dict[str, str]:
    """Return the variables of the notebook's container, with references to others replaced as by Kubernetes."""
    found: dict[str, str] = {}
    for one in container(notebook())["env"]:
        given = one.get("value") or f"<{one['valueFrom']['fieldRef']['fieldPath']}>"
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], given)
    return found


def dockerfile() -> tuple[str, dict[str, str]]:
    """Return the Dockerfile, with one instruction a line, and its variables."""
    text = text_of("Dockerfile").replace("\\\n", "")
    told = re.findall(r"^(?:ARG|ENV) (.*)$", text, re.MULTILINE)
    return text, dict(pair for line in told for pair in re.findall(r"(\w+)=(\S+)", line))


# --- the policies


@dataclass(frozen=True)
class Pod:
    """A pod as a policy sees it."""

    labels: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, labels: dict[str, str]) -> Pod:
        return cls(frozenset(labels.items()))

    def wears(self, selector: Object) -> bool:
        """Whether the selector matches this pod."""
        assert selector.keys() == {"matchLabels"}
        return bool(selector["matchLabels"].items() <= self.labels)


def ports_open(source: Pod, target: Pod) -> set[int]:
    """Return the ports at which one pod may connect to another: all, if no policy selects the other."""
    policies = [one["spec"] for one in rendered() if one["kind"] == "NetworkPolicy"]
    about = [spec for spec in policies if target.wears(spec["podSelector"])]
    assert all(spec["policyTypes"] == ["Ingress"] for spec in about)
    if not about:
        return set(range(1, 65536))
    rules = [rule for spec in about for rule in spec["ingress"] if _is_from(rule, source)]
    return {port for rule in rules for ports in _ranges(rule) for port in ports}


def _is_from(rule: Object, source: Pod) -> bool:
    assert rule.keys() <= {"from", "ports"}
    assert all(peer.keys() == {"podSelector"} for peer in rule["from"])
    return any(source.wears(peer["podSelector"]) for peer in rule["from"])


def _ranges(rule: Object) -> list[range]:
    told = rule.get("ports", [{"protocol": "TCP", "port": 1, "endPort": 65535}])
    assert all(one["protocol"] == "TCP" for one in told)
    return [range(one["port"], one.get("endPort", one["port"]) + 1) for one in told]
