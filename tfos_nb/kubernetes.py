"""Write the manifests of docs/kubernetes with a user's own values: ``python -m tfos_nb kubernetes render``.

::

    docs/kubernetes/*.yaml, spark-defaults.conf  ──▶  render(Values)  ──▶  one YAML text for kubectl apply -f -

The files come with the wheel. They are read and written by PyYAML, without a language for templates: only values are
replaced, in the objects. docs/kubernetes.md explains the objects.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tfos_nb.data_files import find_data_file
from tfos_nb.errors import MissingPackage, PlanError

__all__ = ["Values", "add_options", "render", "values_of"]

_LIST = Path("docs/kubernetes/kustomization.yaml")
_SETTINGS = "spark-defaults.conf"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The reference grammar of the OCI distribution: https://pkg.go.dev/github.com/distribution/reference
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*(?::\d+)?/)?"
_IMAGE = re.compile(rf"{_HOST}{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?", re.ASCII)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
_SPARK_SIZE = re.compile(r"(\d+)([kmgt])", re.ASCII)  # without the b that Spark allows: Java gets it as -Xmx, and fails
_CPUS = re.compile(r"\d+(\.\d{1,3})?|\d+m", re.ASCII)
_SETTING = re.compile(r"spark(\.[\w/-]+)+", re.ASCII)  # the names of labels and annotations may have a slash
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)
}
_LEAST_QUANTITY = 2**20  # bytes: who writes 20 means 20Gi
_PLAIN = re.compile(r"[A-Za-z][^:#\n]*[A-Za-z0-9/._-]")
"""Texts that only PyYAML's own rules need to quote. Kubernetes' reader takes ``y`` for true."""
_LEAST_MEMORY = 450 * 2**20  # UnifiedMemoryManager: one and a half times the 300 MiB that Spark reserves
_IN_SPARKS = (_SPARK_SIZE, "a size in Spark's units, such as 3g")
_IN_KUBERNETES = (_QUANTITY, "a size in Kubernetes' units, such as 4Gi")
_FORMS = {
    "namespace": (_LABEL, "up to 63 small letters, digits and hyphens, such as tfos-nb"),
    "image": (_IMAGE, "the name of an image, such as registry.example/tfos-nb:1"),
    "executor_memory": _IN_SPARKS,
    "executor_overhead": _IN_SPARKS,
    "shm": _IN_KUBERNETES,
    "spill": _IN_KUBERNETES,
    "notebook_cpus": (_CPUS, "a number of CPUs, such as 1 or 500m"),
    "notebook_memory": _IN_KUBERNETES,
    "storage": _IN_KUBERNETES,
}
_FIXED = {
    "spark.master": "the notebook's pod names it",
    "spark.authenticate": "the secrets of tfos_nb go through Spark's connections",
    "spark.network.crypto.enabled": "the secrets of tfos_nb go through Spark's connections",
    "spark.driver.bindAddress": "executors reach the driver through the service",
    "spark.driver.blockManager.port": "the service and the network policy have the same ports",
    "spark.driver.host": "it is the name of the service",
    "spark.port.maxRetries": "the service and the network policy have the same ports",
    "spark.kubernetes.executor.container.image": "give --image",
    "spark.kubernetes.executor.podTemplateContainerName": "it is the name in the template",
    "spark.kubernetes.executor.useDriverPodIP": "executors reach the driver through the service",
    "spark.driver.port": "the service and the network policy have the same ports",
    "spark.blockManager.port": "the service and the network policy have the same ports",
    "spark.kubernetes.container.image": "give --image",
    "spark.kubernetes.namespace": "give --namespace",
    "spark.executor.instances": "give --executors",
    "spark.executor.cores": "give --executor-cores",
    "spark.executor.memory": "give --executor-memory",
    "spark.executor.memoryOverhead": "give --executor-overhead",
    "spark.executor.resource.gpu.amount": "give --gpus",
    "spark.kubernetes.executor.podTemplateFile": "--gpus chooses the template",
    "spark.kubernetes.driver.pod.name": "the notebook's pod says its name",
    "spark.kubernetes.driver.ownPersistentVolumeClaim": "the notebook's role may not read volume claims",
    "spark.kubernetes.driver.reusePersistentVolumeClaim": "the notebook's role may not read volume claims",
    "spark.kubernetes.driver.service.deleteOnTermination": "the notebook's role may not delete services",
}
"""Settings that the manifests depend on, or that have an option."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """Values of a user's own; all others are those of docs/kubernetes.

    Parameters
    ----------
    namespace : str
        The namespace of all objects.
    image : str
        The image of the notebook and of the executors, which docs/kubernetes/Dockerfile describes.
    executors : int
        Number of executors of a session.
    executor_cores : int
        Cores, and so slots, of each.
    executor_memory, executor_overhead : str
        Memory of an executor's JVM, and of all else in its pod, in Spark's units (``3g``). TensorFlow and ``/dev/shm``
        are in the second.
    shm, spill : str
        Size of an executor's ``/dev/shm``, and of its volume for rows and shuffles, in Kubernetes' units (``1Gi``).
    gpus : int
        NVIDIA's GPUs of an executor.
    notebook_cpus, notebook_memory : str
        CPUs and memory of the notebook's pod, in Kubernetes' units.
    storage, storage_class : str
        Size of the volume ``/shared``, and its class; empty for the cluster's default class.
    create_namespace : bool
        Whether the namespace is among the objects.
    conf : mapping
        More of Spark's settings.

    Raises
    ------
    PlanError
        If a value is not valid.
    """

    namespace: str
    image: str
    executors: int = 2
    executor_cores: int = 2
    executor_memory: str = "1g"
    executor_overhead: str = "3g"
    shm: str = "1Gi"
    spill: str = "20Gi"
    gpus: int = 0
    notebook_cpus: str = "1"
    notebook_memory: str = "4Gi"
    storage: str = "50Gi"
    storage_class: str = ""
    create_namespace: bool = False
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (form, wanted) in _FORMS.items():
            _check(name, getattr(self, name), form, wanted)
        for name, least in (("executors", 1), ("executor_cores", 1), ("gpus", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"--{_option(name)} must be {least} or more, got {getattr(self, name)}")
        for part in self.storage_class.split(".") if self.storage_class else ():
            _check("storage_class", part, _LABEL, "the name of a StorageClass: kubectl get storageclass lists them")
        if self.create_namespace and (self.namespace == "default" or self.namespace.startswith("kube-")):
            raise PlanError(f"--create-namespace: {self.namespace} is a namespace of Kubernetes' own: choose another")
        self._check_sizes()
        for key, value in self.conf.items():
            _check_setting(key, value)
        cpus = self.conf.get("spark.task.cpus", "1")
        if not re.fullmatch(r"[1-9][0-9]*", cpus) or int(cpus) > self.executor_cores:
            cores = f"1 to {self.executor_cores}, the cores of an executor"
            raise PlanError(f"--conf spark.task.cpus must be {cores}, got {cpus}")

    def _check_sizes(self) -> None:
        for name in ("shm", "spill", "notebook_memory", "storage"):
            if _bytes(size := getattr(self, name)) < _LEAST_QUANTITY:
                raise PlanError(f"--{_option(name)} must be 1Mi or more, got {size}: say the unit, such as 20Gi")
        if not float(self.notebook_cpus.rstrip("m")):
            raise PlanError(f"--notebook-cpus must be more than 0, got {self.notebook_cpus}")
        if _bytes(self.executor_memory) < _LEAST_MEMORY:
            raise PlanError(f"--executor-memory must be 450m or more, as Spark demands, got {self.executor_memory!r}")
        if _bytes(self.shm) >= _bytes(self.executor_overhead):
            raise PlanError(
                f"--shm must be less than --executor-overhead, of whose memory it is a part, got {self.shm} and "
                f"{self.executor_overhead}: raise --executor-overhead"
            )


def _check_setting(key: str, value: str) -> None:
    if not _SETTING.fullmatch(key):
        raise PlanError(f"--conf {key}: must be a setting of Spark's and its value, such as spark.task.cpus=2")
    if key in _FIXED:
        raise PlanError(f"--conf {key}: this setting cannot be given here: {_FIXED[key]}")
    if not value or not value.isprintable():
        raise PlanError(f"--conf {key}: its value must be one line of printable characters, got {value!r}")


def _option(name: str) -> str:
    return name.replace("_", "-")


def _check(name: str, value: str, form: re.Pattern[str], wanted: str) -> None:
    if not form.fullmatch(value):
        raise PlanError(f"--{_option(name)} must be {wanted}, got {value!r}")


def _bytes(size: str) -> float:
    """Return a size in Kubernetes' or Spark's units in bytes.

    Examples
    --------
    >>> _bytes("1Gi") == _bytes("1g") == 2**30, _bytes("1G")
    (True, 1000000000.0)
    """
    if of_spark := _SPARK_SIZE.fullmatch(size):
        return float(of_spark[1]) * 1024.0 ** ("kmgt".index(of_spark[2]) + 1)
    found = _QUANTITY.fullmatch(size)
    assert found is not None, "it was checked"
    return float(found[1]) * float(_UNITS[found[2] or ""])


# --- the options of the command ---------------------------------------------------------------------------------------

_HELP = {
    "namespace": "the namespace of all objects",
    "image": "the image of the notebook and of the executors",
    "executors": "number of executors of a session",
    "executor_cores": "cores, and so slots, of an executor",
    "executor_memory": "memory of an executor's JVM, in Spark's units",
    "executor_overhead": "memory of all else in an executor's pod: TensorFlow, rows, /dev/shm",
    "shm": "size of an executor's /dev/shm, in Kubernetes' units",
    "spill": "size of an executor's volume for rows and shuffles",
    "gpus": "NVIDIA's GPUs of an executor",
    "notebook_cpus": "CPUs of the notebook's pod",
    "notebook_memory": "memory of the notebook's pod",
    "storage": "size of the volume /shared",
    "storage_class": "class of the volume /shared, which many pods may write to",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each of :class:`Values`."""
    for one in fields(Values):
        if one.name not in _HELP:
            continue
        required = one.name in ("namespace", "image")
        default = None if required else one.default
        told = _HELP[one.name] + (f" (default: {default})" if default else "")
        kind = int if isinstance(default, int) else str
        metavar = "N" if kind is int else one.name.rpartition("_")[2].upper()
        parser.add_argument(
            f"--{_option(one.name)}", required=required, default=default, type=kind, metavar=metavar, help=told
        )
    parser.add_argument("--create-namespace", action="store_true", help="have the namespace among the objects")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="K=V", help="one more of Spark's settings; may be repeated"
    )


