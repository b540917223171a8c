"""Keras' own tests under the strategy: ``python -m tests.keras_parity.upstream``, or ``make keras-tests``.

The installed Keras includes its tests. Those of areas that a strategy affects (:data:`AREAS`) run in one process. The
tests that pass there run on two workers, with Keras patched as in a node and each test in the strategy's scope. A
test's ``setUp`` clears Keras' session, which must not happen within a scope, so the scope is entered after it.

One process of each kind imports TensorFlow and forks the others. After a failed collective a process cannot run
another one, so the two workers are forked again after each test that did not pass::

    this process ── "test 7" ──▶ worker 0 ┐ one runs pytest's item, the other the same
                 ── "test 7" ──▶ worker 1 ┘
                 ◀── passed, or why not ── both; a worker that does not answer in time is killed

Each result is written to ``build/keras-tests.json`` at once, so that an interrupted run continues where it ended
(``--anew`` starts from the beginning). ``--page`` writes ``docs/keras-tests.md`` from the results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "keras-tests.md"
OUTCOMES = CHECKOUT / "build" / "keras-tests.json"
AREAS = ("losses", "metrics", "optimizers", "models", "callbacks", "trainers", "layers")
WORKERS = 2
_STARTED_WITHIN = 180.0  # seconds, in which a file is imported and the workers connect to each other
_DONE_WITHIN = 300.0
_WORSE = ("passed", "skipped", "no answer", "failed")
_OTHER_WITHIN = 30.0  # after one has failed: the other one may wait for it in a collective forever

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"OptimizerSparseTest::test_sparse_gradients_",
        r"False != True",
        "looks for an update of the strategy's variable, and each replica updates its own copy of it",
    ),
    (
        r"models/model_test.*optional_none",
        r"OptionalSpec|NoneTensorSpec",
        "gives None for an input, which TensorFlow does not divide between replicas",
    ),
    (
        r"OptimizerTest::test_tf_checkpointing",
        r"MergeV2Checkpoints",
        "writes a `tf.train.Checkpoint` to one path on both workers, as nobody may ([limits](limits.md))",
    ),
    (
        r"callbacks/(model_checkpoint|csv_logger)_test|StringLookupTest::test_vocabulary_file",
        r"False is not true|No such file|does not exist|Could not determine delimiter",
        "looks for a file, and removes it, that the workers share and the chief alone writes",
    ),
    (
        r"",
        r"Trying to access a placeholder that is not supposed to be executed",
        "runs an exported model in a strategy's scope and outside of `strategy.run`, as TensorFlow does not",
    ),
    (
        r"",
        r"DistributedVariable.handle is not available outside the replica context",
        "takes a gradient or multiplies by a sparse tensor outside of `strategy.run`, as TensorFlow does not",
    ),
    (
        r"reshape_model_fit_with_varying_input_size",
        r"Input to reshape is a tensor with 2 values",
        "has one row in a step, and zeros of another shape stand in on the worker without ([limits](limits.md))",
    ),
    (
        r"test_binary_accuracy_with_boolean_inputs",
        r"parameter 'input' has DataType bool",
        "keeps a metric's state of type bool, which TensorFlow does not add up over replicas",
    ),
    (
        r"test_spectrogram_channels_broadcasting",
        r"Not equal to tolerance",
        "asks for more than float32 has: in one process it fails with `batch_size=2`, by as much",
    ),
    (r"", r"Mixing different tf.distribute.Strategy", "makes a strategy of its own"),
    (r"", r"jit_compile=True\): XLA has no collectives on CPUs", "`jit_compile=True` is refused on CPUs"),
)
"""What is found in a test's name and its error, and why it cannot hold on several workers, or says nothing of them."""


@dataclass(frozen=True)
class Outcome:
    """Result of a test: ``passed``, ``skipped``, ``failed`` or ``no answer``, and the error's last lines."""

    result: str
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return self.result == "passed"


# --- a process that runs a file's tests ---

_mkdtemp = tempfile.mkdtemp


