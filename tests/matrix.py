"""Run the core tests under other versions: ``python -m tests.matrix``, or ``make matrix``.

A cell has one version of Python, PySpark and TensorFlow, and its own environment under ``build/matrix``, in which
the checkout's wheel is installed as users install it. Little but these versions is pinned; pip finds the rest. The
cells are chosen so that each version is tested with several of the others, the oldest with the oldest, and the newest
with the newest. A cell that pip cannot resolve, or whose Python is not on this machine, is skipped, and the table says
so.

::

    python -m tests.matrix --list
    python -m tests.matrix --only 3.10 --only 2.16      # cells that have both
    python -m tests.matrix --json matrix.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
CORE = (
    "tests/keras_parity/test_adapt.py",
    "tests/keras_parity/test_loops.py",
    "tests/keras_parity/test_models.py",
    "tests/keras_parity/test_outside.py",
    "tests/keras_parity/test_scope.py",
    "tests/runtime/rows/test_columns.py",
    "tests/runtime/program/test_keras_check.py",
    "tests/runtime/recovery/test_keras_state.py",
    "tests/runtime/code/test_payload.py",
    "tests/runtime/models/test_scoring.py",
    "tests/runtime/keras/test_fit.py",
    "tests/runtime/control/test_wire.py",
    "tests/spark/test_session.py::test_counts_the_slots_of_all_executors",
    "tests/spark/test_session.py::test_says_which_job_holds_how_many_slots",
    "tests/spark/test_session.py::test_a_node_with_two_cpus_gets_them_and_halves_the_slots",
    "tests/spark/test_session.py::test_cancel_ends_its_own_job_and_leaves_the_others",
    "tests/driver/feeding/test_training.py::test_two_workers_end_alike_and_like_one_process_on_the_same_global_batches",
    "tests/driver/feeding/test_training.py::test_tf_config_is_right_for_every_role",
    "tests/end_to_end/test_rows_once.py::test_a_feeding_task_that_is_killed_and_run_again_neither_loses_nor_repeats_a_row",
    "tests/inference/test_frames.py::test_every_kind_of_model_gives_what_keras_predict_gives",
    "tests/inference/test_frames.py::test_dense_and_sparse_vectors_are_taken",
    "tests/end_to_end/test_recovery.py::test_keras_fit_goes_on_from_memory_without_a_line_of_ones_own",
    "tests/end_to_end/test_replacement.py::test_a_lost_worker_is_replaced_while_the_others_go_on",
    "tests/end_to_end/strategies/test_asynchronous.py::test_a_coordinators_steps_see_every_row_once_a_pass_and_learn",
    "tests/end_to_end/strategies/test_asynchronous.py::test_tf_keras_fits_on_the_workers_own_data",
    "tests/pipeline/test_estimator.py::test_a_fit_trains_on_all_nodes_and_gives_a_model_that_is_right",
    "tests/pipeline/test_estimator.py::test_estimator_and_model_are_saved_and_loaded_in_a_pipeline",
    "tests/tfrecord/test_spark.py",
    "tests/magics/test_cells_on_spark.py",
)
"""What a user's programs stand on, and where versions differ: each way of training once, and what is made of it.

