"""``python -m tfos_nb.demo``: run the quickstart notebook without a browser and print its outcome.

In a checkout, or an editable install of one, it is the checkout's notebook in ``notebooks``. Elsewhere it is the one
that pip has installed. ``--copy`` only copies it.

All printed figures come from the notebook's own outputs: the table that the magic shows while the cluster runs, and the
figures that the last cell displays under :data:`OUTCOME`. The executed notebook and its HTML stay in a folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfos_nb.data_files import find_data_file
from tfos_nb.errors import PlanError

__all__ = ["OUTCOME", "Outcome", "main", "run_notebook"]

OUTCOME = "application/vnd.tfos-nb.outcome+json"
"""The type under which the notebook displays its figures."""

_NOTEBOOK = Path("notebooks/01_quickstart.ipynb")
_OUT = Path("build/demo")
_CELL_SECONDS = 900
_SILENCE = 10.0
_PANEL = "tfos-panel"  # in the HTML of the table, and in no other output
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_EPOCH = re.compile(r"Epoch (\d+)/(\d+)")  # Keras' own line in a cell that trains here
_KERAS_LINE = re.compile(r"(Epoch )?\d+/\d+")

Write = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run of the notebook.

    Attributes
    ----------
    notebook, html : pathlib.Path
        The executed notebook and its rendering.
    figures : mapping
        The text that the notebook displayed under :data:`OUTCOME`; empty if no such cell ran.
    error : str
        Why it ended early: the heading that the cell stands under, and the error. Empty if it ran to its end.
    seconds : float
        How long it took.
    """

    notebook: Path
    html: Path
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if the notebook ran to its end."""
    parser = argparse.ArgumentParser(prog="python -m tfos_nb.demo", description="Run the quickstart without a browser.")
    parser.add_argument("--notebook", type=Path, help=f"what to run (default: {_NOTEBOOK}, or the installed one)")
    parser.add_argument("--out", type=Path, default=_OUT, help="where the results go (default: %(default)s)")
    parser.add_argument(
        "--copy", type=Path, metavar="FOLDER", help="only copy the notebook there, to open it in Jupyter"
    )
    asked = parser.parse_args(argv)
    notebook = asked.notebook or _quickstart()
    try:
        if asked.copy is not None:
            _say(f"jupyter lab {shlex.quote(str(_copied(notebook, asked.copy)))}")
            return 0
        outcome = run_notebook(notebook, asked.out, _say)
    except PlanError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if outcome.error:
        sys.stdout.flush()
        sys.stderr.write(f"\n{outcome.error}\n\nThe notebook up to there: {outcome.notebook}\n")
        return 1
    for line in _summary(outcome):
        _say(line)
    return 0


def _quickstart() -> Path:
    """Find the quickstart: in the checkout in which one is, or else the installed one."""
    return _NOTEBOOK if _NOTEBOOK.is_file() else find_data_file(_NOTEBOOK) or _NOTEBOOK


def _copied(notebook: Path, folder: Path) -> Path:
    """Copy a notebook into a folder; existing files are not overwritten."""
    _refuse_missing(notebook)
    there = folder / notebook.name
    if there.exists():
        raise PlanError(f"{there} exists already: remove it, or copy the notebook to another folder")
    _make(folder)
    return Path(shutil.copyfile(notebook, there))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise PlanError(f"{folder} is not writable: give another folder")


def _refuse_missing(notebook: Path) -> None:
    if not notebook.is_file():
        raise PlanError(
            f"{notebook}: no such notebook in {Path.cwd()}; give another with --notebook, or none for the quickstart"
        )


def _read(notebook: Path) -> Any:
    import nbformat

    _refuse_missing(notebook)
    try:
        return nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise PlanError(f"{notebook} is not a notebook: {str(error).partition(chr(10))[0]}") from error
    except (AttributeError, TypeError) as error:  # what nbformat says of JSON of another shape
        raise PlanError(f"{notebook} is not a notebook: its JSON has another structure") from error


def run_notebook(notebook: Path, out: Path, say: Write) -> Outcome:
    """Run a notebook in a new kernel, in the folder ``out``, and print its progress.

    Parameters
    ----------
    notebook : pathlib.Path
        The notebook; it is not changed.
    out : pathlib.Path
        Where the executed notebook and its HTML go, and whatever its cells write.
    say : callable
        Takes a line of text.

    Returns
    -------
    Outcome

    Raises
    ------
    PlanError
        If there is no such notebook, the folder cannot be written to, or what runs notebooks is not installed.
    """
    try:
        import nbclient  # noqa: F401 - imported here, so that a missing package is reported before anything starts
        import nbformat
        from nbconvert import HTMLExporter

        if importlib.util.find_spec("sklearn") is None:  # it has the quickstart's digits
            raise ModuleNotFoundError(name="scikit-learn")
    except ImportError as error:
        raise PlanError(
            f"{error.name} is not installed: pip install jupyterlab nbclient nbconvert scikit-learn; "
            "in a checkout, pip install '.[demo]'"
        ) from error
    content = _read(notebook)
    _make(out)
    started = time.monotonic()
    problem = _execute(content, out, say)
    executed, html = out / notebook.name, (out / notebook.name).with_suffix(".html")
    nbformat.write(content, executed)  # type: ignore[no-untyped-call]
    html.write_text(HTMLExporter().from_notebook_node(content)[0], encoding="utf-8")  # type: ignore[no-untyped-call]
    figures = _figures(content)
    if not problem and not figures:
        problem = f"{notebook} ran to its end, and displayed nothing of type {OUTCOME}"
    return Outcome(executed, html, figures, problem, time.monotonic() - started)


def _execute(content: Any, out: Path, say: Write) -> str:
    """Run the cells; return what went wrong, or nothing."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    with _Teller(content, say) as teller, (out / "kernel.log").open("wb") as log:
        try:
            # TensorFlow and the kernel write to the process' own output too; the cells have the same text
            _client(content, out, teller).execute(env=_environment(), stdout=log, stderr=log)
        except CellExecutionError as failed:
            return f"{teller.heading}: {failed.ename}: {failed.evalue}\n{_plain(failed.traceback)}"
        except (CellTimeoutError, DeadKernelError) as failed:
            return f"{teller.heading}: {failed}"
    return ""