class _Runner:
    """Plugin of pytest that runs items by the numbers it receives."""

    def __init__(self, orders: Connection, shared: str) -> None:
        self._orders = orders
        self._shared = shared
        self._test = self._folders = 0
        self._unread = ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            said = [line[2:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self._unread = said[-1] if said else str(report.longrepr).splitlines()[-1]
        elif report.skipped:
            self._unread = str(report.longrepr[2])

    def pytest_runtestloop(self, session: Any) -> bool:
        import keras
        from _pytest.runner import runtestprotocol
        from keras.src.testing import TestCase

        if self._unread and not session.items:
            self._orders.send(self._unread)
            return True
        tempfile.mkdtemp = self._mkdtemp
        # Keras' own method removes the folder once this worker is done, and the other one may still need it.
        TestCase.get_temp_dir = lambda case: self._folder()
        self._orders.send([item.nodeid.partition("::")[2] for item in session.items])
        while (number := self._orders.recv()) is not None:
            self._test, self._folders = number, 0
            keras.utils.set_random_seed(number)  # both workers must make the same data
            reports = runtestprotocol(session.items[number], log=False, nextitem=None)
            self._orders.send(_outcome_of(reports))
        return True

    def _mkdtemp(self, *args: Any, **kwargs: Any) -> str:
        """Return a test's next folder, which all workers share, as on a cluster."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"] == "tempfile":  # a TemporaryDirectory
            frame = frame.f_back
        caller = frame.f_globals["__name__"]
        return self._folder() if caller.endswith("_test") else _mkdtemp(*args, **kwargs)

    def _folder(self) -> str:
        self._folders += 1
        path = os.path.join(self._shared, f"{self._test}.{self._folders}")
        os.makedirs(path, exist_ok=True)
        return path


def _outcome_of(reports: Sequence[Any]) -> Outcome:
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            return Outcome("failed", str(crash.message if crash else report.longrepr)[-1500:])
        if report.skipped:
            return Outcome("skipped", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else ""))
    return Outcome("passed")


def _enter_scopes(strategy: Any) -> None:
    """Run each test case in the strategy's scope, once its session is cleared."""
    from keras.src.testing import TestCase

    clear = TestCase.setUp

    def set_up(self: Any) -> None:
        self.doCleanups()  # a test may call it again
        clear(self)
        scope = strategy.scope()
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)

    TestCase.setUp = set_up


def _skip_if_backend(backend: str, reason: str) -> Any:
    """Replace a function of Keras' ``conftest`` that some tests import; Keras' wheel does not include it."""
    import keras
    import pytest

    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)


def _serve(path: str, config: str, log: str, orders: Connection) -> None:
    """Run the tests of a file as one worker, or without ``config`` as a single process."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    folder = Path(log).with_name("workers.files" if config else "alone.files")  # for relative paths
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if config:
        os.environ["TF_CONFIG"] = config
        import tensorflow as tf

        from tfos_nb.runtime.program.setup import patch_keras_fit

        print(patch_keras_fit())
        _enter_scopes(tf.distribute.MultiWorkerMirroredStrategy())
    import pytest

    sys.modules["conftest"] = SimpleNamespace(skip_if_backend=_skip_if_backend)
    options = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.path.dirname(path), "-q")
    runner = _Runner(orders, str(folder.with_name("workers" if config else "alone")))
    orders.send(f"pytest: {pytest.main([path, *options], plugins=[runner])!r}")


# --- the process that gives out the numbers ---


class _Workers:
    """Processes that run the same tests at the same time."""

    def __init__(self, path: Path, count: int, logs: Path) -> None:
        from tests.programs import reserved_ports

        self._stack = contextlib.ExitStack()
        addresses = self._stack.enter_context(reserved_ports(count)) if count > 1 else []
        fork = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._processes = []
        for index in range(count):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            mine, theirs = fork.Pipe()
            log = str(logs / f"{'worker' if addresses else 'alone'}.{index}.log")
            arguments = (str(path), json.dumps(config) if addresses else "", log, theirs)
            process = fork.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def tests(self) -> list[str]:
        """Return the names of the file's tests, as each process finds them."""
        names = _heard(self._ends[0], _STARTED_WITHIN)
        if any(_heard(end, _STARTED_WITHIN) != names for end in self._ends[1:]):
            raise RuntimeError("the workers find other tests, each")
        if not isinstance(names, list):
            raise RuntimeError(names)
        return names

    def run(self, number: int) -> list[Outcome]:
        """Run one test in all processes; return the result of each."""
        for end in self._ends:
            end.send(number)
        outcomes: dict[int, Outcome] = {}
        limit = time.monotonic() + _DONE_WITHIN
        while len(outcomes) < len(self._ends):
            waiting = [end for index, end in enumerate(self._ends) if index not in outcomes]
            ready = multiprocessing.connection.wait(waiting, max(0.0, limit - time.monotonic()))
            for end in ready or waiting:
                outcome = _heard(end, 0.0)
                known = outcome if isinstance(outcome, Outcome) else Outcome("no answer", str(outcome or ""))
                outcomes[self._ends.index(end)] = known
                if not known.passed:
                    limit = min(limit, time.monotonic() + _OTHER_WITHIN)
        return [outcomes[index] for index in range(len(self._ends))]

    def end(self) -> None:
        """End the processes, even if they are busy."""
        for process in self._processes:
            process.kill()
            process.join()
        self._stack.close()


