"""Run the code blocks of a page on a test's cluster; only the reader's own hosts and paths are replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from tests.cluster_managers import daemons
from tests.cluster_managers.submit import environment_of
from tests.docs.reading import BLOCKS, CHECKOUT


def written(name: str, own: Mapping[str, str]) -> tuple[str, str]:
    """Return the language and the text of the block that stands after ``<!-- run as: NAME -->``.

    ``own`` has a test's host or path for each of the page's.
    """
    (block,) = (block for block in BLOCKS if block.run_as == name)
    text = block.text
    for theirs, ours in own.items():
        assert theirs in text, f"{block} has no {theirs}"
        text = text.replace(theirs, ours)
    return block.language, TransformerManager().transform_cell(text) if block.language == "python" else text


@contextmanager
def as_written(
    name: str,
    own: Mapping[str, str],
    folder: Path,
    *,
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    home: Path | None = None,
    first: str = "",
    then: str = "",
) -> Iterator[daemons.Daemon]:
    """Run a block with bash or Python, beside the checkout's notebooks; end its processes afterwards.

    ``settings`` are those of the cluster's ``spark-defaults.conf``; ``first`` and ``then`` are the code
    before and after the block, which the page does not show.
    """
    conf = folder / "spark-conf"
    conf.mkdir(parents=True)
    lines = (f"{key} {value}\n" for key, value in (settings or {}).items())
    (conf / "spark-defaults.conf").write_text("".join(lines))
    (folder / "notebooks").symlink_to(CHECKOUT / "notebooks")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an active environment
    whole = environment_of({"PATH": path, "SPARK_CONF_DIR": str(conf), **(environment or {})}, home)
    language, text = written(name, own)
    command = {"bash": ["bash", "-euc"], "python": [sys.executable, "-c"]}[language]
    running = daemons.start(name, [*command, "\n".join((first, text, then))], whole, folder)
    try:
        yield running
    finally:
        running.stop()
