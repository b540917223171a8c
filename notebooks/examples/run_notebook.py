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


def read(source: str) -> nbformat.NotebookNode:
    """Read a notebook; what is none is a ValueError of one line."""
    try:
        return nbformat.read(source, as_version=4)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from error
    except (AttributeError, TypeError) as error:  # what nbformat says of JSON of another shape
        raise ValueError(f"{source} is no notebook: its JSON is of another kind") from error
    except (ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"{source} is no notebook: {str(error).partition(chr(10))[0]}") from error


def make_room(target: str) -> None:
    """Make the target's folder, and see that the file can be written; one that is there keeps what it has."""
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.is_symlink() or path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()  # until there are outputs, there is no file that looks like some
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}") from error


def run(notebook: nbformat.NotebookNode, target: str) -> None:
    try:
        NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    finally:
        Path(target).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="the notebook")
    parser.add_argument("target", help="where it goes with its outputs")
    given = parser.parse_args()
    try:
        whole = read(given.source)
        make_room(given.target)
    except ValueError as wrong:
        parser.error(str(wrong))
    run(whole, given.target)
