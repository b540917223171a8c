"""Explanation of a hang, from the nodes' stacks and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tfos_nb.driver.hangs.explanation import Situation, explain, never_ends
from tfos_nb.runtime.node.stacks import StacksTaken

PYTHON = "/usr/lib/python3.11"
PACKAGES = f"{PYTHON}/site-packages"
USERS = ("/home/ann/clicks.py", 31, "load")
EXECUTE = (f"{PACKAGES}/tensorflow/python/eager/execute.py", 53, "quick_execute")


def stacks(*frames: tuple[str, int, str], state: str = "S", pressure: float = 0.0) -> StacksTaken:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    called = "(most recent call first):"
    text = "\n".join([f"Thread (main) 0x01 {called}", *lines, "", f"Thread 0x02 {called}"])
    return StacksTaken("", 1, text if frames else "", state, pressure)


@pytest.mark.parametrize(
    ("taken", "text"),
    [
        (stacks(USERS), "is in your program, line 31 of clicks.py, in load"),
        (stacks(("/tmp/ipykernel_7/123.py", 4, "main")), "is in your program, line 4 of the cell, in main"),
        (stacks((f"{PYTHON}/threading.py", 320, "wait"), USERS), "is in your program, line 31 of clicks.py, in load"),
        (
            stacks((f"{PYTHON}/ssl.py", 1166, "read"), (f"{PACKAGES}/requests/api.py", 59, "get"), USERS),
            "waits for an answer from the network, line 31 of clicks.py, in load",
        ),
        (
            stacks((f"{PACKAGES}/keras/src/saving/saving_lib.py", 9, "save_model"), USERS),
            "saves, line 31 of clicks.py, in load",
        ),
        (stacks(USERS, state="D"), "waits for a disk or a network file system, line 31 of clicks.py, in load"),
        (stacks(state="T"), "was stopped by a signal (SIGSTOP)"),
        (stacks(), "did not answer when it was asked for its stack"),
        (
            stacks(USERS, pressure=42.0),
            "is in your program, line 31 of clicks.py, in load; its host is short of memory (pressure 42 %)",
        ),
    ],
)
def test_a_node_that_the_others_wait_for_is_named(taken: StacksTaken, text: str) -> None:
    waits = stacks(EXECUTE, USERS)
    others = [Situation(name, (1, 9), cpu_percent=1.0, stacks=waits) for name in ("worker:0", "worker:2")]
    told, findings = explain([*others, Situation("worker:1", (1, 9), cpu_percent=1.0, stacks=taken)])
    assert told == f"worker:1 is behind: it {text}"
    assert [one.waits for one in findings] == [True, True, False]


def test_nodes_that_all_wait_in_tensorflow_are_shown_with_their_last_reports() -> None:
    pool = (f"{PYTHON}/multiprocessing/pool.py", 774, "get")
    devices = (f"{PACKAGES}/tensorflow/python/distribute/cross_device_ops.py", 1208, "_all_reduce_per_replica_values")
    first = Situation("worker:0", (1, 6), cpu_percent=0.0, stacks=stacks(EXECUTE, USERS))
    second = Situation("worker:1", (1, 7), cpu_percent=0.0, stacks=stacks(pool, devices, USERS))
    told, _ = explain([first, second])
    assert told.startswith("all nodes wait for each other in TensorFlow")
    assert told.endswith("Last reported: worker:0 step 6 of epoch 1, worker:1 step 7 of epoch 1")


def test_nodes_that_wait_for_each_other_at_different_lines_are_shown_with_these() -> None:
    first = Situation("worker:0", (1, 6), cpu_percent=0.0, stacks=stacks(EXECUTE, USERS))
    second = replace(first, node="worker:1", stacks=stacks(EXECUTE, ("/home/ann/clicks.py", 40, "load")))
    inside = replace(first, node="worker:2", stacks=stacks(EXECUTE))
    assert (
        ". worker:0 is in line 31 of clicks.py, in load; worker:1 is in line 40 of clicks.py, in load; worker:2 is in "
        "no line of your program. Last reported: worker:0 step 6"
    ) in explain([first, second, inside])[0]
    assert " is in " not in explain([first, replace(first, node="worker:1")])[0]


def test_a_node_that_computes_is_behind_and_one_that_waits_for_rows_is_named() -> None:
    waits = Situation("worker:0", cpu_percent=1.0, stacks=stacks(EXECUTE, USERS))
    computes = Situation("worker:1", cpu_percent=180.0, stacks=stacks(EXECUTE, USERS))
    waits_for_rows = Situation("worker:1", waits_for_rows=True, cpu_percent=1.0, stacks=stacks(EXECUTE, USERS))
    on_gpu = replace(waits, gpu_percent=100.0)
    assert [one.works for one in explain([on_gpu, computes])[1]] == [True, True]
    assert explain([waits, computes])[0].startswith("worker:1 is behind: it computes in TensorFlow")
    assert explain([waits, waits_for_rows])[0] == "worker:1 waits for rows"
    assert explain([waits], ["worker:1"])[0].endswith("; main of worker:1 has returned")


SCRIPT_OPS = (f"{PACKAGES}/tensorflow/python/ops/script_ops.py", 145, "_call")
SOCKET = (f"{PYTHON}/socket.py", 718, "readinto")
THREAD = (f"{PYTHON}/threading.py", 1002, "_bootstrap")


def with_thread(*frames: tuple[str, int, str], main: StacksTaken | None = None) -> StacksTaken:
    """Return stacks with the frames of another thread."""
    taken = main or stacks(EXECUTE, KERAS, ("/home/ann/clicks.py", 50, "main"))
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return replace(taken, text="\n".join([taken.text, "", "Thread 0x03 (most recent call first):", *lines]))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (
            (SOCKET, USERS, SCRIPT_OPS),
            "waits for an answer from the network, line 31 of clicks.py, in load, which runs",
        ),
        (
            (USERS, SCRIPT_OPS),
            "is in your program, line 31 of clicks.py, in load, which runs in a thread of TensorFlow",
        ),
        ((EXECUTE, USERS, SCRIPT_OPS), "is in your program, line 31 of clicks.py, in load, which runs in a thread"),
        (
            (USERS, (f"{PACKAGES}/keras/src/trainers/data_adapters/py_dataset_adapter.py", 9, "get_index"), THREAD),
            "is in your program, line 31 of clicks.py, in load, which runs",
        ),
    ],
)
def test_a_node_whose_input_pipeline_waits_is_behind(frames: Sequence[tuple[str, int, str]], text: str) -> None:
    waits = Situation("worker:0", (1, 6), cpu_percent=0.0, stacks=with_thread())
    behind = replace(waits, node="worker:1", stacks=with_thread(*frames))
    assert explain([waits, behind])[0].startswith(f"worker:1 is behind: it {text}")
    assert explain([replace(behind, waits_for_rows=True)])[0].startswith(f"worker:1 is behind: it {text}")


def test_threads_of_the_program_itself_do_not_explain_a_wait() -> None:
    waits = Situation("worker:0", (1, 6), cpu_percent=0.0, stacks=with_thread(USERS, THREAD))
    assert explain([waits, replace(waits, node="worker:1")])[0].startswith("all nodes wait for each other")
    own = replace(waits, stacks=with_thread(SOCKET, USERS, SCRIPT_OPS, main=stacks(("/home/ann/clicks.py", 7, "end"))))
    assert explain([own])[0] == "worker:0 is behind: it is in your program, line 7 of clicks.py, in end"


def test_a_single_node_waits_for_no_other() -> None:
    alone = Situation("worker:0", (1, 6), cpu_percent=0.0, stacks=stacks(EXECUTE, USERS))
    told, (finding,) = explain([alone])
    assert told == "worker:0 waits in TensorFlow, line 31 of clicks.py, in load, and does not compute"
    assert finding.text == "waits in TensorFlow, line 31 of clicks.py, in load"


KERAS = (f"{PACKAGES}/keras/src/backend/tensorflow/trainer.py", 399, "fit")
TOGETHER = (f"{PACKAGES}/tfos_nb/runtime/keras/replicas/collective_calls.py", 21, "call_with_all_workers")
ALONE = (f"{PACKAGES}/tfos_nb/runtime/keras/replicas/collective_calls.py", 51, "method_that_is_shown")
CALLBACKS = (f"{PACKAGES}/keras/src/callbacks/callback_list.py", 172, "on_epoch_end")
FITS = Situation("worker:0", cpu_percent=1.0, stacks=stacks(EXECUTE, KERAS, TOGETHER, USERS))


def ends(*situations: Situation, returned: Sequence[str] = ("worker:1",)) -> str:
    return never_ends(explain(situations, returned)[1], returned)


def test_a_step_of_all_workers_never_ends_once_main_of_one_has_returned() -> None:
    assert ends(FITS).startswith(
        "waits in TensorFlow for the other nodes, line 31 of clicks.py, in load, and main of worker:1 has returned, so "
    )
    assert "load, as worker:2 does, and main of worker:1" in ends(FITS, replace(FITS, node="worker:2"))
    others = [replace(FITS, node=f"worker:{number}") for number in (2, 3)]
    assert "load, as worker:2, worker:3 do, and main of worker:1, worker:4" in ends(
        FITS, *others, returned=("worker:1", "worker:4")
    )
    agrees = replace(FITS, stacks=stacks(EXECUTE, TOGETHER, CALLBACKS, KERAS, TOGETHER, USERS))
    assert ends(agrees), "fit's own callback asks whether to stop"


@pytest.mark.parametrize(
    "other",
    [
        Situation("worker:0", cpu_percent=1.0, stacks=stacks(EXECUTE, USERS)),
        Situation("worker:0", cpu_percent=1.0, stacks=stacks(EXECUTE, KERAS, USERS)),
        Situation("worker:0", cpu_percent=1.0, stacks=stacks(EXECUTE, KERAS, ALONE, USERS)),
        replace(FITS, waits_for_rows=True),
        replace(FITS, saving=True),
        replace(FITS, cpu_percent=90.0),
        replace(FITS, gpu_percent=90.0),
        replace(FITS, stacks=None),
        replace(FITS, stacks=stacks(state="T")),
        replace(FITS, stacks=stacks(USERS, CALLBACKS, KERAS, TOGETHER, USERS)),
        replace(FITS, stacks=stacks(EXECUTE, USERS, CALLBACKS, KERAS, TOGETHER, USERS)),
        replace(FITS, stacks=stacks(EXECUTE, CALLBACKS, KERAS, TOGETHER, USERS)),
        replace(FITS, stacks=stacks((f"{PYTHON}/threading.py", 320, "wait"), KERAS, TOGETHER, USERS)),
    ],
)
def test_a_wait_that_may_end_is_left_alone(other: Situation) -> None:
    assert not ends(other)
    assert not ends(FITS, replace(other, node="worker:2"))
    assert not ends(FITS, returned=())
    assert not ends()