Losses are in it because what replaces a lost worker is made of TensorFlow's own means that its users do not see.
"""

_NOT_THERE = ("no Python", "these do not go together")
_MARKS = "not browser and not faults and not slow and not standalone and not yarn and not kubernetes"
_PATIENCE = 3600.0
_TESTS_NEED = ("hypothesis", "packaging", "pytest", "pyyaml", "scikit-learn", "nbclient", "nbconvert")


@dataclass(frozen=True)
class Cell:
    """Versions that are tested together."""

    python: str
    pyspark: str
    tensorflow: str
    keras: str = ""  # the version that pip chooses; a full version may be that of a keras-nightly

    @property
    def name(self) -> str:
        keras = f"-keras{self.keras}" if self.keras else ""
        return f"py{self.python}-spark{self.pyspark}-tf{self.tensorflow}{keras}"

    @property
    def packages(self) -> tuple[str, ...]:
        pinned: tuple[str, ...] = (f"pyspark=={self.pyspark}.*",)
        if "rc" in self.tensorflow:  # tf_keras is installed later
            pinned += (f"tensorflow=={self.tensorflow}",)
        else:
            pinned += (f"tensorflow=={self.tensorflow}.*", f"tf_keras=={self.tensorflow}.*")
        if self.keras and not self.nightly:
            pinned += (f"keras=={self.keras}.*",)
        # These need NumPy 1, which pyarrow 26 no longer supports; its requirements do not say so to pip.
        older = ("pyarrow<26",) if self.tensorflow in ("2.16", "2.17") else ()
        return (*pinned, *older, *_TESTS_NEED)

    @property
    def nightly(self) -> str:
        """Return the nightly that replaces the Keras that TensorFlow requires: both install into the same folder."""
        return f"keras-nightly=={self.keras}" if "dev" in self.keras else ""


CELLS = (
    Cell("3.10", "3.5", "2.16"),
    Cell("3.10", "4.0", "2.18"),
    Cell("3.10", "4.2", "2.21"),  # the newest of each that supports Python 3.10
    Cell("3.11", "3.5", "2.21"),
    Cell("3.11", "4.0", "2.17"),
    Cell("3.11", "4.1", "2.19"),
    Cell("3.11", "4.3", "2.16"),
    Cell("3.12", "3.5", "2.20"),
    Cell("3.12", "4.1", "2.16"),
    Cell("3.12", "4.2", "2.18"),
    Cell("3.13", "4.1", "2.20"),
    Cell("3.13", "4.3", "2.21"),
    Cell("3.11", "4.3", "2.21", "3.12"),  # the oldest that TensorFlow 2.21 supports
    Cell("3.11", "4.3", "2.21", "3.16.0.dev2026102704"),
    Cell("3.11", "4.3", "2.22.0rc0"),
)


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell; ``versions`` are those that pip has chosen."""

    cell: Cell
    told: str
    seconds: float = 0.0
    versions: str = ""
    day: str = field(default_factory=_today)

    @property
    def is_well(self) -> bool:
        """Whether tests have run and none has failed, or the cell was skipped."""
        ran = re.search(r"\d+ passed", self.told) and not re.search(r"failed|error", self.told)
        return bool(ran) or self.told.startswith(_NOT_THERE)

    @property
    def row(self) -> str:
        where = f"{self.cell.python} | {self.cell.pyspark} | {self.cell.tensorflow}"
        return f"| {where} | {self.versions} | {self.told} | {self.day} |"


