"""Build the image of docs/kubernetes/Dockerfile without a registry, by Buildah.

The Dockerfile begins with ``debian:bookworm-slim``. Here that is what debootstrap makes, less the pages and languages
that the slim image leaves out. Buildah keeps its layers, so that a second build only installs the checkout again.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster_managers.kubernetes.binaries import FOLDER

CHECKOUT = Path(__file__).parents[3]
NAME = "registry.example/tfos-nb:1"
"""The name that the manifests have."""
BARE = "registry.example/no-tensorflow:1"
"""The same without TensorFlow."""
PAUSE = "registry.example/pause:1"

_BASE = "docker.io/library/debian:bookworm-slim"
_MIRROR = "http://deb.debian.org/debian"
_LEFT_OUT = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")
_ALONE = ("--isolation", "chroot", "--network", "host")
"""A build needs no container runtime, and the host's network."""


def build() -> Path:
    """Build the images; return the folder of containerd's in which they are, for :func:`copy_of`.

    The folder is beside the binaries. A second call brings only the layers that are new.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not _exists(_BASE):
        _build_base()
    earlier = {_id(name) for name in (NAME, BARE)}
    with _pip_settings() as mounted:
        dockerfile = CHECKOUT / "docs" / "kubernetes" / "Dockerfile"
        options = (*_ALONE, "--layers", "--pull-never", *mounted, "--file", str(dockerfile), "--tag", NAME)
        _run("buildah", "build", *options, str(CHECKOUT))
        text = f"FROM {NAME}\nUSER 0:0\nRUN pip uninstall --yes tensorflow\nUSER 185:185\n"
        bare = FOLDER / "Dockerfile.bare"
        bare.write_text(text)
        _run("buildah", "build", *_ALONE, "--layers", "--pull-never", "--file", str(bare), "--tag", BARE, str(FOLDER))
    if not _exists(PAUSE):
        _build_pause()
    for old in earlier - {_id(name) for name in (NAME, BARE)} - {""}:
        subprocess.run(["buildah", "rmi", old], capture_output=True)  # fails while somebody uses it
    return _imported((NAME, BARE, PAUSE))


def _exists(name: str) -> bool:
    return subprocess.run(["buildah", "inspect", "--type", "image", name], capture_output=True).returncode == 0


def _id(name: str) -> str:
    """Return the number of an image; empty if there is none."""
    words = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", name]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def _build_base() -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        root = Path(folder) / "debian"
        _run("debootstrap", "--variant=minbase", "bookworm", str(root), _MIRROR)
        for name in (*_LEFT_OUT, "var/cache/apt"):
            shutil.rmtree(root / name, ignore_errors=True)
        lines = [f"path-exclude /{name}/*\n" for name in _LEFT_OUT]
        (root / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text("".join(lines))
        _commit(root, _BASE, "--cmd", "bash")


def _build_pause() -> None:
    """What keeps a pod's namespaces: it waits for a signal."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        shutil.copy("/bin/busybox", folder)
        _commit(Path(folder), PAUSE, "--cmd", '["/busybox", "sleep", "inf"]')


def _commit(root: Path, name: str, *options: str) -> None:
    made = _run("buildah", "from", "scratch").strip()
    try:
        _run("tar", "--create", "--file", f"{root}.tar", "--directory", str(root), ".")
        _run("buildah", "add", "--quiet", made, f"{root}.tar", "/")
        _run("buildah", "config", *options, made)
        _run("buildah", "commit", "--quiet", made, name)
    finally:
        _run("buildah", "rm", made)
        Path(f"{root}.tar").unlink(missing_ok=True)


@contextmanager
def _pip_settings() -> Iterator[list[str]]:
    """Give the build pip's own settings of this machine, so that it reaches the same index, with its certificates."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", said.stdout, re.MULTILINE))
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        if certificates := settings.get("cert"):
            shutil.copy(certificates, Path(folder) / "certificates.pem")
            settings["cert"] = "/run/pip/certificates.pem"
        settings.pop("find-links", None)  # a folder of this machine
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (Path(folder) / "pip.conf").write_text("".join(["[global]\n", *lines]))
        yield ["--volume", f"{folder}:/run/pip:ro", "--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"]


def _imported(names: Sequence[str]) -> Path:
    """Bring the images into containerd's folder: the layers that it does not have yet."""
    layout, store = FOLDER / "layout", FOLDER / "containerd"
    layout.joinpath("index.json").unlink(missing_ok=True)  # with the images of earlier builds
    for name in names:
        _run("buildah", "push", "--quiet", "--disable-compression", name, f"oci:{layout}:{name}")
    index = json.loads(layout.joinpath("index.json").read_text())
    _remove_unused(layout / "blobs" / "sha256", index)
    for manifest in index["manifests"]:
        named = manifest["annotations"]
        named["io.containerd.image.name"] = named["org.opencontainers.image.ref.name"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        (Path(folder) / "index.json").write_text(json.dumps(index))
        known = store / "io.containerd.content.v1.content" / "blobs" / "sha256"
        blobs = [blob for blob in layout.glob("blobs/sha256/*") if not (known / blob.name).exists()]
        files = [f"--directory={folder}", "index.json", f"--directory={layout}", "oci-layout"]
        _run("tar", "--create", f"--file={folder}/new.tar", *files, *(str(blob.relative_to(layout)) for blob in blobs))
        words = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", _IMPORT, "sh")
        _run(*words, str(store), f"{folder}/new.tar", f"{folder}/containerd.log")
    return store


def _remove_unused(blobs: Path, index: dict[str, Any]) -> None:
    """Remove the files of layers that no image has any more."""
    used = set()
    for one in index["manifests"]:
        manifest = json.loads((blobs / one["digest"].partition(":")[2]).read_text())
        parts = (one, manifest["config"], *manifest["layers"])
        used |= {part["digest"].partition(":")[2] for part in parts}
    for blob in blobs.iterdir():
        if blob.name not in used:
            blob.unlink()


# While an image replaces one of the same name, nothing holds the layers that both have: containerd must not collect
# what is unused before all are unpacked ("parent snapshot … does not exist"). A lease's end makes it collect at once.
_IMPORT = """\
mount --make-rprivate / && mount -t tmpfs own /run && mkdir -p "$1"
cat >/run/containerd.toml <<END
version = 2
[plugins."io.containerd.gc.v1.scheduler"]
  deletion_threshold = 0
  mutation_threshold = 1000000000
  startup_delay = "24h"
END
containerd --config /run/containerd.toml --root "$1" >"$3" 2>&1 &
while ! ctr version >/dev/null 2>&1; do kill -0 $! && sleep 0.1; done
ctr --namespace=k8s.io images import "$2" >/dev/null
ctr --namespace=k8s.io leases create --id=collect >/dev/null
ctr --namespace=k8s.io leases delete --sync collect >/dev/null
kill $! && wait $! || true
"""


def copy_of(store: Path, to: Path) -> None:
    """Copy a folder of containerd's. Images' files are not written to, and so are links; databases are copied."""
    _run("cp", "--archive", "--link", f"{store}/.", str(to))
    for database in to.rglob("*.db"):
        if "snapshots" not in database.parts:
            _run("cp", "--archive", "--remove-destination", str(store / database.relative_to(to)), str(database))


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:2])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build())
