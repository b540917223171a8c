"""A notebook's pod and executors' pods on a real Kubernetes of two nodes, by the manifests of docs/kubernetes.

They are applied as ``python -m tfos_nb kubernetes render`` writes them, with smaller sizes. A program runs in the
notebook's pod with the session of ``spark-defaults.conf``; what a test changes is on Spark's command line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.cluster_managers.kubernetes import image
from tests.cluster_managers.kubernetes.cluster import Kubernetes, Node, kubeconfig_of, kubernetes, why_not
from tests.cluster_managers.submit import PROGRAMS, as_options, outcome, printed, submitted
from tests.faults import steps_done_again, sum_of_ids
from tests.waiting import until

pytestmark = pytest.mark.kubernetes

CHECKOUT = Path(__file__).parents[2]
USER = 185
SIZES = ("--executor-cores", "1", "--executor-overhead", "1500m", "--shm", "512Mi", "--notebook-memory", "3Gi")
SELECTOR = "spark-role=executor"
SECONDS = 300.0


@dataclass
class Place:
    """A namespace with a notebook's pod, and the folder that is ``/shared`` in its pods."""

    kubernetes: Kubernetes
    shared: Path
    namespace: str = "tfos-nb"
    manifests: str = field(default="", repr=False)

    def ctl(self, *words: str, **options: Any) -> str:
        return self.kubernetes.ctl(f"--namespace={self.namespace}", *words, **options)

    def command(self, *words: str, conf: dict[str, object] | None = None) -> list[str]:
        """Return the command that runs another one in the notebook's pod, with more settings of Spark's."""
        more = " ".join(as_options(conf or {}))
        submit = f"${{PYSPARK_SUBMIT_ARGS% *}} {more} pyspark-shell"
        script = f'export PYTHONPATH=/shared PYSPARK_SUBMIT_ARGS="{submit}"; exec "$@"'
        kubectl = [*self.kubernetes.kubectl, f"--namespace={self.namespace}"]
        # By the entrypoint, as the notebook's own processes: it gives a user a name who has none.
        return [*kubectl, "exec", "notebook-0", "--", "/opt/entrypoint.sh", "bash", "-c", script, "bash", *words]

    @contextmanager
    def running(self, program: str, *arguments: str, conf: dict[str, object] | None = None) -> Iterator[Program]:
        """Start a program of tests/cluster_managers/programs in the notebook's pod; end it when the block is left."""
        words = ["timeout", f"{SECONDS:.0f}", "python", "-m", f"tests.cluster_managers.programs.{program}", *arguments]
        log = self.shared.parent / f"{program}-{len(list(self.shared.parent.glob(f'{program}-*.log')))}.log"
        with log.open("w") as out:
            process = subprocess.Popen(self.command(*words, conf=conf), stdout=out, stderr=out)
        try:
            yield Program(process, log)
        finally:
            process.kill()
            process.wait()
            subprocess.run(self.command("pkill", "-f", f"programs.{program}"), capture_output=True)
            until(lambda: not self.executors(), 60, every=0.5)

    def outcome(self, program: str, *arguments: str, conf: dict[str, object] | None = None) -> dict[str, Any]:
        """Run a program, and return its outcome."""
        with self.running(program, *arguments, conf=conf) as it:
            return it.outcome()

    def executors(self) -> dict[str, Any]:
        return self.kubernetes.pods(self.namespace, SELECTOR)

    def restart(self) -> None:
        """Have the notebook's pod read what was applied."""
        self.ctl("delete", "pod", "notebook-0")
        self.ready()

    def ready(self) -> None:
        self.ctl("wait", "--for=create", "pod/notebook-0", "--timeout=60s", seconds=70)
        self.ctl("wait", "--for=condition=Ready", "pod/notebook-0", "--timeout=120s", seconds=130)


