"""Checksums of rows, in a task that is soon to send the first of them."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ENVIRONMENT

PROGRAM = """
import sys
import pyarrow as pa
from tfos_nb.runtime.feed.feed_task import _one
from tfos_nb.runtime.rows.fingerprint import Fingerprint

numbers = pa.Array.from_buffers(pa.int64(), 3, [None, pa.py_buffer(bytes(24))])
lists = pa.ListArray.from_arrays(pa.Array.from_buffers(pa.int32(), 2, [None, pa.py_buffer(bytes(8))]), numbers)
for array in (numbers, lists, numbers.cast(pa.float32()), numbers.cast(pa.string()), lists.slice(1), numbers.slice(3)):
    Fingerprint().add(pa.RecordBatch.from_arrays([array], ["x"]))
assert _one(-7)[0].as_py() == -7
print("pandas" in sys.modules)
"""


def test_a_feeding_task_does_not_import_pandas() -> None:
    """It would take half a second of each new worker of Spark's, before its first row."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "False\n"
