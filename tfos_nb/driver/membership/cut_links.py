"""Nodes whose hosts do not reach each other although the driver reaches both, and the workers that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tfos_nb.driver.membership.members import Member
from tfos_nb.runtime.node.links import Pair

__all__ = ["CutLinks", "describe_cut", "left_out"]


class CutLinks:
    """The cut links of a cluster: between nodes since the last restart, and between hosts until they are restored.

    Attributes
    ----------
    pairs : frozenset of (str, str)
        The nodes that do not reach each other, since the last restart.
    """

    def __init__(self) -> None:
        self.pairs: frozenset[Pair] = frozenset()
        self._hosts: set[frozenset[str]] = set()
        self._new: set[frozenset[str]] = set()  # of these, those since the last restart

    def cut(self, pairs: Collection[Pair], members: Mapping[str, Member]) -> None:
        """Record nodes that do not reach each other."""
        self.pairs |= frozenset(pairs)
        self._new |= {frozenset((_host_of(members[one]), _host_of(members[other]))) for one, other in pairs}
        self._hosts |= self._new

    def restart(self, without: Collection[str]) -> None:
        """Record that the nodes start again: all of them since these links are restored, or ``without`` some."""
        if not without:
            self._hosts -= self._new
        self.pairs, self._new = frozenset(), set()

    def restore(self, one: Member) -> None:
        """Record that a node's host reaches all others."""
        self._hosts = {pair for pair in self._hosts if _host_of(one) not in pair}

    def reaches_all(self, host: str, others: Iterable[str]) -> bool:
        """Return whether a task on ``host`` reaches all these hosts, as far as is known."""
        return not self._hosts or not any(frozenset((host, other)) in self._hosts for other in others)


def left_out(pairs: Iterable[Pair], workers: Sequence[str], first: str, least: int) -> tuple[str, ...]:
    """Return the workers without which all other nodes reach each other; empty if fewer than ``least`` would be left.

    Of two nodes, it is the one that reaches fewer others; of two alike not the ``first``, which saves, and else the one
    with the higher index.

    Examples
    --------
    >>> workers = ["worker:0", "worker:1", "worker:2"]
    >>> left_out([("worker:0", "worker:1")], workers, "worker:0", 2)
    ('worker:1',)
    >>> left_out([("worker:0", "worker:1"), ("worker:0", "worker:2")], workers, "worker:0", 2)
    ('worker:0',)
    >>> left_out([("worker:0", "worker:1")], workers, "worker:0", 3)
    ()
    """
    cut, out = set(pairs), list[str]()
    while cut:
        counts = Counter(name for pair in cut for name in pair)
        candidates = [name for name in workers if counts[name]]
        if not candidates:
            return ()
        worst = max(candidates, key=lambda name: (counts[name], name != first, workers.index(name)))
        out.append(worst)
        cut = {pair for pair in cut if worst not in pair}
    return tuple(out) if len(workers) - len(out) >= least else ()


def describe_cut(pairs: Collection[Pair], hosts: Mapping[str, str]) -> str:
    """Return a sentence that names the nodes that do not reach each other.

    Examples
    --------
    >>> describe_cut([("worker:1", "worker:2")], {"worker:1": "10.0.0.7", "worker:2": "10.0.0.8"})
    'worker:1 on 10.0.0.7 and worker:2 on 10.0.0.8 do not reach each other, though the driver reaches both'
    """
    (one, other), *more = sorted(pairs)
    rest = f" (and {len(more)} more pairs)" if len(more) > 1 else " (and one more pair)" if more else ""
    named = f"{one} on {hosts[one]} and {other} on {hosts[other]}{rest}"
    return f"{named} do not reach each other, though the driver reaches {'all' if more else 'both'}"


def _host_of(one: Member) -> str:
    return one.reservation.host if one.reservation is not None else ""