@dataclass
class Program:
    """A program that runs in the notebook's pod."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, pattern: str, seconds: float = SECONDS) -> bool:
        """Wait until it has written something; False if it has ended without."""

        def looks() -> bool:
            return self.process.poll() is not None or bool(re.search(pattern, self.log.read_text(errors="replace")))

        until(looks, seconds, every=0.2)
        return bool(re.search(pattern, self.log.read_text(errors="replace")))

    def outcome(self) -> dict[str, Any]:
        code = self.process.wait(SECONDS)
        text = self.log.read_text(errors="replace")
        assert code == 0, text[-4000:]
        return printed(text)


def rendered(*options: str) -> str:
    """Return the manifests, by the command of the docs."""
    words = [sys.executable, "-m", "tfos_nb", "kubernetes", "render", "--image", image.NAME, *SIZES, *options]
    return subprocess.run(words, check=True, capture_output=True, text=True, cwd=CHECKOUT).stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    if reason := why_not():
        pytest.fail(reason, pytrace=False)  # nobody runs these tests but on purpose
    with kubernetes(tmp_path_factory.mktemp("kubernetes"), image.build(), gpus=2) as running:
        yield running


@pytest.fixture(scope="module")
def place(cluster: Kubernetes) -> Place:
    """The namespace of the docs, with a volume of this machine's that both nodes see."""
    shared = cluster.folder / "shared"
    shared.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "tests", shared / "tests", ignore=ignored)
    shared.chmod(0o777)
    cluster.ctl("apply", "--filename=-", given=json.dumps(volume_of(shared, "tfos-nb", "shared")))
    made = Place(cluster, shared, manifests=rendered("--namespace", "tfos-nb", "--create-namespace"))
    cluster.ctl("apply", "--filename=-", given=made.manifests)
    made.ready()
    return made