def _heard(end: Connection, timeout: float) -> Any:
    """Return a process' message; a text if it ended, None if it sent nothing in time."""
    try:
        return end.recv() if end.poll(timeout) else None
    except EOFError:
        return "its process ended"


@contextlib.contextmanager
def _running(path: Path, count: int, logs: Path) -> Iterator[_Workers]:
    workers = _Workers(path, count, logs)
    try:
        yield workers
    finally:
        workers.end()


def outcomes_of(
    path: Path, count: int, logs: Path, only: Sequence[str] | None, done: Collection[str]
) -> Iterator[tuple[str, Outcome]]:
    """Run a file's tests, except for those in ``done``, in ``count`` processes; yield the worst outcome of each."""
    left: list[str] | None = None if only is None else [name for name in only if name not in done]
    while left is None or left:
        with _running(path, count, logs) as workers:
            names = workers.tests()
            left = [name for name in names if name not in done] if left is None else left
            while left:
                name = left.pop(0)
                outcome = max(workers.run(names.index(name)), key=lambda one: _WORSE.index(one.result))
                yield name, outcome
                if outcome.result not in ("passed", "skipped"):
                    break  # after a failed collective a process cannot run another one


# --- results ---


def own_tests() -> dict[str, Path]:
    """Return the files of the installed Keras' tests in :data:`AREAS`, by their names below ``keras/src``."""
    import keras

    source = Path(keras.__file__).parent / "src"
    paths = [path for area in AREAS for path in sorted((source / area).rglob("*_test.py"))]
    return {str(path.relative_to(source)): path for path in paths}


class Outcomes:
    """The results so far, in a file: an interrupted run continues with the next test.

    Parameters
    ----------
    path : pathlib.Path
        The JSON file: for each file of tests the results in one process (``alone``) and on the workers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def forget(self, names: Sequence[str]) -> None:
        """Forget the results of these files, so that they run again."""
        for name in names:
            self.found.pop(name, None)

    def is_whole(self, name: str) -> bool:
        """Return whether all of a file's tests have run."""
        return "unread" in self.found.get(name, {}) or self.found.get(name, {}).get("whole", False)

    def look_at(self, name: str, path: Path, logs: Path) -> None:
        """Run the remaining tests of a file, in one process and then on the workers."""
        file = self.found.setdefault(name, {"alone": {}, "together": {}})
        try:
            for kind, count in (("alone", 1), ("together", WORKERS)):
                only = (
                    None if count == 1 else [test for test, one in file["alone"].items() if one["result"] == "passed"]
                )
                for test, outcome in outcomes_of(path, count, logs, only, file[kind]):
                    file[kind][test] = asdict(outcome)
                    self._save()
            file["whole"] = True
        except RuntimeError as error:
            self.found[name] = {"unread": str(error)}
        self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(self.found, indent=1))
        whole.replace(self._path)


def reason_of(name: str, why: str) -> str:
    """Return the named reason why a test fails on several workers; empty if no reason is known."""
    return next((reason for test, error, reason in REASONS if re.search(test, name) and re.search(error, why)), "")


def failures(found: dict[str, Any]) -> dict[str, str]:
    """Return the tests that pass only in one process, each with its error."""
    return {
        f"{name}::{test}": outcome["why"] or outcome["result"]
        for name, file in found.items()
        for test, outcome in file.get("together", {}).items()
        if outcome["result"] != "passed"
    }


