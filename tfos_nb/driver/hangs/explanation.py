"""Say why a training does not move: which node is behind, and in what.

Pure functions of what the nodes have reported: :func:`explain`, and :func:`never_ends`, which finds a wait without end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import PurePath

from tfos_nb.runtime.node.stacks import Frame, StacksTaken, frames_of_main, frames_of_others

__all__ = ["WORKS", "Finding", "Situation", "describe_slow", "explain", "never_ends"]

WORKS = 20.0
"""Percent of a core, or of a GPU: a process that waits for its peers uses less of a core."""

_LIBRARIES = re.compile(
    r"/(site|dist)-packages/|/lib/python\d|^<frozen |^<string>$|/tfos_nb/|__autograph_generated_file"
)
_STANDARD = re.compile(r"/lib/python\d[\d.]*/(?!(site|dist)-packages/)")
_TENSORFLOW = re.compile(r"/tensorflow/python/(eager|framework|client|distribute|ops)/")
_SAVES = re.compile(
    r"/keras/src/saving/|/tensorflow/python/(saved_model|checkpoint|training/saver)|/h5py/|/tf_keras/.*saving"
)
_NETWORK = re.compile(
    r"/(socket|ssl|http/client|urllib/request|selectors|asyncio/.*)\.py$|/(urllib3|requests|aiohttp|botocore)/"
)
_TOGETHER = re.compile(r"/tfos_nb/runtime/keras/replicas/collective_calls\.py:\d+ in call_with_all_workers$")
_CALLBACKS = re.compile(r"/callbacks(/|\.py$)")  # of Keras, and of tf_keras
_FEED = re.compile(r"/tfos_nb/runtime/(feed|datasets)/")
_CALLERS = re.compile(r"/tensorflow/python/(ops/script_ops\.py$|data/)|/keras/src/|/tf_keras/")
_CELL = re.compile(r"/ipykernel_\d+/|^<ipython-input")
_PRESSED = 10.0  # percent


@dataclass(frozen=True)
class Situation:
    """Facts about a node that makes no progress.

    ``place`` is how far it has come, as the user counts: the epoch and the step. ``waits_for_rows``: TensorFlow does.
    """

    node: str
    place: tuple[int, int] = (0, 0)
    waits_for_rows: bool = False
    saving: bool = False
    cpu_percent: float | None = None
    gpu_percent: float | None = None
    stacks: StacksTaken | None = None


@dataclass(frozen=True)
class Finding:
    """Activity of a node.

    ``waits`` says that it waits for the other nodes, so that it is not the cause; ``works``, that it may compute. A GPU
    is busy in either case: NCCL's kernels wait actively. ``needs_all`` says that the wait ends only if all other nodes
    that train make the same step, or the same variable. ``line`` is the line of the program that it is in.
    ``blocked`` says that it may wait for another node outside of a step: for an answer from the network, or in native
    code that holds Python's lock. ``answered`` says that its stack is known.
    """

    node: str
    text: str
    waits: bool = False
    works: bool = False
    stopped: bool = False
    needs_all: bool = False
    line: str = ""
    blocked: bool = False
    answered: bool = True


def explain(
    situations: Sequence[Situation], returned: Sequence[str] = (), *, starts: bool = False
) -> tuple[str, list[Finding]]:
    """Return one sentence about the whole, and what each node does; ``returned`` are nodes whose ``main`` is over.

    While a cluster ``starts``, a node that does not answer may wait for another one.

    Examples
    --------
    >>> stopped = Situation("worker:1", (1, 7), stacks=StacksTaken("worker:1", 1, "", "T"))
    >>> explain([Situation("worker:0", (1, 7), waits_for_rows=True), stopped])[0]
    'worker:1 is behind: it was stopped by a signal (SIGSTOP)'
    """
    is_alone = len(situations) == 1 and not returned
    findings = [_finding(one, is_alone) for one in situations]
    if starts:
        findings = _with_those_that_connect(findings)
    behind = [one for one in findings if not one.waits]
    without_rows = [one.node for one in situations if one.waits_for_rows]
    if len(behind) == 1:
        return f"{behind[0].node} is behind: it {behind[0].text}", findings
    if behind:
        return "; ".join(f"{one.node} {one.text}" for one in behind), findings
    if without_rows:
        return f"{', '.join(without_rows)} {'wait' if len(without_rows) > 1 else 'waits'} for rows", findings
    if returned:
        waiting = "; ".join(f"{one.node} {one.text}" for one in findings)
        return f"{waiting}; main of {', '.join(returned)} has returned", findings
    if is_alone:
        return f"{findings[0].node} {findings[0].text}, and does not compute", findings
    places = ", ".join(f"{one.node} step {one.place[1]} of epoch {one.place[0]}" for one in situations if one.place[0])
    told = (
        "all nodes wait for each other in TensorFlow. All of them must do the same operations together, in the same "
        "order; one may have left one out"
    )
    if len({one.line for one in findings}) > 1:
        lines = (f"{one.node} is in {one.line or 'no line of your program'}" for one in findings)
        told += f". {'; '.join(lines)}"
    return f"{told}. Last reported: {places}" if places else told, findings


def _with_those_that_connect(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; nodes that did not answer wait for the one that is behind, if there is one.

    TensorFlow holds Python's lock while it connects to the other nodes.
    """
    if not any(one.answered and not one.waits for one in findings):
        return list(findings)
    text = "did not answer when it was asked for its stack: TensorFlow may wait until it has connected to all nodes"
    return [one if one.answered else replace(one, text=text, waits=True) for one in findings]


