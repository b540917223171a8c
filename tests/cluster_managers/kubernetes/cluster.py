"""A Kubernetes for a test: its daemons on this machine, and nodes in namespaces of their own.

::

    this machine     10.77.x.1   etcd, kube-apiserver, kube-controller-manager, kube-scheduler, CoreDNS
        │ bridge
        ├── node-0   10.77.x.2   containerd, kubelet, kube-proxy, kube-router; pods 10.244.a.0/24
        └── node-1   10.77.x.3   the same;                                     pods 10.244.b.0/24

A node has a network of its own (:mod:`tests.cluster_managers.hosts`), and its own processes and mounts: its first
process is the parent of all that runs on it, pods included. When that ends, however the test ends, the kernel ends the
others, and what they have mounted is gone. Kubernetes' folders are the usual ones (``/var/lib/kubelet``, ``/run``);
each node sees its own there.

What is left by a test that was killed: namespaces and links of its network, empty control groups, its folder, and
Kubernetes' usual ones, which are empty on this machine itself. The next start removes the network and the control
groups; pytest keeps the folders of three runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster_managers import daemons, hosts
from tests.cluster_managers.kubernetes import binaries, image, packages
from tests.waiting import until

PATIENCE = 120.0
PODS, SERVICES, API = "10.244.0.0/16", "10.96.0.0/24", "10.96.0.1"
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MADE = tuple(
    Path(one)
    for one in (
        "/var/lib/kubelet",
        "/var/lib/containerd",
        "/var/lib/cni",
        "/var/log/pods",
        "/var/log/containers",
        "/etc/cni",
        "/usr/libexec/kubernetes",
    )
)
"""Folders that kubelets and containerd use, or over which a node mounts its own."""


def why_not() -> str:
    """Return why this machine cannot run it; empty if it can."""
    if os.geteuid():
        return "a kubelet needs root"
    if missing := packages.missing():
        return f"these packages are not installed: {', '.join(missing)}"
    if missing := binaries.missing():
        return (
            f"these binaries are not built: {', '.join(missing)} (python -m tests.cluster_managers.kubernetes.binaries)"
        )
    try:
        with _alone():
            return hosts.why_not()
    except _RunsAlreadyError as error:
        return str(error)


class _RunsAlreadyError(Exception):
    """A Kubernetes of these tests runs on this machine, with the same addresses of pods."""


@dataclass
class Kubernetes:
    """A running Kubernetes."""

    folder: Path
    network: hosts.Network
    nodes: list[Node] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The API server's address."""
        return f"https://{self.network.address}:6443"

    @property
    def kubeconfig(self) -> Path:
        """The file with which one may do everything."""
        return self.folder / "kubeconfig"

    @property
    def certificate(self) -> Path:
        """The API server's certificate, which is its own authority."""
        return self.folder / "ca.crt"

    @property
    def kubectl(self) -> list[str]:
        """The words with which a command begins that may do everything."""
        options = [f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder}/cache"]
        return [str(binaries.FOLDER / "kubectl"), *options]

    def ctl(self, *words: str, given: str = "", fails: bool = False, seconds: float = 60.0) -> str:
        """Run kubectl; return what it printed, or if it ``fails``, its error."""
        done = subprocess.run([*self.kubectl, *words], input=given, capture_output=True, text=True, timeout=seconds)
        assert bool(done.returncode) == fails, f"kubectl {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stderr if fails else done.stdout

    def get(self, *words: str) -> Any:
        """Return an object, or a list's items, as ``kubectl get`` finds them."""
        found = json.loads(self.ctl("get", *words, "--output=json"))
        return found["items"] if found["kind"] == "List" else found

    def pods(self, namespace: str, selector: str = "") -> dict[str, Any]:
        """Return the pods of a namespace by their names."""
        options = [f"--selector={selector}"] if selector else []
        return {pod["metadata"]["name"]: pod for pod in self.get("pods", f"--namespace={namespace}", *options)}


