"""Detection of slow workers, by how long each worker waits for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tfos_nb.driver.hangs.stragglers import Mark, Straggler, Stragglers, say_slow
from tfos_nb.runtime.node.stacks import HostFigures, StacksTaken


class Training:
    """Workers with given seconds for their own part of a step; every step waits for the slowest one."""

    def __init__(self) -> None:
        self.stragglers = Stragglers()
        self.at, self.steps = 0.0, 0
        self.waited: dict[str, float] = {}

    def run(self, steps: int, seconds: Mapping[str, float], network: float = 0.0) -> tuple[Straggler, ...]:
        step = max(seconds.values()) + network
        for _ in range(steps):
            self.at, self.steps = self.at + step, self.steps + 1
            for name, own in seconds.items():
                self.waited[name] = self.waited.get(name, 0.0) + step - own
            marks = {name: Mark(self.at, self.steps, self.waited[name]) for name in seconds}
            found = self.stragglers.take(marks)
        return found


def test_a_worker_for_which_the_others_wait_is_slow_until_it_is_as_fast_as_they_are() -> None:
    training, alike = Training(), {"chief:0": 0.2, "worker:0": 0.25, "worker:1": 0.22}
    assert training.run(50, alike) == ()
    assert training.run(15, {**alike, "worker:1": 1.0}) == (), "for 20 steps"
    (slow,) = training.run(10, {**alike, "worker:1": 1.0})
    assert (slow.node, round(slow.own), slow.median < 0.3) == ("worker:1", 1, True)
    assert training.run(15, alike) == (slow,), "it stays slow for as long"
    assert training.run(10, alike) == ()


def test_nothing_is_compared_before_the_first_reports() -> None:
    stragglers = Stragglers()
    assert [stragglers.take({}) for _ in range(3)] == [()] * 3


def test_one_long_step_makes_no_worker_slow() -> None:
    training, alike = Training(), {"worker:0": 0.2, "worker:1": 0.2}
    for _ in range(5):
        assert training.run(30, alike) == ()
        assert training.run(1, {**alike, "worker:0": 20.0}) == (), "the chief saves"


def test_time_in_the_network_makes_no_worker_slow() -> None:
    assert Training().run(100, {"worker:0": 0.10, "worker:1": 0.12}, network=1.0) == ()
    assert Training().run(100, {"worker:0": 0.1, "worker:1": 0.3}, network=1.0) == (), "a sixth of the step"


def test_a_worker_that_restarted_is_compared_from_the_start() -> None:
    training, slow = Training(), {"worker:0": 0.2, "worker:1": 1.0}
    assert training.run(30, slow)
    training.steps, training.waited = 3, {}
    assert training.run(10, slow) == ()
    assert training.run(20, slow)
    assert training.run(1, {**slow, "worker:2": 1.0}) == ()


@given(st.lists(st.floats(0.08, 0.12), min_size=2, max_size=9), st.floats(0.0, 1.0))
def test_workers_that_are_alike_are_not_slow(own: list[float], network: float) -> None:
    assert Training().run(80, {f"worker:{index}": one for index, one in enumerate(own)}, network) == ()


@given(st.lists(st.floats(0.1, 0.2), min_size=1, max_size=9), st.floats(0.8, 5.0))
def test_a_much_slower_worker_is_found_among_any_number(own: list[float], slow: float) -> None:
    workers = {f"worker:{index}": one for index, one in enumerate(own)}
    assert [one.node for one in Training().run(80, {**workers, "chief:0": slow})] == ["chief:0"]


def test_the_text_says_what_the_slow_worker_and_its_host_do() -> None:
    found = Straggler("worker:1", 0.9, 0.3)
    assert say_slow(found, []) == "is slow: its own part of a step is 90%, that of the others 30%"
    text = 'Thread (main) 0x01 (most recent call first):\n  File "/home/ann/train.py", line 7 in augment'
    host = HostFigures(97.4, 4, 3 << 20, 1 << 19)
    taken = StacksTaken("worker:1", 1, text, "S", 12.0, host)
    tensorflow = "/usr/lib/python3.11/site-packages/tensorflow/python/eager/execute.py"
    computes = f'Thread (main) 0x01 (most recent call first):\n  File "{tensorflow}", line 53 in quick_execute'
    other = replace(taken, text=computes)
    assert "; it waits for its rows, or computes in TensorFlow; its host" in say_slow(found, [other, taken, other])
    assert say_slow(found, [other, taken, other, taken]) == (
        "is slow: its own part of a step is 90%, that of the others 30%; it is in your program, line 7 of train.py, in "
        "augment; its host: CPU 97 % of 4, memory pressure 12 %, network 3.0 MiB/s in and 0.5 MiB/s out"
    )
    limited = say_slow(found, [replace(taken, host=replace(host, throttled=66.7))])
    assert limited.endswith("0.5 MiB/s out; its container waits 67 % of the time for its CPU limit")
    unknown = say_slow(found, [replace(taken, memory_pressure=-1.0)])
    assert "memory pressure unknown, network" in unknown, "the host's kernel does not count it"