class _Teller:
    """Prints the progress of a notebook while it runs, also when no cell ends for a while.

    Parameters
    ----------
    content : nbformat.NotebookNode
        The notebook.
    say : callable
        Takes a line of text.
    """

    def __init__(self, content: Any, say: Write) -> None:
        self.heading = "the kernel"
        self._say = say
        self._headings = _headings(content)
        self._number = 0
        self._table = ""
        self._said: list[str] = []
        self._started = self._said_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._break_silence, name="tfos-demo", daemon=True)

    def __enter__(self) -> _Teller:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self, cell_index: int) -> None:
        """Say that a cell begins, if it is the first under its heading."""
        heading = self._headings.get(cell_index, self.heading)
        if heading != self.heading:
            self.heading = heading
            self._number += 1
            total = len(set(self._headings.values()))
            self._tell(f"[{self._number}/{total}] {heading}")

    def take(self, message: Mapping[str, Any]) -> None:
        """Print the news in a message of the kernel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            self._take_text(content["text"])
        elif kind in ("display_data", "update_display_data") and _PANEL in content["data"].get("text/html", ""):
            self._take_table(content["data"].get("text/plain", ""))

    def end(self) -> None:
        """Show the table as it was last: the nodes."""
        if self._table:
            for line in self._table.splitlines()[1:]:
                self._tell(f"      {line}")
        self._table = ""

    def _take_text(self, text: str) -> None:
        for line in text.splitlines():
            epoch = _EPOCH.match(line)
            if epoch and int(epoch[1]) % 5 == 0 and epoch[1] != epoch[2]:
                self._tell(f"      epoch {epoch[1]} of {epoch[2]}")
            elif line.strip() and not _KERAS_LINE.match(line):
                self._tell(f"      {line}")

    def _take_table(self, text: str) -> None:
        """Show the first table, which is the plan; of the later ones, the sentence whenever it is a new one."""
        lines = text.splitlines()
        if not self._table:
            self._said = []
            for line in lines[1:]:
                self._tell(f"      {line}")
        elif len(lines) > 1 and lines[1] not in self._said and not lines[1].startswith("Done"):
            self._said.append(lines[1])
            metrics = next((line.partition(" ")[2].strip() for line in lines if line.startswith("cluster ")), "")
            self._tell(f"      {lines[1]}{f'  {metrics}' if 'loss' in metrics else ''}")
        self._table = text

    def _tell(self, line: str) -> None:
        self._said_at = time.monotonic()
        self._say(line)

    def _break_silence(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._said_at >= _SILENCE:
                self._tell(f"      … {time.monotonic() - self._started:.0f} s")


def _client(content: Any, out: Path, teller: _Teller) -> Any:
    """Make the client that runs the notebook and lets the teller hear every message."""
    from nbclient import NotebookClient

    class TellingClient(NotebookClient):
        def process_message(self, message: dict[str, Any], cell: Any, cell_index: int) -> Any:
            teller.take(message)
            return super().process_message(message, cell, cell_index)

    return TellingClient(
        content,
        timeout=_CELL_SECONDS,
        resources={"metadata": {"path": str(out)}},
        on_cell_execute=lambda cell, cell_index: teller.begin(cell_index),
        on_cell_executed=lambda **_: teller.end(),
    )


def _environment() -> dict[str, str]:
    """Let the kernel, which runs in another folder, import the same tfos_nb as this process."""
    here = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}


def _headings(content: Any) -> dict[int, str]:
    """Return, for each code cell, the heading that it stands under."""
    found, heading = {}, "Run the notebook"
    for index, cell in enumerate(content.cells):
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            heading = cell.source.splitlines()[0].removeprefix("## ").strip()
        elif cell.cell_type == "code":
            found[index] = heading
    return found


def _figures(content: Any) -> Mapping[str, Any]:
    for cell in reversed(content.cells):
        for output in cell.get("outputs", ()):
            if OUTCOME in output.get("data", {}):
                figures: Mapping[str, Any] = output["data"][OUTCOME]
                return figures
    return {}


def _summary(outcome: Outcome) -> list[str]:
    """Write what came out, one line a figure."""
    epochs, held_out = outcome.figures["epochs"], outcome.figures["held_out"]
    accuracy, alone = outcome.figures["accuracy"], outcome.figures["accuracy_alone"]
    return [
        "",
        "epoch    loss  accuracy, on the rows trained on",
        *(f"{epoch['epoch']:>5}  {epoch['loss']:.4f}  {epoch['accuracy']:.4f}" for epoch in epochs),
        "",
        f"{accuracy:.1%} of {held_out} held-out digits are right; of the model trained on one machine, {alone:.1%}.",
        f"{outcome.figures['differing_lines']} lines of the program differ between one machine and the cluster.",
        f"The notebook took {outcome.seconds:.0f} s.",
        "",
        f"executed notebook  {outcome.notebook}",
        f"as a page          {outcome.html}",
        f"model              {outcome.figures['model']}",
    ]


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # jsonschema would have it build the grammar of international addresses, for seconds; no notebook is checked by it.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    sys.exit(main())
