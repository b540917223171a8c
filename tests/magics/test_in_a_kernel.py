"""Completion, ``?`` and the doctor in a real kernel, by its messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.conftest import ENVIRONMENT, RunScript

SECONDS = 90


@pytest.fixture(scope="module")
def client() -> Iterator[BlockingKernelClient]:
    """A kernel with the extension and a variable that counts as a DataFrame."""
    manager = KernelManager(kernel_name="python3")
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv[0] = sys.executable
    environment = {**ENVIRONMENT, "JPY_SESSION_NAME": "/a.ipynb", "JPY_PARENT_PID": "0"}
    environment.pop("TFOS_NB_PROGRESS", None)
    manager.start_kernel(env=environment)
    made = manager.client()
    made.start_channels()
    try:
        made.wait_for_ready(timeout=SECONDS)
        made.execute_interactive(
            "%load_ext tfos_nb\nclass Rows:\n    def mapInArrow(self): ...\ntrain_df = Rows()", timeout=SECONDS
        )
        yield made
    finally:
        made.stop_channels()
        manager.shutdown_kernel(now=True)


def completed(client: BlockingKernelClient, text: str) -> tuple[list[str], str]:
    reply: dict[str, Any] = client.complete(text, reply=True, timeout=SECONDS)["content"]
    return reply["matches"], text[reply["cursor_start"] : reply["cursor_end"]]


def test_options_and_dataframes_are_completed_in_a_kernel(client: BlockingKernelClient) -> None:
    assert completed(client, "%%tfos_cluster mnist --work") == (["--workers"], "--work")
    assert completed(client, "%%tfos_cluster mnist --data ") == (["train_df"], "")
    assert completed(client, "%tfos_stop --n") == (["--now"], "--n")


def test_the_question_mark_shows_the_usage(client: BlockingKernelClient) -> None:
    found: dict[str, Any] = client.inspect("%tfos_logs", reply=True, timeout=SECONDS)["content"]
    assert "usage: %tfos_logs NODE [NAME] [-f] [-n N]" in found["data"]["text/plain"]


def test_the_doctor_displays_a_table_and_text(client: BlockingKernelClient) -> None:
    shown: list[dict[str, Any]] = []

    def keep(message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] in ("display_data", "stream", "error"):
            shown.append(message["content"])

    client.execute_interactive("%tfos_doctor", timeout=SECONDS, output_hook=keep)
    assert len(shown) == 1
    data = shown[0]["data"]
    assert "<table" in data["text/html"]
    assert "tfos_nb doctor" in data["text/plain"]
    assert "enable-sparkmonitor" in data["text/plain"]
    assert "jupyter" in data["text/plain"]


def test_loading_the_extension_imports_neither_spark_nor_tensorflow(run_script: RunScript) -> None:
    ended = run_script(
        """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        InteractiveShell.instance().run_cell("%load_ext tfos_nb")
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "tensorflow", "keras", "py4j"}))
        """
    )
    assert ended.stdout.strip() == "[]"
