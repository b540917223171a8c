"""How long executors are waited for, by what the cluster manager says of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tfos_nb.spark import slots
from tfos_nb.spark.contexts.pods import Missing

WAITS = Missing("Kubernetes says of pod p: Unschedulable: no host", coming=True, kinds=frozenset({"Unschedulable"}))
WRONG = Missing("Kubernetes says of pod p: ErrImagePull: no image", coming=False, kinds=frozenset({"ErrImagePull"}))


class Session:
    """A context of two executors that were asked for; ``come`` is asked at every look how many have registered."""

    is_local = False
    local_cluster = None
    has_dynamic_allocation = False
    executor_cores = 1

    def __init__(self, said: Missing, come: Callable[[], int]) -> None:
        self.key, self._said, self._come = object(), said, come
        self.asked = 0

    def setting(self, name: str, default: str = "") -> str:
        return {"spark.executor.instances": "2"}.get(name, default)

    def executors(self) -> int:
        return self._come()

    def places(self, profile: object) -> int:
        return self._come()

    @contextmanager
    def executors_to_come(self) -> Iterator[Callable[[], Missing]]:
        def ask() -> Missing:
            self.asked += 1
            return self._said

        yield ask


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("_REGISTER_SECONDS", 0.4),
        ("_REFUSAL_SECONDS", 0.1),
        ("LOOK_SECONDS", 0.05),
        ("_POLL_SECONDS", 0.01),
    ):
        monkeypatch.setattr(slots, name, value)


def waited(monkeypatch: pytest.MonkeyPatch, session: Session, timeout: float) -> float:
    monkeypatch.setattr(slots, "context_of", lambda spark: spark)
    began = time.monotonic()
    given: Any = session
    slots.await_executors(given, 2, timeout)
    return time.monotonic() - began


def test_a_pod_that_may_still_start_is_waited_for_with_a_reason_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(WAITS, lambda: 2 if session.asked > 20 else 0)
    assert waited(monkeypatch, session, 60.0) > 0.9, "longer than executors are waited for otherwise"
    assert [record.getMessage() for record in caplog.records] == [f"tfos_nb waits for Spark's executors. {WAITS.text}"]


def test_the_wait_ends_at_the_timeout_and_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(WAITS, lambda: 1)
    assert waited(monkeypatch, session, 1.0) > 0.9
    asked = session.asked
    given: Any = session
    slots.slots_total(given)
    assert session.asked == asked
    assert slots._why_in_vain(session) == WAITS.text  # type: ignore[arg-type]


def test_what_somebody_has_to_mend_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(WRONG, lambda: 0)
    waited(monkeypatch, session, 60.0)
    assert session.asked == slots._HOPELESS_LOOKS


def test_executors_of_which_nothing_is_said_are_waited_for_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Missing(), lambda: 0)
    assert waited(monkeypatch, session, 60.0) >= 0.5
    assert session.asked >= 2


def test_a_launch_waits_again_though_somebody_else_has_just_waited_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(WAITS, lambda: 1)
    monkeypatch.setitem(slots._in_vain, session.key, (time.monotonic(), ""))  # type: ignore[misc]
    assert waited(monkeypatch, session, 0.6) >= 0.6


def test_a_reason_is_logged_once_however_often_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    said = iter([WAITS, WRONG, WAITS, WRONG])
    executors = slots.ExecutorsToCome(lambda: next(said))
    for _ in range(4):
        executors.look()
    assert len(caplog.records) == 2
