"""Run an evaluator beside the training: it ends after the training, and may be allowed to fail.

An :class:`EvaluatorDesk` sits between the door and the cluster's desk. It tells the evaluator when the training is
over, and waits for its end for a limited time. Where the plan says so, an evaluator's failure does not count as the
cluster's.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tfos_nb.driver.cluster_desk import ClusterDesk
from tfos_nb.runtime.control.door import Desk, Link
from tfos_nb.runtime.control.lifecycle import MainRaised, MainReturned, NodeEnded, NodeUp, Serving
from tfos_nb.runtime.control.plan import Role
from tfos_nb.runtime.feed.ledger import NoMoreFeeds

__all__ = ["EvaluatorDesk"]

logger = logging.getLogger(__name__)


class EvaluatorDesk:
    """Desk of a cluster with an evaluator, as the door sees it.

    The cluster is done only when the evaluator's ``main`` has returned. When the chief and the workers have finished,
    the evaluator is told so, which ends ``ctx.checkpoints()``. After ``grace`` more seconds the cluster stops waiting.

    Parameters
    ----------
    desk : ClusterDesk
        Receives every message that comes here.
    grace : float
        Seconds between the training's end and the evaluator's.
    """

    def __init__(self, desk: ClusterDesk, grace: float) -> None:
        plan = desk.plan
        self._desk = desk
        self._grace = grace
        self._may_fail = plan.evaluator_may_fail
        self._name = plan.name
        self._nodes = {str(node) for node in plan.nodes if node.role is Role.EVALUATOR}
        self._training = {str(node) for node in plan.training_nodes}
        self._chief = str(plan.chief_node)
        self._links: dict[str, Link] = {}
        self._said: set[str] = set()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._generation = self._desk.generation
        self._returned: set[str] = set()
        self._serve: set[str] = set()
        self._up: set[str] = set()
        self._waits_until: float | None = None
        self._told = False

    @staticmethod
    def before(desk: Desk, grace: float) -> Desk:
        """Return the desk for the door: one of this class if the plan has an evaluator, else ``desk``."""
        return EvaluatorDesk(desk, grace) if isinstance(desk, ClusterDesk) and desk.plan.evaluator else desk

    def arrived(self, link: Link, message: Any) -> None:
        """Take the first message of a stream."""
        self._desk.arrived(link, message)
        if link.node in self._nodes:
            self._links[link.node] = link

    def received(self, link: Link, message: Any) -> None:
        """Take every later one."""
        node = link.node or ""
        with self._desk.changed:  # no other thread may see a failure before it is forgiven
            if self._desk.generation != self._generation:
                self._begin_anew()
            if node in self._nodes and isinstance(message, (MainRaised, NodeEnded)):
                self._before_end(link)
            self._desk.received(link, message)
            self._forgive()
            self._note(node, message)
            self._look()

    def left(self, link: Link) -> None:
        """Take the end of a stream."""
        with self._desk.changed:
            if link.node in self._nodes:
                self._before_end(link)
            self._desk.left(link)
            self._forgive()

    def asked(self, message: Any) -> Any:
        """Answer a question."""
        with self._desk.changed:
            answer = self._desk.asked(message)
            self._forgive()
            return answer

    def ticked(self, late: float) -> None:
        """Check the time limits."""
        with self._desk.changed:
            self._desk.ticked(late)
            self._forgive()
            if self._waits_until is not None and time.monotonic() >= self._waits_until:
                self._waits_until = None
                for node in self._nodes - self._returned:
                    self._say(node, f"had not ended {self._grace:g} s after the training; the cluster ends without it")
                    self._wait_no_more(self._links[node])

    def _note(self, node: str, message: Any) -> None:
        if isinstance(message, NodeUp):
            self._up.add(node)
        elif isinstance(message, MainReturned):
            self._returned.add(node)
        elif isinstance(message, Serving):
            self._serve.add(node)

    def _look(self) -> None:
        """Tell the evaluator, once, that the others are through."""
        through = self._chief in self._returned and self._training <= self._returned | self._serve
        if through and self._waits_until is None and not self._told and self._nodes - self._returned:
            self._told = True
            self._waits_until = time.monotonic() + self._grace
            for link in self._links.values():
                link.send(NoMoreFeeds())

    def _before_end(self, link: Link) -> None:
        if link.node in self._forgiven - self._returned:
            self._wait_no_more(link)

    def _wait_no_more(self, link: Link) -> None:
        if link.node not in self._serve:
            self._serve.add(link.node or "")
            self._desk.count_as_serving(link.node or "")

    @property
    def _forgiven(self) -> set[str]:
        """The nodes whose failure does not count. One that never started counts: other nodes would wait for it."""
        return self._nodes & self._up if self._may_fail else set()

    def _forgive(self) -> None:
        for failure in [failure for failure in self._desk.failures if failure.node in self._forgiven]:
            self._desk.forgive(failure.node)
            if failure.node not in self._said:
                self._said.add(failure.node)
                self._say(failure.node, f"failed, and the training continues: {failure.error}")
            self._wait_no_more(self._links[failure.node])

    def _say(self, node: str, text: str) -> None:
        logger.warning("cluster %s: %s %s", self._name, node, text)
        self._desk.write_log(node, f"{node} {text}".splitlines())