def interpreter(version: str) -> str | None:
    """Find a Python of a version, on PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    say = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):  # a name on PATH may be a shim without a Python
        said = subprocess.run([candidate, "-c", say], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return candidate
    return None


def build_wheel(folder: Path) -> Path:
    """Build the wheel that all cells install."""
    with tempfile.TemporaryDirectory() as made:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, str(CHECKOUT)],
            check=True,
        )
        (wheel,) = Path(made).glob("*.whl")
        return Path(shutil.copy(wheel, folder))


def run(cell: Cell, wheel: Path, tests: Sequence[str], marks: str) -> Outcome:
    """Make a cell's environment, and run the tests in it; their output goes to a log beside it."""
    folder = wheel.parent
    python = interpreter(cell.python)
    if python is None:
        return Outcome(cell, f"{_NOT_THERE[0]} {cell.python} here")
    home, begun = folder / cell.name, time.monotonic()
    own, log = home / "bin" / "python", folder / f"{cell.name}.log"
    with log.open("w") as out:
        if not own.exists():
            subprocess.run([python, "-m", "venv", str(home)], check=True, stdout=out, stderr=out)
        install = [str(own), "-m", "pip", "install", "--quiet"]
        # Replace a wheel that the environment has kept, and the Keras that TensorFlow requires by the nightly.
        of_now = [*install, "--no-deps", "--force-reinstall", *filter(None, (cell.nightly, str(wheel)))]
        commands = ([*install, "--upgrade", *cell.packages, f"{wheel}[connect]"], of_now)
        if any(subprocess.run(command, stdout=out, stderr=out, check=False).returncode for command in commands):
            return Outcome(cell, _reason(log), time.monotonic() - begun)
        # The checkout is on PYTHONPATH for the tests' own modules; the installed wheel is the same, for its scripts.
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYSPARK_PYTHON": str(own)}
        for name in ("PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV"):
            environment.pop(name, None)
        subprocess.run([str(own), "-m", "tests.quick_java"], cwd=CHECKOUT, env=environment, stdout=out, stderr=out)
        command = [str(own), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
        try:
            subprocess.run(
                command, cwd=CHECKOUT, env=environment, stdout=out, stderr=out, check=False, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            return Outcome(cell, f"not through after {_PATIENCE:g} s", _PATIENCE, _versions(own))
    return Outcome(cell, _closing_line(log), time.monotonic() - begun, _versions(own))


def _reason(log: Path) -> str:
    errors = re.findall(r"^ERROR: (.*)$", log.read_text(errors="replace"), re.MULTILINE)
    unlike = [error for error in errors if re.search("Requires-Python|ResolutionImpossible|No matching distr", error)]
    return f"{_NOT_THERE[1]}: {unlike[0][:160]}" if unlike else "pip failed; see its log"


def _closing_line(log: Path) -> str:
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if re.search(r"\d+ (passed|failed|error)", line)
    ]
    said = re.sub(r" in [\d.]+s.*|, \d+ (deselected|xfailed)", "", lines[-1]) if lines else ""
    return said.strip("= ") or "no test ran; see its log"


def _versions(python: Path) -> str:
    say = (
        "from importlib.metadata import version as v; "
        "from tfos_nb.runtime.keras.versions import installed_keras as keras; "
        "names = ('pyspark', 'tensorflow', 'keras', 'numpy', 'pandas', 'pyarrow'); "
        "print(', '.join(f\"{n} {keras() if n == 'keras' else v(n)}\" for n in names))"
    )
    return subprocess.run([str(python), "-c", say], capture_output=True, text=True, check=False).stdout.strip()


def chosen(only: Sequence[str]) -> Iterator[Cell]:
    """Choose the cells that have all of the given versions."""
    for cell in CELLS:
        if all(version in (cell.python, cell.pyspark, cell.tensorflow, cell.keras) for version in only):
            yield cell


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table for the docs."""
    head = ["| Python | PySpark | TensorFlow | what pip chose | core tests | run |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *(outcome.row for outcome in outcomes)])


def main() -> int:
    """Run the cells; return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="VERSION", help="cells with this version")
    parser.add_argument("--list", action="store_true", help="say which cells there are")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "build" / "matrix", help="where environments go")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many cells at a time")
    parser.add_argument("--keep", action="store_true", help="leave each environment, of 2 GB, for another run")
    parser.add_argument("--marks", default=_MARKS, help="of which marks tests are, for pytest's -m (%(default)s)")
    parser.add_argument("tests", nargs="*", default=list(CORE), help="other tests than the core")
    given = parser.parse_args()
    cells = list(chosen(given.only))
    if given.list or not cells:
        print("\n".join(cell.name for cell in cells) or f"no cell has {' and '.join(given.only)}")
        return 0 if cells else 2
    given.folder.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(given.folder)

    def try_out(cell: Cell) -> Outcome:
        outcome = run(cell, wheel, given.tests, given.marks)
        print(f"{cell.name}: {outcome.told} ({outcome.seconds:.0f} s)", flush=True)
        if not given.keep:
            shutil.rmtree(given.folder / cell.name, ignore_errors=True)
        return outcome

    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(try_out, cells))
    print(f"\n{table(outcomes)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(not all(outcome.is_well for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
