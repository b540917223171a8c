"""Start a Kubernetes by hand, until Ctrl-C, with this image: ``python -m tests.cluster_managers.kubernetes``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

import psutil

from tests.cluster_managers.kubernetes import binaries, image
from tests.cluster_managers.kubernetes.cluster import kubernetes, why_not

_PREFIX = "tfos_nb-k8s-"


def _remove_left() -> None:
    """Remove the folders of earlier starts that were killed; :func:`kubernetes` removes their network."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    binaries.build()
    if reason := why_not():
        raise SystemExit(reason)
    images = image.build()
    _remove_left()
    prefix = f"{_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, kubernetes(Path(folder), images) as running:
        print(f"{binaries.FOLDER / 'kubectl'} --kubeconfig {running.kubeconfig} get nodes", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