def values_of(asked: argparse.Namespace) -> Values:
    """Return the values that a command line has.

    Raises
    ------
    PlanError
        If one is not valid.
    """
    pairs = [text.partition("=") for text in asked.conf]
    for text, (_, sign, value) in zip(asked.conf, pairs, strict=True):
        if not sign or not value.strip():
            raise PlanError(f"--conf {text}: must be a setting of Spark's and its value, such as spark.task.cpus=2")
    given = {one.name: getattr(asked, one.name) for one in fields(Values) if one.name != "conf"}
    return Values(**given, conf={key.strip(): value.strip() for key, _, value in pairs})


# --- the objects ------------------------------------------------------------------------------------------------------


def render(values: Values) -> str:
    """Return the objects as YAML, for ``kubectl apply -f -``.

    Raises
    ------
    MissingPackage
        If PyYAML is not installed.
    PlanError
        If the files are not found, or if Spark's driver does not fit into the notebook's memory.

    Examples
    --------
    >>> print(render(Values("training", "registry.example/tfos-nb:1", create_namespace=True)).partition("---")[0])
    apiVersion: v1
    kind: Namespace
    metadata:
      name: training
      labels:
        pod-security.kubernetes.io/enforce: restricted
    <BLANKLINE>
    """
    yaml = _yaml()
    folder = _folder()
    (listed,) = yaml.safe_load_all((folder / _LIST.name).read_text(encoding="utf-8"))
    objects = [one for name in listed["resources"] for one in _read(folder / name)]
    objects += [
        _config_map(made["name"], {name: _text_of(folder / name, values) for name in made["files"]})
        for made in listed["configMapGenerator"]
    ]
    for one in objects:
        if one["kind"] == "ConfigMap" and _SETTINGS in one["data"]:
            _check_driver(one["data"][_SETTINGS], values)
        if adapt := _ADAPT.get(one["kind"]):
            adapt(one, values)
        one["metadata"]["namespace"] = values.namespace
        for subject in one.get("subjects", ()):  # of a RoleBinding, in which the namespace cannot be left out
            subject["namespace"] = values.namespace
    first = [_namespace(values.namespace)] if values.create_namespace else []
    return str(yaml.dump_all([*first, *objects], Dumper=_dumper(), sort_keys=False, width=120, allow_unicode=True))


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        told = "PyYAML is not installed in this Python: python -m pip install 'tfos_nb[kubernetes]'"
        raise MissingPackage(told) from None


