"""Independent programs, forked from the application's warm process or in fresh interpreters."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession

from tests.faults import its_warm_process
from tests.waiting import until
from tfos_nb import parallel
from tfos_nb.errors import NodeFailed, PlanError


def describe(args: Any, ctx: Any) -> dict[str, Any]:
    """Return what a program finds in its process."""
    forker = os.getppid()
    return {
        "imported": "tensorflow" in sys.modules,
        "pid": os.getpid(),
        "leads": os.getpgid(0) == os.getpid(),
        "forker": forker,
        "parent": psutil.Process(forker).ppid(),
        "argv": list(sys.argv),
        "set": os.environ.get("MINE"),
        "config": os.environ.get("TF_CONFIG"),
        "random": [random.random(), float(np.random.rand())],
        "left": sorted(os.listdir(os.environ["TMPDIR"])),
        "index": ctx.index,
    }


def test_a_forked_program_has_the_same_environment_as_a_fresh_one(spark: SparkSession) -> None:
    forked = parallel.run(describe, nodes=3, spark=spark, env={"MINE": "1"})
    fresh = parallel.run(describe, nodes=1, spark=spark, env={"MINE": "1"}, warm=False)
    assert [one["imported"] for one in (*forked, *fresh)] == [True, True, True, False]
    assert len({one["parent"] for one in forked}) == 1
    assert len({one["forker"] for one in forked}) == 3
    assert len({number for one in (*forked, *fresh) for number in one["random"]}) == 8, "none has the same numbers"
    for name in ("argv", "set", "config", "leads", "left"):
        assert forked[0][name] == fresh[0][name], name
    assert not psutil.pid_exists(forked[0]["pid"])
    assert not psutil.pid_exists(forked[0]["forker"])


def test_a_failed_forked_program_is_reported_with_its_output_and_its_exit(spark: SparkSession) -> None:
    def dies(args: Any, ctx: Any) -> None:
        print("its last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)

    def ends(args: Any, ctx: Any) -> None:
        os._exit(7)

    with pytest.raises(NodeFailed, match="killed by SIGSEGV") as died:
        parallel.run(dies, nodes=1, spark=spark)
    assert "its last words" in died.value.log_tail
    with pytest.raises(NodeFailed, match="exited with code 7 before main had returned"):
        parallel.run(ends, nodes=1, spark=spark)


def test_a_program_starts_after_the_warm_process_was_killed(spark: SparkSession) -> None:
    def kills(args: Any, ctx: Any) -> int:
        server = its_warm_process(os.getppid())
        os.kill(server, signal.SIGKILL)
        return server

    def has_ended() -> bool:
        return not psutil.pid_exists(killed) or psutil.Process(killed).status() == psutil.STATUS_ZOMBIE

    (killed,) = parallel.run(kills, nodes=1, spark=spark)
    assert until(has_ended)  # before, its socket may still accept, and the program would import TensorFlow by itself
    (found,) = parallel.run(describe, nodes=1, spark=spark)
    assert found["imported"]
    assert found["parent"] != killed


def test_warm_must_be_true_or_false(spark: SparkSession) -> None:
    with pytest.raises(PlanError, match="warm must be True or False, got 'no'"):
        parallel.run(describe, nodes=1, spark=spark, warm="no")  # type: ignore[arg-type]