@dataclass(frozen=True)
class Node:
    """A node: its host, and the daemon that is the parent of all its processes."""

    host: hosts.Host
    daemon: daemons.Daemon
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def pid(self) -> int:
        """The node's first process, as this machine numbers it."""
        return int((self.folder / "pid").read_text())

    def run(self, *words: str, seconds: float = 300.0) -> str:
        """Run a command on the node."""
        command = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(words)} on {self.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def logs(self) -> str:
        """Return the ends of the logs of the node's daemons."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def processes(self) -> list[str]:
        """Return the command lines of the processes of the node's pods."""
        own = r"^(tini|sh|containerd|kubelet|kube-proxy|kube-router|/usr/bin/containerd-shim|\S*/(kube|coredns)|ps)\b"
        lines = self.run("ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines if line.strip() and not re.match(own, line.strip())]


@contextmanager
def kubernetes(folder: Path, images: Path, nodes: int = 2, gpus: int = 0) -> Iterator[Kubernetes]:
    """Start a Kubernetes whose nodes have the images of :func:`image.build`; end all of it afterwards.

    The last node has ``gpus`` GPUs that do not exist, and the label of hosts that have some.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as started:
        started.enter_context(_alone())
        _remove_control_groups()
        started.callback(_remove_control_groups)
        started.callback(_remove_folders, [path for path in _MADE if not path.exists()])
        started.callback(_remove_data, folder)
        network = started.enter_context(hosts.network(nodes))
        made = Kubernetes(folder, network)
        _write_keys(made)
        _start_control_plane(made, started)
        for number, host in enumerate(network.hosts):
            folder_of_images = folder / f"node-{number}" / "containerd"
            folder_of_images.mkdir(parents=True)
            image.copy_of(images, folder_of_images)
            of_node = gpus if number == nodes - 1 else 0
            made.nodes.append(_start_node(made, host, f"node-{number}", started, of_node))
        for node in made.nodes:
            made.ctl(
                "wait", "--for=condition=Ready", f"node/{node.name}", f"--timeout={PATIENCE:.0f}s", seconds=PATIENCE + 5
            )
        if gpus:
            made.ctl("label", "node", made.nodes[-1].name, "nvidia.com/gpu.present=true")
        yield made


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second Kubernetes on this machine: its pods would have the same addresses."""
    with (binaries.FOLDER / "running.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _RunsAlreadyError(
                f"another Kubernetes of these tests runs on this machine, with the same addresses of pods ({PODS}): "
                "wait for its end, or end it"
            ) from None
        yield


def _remove_folders(made: list[Path]) -> None:
    """Remove the usual folders that were not there before; they are empty but for links to the logs of pods."""
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


def _remove_data(folder: Path) -> None:
    """Remove gigabytes of images, and all keys; the logs stay, for somebody who looks for a reason."""
    of_nodes = list(folder.glob("node-*"))
    for one in (*folder.iterdir(), *(inside for node in of_nodes for inside in node.iterdir())):
        if one.is_dir() and one not in of_nodes:
            shutil.rmtree(one, ignore_errors=True)
        elif one.is_file() and one.suffix != ".log":
            one.unlink()


# --- keys -------------------------------------------------------------------------------------------------------------


def _write_keys(made: Kubernetes) -> None:
    """Make a certificate, which is its own authority, and a token for each who asks the API server."""
    folder = made.folder
    names = [f"IP:{address}" for address in ("127.0.0.1", API, made.network.address)]
    names += [f"DNS:kubernetes{rest}" for rest in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    _run("openssl", "req", "-x509", *curve, "-subj", "/CN=tfos-nb-test", "-addext", f"subjectAltName={','.join(names)}",
         "-keyout", str(folder / "ca.key"), "-out", str(made.certificate))  # fmt: skip
    # By this the API server proves to a kubelet who it is.
    request, client = folder / "client.csr", folder / "client"
    _run(
        "openssl",
        "req",
        *curve[:-2],
        "-subj",
        "/O=system:masters/CN=kube-apiserver",
        "-keyout",
        f"{client}.key",
        "-out",
        str(request),
    )
    _run("openssl", "x509", "-req", "-in", str(request), "-CA", str(made.certificate), "-CAkey", str(folder / "ca.key"),
         "-CAcreateserial", "-days", "2", "-out", f"{client}.crt")  # fmt: skip
    users = {"admin": "system:masters"}
    users |= {f"system:node:node-{number}": "system:nodes" for number in range(len(made.network.hosts))}
    tokens = {user: secrets.token_hex(16) for user in users}
    (folder / "tokens.csv").write_text(
        "".join(f'{tokens[user]},{user},{number},"{group}"\n' for number, (user, group) in enumerate(users.items()))
    )
    for user in users:
        name = "kubeconfig" if user == "admin" else f"kubeconfig-{user.rpartition(':')[2]}"
        (folder / name).touch(0o600)
        (folder / name).write_text(yaml.safe_dump(kubeconfig_of(made, tokens[user])))


def kubeconfig_of(made: Kubernetes, token: str) -> dict[str, Any]:
    """Return the content of a file by which one who has a token asks the API server."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": made.url, "certificate-authority": str(made.certificate)}}],
        "users": [{"name": "test", "user": {"token": token}}],
    }


# --- the control plane ------------------------------------------------------------------------------------------------


def _start_control_plane(made: Kubernetes, started: ExitStack) -> None:
    folder, address = made.folder, made.network.address
    client, peer, *other = daemons.free_ports(4)

    def start(name: str, *options: str) -> daemons.Daemon:
        daemon = daemons.start(name, [str(binaries.FOLDER / name), *options], os.environ, folder)
        started.callback(daemon.stop)
        return daemon

    etcd = f"http://127.0.0.1:{client}"
    start("etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
          f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
          f"--initial-cluster=default=http://127.0.0.1:{peer}", "--unsafe-no-fsync")  # fmt: skip
    server = start(
        "kube-apiserver",
        f"--etcd-servers={etcd}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        "--secure-port=6443",
        f"--tls-cert-file={made.certificate}",
        f"--tls-private-key-file={folder}/ca.key",
        f"--service-cluster-ip-range={SERVICES}",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction,ExtendedResourceToleration",
        f"--service-account-issuer={made.url}",
        f"--service-account-key-file={made.certificate}",
        f"--service-account-signing-key-file={folder}/ca.key",
        f"--kubelet-client-certificate={folder}/client.crt",
        f"--kubelet-client-key={folder}/client.key",
        "--kubelet-preferred-address-types=InternalIP",
    )
    assert until(lambda: server.ended or _answers(made), PATIENCE, every=0.2), server.tail
    assert not server.ended, server.tail
    start(
        "kube-controller-manager",
        f"--kubeconfig={made.kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={other[0]}",
        f"--root-ca-file={made.certificate}",
        f"--service-account-private-key-file={folder}/ca.key",
        "--use-service-account-credentials",
        "--allocate-node-cidrs",
        f"--cluster-cidr={PODS}",
        "--leader-elect=false",
        "--node-monitor-grace-period=16s",
    )
    start("kube-scheduler", f"--kubeconfig={made.kubeconfig}", "--bind-address=127.0.0.1", f"--secure-port={other[1]}",
          "--leader-elect=false")  # fmt: skip
    (folder / "Corefile").write_text(
        textwrap.dedent(f"""\
        .:53 {{
            bind {address}
            errors
            kubernetes cluster.local {{
                kubeconfig {made.kubeconfig} test
                ttl 1
            }}
        }}
        """)
    )
    start("coredns", "-conf", str(folder / "Corefile"))


def _answers(made: Kubernetes) -> bool:
    return subprocess.run([*made.kubectl, "get", "--raw=/readyz"], capture_output=True, text=True).stdout == "ok"


# --- a node -----------------------------------------------------------------------------------------------------------

_FIRST = """\
# The first process of a node, in its namespaces.
set -eu
folder=$1 name=$2
mount --make-rprivate /
mount -t tmpfs own /run
mkdir -p "$folder/kubelet" "$folder/containerd" "$folder/pods" "$folder/cni" "$folder/networks"
mkdir -p /var/lib/kubelet /var/lib/containerd /var/log/pods /etc/cni/net.d /var/lib/cni /run/lock
mount --bind "$folder/kubelet" /var/lib/kubelet
mount --bind "$folder/containerd" /var/lib/containerd
mount --bind "$folder/pods" /var/log/pods
mount --bind "$folder/cni" /etc/cni/net.d
mount --bind "$folder/networks" /var/lib/cni
mount --make-rshared /
for setting in ipv4/ip_forward bridge/bridge-nf-call-iptables; do echo 1 >/proc/sys/net/$setting; done
containerd --config "$folder/containerd.toml" >"$folder/containerd.log" 2>&1 &
while ! ctr version >/dev/null 2>&1; do sleep 0.1; done
"$BINARIES/kube-proxy" --config="$folder/proxy.yaml" --hostname-override="$name" >"$folder/kube-proxy.log" 2>&1 &
"$BINARIES/kubelet" --config="$folder/kubelet.yaml" --kubeconfig="$folder/../kubeconfig-$name" \\
    --hostname-override="$name" --node-ip="$ADDRESS" >"$folder/kubelet.log" 2>&1 &
while [ ! -e "$folder/cni/net.conflist" ]; do sleep 0.1; done
"$BINARIES/gpu-plugin" "$GPUS" "$folder/nvidia-smi" >"$folder/gpu-plugin.log" 2>&1 &
"$BINARIES/kube-router" --run-router=false --run-service-proxy=false --run-firewall=true \\
    --kubeconfig="$folder/../kubeconfig" --hostname-override="$name" \\
    --service-cluster-ip-range="$SERVICES" --health-port=0 >"$folder/kube-router.log" 2>&1 &
wait
"""


_NVIDIA_SMI = """\
#!/bin/sh
# A container numbers its GPUs from 0.
echo "$NVIDIA_VISIBLE_DEVICES" | tr , '\\n' | awk '{print NR - 1}'
"""


def _start_node(made: Kubernetes, host: hosts.Host, name: str, started: ExitStack, gpus: int) -> Node:
    folder = made.folder / name
    (folder / "containerd.toml").write_text(_containerd())
    (folder / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet(made, host)))
    (folder / "proxy.yaml").write_text(yaml.safe_dump(_proxy(made)))
    (folder / "first.sh").write_text(_FIRST)
    (folder / "nvidia-smi").write_text(_NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "BINARIES": str(binaries.FOLDER), "ADDRESS": host.address, "SERVICES": SERVICES}
    environment["GPUS"] = str(gpus)
    command = ["nsenter", f"--net=/run/netns/{host.name}", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
               "tini", "-g", "--", "sh", str(folder / "first.sh"), str(folder), name]  # fmt: skip
    daemon = daemons.start(name, command, environment, folder)
    started.callback(daemon.stop)
    node = Node(host, daemon, folder)
    assert until(lambda: _first_process(daemon), PATIENCE), daemon.tail
    (folder / "pid").write_text(str(_first_process(daemon)))
    assert until(lambda: daemon.ended or _range(made, name), PATIENCE, every=0.2), node.logs()
    assert not daemon.ended, node.logs()
    _connect(made, node, _range(made, name))
    return node


def _first_process(daemon: daemons.Daemon) -> int:
    """Return the process that ``unshare`` has forked."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return int(children[0]) if children else 0


def _range(made: Kubernetes, name: str) -> str:
    """Return the addresses of a node's pods, once the node is there."""
    found = [node for node in made.get("nodes") if node["metadata"]["name"] == name]
    return str(found[0]["spec"].get("podCIDR", "")) if found else ""


def _connect(made: Kubernetes, node: Node, addresses: str) -> None:
    """Give a node's pods their addresses, and tell all hosts the way to them."""
    range_of = {"type": "host-local", "ranges": [[{"subnet": addresses}]], "routes": [{"dst": "0.0.0.0/0"}]}
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": range_of},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    conf = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    for host in made.network.hosts:
        if host != node.host:
            _run(*host.command("ip", "route", "add", addresses, "via", node.host.address))
    _run("ip", "route", "add", addresses, "via", node.host.address)
    for host in made.network.hosts:
        subprocess.run(host.command("ip", "route", "add", "default", "via", made.network.address), capture_output=True)
    (node.folder / "cni" / "net.tmp").write_text(json.dumps(conf))
    (node.folder / "cni" / "net.tmp").rename(node.folder / "cni" / "net.conflist")


def _containerd() -> str:
    """``restrict_oom_score_adj``: root may lack CAP_SYS_RESOURCE, as in a container."""
    return textwrap.dedent(f"""\
        version = 2
        [plugins."io.containerd.grpc.v1.cri"]
          restrict_oom_score_adj = true
          sandbox_image = "{image.PAUSE}"
          [plugins."io.containerd.grpc.v1.cri".containerd]
            snapshotter = "overlayfs"
            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
              runtime_type = "io.containerd.runc.v2"
          [plugins."io.containerd.grpc.v1.cri".cni]
            bin_dir = "/usr/lib/cni"
        """)


def _kubelet(made: Kubernetes, host: hosts.Host) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": host.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(made.certificate)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "cgroupRoot": f"/{_control_group(host)}",
        "clusterDNS": [made.network.address],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "enforceNodeAllocatable": [],
        "evictionHard": {},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,  # it would remove images on a full disk, and no registry has them
        "localStorageCapacityIsolation": True,
        "nodeStatusUpdateFrequency": "4s",
        "registerWithTaints": [],
        "resolvConf": "",
        "serializeImagePulls": False,
    }


def _proxy(made: Kubernetes) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(made.kubeconfig)},
        "clusterCIDR": PODS,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
        "mode": "nftables",  # a table of its own: kube-router writes iptables' as a whole, over others' changes
    }


# --- control groups ---------------------------------------------------------------------------------------------------


def _control_group(host: hosts.Host) -> str:
    return f"tfos-nb-{host.name}"


def _remove_control_groups() -> None:
    """Remove the control groups that have no process any more, of this start and of earlier ones."""
    for top in (*_CONTROL_GROUPS.glob("*/tfos-nb-*"), *_CONTROL_GROUPS.glob("tfos-nb-*")):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                break


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
