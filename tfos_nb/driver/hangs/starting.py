"""Say why nodes do not come to their first step, though rows are fed.

Imports, downloads, models and compilations take their time before the first step, so silence is no sign. A node counts
as still if it is at the same line as ten seconds before, and neither it nor its programs have used the CPU or a GPU.
Its main thread must not have woken up often either: a download uses little CPU, but wakes with each packet. The text
says no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfos_nb.driver.hangs.explanation import WORKS, Finding, Situation, explain
from tfos_nb.runtime.node.stacks import Frame, frames_of_main

__all__ = ["Look", "are_still", "explain_start"]

_IDLE, _OVER = 0.05, 10.0  # of a core, in at least so many seconds: a moment of work is no sign
_WAKES = 5.0  # times in a second: a loop that sleeps wakes less often


@dataclass(frozen=True)
class Look:
    """Facts about all nodes that train, ``at`` a time of the monotonic clock; ``worked``: their CPU time in seconds."""

    at: float
    situations: Sequence[Situation]
    worked: Mapping[str, float]


def explain_start(before: Look, now: Look) -> tuple[str, list[Finding]]:
    r"""Return one sentence about the whole, and what each node does; without text if a node works or all wait for rows.

    The nodes were still between the two looks.

    Examples
    --------
    >>> from tfos_nb.runtime.node.stacks import StacksTaken
    >>> lines = ["Thread (main) 0x01 (most recent call first):", '  File "/home/ann/train.py", line 9 in main']
    >>> sleeps = Situation("worker:0", stacks=StacksTaken("worker:0", 1, "\\n".join(lines)))
    >>> told, _ = explain_start(Look(2.0, [sleeps], {"worker:0": 5.0}), Look(12.0, [sleeps], {"worker:0": 5.1}))
    >>> told.partition("; ")[2]
    'for 10 s it has been at the same line, and used no CPU'
    """
    told, findings = explain(now.situations, starts=True)
    behind = [one for one in findings if not one.waits]
    wait_for_rows = not behind and any(one.waits_for_rows for one in now.situations)
    if wait_for_rows or any(one.works for one in findings):
        return "", findings
    seconds, has = now.at - before.at, "it has" if len(behind or findings) == 1 else "they have"
    return f"{told}; for {seconds:.0f} s {has} been at the same line, and used no CPU", findings


def are_still(before: Look, now: Look) -> bool:
    r"""Return whether no node has done anything between two looks.

    Examples
    --------
    >>> nodes = [Situation("worker:0"), Situation("worker:1")]
    >>> before = Look(2.0, nodes, {"worker:0": 5.0, "worker:1": 5.0})
    >>> are_still(before, Look(12.0, nodes, {"worker:0": 5.1, "worker:1": 5.1}))
    True
    >>> are_still(before, Look(12.0, nodes, {"worker:0": 5.1, "worker:1": 9.0}))
    False
    """
    past = {one.node: one for one in before.situations}
    seconds = now.at - before.at
    most = _IDLE * max(seconds, _OVER)
    return past.keys() == {one.node for one in now.situations} and all(
        _is_still(past[one.node], one, seconds)
        and now.worked.get(one.node, 0.0) - before.worked.get(one.node, 0.0) < most
        for one in now.situations
    )


def _is_still(before: Situation, now: Situation, seconds: float) -> bool:
    """Whether a node is where it was, and waits for nothing that comes."""
    uses_gpu = (now.gpu_percent or 0.0) >= WORKS
    wakes = _waits(now) - _waits(before) > _WAKES * seconds
    return not uses_gpu and not wakes and _place(before) == _place(now)


def _place(one: Situation) -> list[Frame]:
    return frames_of_main(one.stacks.text) if one.stacks is not None else []


def _waits(one: Situation) -> int:
    return one.stacks.waits if one.stacks is not None else 0