def volume_of(path: Path, namespace: str, name: str) -> dict[str, Any]:
    """Return a volume of this machine's, which both nodes see, for the claim of a namespace."""
    spec = {
        "capacity": {"storage": "50Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(path)},
        "claimRef": {"namespace": namespace, "name": "tfos-nb-shared"},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def folder(place: Place, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own in /shared, as this machine sees it."""
    made = place.shared / re.sub(r"\W+", "-", request.node.name)
    made.mkdir()
    made.chmod(0o777)
    return made


def in_pods(place: Place, path: Path) -> str:
    """Return a path below the shared folder as pods see it."""
    return f"/shared/{path.relative_to(place.shared)}"


# --- the page's commands ----------------------------------------------------------------------------------------------


def test_the_quickstart_runs_unchanged_in_the_notebooks_pod(place: Place, folder: Path) -> None:
    """Its own assertions are about the accuracy. The panel's static page is in its outputs."""
    shutil.copy(CHECKOUT / "notebooks" / "01_quickstart.ipynb", folder)
    (folder / "01_quickstart.ipynb").chmod(0o666)
    command = place.command("jupyter", "execute", "--inplace", f"{in_pods(place, folder)}/01_quickstart.ipynb")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = [
        output
        for cell in nbformat.read(folder / "01_quickstart.ipynb", 4)["cells"]
        for output in cell.get("outputs", ())
    ]
    data = [output["data"] for output in outputs if "data" in output]
    (found,) = [
        one["application/vnd.tfos-nb.outcome+json"] for one in data if "application/vnd.tfos-nb.outcome+json" in one
    ]
    assert found["accuracy"] >= 0.97
    assert any("worker:1" in one.get("text/html", "") for one in data), "the panel"
    assert "k8s://https://kubernetes.default.svc" in "".join(output.get("text", "") for output in outputs)


def test_rows_models_and_checkpoints_are_on_the_shared_volume(place: Place, folder: Path) -> None:
    """Training fed from a DataFrame, files read by TensorFlow, and two models applied by TFModel.transform."""
    found = place.outcome("train_on_shared", in_pods(place, folder))
    assert found["scored"] == {"keras": 600, "saved_model": 600}
    assert found["records"] == 600
    assert found["executors"] == ["1", "2"]
    assert {node["tfos_nb"] for node in found["fed"].values()} == {
        "/opt/python/lib/python3.11/site-packages/tfos_nb/__init__.py"
    }
    assert {pod["status"].get("phase") for pod in place.executors().values()} <= {"Succeeded", "Running"}
    assert until(lambda: not place.executors(), 60, every=0.5), "no pod is left"


def test_stop_leaves_neither_processes_nor_sockets_in_the_pods(place: Place, folder: Path) -> None:
    """The session stays, and with it the executors' pods, Spark's own processes in them, and the warm ones."""
    with place.running("stop_in_pod", in_pods(place, folder)) as it:
        assert it.said("session"), it.log.read_text()[-4000:]
        pods = [*place.executors(), "notebook-0"]
        before = {pod: ports_of(place, pod) for pod in pods}
        (folder / "launch").touch()
        assert it.said("running"), it.log.read_text()[-4000:]
        assert supervisors(place) == 2
        during = {pod: ports_of(place, pod) for pod in pods}
        assert all(len(during[pod]) > len(before[pod]) for pod in pods), "TensorFlow's servers, and the door"
        (folder / "stop").touch()
        assert it.said("stopped"), it.log.read_text()[-4000:]
        assert until(lambda: supervisors(place) == 0, 10, every=0.5)
        assert until(lambda: {pod: ports_of(place, pod) for pod in pods} == before, 10, every=1.0), (before, during)
        (folder / "end").touch()
        assert it.process.wait(60) == 0
    assert until(lambda: not place.executors(), 60, every=0.5)


def test_an_interrupt_of_the_program_leaves_no_process_in_the_pods(place: Place) -> None:
    with place.running("on_kubernetes", "wait") as it:
        assert it.said("running")
        assert until(lambda: supervisors(place) == 2, 60, every=0.5)
        # The brackets: the shell that starts pkill is not meant.
        subprocess.run(place.command("pkill", "-INT", "-f", "programs[.]on_kubernetes"), check=True)
        assert until(lambda: supervisors(place) == 0, 30, every=0.5)
    assert until(lambda: not place.executors(), 60, every=0.5)


def supervisors(place: Place) -> int:
    """Count the nodes' supervisors on both nodes of Kubernetes."""
    return sum("tfos_nb.runtime.node.supervisor" in line for line in of_tfos_nb(place))


def of_tfos_nb(place: Place) -> list[str]:
    """Return the processes of nodes, their supervisors, and the executors' warm processes."""
    return [line for node in place.kubernetes.nodes for line in node.processes() if "tfos_nb.runtime.node." in line]


ASK = """\
import json, subprocess, sys, urllib.request
listed = subprocess.run(["jupyter", "server", "list", "--jsonlist"], capture_output=True, text=True, check=True)
server = json.loads(listed.stdout)[0]
asked = urllib.request.Request("http://127.0.0.1:8888/" + sys.argv[2], method=sys.argv[1])
asked.add_header("Authorization", "token " + server["token"])
print(urllib.request.urlopen(asked, timeout=10).read().decode())
"""


def answer(place: Place, method: str, path: str) -> str:
    """Ask the notebook's Jupyter server, in its pod."""
    done = subprocess.run(place.command("python", "-c", ASK, method, path), capture_output=True, text=True, timeout=60)
    return done.stdout


def test_tensorboard_and_stop_go_through_the_notebooks_server(place: Place, folder: Path) -> None:
    """TensorBoard runs in the chief's pod; nothing but the door connects it with the notebook's pod."""
    with place.running("show_tensorboard", f"{in_pods(place, folder)}/logs", in_pods(place, folder)) as it:
        assert until(lambda: (folder / "cluster").exists(), 120), it.log.read_text()[-4000:]
        cluster = (folder / "cluster").read_text()
        page = f"tfos-nb/tb/{cluster}/data/plugin/timeseries/tags"
        assert until(lambda: "speed" in answer(place, "GET", page), 90, every=1.0), answer(place, "GET", page)
        answer(place, "POST", f"tfos-nb/api/clusters/{cluster}/stop")
        (folder / "end").touch()
        assert it.process.wait(60) == 0, it.log.read_text()[-4000:]


def test_a_detached_cluster_outlives_its_kernel_in_the_pod(place: Place, folder: Path) -> None:
    with place.running("detach_in_pod", "launch", in_pods(place, folder)) as it:
        assert it.process.wait(SECONDS) != 0, "it kills itself"
        assert (folder / "id").exists(), it.log.read_text()[-4000:]
        found = place.outcome("detach_in_pod", "attach", in_pods(place, folder))
    assert found["id"] == (folder / "id").read_text()
    assert sum(found["results"].values()) == 1000


def test_a_driver_outside_trains_with_executors_in_pods(place: Place, folder: Path, tmp_path: Path) -> None:
    """Spark's driver is a process of this machine, in client mode, with the rights of the notebook's account.

    /shared has the same path on both sides.
    """
    import yaml

    kubernetes, namespace = place.kubernetes, "outside"
    kubernetes.ctl("create", "namespace", namespace)
    objects = list(yaml.safe_load_all(rendered("--namespace", namespace)))
    needed = ("ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim")
    manifests = yaml.safe_dump_all([one for one in objects if one["kind"] in needed])
    kubernetes.ctl("apply", "--filename=-", given=manifests)
    kubernetes.ctl("apply", "--filename=-", given=json.dumps(volume_of(place.shared, namespace, "outside")))
    token = kubernetes.ctl("create", "token", "tfos-nb", f"--namespace={namespace}").strip()
    login = tmp_path / "kubeconfig"
    login.touch(0o600)
    login.write_text(yaml.safe_dump(kubeconfig_of(kubernetes, token)))
    template = tmp_path / "executor.yaml"
    text = (CHECKOUT / "docs" / "kubernetes" / "executor.yaml").read_text()
    template.write_text(text.replace("mountPath: /shared", f"mountPath: {place.shared}"))
    settings = {
        "spark.kubernetes.namespace": namespace,
        "spark.kubernetes.container.image": image.NAME,
        "spark.kubernetes.executor.podTemplateFile": str(template),
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
        "spark.kubernetes.executor.useDriverPodIP": "false",
        "spark.driver.host": kubernetes.network.address,
        "spark.driver.bindAddress": kubernetes.network.address,
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.executor.maxNumFailures": "1000000",
        "spark.executor.instances": "2",
        "spark.executor.cores": "1",
        "spark.executor.memoryOverhead": "1500m",
        "spark.decommission.enabled": "true",
        "spark.hadoop.fs.permissions.umask-mode": "000",  # the pods' user writes into folders that this one makes
    }
    given = [
        "--master",
        f"k8s://{kubernetes.url}",
        *as_options(settings),
        str(PROGRAMS / "train_on_shared.py"),
        str(folder),
    ]
    told = {
        "KUBECONFIG": str(login),
        "PYSPARK_PYTHON": "/opt/python/bin/python",
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": kubernetes.network.address,
    }
    before = os.umask(0)
    try:
        with submitted(given, told, tmp_path) as running:
            outcome(running)
    finally:
        os.umask(before)
    found = printed(running.log.read_text(errors="replace"))
    assert found["scored"] == {"keras": 600, "saved_model": 600}
    assert until(lambda: not kubernetes.pods(namespace), 60, every=0.5), "no pod is left"


# --- the loss of a pod ------------------------------------------------------------------------------------------------


def losing(place: Place, folder: Path, epochs: int, **options: Any) -> tuple[str, ...]:
    return "lose_a_host", in_pods(place, folder), str(epochs), json.dumps({"restarts": 3, **options})


def saved_once(folder: Path, state: str = "00000001") -> bool:
    return until(lambda: any(folder.glob(f"models/checkpoints/*/{state}/place.json")), 120, every=0.2)


def first_executor(place: Place) -> str:
    return min(place.executors())


@pytest.mark.parametrize("how", ["delete", "kill", "evict"])
def test_a_training_goes_on_after_the_loss_of_an_executors_pod(place: Place, folder: Path, how: str) -> None:
    """Announced or not. A node that is told in time leaves after it has saved a state: no step is done again."""
    epochs, steps = 6, folder / "steps"
    steps.mkdir()
    steps.chmod(0o777)
    args = {"fits": [{"epochs": epochs}], "pause_step": 0.05, "steps": in_pods(place, steps)}
    training = {"program": "several_fits", "args": args, "checkpoint_every": 1}
    with place.running(*losing(place, folder, epochs, **training)) as it:
        assert saved_once(folder, "fit/*"), it.log.read_text()[-4000:]
        remove(place, first_executor(place), how)
        found = it.outcome()
        text = it.log.read_text(errors="replace")
    for result in found["results"].values():
        assert result["after"][0][:2] == [epochs, epochs], "each row once an epoch"
    if how == "kill":
        assert re.search(r"worker:\d .*its supervisor is gone", text)
    else:
        assert re.search(r"Spark decommissions executor \d: Kubernetes says of pod \S+: \w+", text), text[-3000:]
        assert "its supervisor is gone" not in text, "it has left before"
        assert steps_done_again(steps) == 0
    if how == "evict":
        assert "EvictionByEvictionAPI" in text


def remove(place: Place, pod: str, how: str) -> None:
    if how == "evict":
        asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": place.namespace}}
        path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/eviction"
        place.ctl("create", f"--raw={path}", "--filename=-", given=json.dumps(asked))
    elif how == "delete":
        place.ctl("delete", "pod", pod, "--wait=false")
    else:
        kill(place, pod)


def kill(place: Place, pod: str) -> None:
    """Kill a pod's processes at once, as when a host dies: Kubernetes gives them time, whatever is asked of it."""
    status = place.kubernetes.pods(place.namespace)[pod]["status"]
    container = status["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    words = ("ctr", "--namespace=k8s.io", "task", "kill", "--all", "--signal=SIGKILL", container)
    node_of(place, pod).run(*words)


def node_of(place: Place, pod: str) -> Node:
    address = place.kubernetes.pods(place.namespace)[pod]["status"]["hostIP"]
    return next(node for node in place.kubernetes.nodes if node.host.address == address)


def test_a_drained_node_is_left_and_used_again(place: Place, folder: Path) -> None:
    """With ``min_workers`` the others go on; the lost worker joins them again once its pod finds a host."""
    epochs, notebooks = 40, node_of(place, "notebook-0")
    (host,) = (node.name for node in place.kubernetes.nodes if node != notebooks)
    elsewhere: dict[str, object] = {"spark.kubernetes.executor.request.cores": "600m"}  # the notebook's node takes one
    with place.running(*losing(place, folder, epochs, min_workers=1), conf=elsewhere) as it:
        assert saved_once(folder), it.log.read_text()[-4000:]
        try:
            place.ctl("drain", host, "--ignore-daemonsets", "--force", "--delete-emptydir-data", seconds=90)
            assert it.said(r"continues without worker:|Spark decommissions executor"), it.log.read_text()[-3000:]
        finally:
            place.ctl("uncordon", host)
        assert it.said(r"changes: worker:\d joined"), it.log.read_text()[-3000:]
        assert host in {pod["spec"]["nodeName"] for pod in place.executors().values()}
        found = it.outcome()
    assert {total for total, _ in found["results"].values()} == {sum_of_ids(epochs)}
    assert len(found["results"]) == 2


def test_an_eviction_that_ends_a_cluster_is_named(place: Place) -> None:
    with place.running("on_kubernetes", "wait") as it:
        assert it.said("running")
        evicted = first_executor(place)
        remove(place, evicted, "evict")
        found = it.outcome()
    assert re.search(rf"Kubernetes says of pod {evicted}: EvictionByEvictionAPI", found["error"])


def test_a_node_that_takes_too_much_memory_is_named_with_the_pods_limit(place: Place) -> None:
    with place.running("on_kubernetes", "take_memory") as it:
        assert it.said("running")
        limits = {one["spec"]["containers"][0]["resources"]["limits"]["memory"] for one in place.executors().values()}
        found = it.outcome()
    (limit,) = limits
    assert limit.endswith("Mi")
    gib = f"{int(limit[:-2]) / 1024:.1f}"
    told = rf"killed by SIGKILL \(OOMKilled\): its container has reached its memory limit of {re.escape(gib)} GiB"
    assert found["node"] == "worker:1"
    assert re.search(told, found["error"])


@pytest.mark.parametrize("how", ["killed", "deleted"])
def test_executors_end_with_the_notebooks_pod(place: Place, how: str) -> None:
    with place.running("on_kubernetes", "wait", json.dumps({"heartbeat_timeout": 5.0})) as it:
        assert it.said("running")
        assert supervisors(place) == 2
        if how == "killed":
            kill(place, "notebook-0")
            place.ctl("delete", "pod", "notebook-0", "--force", "--grace-period=0", "--wait=false")
        else:
            uid = place.kubernetes.pods(place.namespace)["notebook-0"]["metadata"]["uid"]
            place.ctl("delete", "pod", "notebook-0", seconds=90)  # until Jupyter has ended: 60 s at most
            assert place.kubernetes.pods(place.namespace).get("notebook-0", {}).get("metadata", {}).get("uid") != uid
        assert until(lambda: not of_tfos_nb(place), 5.0 + 10.0, every=0.2), "the heartbeat limit, and time to end"
        assert until(lambda: not place.executors(), 30, every=0.5), "Kubernetes removes them with their owner"
    place.ready()


# --- executors that do not start --------------------------------------------------------------------------------------


def refused(place: Place, **conf: object) -> tuple[str, float]:
    """Return the error of a launch whose executors do not start, and the seconds that it took."""
    settings = {name.replace("__", "."): value for name, value in conf.items()}
    found = place.outcome("on_kubernetes", "count", json.dumps({"rendezvous_timeout": 45.0}), conf=settings)
    assert found["seconds"] < 45.0 + 15.0
    return found["error"], found["seconds"]


NOWHERE = "127.0.0.1:1/nothing:1"
"""A registry that refuses the connection."""


def test_an_image_that_cannot_be_pulled_is_named(place: Place) -> None:
    error, _ = refused(place, spark__kubernetes__container__image=NOWHERE)
    assert re.search(
        r"PlanError: needs 2 slots .* Kubernetes says of pods? \S+exec-1.*(ErrImagePull|ImagePullBackOff)", error
    )
    assert NOWHERE in error


def test_pods_for_which_no_host_has_cpus_are_named(place: Place) -> None:
    error, seconds = refused(place, spark__kubernetes__executor__request__cores="50")
    assert re.search(
        r"Kubernetes says of pods \S+exec-1, \S+exec-2: Unschedulable: 0/2 nodes .*Insufficient cpu", error
    )
    assert "see to it that Kubernetes can run these pods" in error
    assert seconds > 40, "a host may be about to be started"


@pytest.mark.parametrize(("pods", "remedy"), [("1", "see to it that"), ("2", "ask for 1 node, or see to it that")])
def test_a_quota_is_named(place: Place, pods: str, remedy: str) -> None:
    """The notebook's pod counts, so the first quota admits no executor, and the second one admits one."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": pods}}}
    place.ctl("apply", "--filename=-", given=json.dumps(quota))
    try:
        error, _ = refused(place)
    finally:
        place.ctl("delete", "resourcequota", "few")
    assert re.search(
        r"Kubernetes refuses Spark's pods: pods \S+ is forbidden: exceeded quota: few, requested: pods=1", error
    )
    assert f"To fix this: {remedy} Kubernetes can run these pods" in error


def test_no_permission_to_create_pods_is_named(place: Place) -> None:
    less = [{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch", "delete"]}]
    place.ctl("patch", "role", "tfos-nb", "--type=json", f"--patch={json.dumps(less)}")
    try:
        error, _ = refused(place)
    finally:
        place.kubernetes.ctl("apply", "--filename=-", given=place.manifests)
    assert re.search(r"Kubernetes refuses Spark's pods: pods .*is forbidden: .* cannot create resource .pods.", error)


def test_no_permission_at_all_is_named(place: Place) -> None:
    place.ctl("delete", "rolebinding", "tfos-nb")
    try:
        found = place.outcome("on_kubernetes", "count")
    finally:
        place.kubernetes.ctl("apply", "--filename=-", given=place.manifests)
    assert found["seconds"] < 60.0
    assert re.search(
        r"PlanError: Spark did not start: Kubernetes refuses .* cannot get resource .pods.", found["error"]
    )
    assert "docs/kubernetes/rbac.yaml" in found["error"]


def test_an_image_without_tensorflow_is_named(place: Place) -> None:
    found = place.outcome("on_kubernetes", "count", conf={"spark.kubernetes.container.image": image.BARE})
    assert re.search(r"worker:\d .*tensorflow.* cannot be imported by the executor's Python", found["error"])
    assert found["seconds"] < 60.0


# --- stricter pods ----------------------------------------------------------------------------------------------------


def with_template(place: Place, name: str, change: Any) -> dict[str, object]:
    """Put a changed template of executors' pods in the shared folder; return the setting that selects it."""
    import yaml

    template = yaml.safe_load((CHECKOUT / "docs" / "kubernetes" / "executor.yaml").read_text())
    change(template["spec"])
    (place.shared / name).write_text(yaml.safe_dump(template))
    return {"spark.kubernetes.executor.podTemplateFile": f"/shared/{name}"}


def without_shm(spec: dict[str, Any]) -> None:
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "shm"]
    mounts = spec["containers"][0]["volumeMounts"]
    spec["containers"][0]["volumeMounts"] = [mount for mount in mounts if mount["name"] != "shm"]


def of_another_user(spec: dict[str, Any]) -> None:
    """As OpenShift does: a user without a name, of group 0, and a root file system that is read-only."""
    spec["securityContext"] |= {"runAsUser": 1000660000, "runAsGroup": 0}
    spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = True
    for name, path in (("tmp", "/tmp"), ("home", "/home/spark")):
        spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path})
        spec["volumes"].append({"name": name, "emptyDir": {}})


@pytest.fixture
def notebook_of_another_user(place: Place) -> Iterator[None]:
    """All pods of such a namespace have this user."""
    import yaml

    changed = list(yaml.safe_load_all(place.manifests))
    (notebook,) = (one for one in changed if one["kind"] == "StatefulSet")
    of_another_user(notebook["spec"]["template"]["spec"])

    def apply(manifests: str) -> None:
        place.ctl("apply", "--filename=-", given=manifests)
        place.restart()

    apply(yaml.safe_dump_all(changed))
    yield
    apply(place.manifests)


def test_sixty_four_megabytes_of_dev_shm_are_enough(place: Place, folder: Path) -> None:
    """The runtime's default, without the template's volume."""
    conf = with_template(place, "no-shm.yaml", without_shm)
    found = place.outcome("train_on_shared", in_pods(place, folder), conf=conf)
    assert found["scored"] == {"keras": 600, "saved_model": 600}
    seen = place.outcome("on_kubernetes", "count", conf=conf)["results"]
    assert {node[2] for node in seen.values()} == {64 << 20}


def test_a_state_of_fit_larger_than_dev_shm_is_kept_in_memory(place: Place, folder: Path) -> None:
    """96 MB, which outlive the process that is killed, and go to the node whose pod was killed.

    Both nodes may then be in one pod, which needs the memory for that.
    """
    conf = with_template(place, "no-shm-either.yaml", without_shm) | {"spark.executor.memoryOverhead": "2500m"}
    faults = [["worker:0", 2, 20, "kill"], ["worker:1", 3, 20, "kill the host", 2]]
    args = {"pause_step": 0.02, "numbers": 24_000_000, "schedule": faults}
    found = place.outcome(*losing(place, folder, 4, program="counting_fit", args=args), conf=conf)
    for total, generation, begun, *_ in found["results"].values():
        assert (total, generation) == (sum_of_ids(4), 3)
        assert 0 not in begun, "the third generation has gone on from a state"


@pytest.mark.usefixtures("notebook_of_another_user")
def test_a_user_without_a_name_and_a_read_only_root_file_system(place: Place, folder: Path) -> None:
    conf = with_template(place, "other-user.yaml", of_another_user)
    found = place.outcome("train_on_shared", in_pods(place, folder), conf=conf)
    assert found["scored"] == {"keras": 600, "saved_model": 600}
    seen = place.outcome("on_kubernetes", "count", conf=conf)["results"]
    assert {node[1] for node in seen.values()} == {1000660000}


def test_workers_get_gpus_and_a_parameter_server_gets_none(place: Place) -> None:
    """By the template and the settings of the page. The GPUs are a device plugin's that do not exist."""
    gpu = "spark.executor.resource.gpu"
    conf: dict[str, object] = {
        "spark.kubernetes.executor.podTemplateFile": "/etc/tfos-nb/executor-gpu.yaml",
        f"{gpu}.amount": 1,
        f"{gpu}.vendor": "nvidia.com",
        f"{gpu}.discoveryScript": "/opt/gpus.sh",
        "spark.executor.cores": 2,
        "spark.kubernetes.executor.request.cores": "300m",
        "spark.task.resource.gpu.amount": 1,
    }
    plan = {"gpus": 1, "workers": 2, "ps": 1, "chief": False}
    found = place.outcome("on_kubernetes", "count", json.dumps(plan), conf=conf)
    gpus = {node: seen[4] for node, seen in found["results"].items()}
    assert gpus == {"worker:0": ["0"], "worker:1": ["0"], "ps:0": []}


def test_gpu_pods_are_started_for_workers_alone(place: Place) -> None:
    """By dynamic allocation, as the page says: pods of two kinds in one cluster. The host of the GPUs has a taint."""
    gpu, allocation = "spark.executor.resource.gpu", "spark.dynamicAllocation"
    conf: dict[str, object] = {
        f"{allocation}.enabled": "true",
        f"{allocation}.maxExecutors": 2,
        "spark.executor.instances": 0,
        "spark.kubernetes.executor.request.cores": "300m",  # a pod with a GPU takes a whole CPU
        f"{gpu}.amount": 0,
        f"{gpu}.vendor": "nvidia.com",
        f"{gpu}.discoveryScript": "/opt/gpus.sh",
    }
    plan = {"gpus": 1, "workers": 2, "ps": 1, "evaluator": True, "chief": False}
    host = place.kubernetes.nodes[-1].name
    place.kubernetes.ctl("taint", "node", host, "nvidia.com/gpu=present:NoSchedule")
    try:
        place.restart()  # on the other host: the two workers take all CPUs of this one
        with place.running("on_kubernetes", "count_in_a_while", json.dumps(plan), conf=conf) as it:
            assert it.said("running"), it.log.read_text()[-4000:]
            pods = place.executors()
            found = it.outcome()
    finally:
        place.kubernetes.ctl("taint", "node", host, "nvidia.com/gpu-")
    gpus = {
        pod["metadata"]["labels"]["spark-exec-id"]: pod["spec"]["containers"][0]["resources"]["limits"].get(
            "nvidia.com/gpu", "0"
        )
        for pod in pods.values()
    }
    assert {node: gpus[executor] for node, executor in found["executors"].items()} == {
        "worker:0": "1",
        "worker:1": "1",
        "ps:0": "0",
        "evaluator:0": "0",
    }
    assert "with 1 GPU each for worker:0, worker:1 and without GPUs for ps:0, evaluator:0" in found["plan"]
    assert {node: seen[4] for node, seen in found["results"].items()} == {
        "worker:0": ["0"],
        "worker:1": ["0"],
        "ps:0": [],
        "evaluator:0": [],
    }


# --- network policies -------------------------------------------------------------------------------------------------

LISTENING = 'cat /proc/net/tcp /proc/net/tcp6 | awk \'$4 == "0A" {split($2, a, ":"); print a[2]}\''


def ports_of(place: Place, pod: str) -> list[int]:
    """Return the ports on which a pod's processes listen."""
    lines = place.ctl("exec", pod, "--", "bash", "-c", LISTENING).split()
    return sorted({int(line, 16) for line in lines})


def test_a_stranger_reaches_neither_tensorflow_nor_the_door(place: Place, folder: Path) -> None:
    """A pod in another namespace tries every port of the pods, while a training runs, which goes on.

    Without the policies it reaches them.
    """
    with place.running(*losing(place, folder, 40)) as it:
        assert saved_once(folder), it.log.read_text()[-4000:]
        pods = place.kubernetes.pods(place.namespace)
        tried = {pod["status"]["podIP"]: ports_of(place, name) for name, pod in pods.items()}
        open_ports = stranger_reaches(place.kubernetes, tried)
        place.ctl("delete", "networkpolicy", "--all")
        try:
            of_all = stranger_reaches(place.kubernetes, tried)
        finally:
            place.kubernetes.ctl("apply", "--filename=-", given=place.manifests)
        found = it.outcome()
    assert open_ports == ["the API server"]
    notebook = pods["notebook-0"]["status"]["podIP"]
    reached = {(host, port) for host, port in of_all[:-1]}
    assert any(host == notebook and 7300 <= port <= 7307 for host, port in reached), "the door"
    of_nodes = Counter(host for host, port in reached if host != notebook and not 7200 <= port <= 7203)
    assert of_nodes.keys() == set(tried) - {notebook}
    assert min(of_nodes.values()) >= 2, "TensorFlow's port, and that of the rows"
    assert {total for total, _ in found["results"].values()} == {sum_of_ids(40)}


TRIES = """\
import json, os, socket, sys

def is_open(host, port):
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True

found = [[host, port] for host, ports in json.loads(sys.argv[1]).items() for port in ports if is_open(host, port)]
if is_open(os.environ["KUBERNETES_SERVICE_HOST"], 443):
    found.append("the API server")  # the stranger has a network
print(json.dumps(found))
"""


def stranger_reaches(kubernetes: Kubernetes, ports: dict[str, list[int]]) -> list[Any]:
    """Run a pod without the labels of the policies, and return what it reaches."""
    container = {
        "name": "stranger",
        "image": image.NAME,
        "command": ["/opt/python/bin/python", "-c", TRIES, json.dumps(ports)],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger", "namespace": "default"},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }
    kubernetes.ctl("apply", "--filename=-", given=json.dumps(pod))
    try:
        done = "--for=jsonpath={.status.phase}=Succeeded"
        kubernetes.ctl("wait", done, "pod/stranger", "--timeout=90s", seconds=100)
        found: list[Any] = json.loads(kubernetes.ctl("logs", "stranger"))
        return found
    finally:
        kubernetes.ctl("delete", "pod", "stranger", "--force", "--grace-period=0")