_HEAD = """\
# Keras' own tests on two workers

The Keras package brings its own tests. `make keras-tests` runs the tests of training, models, losses, metrics,
optimizers, callbacks and layers in one process. The tests that pass there are run on two workers, in the scope of a
`MultiWorkerMirroredStrategy`. Keras is [patched](keras.md) there as in a node. Both workers run the same test at the
same time. So a test that calls `fit` on 10 rows has them cut between the workers, and expects the same loss as in one
process.

Written by `tests/keras_parity/upstream.py` on {day}, with {versions}.

| tests of | files | tests | pass in one process | and on two workers | and not, for a named reason | and not |
|---|---|---|---|---|---|---|
"""


def page(found: dict[str, Any]) -> str:
    """Return the page of the docs: a table by folder, and the tests that pass only in one process, with reasons."""
    found = {name: file for name, file in found.items() if "unread" in file or file.get("whole")}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras"))
    text = _HEAD.format(day=datetime.datetime.now(datetime.timezone.utc).date(), versions=versions)
    folders = sorted({name.rpartition("/")[0] for name in found})
    for folder in folders:
        text += _row(f"`{folder}`", {name: file for name, file in found.items() if name.rpartition("/")[0] == folder})
    text += _row("**all**", found)
    unread = [f"`{name}` ({file['unread']})" for name, file in sorted(found.items()) if "unread" in file]
    if unread:
        text += f"\nNot run, since they need what is not installed: {', '.join(unread)}.\n"
    left = sorted(own_tests().keys() - found.keys())
    if left:
        text += f"\nNot run yet: {', '.join(f'`{name}`' for name in left)}.\n"
    by_reason: dict[str, list[str]] = {}
    for test, why in sorted(failures(found).items()):
        reason = reason_of(test, why) or f"**Not explained**: `{why.strip().splitlines()[-1][:200]}`"
        by_reason.setdefault(reason, []).append(f"`{test}`")
    if by_reason:
        text += "\n## What passes in one process only\n\n| why | tests |\n|---|---|\n"
        text += "".join(f"| {reason} | {', '.join(tests)} |\n" for reason, tests in by_reason.items())
    return text


def _row(title: str, files: dict[str, Any]) -> str:
    read = [file for file in files.values() if "alone" in file]
    alone = [outcome["result"] for file in read for outcome in file["alone"].values()]
    together = [outcome["result"] for file in read for outcome in file["together"].values()]
    failed = failures(files)
    named = sum(bool(reason_of(test, why)) for test, why in failed.items())
    counts = (len(files), len(alone), alone.count("passed"), together.count("passed"), named, len(failed) - named)
    return f"| {title} | {' | '.join(map(str, counts))} |\n"


def main() -> int:
    """Run the tests, and print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.keras_parity.upstream", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--only", action="append", help="the files whose names contain this; may be given again")
    parser.add_argument("--anew", action="store_true", help="run what an earlier run has run, too")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(CHECKOUT)}, and run nothing")
    arguments = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3", TF_GRPC_REUSE_PORT="1")
    outcomes = Outcomes(OUTCOMES)
    if arguments.page:
        PAGE.write_text(page(outcomes.found))
        return 0
    wanted = {
        name: path
        for name, path in own_tests().items()
        if not arguments.only or any(part in name for part in arguments.only)
    }
    if arguments.anew:
        outcomes.forget(list(wanted))
    for number, (name, path) in enumerate(wanted.items(), 1):
        if outcomes.is_whole(name):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as logs:
            outcomes.look_at(name, path, Path(logs))
        seconds = time.monotonic() - began
        print(f"[{number}/{len(wanted)}] {name}: {_in_short(outcomes.found[name])} ({seconds:.0f} s)", flush=True)
        for test, why in failures({name: outcomes.found[name]}).items():
            reason = reason_of(test, why) or why.strip().splitlines()[-1][:200]
            print(f"    {test.partition('::')[2]}: {reason}", flush=True)
    unexplained = [test for test, why in failures(outcomes.found).items() if not reason_of(test, why)]
    print(f"{len(unexplained)} tests pass in one process only, for no reason that is named")
    return int(bool(unexplained))


def _in_short(file: dict[str, Any]) -> str:
    if "unread" in file:
        return f"cannot be imported: {file['unread']}"
    counts = Counter(outcome["result"] for outcome in file["alone"].values())
    passed = sum(outcome["result"] == "passed" for outcome in file["together"].values())
    return f"{len(file['alone'])} tests, {counts['passed']} pass in one process, {passed} on {WORKERS} workers"


if __name__ == "__main__":
    sys.exit(main())
