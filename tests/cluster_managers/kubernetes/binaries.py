"""Build Kubernetes' binaries from its Go modules, once: ``python -m tests.cluster_managers.kubernetes.binaries``.

::

    k8s.io/kubernetes            kubelet, kube-apiserver, kube-controller-manager, kube-scheduler, kube-proxy, kubectl
    go.etcd.io/etcd/server       etcd: Debian's cannot do all that Spark's client asks for
    github.com/coredns/coredns   coredns, with the plugins that names of services need
    github.com/cloudnativelabs/kube-router   kube-router, which enforces network policies
    gpu_plugin.go                gpu-plugin, a device plugin with GPUs that do not exist

They are kept outside the checkout, in a folder named after their versions: ``TFOS_NB_KUBERNETES``, or
``~/.cache/tfos_nb/kubernetes-VERSION``. It takes ten to twenty minutes on two cores, and 600 MB. Everything else comes
from Debian.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

VERSION = "1.34.4"
"""The newest that still runs on a host with control groups of version 1."""
ETCD, COREDNS, KUBE_ROUTER = "v3.6.0", "v1.14.7", "v2.1.0"
FOLDER = Path(os.environ.get("TFOS_NB_KUBERNETES") or Path.home() / ".cache" / "tfos_nb" / f"kubernetes-{VERSION}")

_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
_STRIPPED = "-s -w"
_DNS = """\
package main

import (
	_ "github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	coremain.Run()
}
"""


def build(told: Callable[[str], None] = print) -> None:
    """Build what is not there yet."""
    if missing() and shutil.which("go") is None:
        sys.exit("Go is not installed, with which Kubernetes is built: https://go.dev/dl has it (1.24 or later)")
    for name in _KUBERNETES:
        _once(name, _kubernetes, told)
    _once("etcd", _etcd, told)
    _once("coredns", _coredns, told)
    _once("kube-router", _kube_router, told)
    _once("gpu-plugin", _gpu_plugin, told)


def missing() -> list[str]:
    """Return the names of the binaries that are not there."""
    return [
        name for name in (*_KUBERNETES, "etcd", "coredns", "kube-router", "gpu-plugin") if not (FOLDER / name).exists()
    ]


def _once(name: str, make: Callable[[str, Path], None], told: Callable[[str], None]) -> None:
    if (FOLDER / name).exists():
        return
    told(f"Building {name} in {FOLDER}")
    began, unfinished = time.monotonic(), FOLDER / f"{name}.unfinished"
    make(name, unfinished)
    unfinished.rename(FOLDER / name)
    told(f"    {time.monotonic() - began:.0f} s")


def _kubernetes(name: str, to: Path) -> None:
    """A module that requires k8s.io/kubernetes has to say itself where the parts are that Kubernetes has beside it."""
    module = _module("kubernetes", f"require k8s.io/kubernetes v{VERSION}")
    if "replace" not in module.joinpath("go.mod").read_text():
        found = json.loads(_go(module, "mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}"))
        said = json.loads(_go(module, "mod", "edit", "-json", found["GoMod"]))
        places = [one["Old"]["Path"] for one in said["Replace"]]
        lines = [f"replace {place} => {place} v0{VERSION[1:]}\n" for place in places]
        with module.joinpath("go.mod").open("a") as written:
            written.writelines(lines)
    of = "k8s.io/component-base/version"
    major, minor, _ = VERSION.split(".")
    named = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join([_STRIPPED, *(f"-X {of}.{key}={value}" for key, value in named.items())])
    _go(module, "build", "-trimpath", "-ldflags", flags, "-o", str(to), f"k8s.io/kubernetes/cmd/{name}")


def _etcd(_name: str, to: Path) -> None:
    module = _module("etcd", f"require go.etcd.io/etcd/server/v3 {ETCD}")
    _go(module, "build", "-trimpath", "-ldflags", _STRIPPED, "-o", str(to), "go.etcd.io/etcd/server/v3")


def _coredns(_name: str, to: Path) -> None:
    module = _module("coredns", f"require github.com/coredns/coredns {COREDNS}")
    module.joinpath("main.go").write_text(_DNS)
    _go(module, "build", "-trimpath", "-ldflags", _STRIPPED, "-o", str(to), ".")


def _kube_router(name: str, to: Path) -> None:
    made = FOLDER / "kube-router.bin"
    package = f"github.com/cloudnativelabs/kube-router/v2/cmd/{name}@{KUBE_ROUTER}"
    _go(FOLDER, "install", "-trimpath", "-ldflags", _STRIPPED, package, GOBIN=str(made), GOFLAGS="")
    (made / name).rename(to)
    made.rmdir()


def _gpu_plugin(_name: str, to: Path) -> None:
    module = _module("gpu-plugin", f"require k8s.io/kubelet v0{VERSION[1:]}")
    module.joinpath("main.go").write_text(Path(__file__).with_name("gpu_plugin.go").read_text())
    _go(module, "build", "-trimpath", "-ldflags", _STRIPPED, "-o", str(to), ".")


def _module(name: str, requires: str) -> Path:
    folder = FOLDER / "modules" / name
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.joinpath("go.mod").exists():
        folder.joinpath("go.mod").write_text(f"module tfos.nb/{name}\n\ngo 1.24.0\n\n{requires}\n")
    return folder


def _go(folder: Path, *words: str, **more: str) -> str:
    environment: Mapping[str, str] = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false", **more}
    done = subprocess.run(["go", *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"go {' '.join(words[:2])} failed in {folder}: the reason is above")
    return done.stdout


if __name__ == "__main__":
    build()