def _dumper() -> Any:
    """Return a dumper that writes texts of several lines as such."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None if _PLAIN.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def _folder() -> Path:
    """Return the folder of the manifests."""
    found = find_data_file(_LIST)
    if found is None:
        raise PlanError(f"{_LIST}: the manifests are not there; install tfos_nb again with pip")
    return found.parent


def _read(path: Path) -> Iterator[Object]:
    yield from _yaml().safe_load_all(path.read_text(encoding="utf-8"))


def _text_of(path: Path, values: Values) -> str:
    """Return the content of a file for a ConfigMap."""
    if path.name == _SETTINGS:
        return _with_settings(path.read_text(encoding="utf-8"), _settings(values))
    (pod,) = _read(path)
    _adapt_executor(pod, values)
    return str(_yaml().dump(pod, Dumper=_dumper(), sort_keys=False, width=120))


def _config_map(name: str, data: Mapping[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(data)}


def _namespace(name: str) -> Object:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _settings(values: Values) -> dict[str, str]:
    found = {
        "spark.kubernetes.container.image": values.image,
        "spark.executor.instances": str(values.executors),
        "spark.executor.cores": str(values.executor_cores),
        "spark.executor.memory": values.executor_memory,
        "spark.executor.memoryOverhead": values.executor_overhead,
    }
    if values.gpus:
        found |= {
            "spark.kubernetes.executor.podTemplateFile": "/etc/tfos-nb/executor-gpu.yaml",
            "spark.executor.resource.gpu.amount": str(values.gpus),
            "spark.executor.resource.gpu.vendor": "nvidia.com",
            "spark.executor.resource.gpu.discoveryScript": "/opt/gpus.sh",
            "spark.task.resource.gpu.amount": "1",
        }
    return {**found, **values.conf}


def _with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Return the text of spark-defaults.conf with other values, and with those that it does not have at its end.

    Examples
    --------
    >>> _with_settings("spark.a   2", {"spark.a": "4", "spark.b": "0"}).splitlines()
    ['spark.a   4', '', 'spark.b   0']
    """
    left = dict(settings)
    lines = []
    for line in text.splitlines():
        found = re.match(r"(spark\S+)(\s+)", line)
        if found is not None and found[1] in left:
            line = f"{found[1]}{found[2]}{_property(left.pop(found[1]))}"
        lines.append(line)
    added = ["", *(f"{key}   {_property(value)}" for key, value in left.items())] if left else []
    return "\n".join([*lines, *added]) + "\n"


