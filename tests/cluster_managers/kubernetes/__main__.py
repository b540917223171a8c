"""Start a Kubernetes by hand, until Ctrl-C, with this image: ``python -m tests.cluster_managers.kubernetes``."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path

from tests.cluster_managers.kubernetes import binaries, image
from tests.cluster_managers.kubernetes.cluster import kubernetes, why_not

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    binaries.build()
    if reason := why_not():
        raise SystemExit(reason)
    images = image.build()
    with tempfile.TemporaryDirectory(prefix="tfos_nb-k8s-") as folder, kubernetes(Path(folder), images) as running:
        print(f"{binaries.FOLDER / 'kubectl'} --kubeconfig {running.kubeconfig} get nodes", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
