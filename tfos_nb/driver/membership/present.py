"""The nodes that a cluster counts on: all nodes of its plan, or those with which it continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from tfos_nb.driver.membership.members import Member
from tfos_nb.runtime.control.plan import Node, Role

__all__ = ["CheckAll", "PresentMembers"]

_Item = TypeVar("_Item")


class CheckAll(Generic[_Item]):
    """Check repeatedly whether a condition holds for every item, with few evaluations.

    The item for which it did not hold is checked first the next time. So while one item is missing, a check evaluates
    the condition once. A thousand nodes that come one after another cost at most three thousand evaluations, not a
    million.
    """

    def __init__(self, items: Sequence[_Item], holds: Callable[[_Item], object]) -> None:
        self._items = items
        self._holds = holds
        self._place = 0

    def __call__(self) -> bool:
        """Check all items."""
        for _ in self._items:
            if not self._holds(self._items[self._place]):
                return False
            self._place = (self._place + 1) % len(self._items)
        return True


class PresentMembers:
    """The nodes that the cluster counts on, and how far all of them have come.

    A new object replaces it when the set of present nodes changes.

    Parameters
    ----------
    members : iterable of Member
        The nodes, in the plan's order.
    fed : collection of Node
        The nodes that the plan feeds.

    Attributes
    ----------
    members : sequence of Member
        All of them.
    training : sequence of Member
        Those that train, or serve what is trained.
    evaluators : sequence of Member
        Those that evaluate its checkpoints.
    fed : sequence of Member
        Those that are fed.
    fed_names : list of str
        Their names.
    first : Member
        The node that saves, and whose result is the cluster's: the chief, or the node in its place.
    """

    def __init__(self, members: Iterable[Member], fed: frozenset[Node]) -> None:
        self.members: Sequence[Member] = list(members)
        finishing = [one for one in self.members if one.node.role.must_return]
        self.training: Sequence[Member] = [one for one in self.members if not one.node.role.evaluates]
        self.evaluators: Sequence[Member] = [one for one in self.members if one.node.role.evaluates]
        self.fed: Sequence[Member] = [one for one in self.members if one.node in fed]
        self.fed_names = [str(one.node) for one in self.fed]
        self.first = finishing[0]
        self._reserved = CheckAll(self.members, attrgetter("reservation"))
        self._up = CheckAll(self.members, attrgetter("is_up"))
        self._take_rows = CheckAll(self.fed, attrgetter("up"))
        self._returned = CheckAll(finishing, attrgetter("needs_no_wait"))
        self._trained = CheckAll(self.training, attrgetter("needs_no_wait"))
        self._through = CheckAll(self.members, attrgetter("is_through"))
        self._at_rest = CheckAll(self.members, attrgetter("is_at_rest"))

    def __len__(self) -> int:
        return len(self.members)

    @property
    def all_reserved(self) -> bool:
        """Whether every node has reserved."""
        return self._reserved()

    @property
    def all_up(self) -> bool:
        """Whether ``main`` has been called on every node."""
        return self._up()

    @property
    def all_take_rows(self) -> bool:
        """Whether every node that is fed has said where it takes rows."""
        return self._take_rows()

    @property
    def all_returned(self) -> bool:
        """Whether ``main`` has returned on every node that has to."""
        return self.first.returned and self._returned()

    @property
    def have_trained(self) -> bool:
        """Whether ``main`` has returned on every node that has to, evaluators aside."""
        return self.first.returned and self._trained()

    @property
    def all_through(self) -> bool:
        """Whether ``main`` has ended on every node, or only serves other nodes."""
        return self._through()

    @property
    def saving(self) -> bool:
        """Whether a node is writing a model."""
        return not self._at_rest()

    @property
    def unread(self) -> bool:
        """Whether ``main`` has returned on every node that is fed, and never asked for rows on any of them."""
        return all(one.returned and one.unread for one in self.fed)

    @property
    def some_are_coming(self) -> bool:
        """Whether a node that has not reserved again still has a supervisor, which starts its next process at once."""
        return any(one.reservation is None and one.stream is not None for one in self.members)

    @property
    def late_evaluators(self) -> list[Member]:
        """The evaluators whose ``main`` is still waited for."""
        return [one for one in self.evaluators if not one.needs_no_wait]

    @property
    def not_reserved(self) -> list[Member]:
        """The nodes that have not reserved."""
        return [one for one in self.members if one.reservation is None]

    def are_enough(self, least: int) -> bool:
        """Return whether all nodes have come, or all but some workers, of which at least ``least`` have."""
        gone = self.not_reserved
        came = sum(one.node.role is Role.WORKER for one in self.members) - len(gone)
        return not gone or (came >= least and all(one.node.role is Role.WORKER for one in gone))

    def addresses(self) -> dict[str, list[str]]:
        """Return the addresses of TensorFlow's servers by role. All nodes have reserved."""
        spec: dict[str, list[str]] = {}
        for one in self.members:
            spec.setdefault(one.node.role.value, []).append(one.address)
        return spec