def _property(value: str) -> str:
    r"""Return a value as it stands in a file of Java's properties.

    A backslash begins an escape there, and one sign before the value separates it from the name.

    Examples
    --------
    >>> print(_property(r"C:\new"), _property(":/opt/a.jar"))
    C:\\new \:/opt/a.jar
    """
    escaped = value.replace("\\", "\\\\")
    return f"\\{escaped}" if escaped.startswith((":", "=")) else escaped


def _check_driver(settings: str, values: Values) -> None:
    """Check that Spark's driver, which is a process of the notebook's pod, fits into the pod's memory."""
    found = re.search(r"^spark\.driver\.memory\s+(.*)$", settings, re.MULTILINE)
    memory = found[1].strip() if found else "1g"  # Spark's default
    if not _SPARK_SIZE.fullmatch(memory):
        raise PlanError(f"--conf spark.driver.memory must be a size in Spark's units, such as 3g, got {memory!r}")
    if _bytes(memory) < _LEAST_MEMORY:
        raise PlanError(f"--conf spark.driver.memory must be 450m or more, as Spark demands, got {memory!r}")
    if _bytes(values.notebook_memory) <= _bytes(memory):
        raise PlanError(
            f"--notebook-memory must be more than spark.driver.memory, which Spark's driver takes of it, got "
            f"{values.notebook_memory} and {memory}: raise --notebook-memory"
        )


def _adapt_notebook(one: Object, values: Values) -> None:
    (container,) = one["spec"]["template"]["spec"]["containers"]
    container["image"] = values.image
    container["resources"] = {
        "requests": {"cpu": values.notebook_cpus, "memory": values.notebook_memory},
        "limits": {"memory": values.notebook_memory},
    }


def _adapt_volume(one: Object, values: Values) -> None:
    one["spec"]["resources"]["requests"]["storage"] = values.storage
    if values.storage_class:
        one["spec"]["storageClassName"] = values.storage_class


def _adapt_executor(pod: Object, values: Values) -> None:
    sizes = {"shm": values.shm, "spark-local-dir-1": values.spill}
    for volume in pod["spec"]["volumes"]:
        if volume["name"] in sizes:
            volume["emptyDir"]["sizeLimit"] = sizes[volume["name"]]
    for container in pod["spec"]["containers"]:
        if "resources" in container and values.gpus:
            container["resources"]["limits"]["nvidia.com/gpu"] = values.gpus


_ADAPT = {"StatefulSet": _adapt_notebook, "PersistentVolumeClaim": _adapt_volume}
