"""Memory that a task frees is reused and does not accumulate."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import ENVIRONMENT

COUNTING = """
    import resource, psutil
    from tfos_nb.runtime.host.malloc import memory_kept

    BATCH = 24 << 20

    def faults_of(batches):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(batches):
            bytearray(BATCH)[:] = bytes(BATCH)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page = resource.getpagesize()
    with memory_kept():
        faults_of(2)
        kept = faults_of(10) * page / (10 * BATCH)
    with memory_kept():
        again = faults_of(10) * page / (10 * BATCH)
    with memory_kept():
        large = [bytearray(b"x") * BATCH for _ in range(20)]
        above = [bytes(1000) for _ in range(1000)]  # so that what is freed is not at the end
        del large
    print(kept, again, psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it needs glibc 2.33")
def test_the_memory_of_a_batch_is_reused_for_the_next_and_no_more_is_kept() -> None:
    script = [sys.executable, "-c", textwrap.dedent(COUNTING)]
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    kept, again, megabytes = map(float, ended.stdout.split())
    assert kept < 0.1  # share of its pages: each would have to be zeroed again
    assert again < 0.1
    assert megabytes < 300  # although 480 were freed
