"""The classes of errors, and their messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from tfos_nb import errors
from tfos_nb.errors import NodeFailed, RendezvousTimeout, TfosError, either, with_article


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PlanError", ValueError),
        ("RendezvousTimeout", TimeoutError),
        ("NodeFailed", RuntimeError),
        ("FeedFailed", RuntimeError),
        ("FeedTimeout", TimeoutError),
        ("ClusterClosed", RuntimeError),
        ("MissingPackage", ImportError),
    ],
)
def test_every_error_is_a_tfos_error_and_has_a_builtin_base(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, TfosError)
    assert issubclass(kind, builtin)


def test_all_names_every_error_and_nothing_else() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, TfosError)}
    assert set(errors.__all__) == defined


def test_a_notebook_shows_one_line_without_our_frames() -> None:
    assert errors.PlanError("too few slots")._render_traceback_() == ["PlanError: too few slots"]


def test_a_rendezvous_timeout_has_the_missing_nodes() -> None:
    assert RendezvousTimeout("1 of 2 came", ("worker:1",)).missing == ("worker:1",)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NodeFailed("exited with code 3", node="worker:1"), "worker:1: exited with code 3"),
        (NodeFailed("no", node="ps:0", host="h"), "ps:0 on h: no"),
        (NodeFailed("no", node="ps:0", host="h", executor="4"), "ps:0 on h (executor 4): no"),
        (
            NodeFailed("no", node="ps:0", remote_traceback="Traceback\n  x\n", log_tail="tail"),
            "ps:0: no\nTraceback\n  x",
        ),
        (NodeFailed("no", node="ps:0", log_tail="a\nb\n"), "ps:0: no\nThe last lines that ps:0 wrote:\na\nb"),
        (NodeFailed("no", node="ps:0", others=2), "ps:0: no (2 more failed after it)"),
    ],
    ids=range(6),
)
def test_a_failed_node_says_where_and_why_in_its_first_line(error: NodeFailed, text: str) -> None:
    assert str(error) == text


def test_counting_other_failures_keeps_the_error_and_extends_its_message() -> None:
    error = NodeFailed("killed by SIGKILL", node="worker:0", host="h", signal="SIGKILL")
    counted = error.counting(3)
    assert counted is error
    assert str(error) == "worker:0 on h: killed by SIGKILL (3 more failed after it)"
    assert (error.node, error.signal, error.exit_code, error.others) == ("worker:0", "SIGKILL", None, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_can_be_copied_and_pickled(copied: Callable[[TfosError], TfosError]) -> None:
    failed = NodeFailed(
        "boom", node="worker:1", host="h", executor="3", exit_code=3, remote_traceback="Trace", others=2
    )
    again = copied(failed)
    assert (str(again), vars(again)) == (str(failed), vars(failed))
    late = copied(RendezvousTimeout("late", ("worker:1",)))
    assert (str(late), vars(late)) == ("late", {"missing": ("worker:1",)})


def test_names_are_quoted_as_alternatives_and_nouns_get_their_article() -> None:
    assert [either(["a"]), either(["a", "b"]), either(["a", "b", "c"])] == ["'a'", "'a' or 'b'", "'a', 'b' or 'c'"]
    nouns = ["an int", "an Iterator", "an RDD", "an RLock", "a list", "a Row"]
    assert [with_article(noun.split()[1]) for noun in nouns] == nouns
