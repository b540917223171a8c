"""Stop while a cell blocks, in a kernel of ipykernel 7.3, which differs from the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.widgets.test_panel_kernel import (
    ROOT,
    SECONDS,
    message,
    run,
)
from tests.widgets.test_panel_kernel import (
    test_stop_reaches_the_cluster_while_a_cell_runs_and_the_output_ends_as_html as press_stop_while_a_cell_runs,
)

INSTALL_SECONDS = 60


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BlockingKernelClient]:
    """A kernel of ipykernel 7.3, which is installed in a separate folder at the front of the path."""
    other = tmp_path / "ipykernel"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(other),
        "ipykernel==7.3.*",
    ]
    got = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if got.returncode:
        pytest.skip(f"no ipykernel 7.3 from the package index: {got.stderr.strip().splitlines()[-1:]}")
    path = filter(None, [str(other), ROOT, os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = KernelManager()
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_stop_reaches_a_blocked_kernel_of_ipykernel_73(kernel: BlockingKernelClient) -> None:
    run(kernel, "import ipykernel; print(ipykernel.__version__, end='')")
    assert message(kernel, "stream")["text"].startswith("7.3.")
    press_stop_while_a_cell_runs(kernel)
