"""Run every code block of the README and of docs/, unless it says why not; a page's blocks run in order."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from pyspark.sql import SparkSession
from traitlets.config import Config

import tfos_nb
from tests.cluster_managers.pages import as_written
from tests.cluster_managers.submit import outcome
from tests.docs.commands import faults_of
from tests.docs.hidden import FIRST, OF_PAGE
from tests.docs.reading import BLOCKS, CHECKOUT, PAGES, Block, blocks_of
from tests.waiting import until
from tfos_nb.detached.attached import AttachedCluster
from tfos_nb.errors import ClusterClosed
from tfos_nb.jupyter import endpoint

LANGUAGES = {"python", "bash", "diff", "text"}
ELSEWHERE = ("hdfs:///", "s3://bucket/")
"""What stands in the pages for a place that all machines see: here it is a folder of the test's."""


def python_of(block: Block) -> str:
    """Return the Python of a block; for a diff, the new text."""
    if block.language == "diff":
        return "\n".join(line[1:] for line in block.text.splitlines() if line.startswith(("+", " ")))
    return block.text if block.language == "python" else ""


RUN_ON = sorted({block.page for block in BLOCKS if python_of(block) and block.in_turn})
MANY_CLUSTERS = {
    "detached",
    "feeding",
    "inference",
    "migrating",
    "mlflow",
    "pipeline",
    "quickstart",
    "recovery",
    "strategies",
    "program",
    "tfrecord",
}
"""Pages that start several clusters or load several models, of kinds that other tests try in every way."""


@pytest.fixture
def shell(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[InteractiveShell]:
    """A notebook's shell in a new folder, with the tests' session and its hidden definitions."""
    for name, value in os.environ.items():
        monkeypatch.setenv(name, value)  # so that variables that a block sets are restored
    for name in ("TFOS_NB_PROXY_URL", "TFOS_SERVER_PORT", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setattr(endpoint, "_the_one", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tfos_nb.launch.__kwdefaults__, "record", True)
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    made = InteractiveShell.instance(config=config)
    made.run_line_magic("load_ext", "tfos_nb")
    made.user_ns.update(spark=spark, folder=str(tmp_path))
    yield made
    for value in list(made.user_ns.values()):
        if isinstance(value, tfos_nb.Cluster):
            value.close()
        elif isinstance(value, AttachedCluster):
            with suppress(ClusterClosed):  # the page has closed it
                value.close()
    for one in endpoint._the_one:
        one.close()
    spark.catalog.clearCache()
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, text: str, where: str) -> None:
    for place in ELSEWHERE:
        text = text.replace(place, shell.user_ns["folder"] + "/")
    with capture_output() as captured:
        result = shell.run_cell(text, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    assert error is None, f"{where}: {type(error).__name__}: {error}\n{captured.stdout[-3000:]}"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in MANY_CLUSTERS else []) for page in RUN_ON]
)
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page: str, shell: InteractiveShell) -> None:
    run(shell, FIRST, "what no page shows")
    run(shell, OF_PAGE.get(page, ""), f"what {page} does not show")
    for block in blocks_of(page):
        if block.in_turn:
            run(shell, python_of(block), str(block))


NOTEBOOK = """
from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_line_magic("load_ext", "tfos_nb")
"""


def test_a_session_is_started_and_stopped_if_none_is_active(tmp_path: Path) -> None:
    with as_written("magics-spark", {"/data": str(tmp_path)}, tmp_path, first=NOTEBOOK) as running:
        outcome(running)
    said = running.log.read_text(errors="replace")
    assert "local[4,4]" in said
    blocks = tmp_path / "spark"
    # Spark's JVM removes its directory when it ends, which Python does not wait for.
    assert until(lambda: not list(blocks.iterdir())), f"left where its blocks were: {list(blocks.iterdir())}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_the_commands_of_a_block_exist_with_their_options(block: Block) -> None:
    assert faults_of(block.text, allowed=not block.in_turn) == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.why_not], ids=str)
def test_a_block_that_cannot_run_here_says_why_and_is_valid_python(block: Block) -> None:
    ast.parse(TransformerManager().transform_cell(python_of(block)))
    pytest.skip(f"{block}: not run: {block.why_not}")


@pytest.mark.parametrize("name", [block.run_as for block in BLOCKS if block.run_as])
def test_a_block_with_run_as_is_run_by_exactly_one_test(name: str) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("test_*.py"))
    assert len(re.findall(rf'as_written\(\s*"{name}"', tests)) == 1


def test_each_block_names_its_language_and_none_is_indented() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_hidden_cells_belong_to_existing_pages() -> None:
    assert OF_PAGE.keys() <= PAGES.keys() & set(RUN_ON)