def never_ends(findings: Sequence[Finding], returned: Sequence[str]) -> str:
    """Return why the nodes that still train wait without end; empty if this is not sure.

    It is sure if each of them waits in a step that all nodes must make, and ``main`` of a node has returned.

    Examples
    --------
    >>> waits = Finding("worker:0", "waits in TensorFlow for the other nodes", waits=True, needs_all=True)
    >>> never_ends([waits], ["worker:1"]).partition(". ")[0]
    'waits in TensorFlow for the other nodes, and main of worker:1 has returned, so this never ends'
    >>> never_ends([waits], [])
    ''
    """
    if not findings or not returned or not all(one.needs_all for one in findings):
        return ""
    first, *others = findings
    too = f", as {', '.join(one.node for one in others)} {'do' if len(others) > 1 else 'does'}" if others else ""
    return (
        f"{first.text}{too}, and main of {', '.join(returned)} has returned, so this never ends. All workers must do "
        "the same number of steps: make the same models on all of them, and call fit, evaluate and predict on all, "
        "with the same epochs and steps. "
        "A callback may set model.stop_training on one worker only at the end of an epoch"
    )


def _finding(one: Situation, is_alone: bool = False) -> Finding:
    """Return what a node does, from the surest sign to the weakest; a node that ``is_alone`` waits for no other."""
    state = one.stacks.state if one.stacks is not None else ""
    frames = frames_of_main(one.stacks.text) if one.stacks is not None else []
    users = next((frame for frame in frames if not _LIBRARIES.search(frame.file)), None)
    where = f", {_named(users)}" if users is not None else ""
    if state == "T":
        return Finding(one.node, "was stopped by a signal (SIGSTOP)", stopped=True)
    if state == "D":
        return Finding(one.node, f"waits for a disk or a network file system{where}")
    pressure = one.stacks.memory_pressure if one.stacks is not None else 0.0
    short = f"; its host is short of memory (pressure {pressure:.0f} %)" if pressure >= _PRESSED else ""
    if one.saving or any(_SAVES.search(frame.file) for frame in frames):
        return Finding(one.node, f"saves{where}{short}")
    busy = (one.cpu_percent or 0.0) >= WORKS
    called = _called_elsewhere(one.stacks.text) if one.stacks is not None and not busy else ()
    if called and _is_in(frames, _LIBRARIES):
        users = next(frame for frame in called if not _LIBRARIES.search(frame.file))
        return _outside(one.node, called, f", {_named(users)}, which runs in a thread of TensorFlow{short}")
    if one.waits_for_rows and not busy and (not frames or _is_in(frames, _TENSORFLOW, _FEED)):
        return Finding(one.node, "waits for rows", waits=True)
    if _is_in(frames, _TENSORFLOW):
        if busy:
            return Finding(one.node, f"computes in TensorFlow{where}{short}", works=True)
        return _waiting(one, frames, "" if is_alone else " for the other nodes", users)
    return _outside(one.node, frames, f"{where}{short}")


