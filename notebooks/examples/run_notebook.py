"""Run a notebook under ``spark-submit``: its kernel gets the Spark that was submitted to.

::

    spark-submit --master spark://host:7077 run_notebook.py mnist.ipynb done.ipynb

The second file is the notebook with its outputs, as far as it got. If a cell fails, so does the program.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(source: str, target: str) -> None:
    notebook = nbformat.read(source, as_version=4)
    try:
        NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    finally:
        Path(target).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="the notebook")
    parser.add_argument("target", help="where it goes with its outputs")
    given = parser.parse_args()
    run(given.source, given.target)
