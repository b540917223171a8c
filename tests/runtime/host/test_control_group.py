"""The processor time that a group of processes may use: read from a group of the system's."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT
from tests.waiting import until

ROOT = Path("/sys/fs/cgroup")
PROGRAM = """
import sys, time
from pathlib import Path
from tfos_nb.runtime.host.control_group import Throttling

def work(seconds):
    "Use the processor for so long, and return the part of the time in which the group had to wait."
    before, end = Throttling.now(), time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return Throttling.now().since(before)

sys.stdout.write(f"{work(0.3):.0f} ")
Path(sys.argv[1], "cgroup.procs").write_text("0")
work(0.2)
print(f"{work(1.5):.0f}")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A group that may use a fifth of one processor."""
    made = (ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT) / "tfos_nb_tests"
    try:
        made.mkdir()
        if made.parent == ROOT:
            (made / "cpu.max").write_text("20000 100000")
        else:
            (made / "cpu.cfs_quota_us").write_text("20000")
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    assert until(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def test_the_part_of_the_time_is_told_in_which_a_container_waits_for_its_cpu_limit(group: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(group)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60)
    before, within = map(int, done.stdout.split())
    assert before == 0
    assert within > 50