def describe_slow(samples: Sequence[StacksTaken]) -> str:
    r"""Return what a slow worker does. It is known not to wait for the others.

    All workers compute in TensorFlow. So what one of them does elsewhere counts, if it is seen twice.

    Examples
    --------
    >>> lines = ["Thread (main) 0x01 (most recent call first):", '  File "/home/ann/train.py", line 12 in augment']
    >>> describe_slow([StacksTaken("worker:1", 1, "\n".join(lines))])
    'is in your program, line 12 of train.py, in augment'
    """
    found = [_finding(Situation(taken.node, cpu_percent=100.0, stacks=taken)) for taken in samples]
    elsewhere = Counter(one.text for one in found if not one.works)
    computes = next((one.text for one in found if one.works), "")
    text, times = max(elsewhere.items(), key=itemgetter(1), default=("", 0))
    return text if times > 1 or not computes else f"waits for its rows, or {computes}"


def _outside(node: str, frames: Sequence[Frame], where: str) -> Finding:
    """Return what a node does that is not in TensorFlow; ``where`` begins with the program's line, if there is one."""
    if frames and _NETWORK.search(frames[0].file):
        return Finding(node, f"waits for an answer from the network{where}", blocked=True)
    if any(not _LIBRARIES.search(frame.file) for frame in frames):
        return Finding(node, f"is in your program{where}")
    if frames:
        return Finding(node, f"is in {_named(frames[0])}{where}")
    return Finding(node, "did not answer when it was asked for its stack", blocked=True, answered=False)


def _waiting(one: Situation, frames: Sequence[Frame], whom: str, users: Frame | None) -> Finding:
    """Return what a node does that is in TensorFlow and uses no CPU."""
    on_gpu = (one.gpu_percent or 0.0) >= WORKS
    needs_all = not on_gpu and not one.waits_for_rows and _needs_all(frames)
    line = _named(users) if users is not None else ""
    text = f"waits in TensorFlow{whom}{', ' if line else ''}{line}"
    return Finding(one.node, text, waits=True, works=on_gpu, needs_all=needs_all, line=line)


def _called_elsewhere(text: str) -> Sequence[Frame]:
    """Return the frames of a thread in which TensorFlow or Keras calls the program; empty if there is none.

    Such calls are those of ``tf.py_function`` and of generators, for which the main thread waits. A thread that the
    program has started itself may wait for as long as it likes.
    """
    for frames in frames_of_others(text):
        place = next((place for place, frame in enumerate(frames) if not _LIBRARIES.search(frame.file)), len(frames))
        if any(_CALLERS.search(frame.file) for frame in frames[place:]):
            return frames
    return ()


def _is_in(frames: Sequence[Frame], *places: re.Pattern[str]) -> bool:
    """Whether the innermost call outside of Python's own library is in one of these places.

    In TensorFlow, it may wait for its threads.
    """
    first = next((frame for frame in frames if not _STANDARD.search(frame.file)), None)
    return first is not None and any(place.search(first.file) for place in places)


def _needs_all(frames: Sequence[Frame]) -> bool:
    """Whether the innermost calls are those of a step that all workers make: not of a callback, nor of the program."""
    place = next((place for place, frame in enumerate(frames) if _TOGETHER.search(str(frame))), None)
    within = frames[: place or 0]
    return bool(within) and all(_LIBRARIES.search(one.file) and not _CALLBACKS.search(one.file) for one in within)


def _named(frame: Frame) -> str:
    file = "the cell" if _CELL.search(frame.file) else PurePath(frame.file).name
    return f"line {frame.line} of {file}, in {frame.function}"
